"""Bounds on values, of any dtype that bounds and entries can have."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optaxclip
from optaxclip import ops

UNSIGNED = [np.uint8(3), np.uint64(3), jnp.uint8(3), jnp.uint32(3)]


@pytest.mark.parametrize("threshold", [*UNSIGNED, np.int8(3), jnp.float16(3)], ids=repr)
@pytest.mark.parametrize("scheduled", [False, True])
def test_a_threshold_of_any_dtype_bounds_both_sides(threshold, scheduled):
    grads = np.float32([-9.0, -3.0, 2.0, 9.0])
    tx = optaxclip.clip((lambda count: threshold) if scheduled else threshold)
    np.testing.assert_array_equal(tx.update(grads, tx.init(grads))[0], [-3, -3, 2, 3])


WHOLE = [2**31, 2**40, np.int64(2**40), np.uint64(2**40), 10**300]


@pytest.mark.by_day(1)
@pytest.mark.parametrize(
    "threshold", [*WHOLE, 1e300, np.float64(1e300)], ids=lambda x: f"{x!r:.12}"
)
def test_a_large_threshold_is_a_large_threshold(threshold):
    jax.clear_caches()  # only a program's first call takes numbers through NumPy, which may warn
    grads, expected = np.float32([-9.0, 3e20]), np.minimum(3e20, float(threshold))
    clips = optaxclip.clip(threshold), optaxclip.clip_by_global_norm(threshold)
    found = [tx.update(grads, tx.init(grads))[0] for tx in clips]
    for updates in (*found, ops.clip_by_value(grads, 0, threshold)):
        np.testing.assert_allclose(np.asarray(updates)[1], expected, rtol=1e-5)


@pytest.mark.by_day(1)
@pytest.mark.parametrize("x64", [False, True])
def test_a_threshold_that_only_float64_holds(x64):
    with jax.enable_x64(x64):
        (update,) = ops.clip_by_global_norm(jnp.array([3e38 if not x64 else 1e305]), 1e300)[0]
        assert update == pytest.approx(3e38 if not x64 else 1e300)


def test_integer_threshold_above_all_floats_acts_as_infinity():
    tx = optaxclip.clip_by_global_norm(10**400)
    assert tx.update(jnp.ones(2), None)[0].tolist() == [1.0, 1.0]
    assert ops.clip_by_norm(jnp.ones(2), 10**400).tolist() == [1.0, 1.0]
    with pytest.raises(ValueError, match="max_norm must not be negative"):
        optaxclip.clip_by_global_norm(-(10**400))


ENTRIES = {
    jnp.int8: [-128, -20, 0, 7, 127],
    jnp.uint8: [0, 7, 100, 255],
    jnp.int32: [-(2**31), -5, 300, 2**31 - 1],
}
BOUNDS = [(-300, 300), (-1, 50), (-(2**70), 2**70), (3, 10**400), (20, 100), (-7, -3)]
KINDS = [jnp.int32, jnp.int16, np.int64, np.int16]


@pytest.mark.by_day(1)
@pytest.mark.parametrize("dtype", ENTRIES, ids=lambda dtype: dtype.__name__)
def test_clip_by_value_accepts_integer_bounds_beyond_dtype(dtype):
    tree, compiled = jnp.array(ENTRIES[dtype], dtype), jax.jit(ops.clip_by_value)
    least, largest = int(jnp.iinfo(dtype).min), int(jnp.iinfo(dtype).max)
    for low, high in BOUNDS:
        # What the bounds allow but the dtype does not have goes to its nearest value.
        held = [min(max(low, min(x, high)), high) for x in ENTRIES[dtype]]
        expected = np.array([min(max(x, least), largest) for x in held])
        given = [(low, high)]
        if abs(low) <= 300 and abs(high) <= 300:
            given += [(kind(low), kind(high)) for kind in KINDS]
            given += [(kind([low]), np.array([high])) for kind in (np.array, jnp.array)]
        for bounds in given:
            found = ops.clip_by_value(tree, *bounds)
            assert found.dtype == dtype
            np.testing.assert_array_equal(found, expected)
            if max(map(abs, (low, high))) < 2**31:
                np.testing.assert_array_equal(compiled(tree, *bounds), expected)


@pytest.mark.usefixtures("x64")
def test_clip_by_value_keeps_digits_of_int64_bounds():
    tree = jnp.array([-(2**63), 2**62 + 3, 2**63 - 1])
    for kind in (int, jnp.int64, np.int64):
        found = ops.clip_by_value(tree, kind(-(2**62) - 1), kind(2**62 + 1))
        np.testing.assert_array_equal(found, [-(2**62) - 1, 2**62 + 1, 2**62 + 1])
    unsigned = jnp.array([0, 2**64 - 1], jnp.uint64)
    found = ops.clip_by_value(unsigned, np.int64(-1), np.uint64(2**63))
    np.testing.assert_array_equal(found, np.array([0, 2**63], np.uint64))


@pytest.mark.parametrize(
    ("shape", "bad"), [((2, 3, 1), (2,)), ((1, 2), (2, 2)), ((), (1,)), ((3,), (2,))]
)
@pytest.mark.parametrize("argument", ["clip_value_min", "clip_value_max"])
def test_clip_by_value_rejects_bounds_of_wrong_shape(shape, bad, argument):
    bounds = {"clip_value_min": 0.0, "clip_value_max": 1.0, argument: jnp.zeros(bad)}
    shapes = f"shape {re.escape(str(shape))} of leaf 'w', got shape {re.escape(str(bad))}; pass"
    message = f"^{argument} must be broadcastable to the {shapes}"
    with pytest.raises(ValueError, match=message):
        ops.clip_by_value({"w": jnp.zeros(shape)}, **bounds)


def test_clip_by_value_rejects_float_bounds_for_integers():
    for leaf, low, high in [([3], 0, 1.0), ([3], 0.0, 1), ([True], 0, 1)]:
        with pytest.raises(TypeError, match=r"'0'.*(int32|bool)"):
            ops.clip_by_value([jnp.array(leaf)], low, high)


COMPLEX = [
    (2.0, 3e38 + 3e38j, (1 + 1j) * np.sqrt(2)),
    (1e-3, 1e36 + 1e36j, (1 + 1j) * np.sqrt(0.5) * 1e-3),
    (1e38, 3e38 - 3e38j, (1 - 1j) * np.sqrt(0.5) * 1e38),
    (3.3e38, 2e38 + 2e38j, 2e38 + 2e38j),
    (1e-30, 3e-25 + 4e-25j, 0.6e-30 + 0.8e-30j),
    (1e-36, 3e38 + 4e37j, 1e-36 * (3e38 + 4e37j) / abs(3e38 + 4e37j)),
    (5.0, 3 + 4j, 3 + 4j),
    (0.0, 3 + 4j, 0),
    (1.0, complex(np.inf, 1), 1),
    (1.0, -1e38 + 1e-38j, -1),
]


@pytest.mark.filterwarnings("ignore:max_delta is 0")
@pytest.mark.parametrize(("threshold", "entry", "expected"), COMPLEX)
def test_clip_keeps_phase_of_complex_elements(threshold, entry, expected):
    grads, tx = jnp.array([entry], jnp.complex64), optaxclip.clip(threshold)
    clipped, _ = tx.update(grads, tx.init(grads))
    np.testing.assert_allclose(clipped[0], expected, rtol=1e-6)


@pytest.mark.parametrize("dtype", [np.float64, np.complex128])
@pytest.mark.parametrize("clip", [optaxclip.clip(0.5), optaxclip.clip_by_value(-0.5, 0.5)])
def test_clip_accepts_numpy_float64_arrays(clip, dtype):
    """NumPy's default dtypes, outside of `jit`."""
    x = np.array([3.0, 0.1], dtype)
    found, expected = (clip.update(y, clip.init(y))[0] for y in (x, jnp.asarray(x)))
    assert found.dtype == expected.dtype
    np.testing.assert_array_equal(found, expected)


def test_clip_by_value_accepts_numpy_integer_arrays():
    np.testing.assert_array_equal(ops.clip_by_value(np.arange(5), -2, 2), [0, 1, 2, 2, 2])

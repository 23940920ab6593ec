"""`optaxclip.ops` beside TensorFlow's own functions: where they agree, and where not on purpose."""

import functools
import importlib.util
import math

import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given, settings
from jax.experimental.sparse import BCOO

from optaxclip import ops

if importlib.util.find_spec("tensorflow") is None:
    pytest.skip("compared where TensorFlow is installed", allow_module_level=True)


class TensorFlow:
    """Imported, which takes seconds, by the process that runs these tests, not by all of them."""

    def __getattr__(self, name):
        if name.startswith("_"):  # pytest asks every process for them while it collects tests
            raise AttributeError(name)
        return getattr(importlib.import_module("tensorflow"), name)


tf = TensorFlow()

INF, NAN = math.inf, math.nan
TOLERANCE = {
    "float16": 1e-2,  # TensorFlow squares, sums, inverts and multiplies in float16: 10 roundings
    "bfloat16": 6e-2,  # the same in bfloat16
    "float32": 3e-6,  # ours is up to 1e-6 below the threshold; the rest is TensorFlow's rounding
    "float64": 1e-14,  # likewise, with up to 2e-15
}
RANGE = {  # the least and the largest entry; TensorFlow can add up their squares in the dtype
    "float16": (0.1, 30.0),
    "bfloat16": (1e-3, 1e3),
    "float32": (1e-6, 1e6),
    "float64": (1e-30, 1e30),
}
TREES = [[(2, 3), None, (5,)], [(), (0, 3), (1,)], [(2, 1, 4)]]
NORM_CLIPS = ["clip_by_norm", "clip_by_average_norm", "clip_by_global_norm"]

each_dtype = pytest.mark.parametrize("dtype", TOLERANCE)
moderate = settings(deadline=None, max_examples=25)


def length(tree):
    return math.sqrt(sum(np.sum(np.asarray(x, np.float64) ** 2) for x in tree))


def tensor(x):
    return None if x is None else tf.constant(np.asarray(x))


def clips(name):
    """Our clip of one leaf, and theirs."""
    ours, theirs = getattr(ops, name), getattr(tf.compat.v1, name)
    if name == "clip_by_global_norm":
        return lambda x, *args: ours([x], *args)[0][0], lambda x, *args: theirs([x], *args)[0][0]
    return ours, theirs


def agree(ours, theirs, dtype, tolerance=None):
    ours, theirs = np.asarray(ours), np.asarray(theirs.numpy())
    assert ours.shape == theirs.shape
    assert ours.dtype == theirs.dtype == jnp.dtype(dtype)
    ours, theirs = ours.astype(np.float64), theirs.astype(np.float64)
    np.testing.assert_allclose(ours, theirs, TOLERANCE[dtype] if tolerance is None else tolerance)


def arrays(dtype, shape, *special):
    low, high = RANGE[dtype]
    entries = st.floats(low, high) | st.floats(-high, -low) | st.sampled_from([0.0, *special])
    return hnp.arrays(np.float64, shape, elements=entries).map(lambda x: x.astype(dtype))


def thresholds(dtype):
    """Thresholds around the largest norms, in the dtype to which TensorFlow rounds them."""
    shares = st.sampled_from([0.01, 0.3, 1, 3])
    return shares.map(lambda share: float(jnp.dtype(dtype).type(share * RANGE[dtype][1])))


# Where they agree.


@pytest.mark.by_day(1)
@each_dtype
@given(st.data())
@moderate
def test_clip_by_value_matches_tensorflow_for_floats(dtype, data):
    x = data.draw(arrays(dtype, (2, 3), INF, -INF, NAN))
    shapes = st.sampled_from([(), (3,), (2, 1), (2, 3)])
    low, high = (data.draw(shapes.flatmap(functools.partial(arrays, dtype))) for _ in range(2))
    with jax.enable_x64(dtype == "float64"):
        clipped = ops.clip_by_value(x, low, high)
    agree(clipped, tf.clip_by_value(*map(tensor, (x, low, high))), dtype, 0)


@pytest.mark.by_day(1)
@pytest.mark.parametrize("dtype", ["int16", "int32", "int64", "uint8"])
@given(st.data())
@moderate
def test_clip_by_value_matches_tensorflow_for_integers(dtype, data):
    x = data.draw(hnp.arrays(dtype, (2, 3)))
    low, high = (data.draw(hnp.from_dtype(np.dtype(dtype))).item() for _ in range(2))
    with jax.enable_x64(True):
        agree(ops.clip_by_value(x, low, high), tf.clip_by_value(tensor(x), low, high), dtype, 0)


@pytest.mark.by_day(1)
@each_dtype
@given(st.data())
@moderate
def test_clip_by_norm_matches_tensorflow(dtype, data):
    x, threshold = data.draw(arrays(dtype, (2, 1, 4))), data.draw(thresholds(dtype))
    axes = data.draw(st.sampled_from([None, (), 0, (-1,), [0, 2]]))
    with jax.enable_x64(dtype == "float64"):
        clipped = ops.clip_by_norm(x, threshold, axes=axes)
    agree(clipped, tf.clip_by_norm(tensor(x), threshold, axes=axes), dtype)


@given(st.data())
@moderate
def test_clip_by_average_norm_matches_tensorflow(data):
    shape = data.draw(st.sampled_from([(), (5,), (0, 3), (2, 1, 4)]))
    x, threshold = data.draw(arrays("float32", shape)), data.draw(thresholds("float32"))
    ours, theirs = clips("clip_by_average_norm")
    agree(ours(x, threshold), theirs(tensor(x), threshold), "float32")


@pytest.mark.by_day(1)
@each_dtype
@given(st.data())
@moderate
def test_clip_by_global_norm_matches_tensorflow(dtype, data):
    shapes = data.draw(st.sampled_from(TREES))
    tree = [None if shape is None else data.draw(arrays(dtype, shape)) for shape in shapes]
    threshold, use_norm = (
        data.draw(thresholds(dtype)),
        data.draw(st.none() | st.just(INF) | thresholds(dtype)),
    )
    theirs = [tensor(x) for x in tree]
    their_norm = None if use_norm is None else tf.constant(use_norm, dtype)
    expected, expected_norm = tf.clip_by_global_norm(theirs, threshold, use_norm=their_norm)
    with jax.enable_x64(dtype == "float64"):
        clipped, norm = ops.clip_by_global_norm(tree, threshold, use_norm=use_norm)
        measured = ops.global_norm(tree)
    for x, y in zip(clipped, expected, strict=True):
        assert x is y is None or agree(x, y, dtype) is None
    for ours, norms in [(norm, expected_norm), (measured, tf.linalg.global_norm(theirs))]:
        np.testing.assert_allclose(float(ours), float(norms), TOLERANCE[dtype])


@pytest.mark.parametrize("tree", [[], [None]])
def test_global_norm_of_empty_tree_matches_tensorflow(tree):
    assert tf.clip_by_global_norm(tree, 1.0) == ops.clip_by_global_norm(tree, 1.0) == (tree, 0)


@pytest.mark.by_day(1)
@pytest.mark.parametrize("name", ["clip_by_value", "clip_by_norm", "clip_by_global_norm"])
@given(arrays("float32", (3, 2)), st.permutations(range(6)), thresholds("float32"))
@moderate
def test_sparse_clips_match_tensorflow(name, rows, order, threshold):
    indices = np.array(order[:3], np.int32)
    ours, theirs = clips(name)
    bounds = (-threshold, threshold) if name == "clip_by_value" else (threshold,)
    clipped = ours(BCOO((jnp.array(rows), jnp.array(indices)[:, None]), shape=(6, 2)), *bounds)
    expected = theirs(tf.IndexedSlices(tensor(rows), tensor(indices), tf.constant([6, 2])), *bounds)
    agree(clipped.data, expected.values, "float32")
    np.testing.assert_array_equal(clipped.indices[:, 0], expected.indices)


# Derivatives.


@functools.cache
def pullback(function):
    return jax.jit(lambda cotangent, *args: jax.vjp(function, *args)[1](cotangent))


def their_pullback(function, cotangent, *args):
    args = [tf.constant(arg) for arg in args]
    with tf.GradientTape() as tape:
        tape.watch(args)
        result = function(*args)
    return [tf.convert_to_tensor(g) for g in tape.gradient(result, args, tensor(cotangent))]


def same_derivatives(ours, theirs, *args):
    with jax.enable_x64(True):
        for mine, yours in zip(pullback(ours)(*args), their_pullback(theirs, *args), strict=True):
            # TensorFlow's product rule subtracts numbers up to 1e3, each rounded to 2e-16.
            np.testing.assert_allclose(mine, yours.numpy(), rtol=1e-12, atol=1e-12)


SMALL = hnp.arrays(np.float64, (2, 3), elements=st.integers(-4, 4).map(float))
clips_of = functools.cache(clips)  # what is compiled of them is found again


@pytest.mark.by_day(1)
@pytest.mark.parametrize("name", NORM_CLIPS[::2])
@given(SMALL, SMALL, st.sampled_from([0.5, 2.1, 7.1, 50.0]))
@moderate
def test_norm_clip_derivatives_match_tensorflow(name, x, cotangent, threshold):
    assume(x.any() or name == "clip_by_norm")  # elsewhere TensorFlow's derivative at 0 is NaN
    same_derivatives(*clips_of(name), cotangent, x, np.float64(threshold))


@pytest.mark.by_day(1)
@pytest.mark.parametrize("shape", [(), (3,), (2, 3)])
@given(SMALL, SMALL, st.data())
@moderate
def test_clip_by_value_derivatives_match_tensorflow(shape, x, cotangent, data):
    low = data.draw(hnp.arrays(np.float64, shape, elements=st.sampled_from([-3.0, -1.0])))
    high = low + data.draw(st.sampled_from([0.0, 2.0]))
    same_derivatives(ops.clip_by_value, tf.clip_by_value, cotangent, x, low, high)


@pytest.mark.by_day(1)
@pytest.mark.parametrize("name", NORM_CLIPS)
@pytest.mark.parametrize("entries", [[0, 0], [3, 4]])
def test_derivative_at_zero_and_at_the_threshold(name, entries):
    x, ones, threshold = np.float32(entries), np.ones(2, np.float32), np.float32(5)
    threshold = threshold / 2 if name == "clip_by_average_norm" else threshold
    ours, theirs = clips(name)
    np.testing.assert_array_equal(pullback(ours)(ones, x, threshold)[0], ones)
    if any(entries):  # on purpose: at the threshold ours is the identity, theirs is as above it
        expected = [0.16, -0.12]
    else:
        expected = [NAN, NAN] if name == "clip_by_global_norm" else ones
    np.testing.assert_allclose(their_pullback(theirs, ones, x, threshold)[0], expected, 1e-5)


# Where they differ on purpose. This backs the table in `docs/coming.md`.

FILLED = [  # the entry of four, the threshold of their L2 norm: TensorFlow's three results, ours
    ("float32", 0, 0, (NAN, NAN, NAN), 0),
    ("float32", 0, INF, (NAN, NAN, NAN), 0),
    ("float32", 3, INF, (NAN, NAN, NAN), 3),
    ("float32", 0, -1, (NAN, 0, 0), 0),
    ("float32", 3, -1, (0, 3, 3), 0),
    ("float32", 1e20, 1, (0, 0, NAN), 0.5),
    ("float32", 1e-25, 1e-26, (0, 0, 1e-25), 5e-27),
    ("bfloat16", 1e20, 1, (0, None, NAN), 0.5),
    ("float16", 300, 1, (0, None, NAN), 0.5),
    ("float16", 300, 1000, (NAN, None, NAN), 300),
    ("float16", 1e-4, 1e-5, (0, None, INF), 5e-6),
]


@pytest.mark.by_day(1)
@pytest.mark.parametrize(("dtype", "entry", "threshold", "their_results", "our_result"), FILLED)
def test_thresholds_and_range(dtype, entry, threshold, their_results, our_result):
    x = jnp.full(4, entry, dtype)
    for name, their_result in zip(NORM_CLIPS, their_results, strict=True):
        ours, theirs = clips(name)
        share = threshold / (4 if name == "clip_by_average_norm" else 1)
        close = functools.partial(np.testing.assert_allclose, rtol=TOLERANCE[dtype])
        close(np.asarray(ours(x, share), np.float64), our_result)
        if their_result is None:
            with pytest.raises(tf.errors.InvalidArgumentError, match=r"half|bfloat16"):
                theirs(tensor(x), share)  # clip_by_average_norm is for float32 only
        else:
            close(np.asarray(theirs(tensor(x), share), np.float64), their_result)


@pytest.mark.by_day(1)
@pytest.mark.parametrize("name", NORM_CLIPS)
def test_infinite_element_makes_group_nan_unlike_tensorflow(name):
    x = np.float32([INF, 1])
    ours, theirs = clips(name)
    second = NAN if name == "clip_by_global_norm" else 0
    np.testing.assert_array_equal(theirs(x, 1.0), [NAN, second])
    np.testing.assert_array_equal(ours(x, 1.0), [NAN, NAN])


@pytest.mark.by_day(1)
@pytest.mark.parametrize("name", NORM_CLIPS)
def test_norm_clips_round_no_worse_than_tensorflow(name):
    ours, theirs = clips(name)
    rng = np.random.default_rng(0)
    xs = rng.normal(size=(300, 10)).astype(np.float32)
    shares = rng.uniform(0.01, 0.1 if name == "clip_by_average_norm" else 1, 300).astype(np.float32)
    thresholds = np.float64(shares) * (10 if name == "clip_by_average_norm" else 1)
    exact = (
        np.float64(xs) * np.minimum(1, thresholds / np.linalg.norm(np.float64(xs), axis=1))[:, None]
    )
    found = jax.jit(jax.vmap(ours))(xs, shares), list(map(theirs, xs, shares))
    our_error, their_error = (np.max(np.abs(np.float64(x) / exact - 1)) for x in found)
    assert our_error <= their_error < 3e-7


def test_global_norm_accumulates_in_float32_unlike_tensorflow():
    narrow = [jnp.full(1000, 0.01, jnp.bfloat16)] * 100
    theirs, their_norm = tf.clip_by_global_norm([tensor(x) for x in narrow], 1.0)
    ours, our_norm = ops.clip_by_global_norm(narrow, 1.0)
    assert (their_norm.dtype, our_norm.dtype) == (tf.bfloat16, jnp.float32)
    np.testing.assert_allclose(our_norm, length(narrow), 1e-6)
    assert float(their_norm) / length(narrow) > 1.01
    assert length(theirs) < 0.99 < 0.998 < length(ours) < 1.002


def test_global_norm_accepts_mixed_dtypes_unlike_tensorflow():
    tree = [np.float32([3, 4]), np.float16([0, 0])]
    with pytest.raises(tf.errors.InvalidArgumentError, match="expected to be a float tensor"):
        tf.clip_by_global_norm(tree, 1.0)
    clipped, norm = ops.clip_by_global_norm(tree, 1.0)
    assert [x.dtype for x in clipped] == ["float32", "float16"]
    assert norm == 5
    np.testing.assert_allclose(clipped[0], [0.6, 0.8], 1e-6)


def test_sparse_duplicates_sum_unlike_tensorflow():
    rows, indices = np.float32([[3], [3]]), np.int32([1, 1])
    slices = tf.IndexedSlices(tensor(rows), tensor(indices), tf.constant([4, 1]))
    sparse = BCOO((jnp.array(rows), jnp.array(indices)[:, None]), shape=(4, 1))
    np.testing.assert_allclose(tf.linalg.global_norm([slices]), 18**0.5, 1e-6)
    np.testing.assert_allclose(ops.global_norm([sparse]), 6, 1e-6)
    for name in ("clip_by_norm", "clip_by_global_norm"):
        ours, theirs = clips(name)
        np.testing.assert_allclose(theirs(slices, 3.0).values, rows / 2**0.5, 1e-6)
        np.testing.assert_allclose(ours(sparse, 3.0).data, rows / 2, 1e-6)


@pytest.mark.by_day(1)
@pytest.mark.parametrize("name", NORM_CLIPS)
def test_norm_clips_accept_complex_leaves_unlike_tensorflow(name):
    ours, theirs = clips(name)
    x = np.complex64([3 + 4j])
    with pytest.raises(tf.errors.InvalidArgumentError, match="complex"):
        theirs(x, 1.0)
    np.testing.assert_allclose(ours(x, 1.0), [0.6 + 0.8j], 1e-6)


@pytest.mark.parametrize("name", NORM_CLIPS)
def test_norm_clips_reject_integers_like_tensorflow(name):
    ours, theirs = clips(name)
    x = np.array([3, 4], np.int32)
    with pytest.raises(tf.errors.InvalidArgumentError, match="int32"):
        theirs(x, 1)
    with pytest.raises(TypeError, match="int32"):
        ours(x, 1)


@pytest.mark.by_day(1)
@pytest.mark.parametrize("name", NORM_CLIPS)
def test_threshold_that_is_no_scalar(name):
    ours, theirs = clips(name)
    x, threshold = np.float32([3, 4]), np.float32([1, 2])
    share = threshold / 2 if name == "clip_by_average_norm" else threshold
    np.testing.assert_allclose(theirs(x, share), [0.6, 1.6], 1e-6)
    with pytest.raises(ValueError, match="clip_norm must be a scalar"):
        ours(x, share)

"""Bounds on values: complex entries that keep them, and a schedule beside a number."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optaxclip


def test_clip_bounds_modulus_of_complex_elements():
    within = [1 + 1j, -1.9j, 2.0, 3e-39 + 1e-39j, 0]
    grads = jnp.array([*within, 3 - 4j, np.inf + 1j, complex(5, -np.inf)], jnp.complex64)
    tx = optaxclip.clip(2.0)
    updates = np.asarray(tx.update(grads, tx.init(grads))[0])
    np.testing.assert_array_equal(updates[: len(within)], np.complex64(within))
    np.testing.assert_allclose(updates[len(within) :], [1.2 - 1.6j, 2, -2j], rtol=1e-6)
    grads, tx = jnp.array([5 + 2j, 0.3j], jnp.complex64), optaxclip.clip(8.0)
    np.testing.assert_array_equal(tx.update(grads, tx.init(grads))[0], grads)


@pytest.mark.parametrize(
    ("bounds", "entries", "expected"),
    [
        ((-1e300, 1.0), [-3e38, 5.0], [-3e38, 1.0]),
        ((-1.0, 10**400), [-3.0, 3e38], [-1.0, 3e38]),
        ((-(10**400), -(2**40)), [-3e38, 0.0], [-3e38, -(2.0**40)]),
        # A modulus is not below 0.
        ((-2.0, -1.0), [3 + 4j, 0.1j], [0, 0]),
    ],
)
def test_clip_by_value_accepts_bounds_beyond_dtype(bounds, entries, expected):
    dtype = np.complex64 if np.iscomplexobj(entries) else np.float32
    tx = optaxclip.clip_by_value(*bounds, record=False)
    found, _ = tx.update(np.asarray(entries, dtype), None)
    np.testing.assert_array_equal(found, np.asarray(expected, dtype))


def test_complex_element_at_bound_keeps_derivative():
    tx = optaxclip.clip(5.0, record=False)

    @jax.jit
    def derivative(z, along):
        return jax.jvp(lambda z: tx.update(z, None)[0], (z,), (along,))[1]

    z = np.complex64([3 + 4j, 6 + 8j])
    np.testing.assert_allclose(derivative(z, z), [3 + 4j, 0], atol=1e-6)


def schedule(count):
    return 2 - count.astype(jnp.float32)


@pytest.mark.parametrize(
    ("bounds", "expected"),
    [
        ((-1.0, schedule), [[-1, 1.5, 2], [-1, 1, 1]]),
        ((lambda count: -schedule(count), 1.0), [[-2, 1, 1], [-1, 1, 1]]),
    ],
)
def test_clip_by_value_combines_schedule_and_number(bounds, expected):
    tx, grads = optaxclip.clip_by_value(*bounds), np.float32([-3.0, 1.5, 3.0])
    state = tx.init(grads)
    for held in expected:
        updates, state = tx.update(grads, state)
        np.testing.assert_array_equal(updates, held)


@pytest.mark.parametrize("bounds", [(-1.0, schedule), (lambda count: -1.0, 1.0)])
def test_clip_by_value_schedule_requires_state(bounds):
    with pytest.raises(
        ValueError,
        match=(
            r"^clip_by_value: record=False cannot be "
            r"combined with a threshold that depends on earlier steps"
        ),
    ):
        optaxclip.clip_by_value(*bounds, record=False)
    with pytest.raises(
        ValueError,
        match=r"^clip_by_value: state must be the state from the previous step, got None",
    ):
        optaxclip.clip_by_value(*bounds).update(jnp.ones(2), None)


def test_clip_by_value_accepts_largest_float_as_bound():
    most = float(np.finfo(np.float32).max)
    tx, grads = optaxclip.clip_by_value(-most, most), np.float32([-np.inf, most, np.inf])
    np.testing.assert_array_equal(tx.update(grads, tx.init(grads))[0], [-most, most, most])


def test_clip_schedules_may_return_arrays():
    optaxclip.clip(lambda count: jnp.ones(2))
    optaxclip.clip_by_value(lambda count: -jnp.ones(2), lambda count: jnp.ones(2))


def test_clip_by_value_combines_traced_bound_and_number():
    def clipped(low):
        return optaxclip.clip_by_value(low, 1.0, record=False).update(jnp.ones(2), None)[0]

    assert jax.eval_shape(clipped, jnp.float32(-1)).shape == (2,)


@pytest.mark.parametrize("value", [0.5 + 1j, True, None, "a"])
def test_clip_schedules_must_return_real_numbers(value):
    for make in (optaxclip.clip, lambda fn: optaxclip.clip_by_value(-1.0, fn)):
        with pytest.raises(
            TypeError, match="must be a schedule \\(a function of the step count\\)"
        ):
            make(lambda count: value)

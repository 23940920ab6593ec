"""Formats of eight bits and fewer: strict results are cut, those without are the nearest."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optaxclip

FORMATS = ["float4_e2m1fn", "float8_e4m3fn", "float8_e5m2", "float8_e3m4", "float8_e4m3b11fnuz"]


def numbers_of(dtype):
    """All finite numbers of a format, ascending."""
    bits = np.arange(2 ** jnp.finfo(dtype).bits, dtype=np.uint8)
    numbers = bits.view(jnp.dtype(dtype)).astype(np.float32)
    return np.unique(numbers[np.isfinite(numbers)])


@pytest.mark.by_day(2)
@pytest.mark.parametrize("how", ["eager", "jit"])
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("dtype", FORMATS)
def test_small_float_formats_round_once(dtype, strict, how):
    numbers = numbers_of(dtype)
    grads = np.random.default_rng(0).choice(numbers[np.abs(numbers) <= 6], 64)
    tx = optaxclip.clip_by_global_norm(3.0, strict=strict)
    x = grads.astype(dtype)
    updates, state = (jax.jit(tx.update) if how == "jit" else tx.update)(x, tx.init(x))
    found, exact = np.asarray(updates, np.float32), grads * np.asarray(state.info.factor)
    assert updates.dtype == x.dtype
    assert np.all(found * exact >= 0)
    if strict:
        below = [numbers[(numbers >= 0) & (numbers <= abs(e))].max() for e in exact]
        np.testing.assert_array_equal(np.abs(found), below)
        assert np.linalg.norm(found) <= 3.0
    else:
        nearest = np.abs(numbers[:, None] - exact).min(axis=0)
        np.testing.assert_allclose(np.abs(found - exact), nearest, rtol=1e-6, atol=1e-12)


BOUNDS = [1e3, 1e4, np.inf, np.float32(1e6), np.int32(1000), jnp.asarray(1e30)]


@pytest.mark.by_day(1)
@pytest.mark.parametrize("dtype", [*FORMATS, "float8_e4m3fnuz", "float16"])
def test_bounds_beyond_format_keep_elements(dtype):
    x = jnp.asarray(numbers_of(dtype), dtype)
    for bound in BOUNDS:
        if np.isinf(bound) or bound > float(jnp.finfo(dtype).max):
            found = [optaxclip.clip(bound).update(x, None)[0]]
            found.append(optaxclip.ops.clip_by_value(x, -bound, bound))
            found.append(optaxclip.ops.clip_by_value(x, -1.0, bound)[x >= -1])
            expected = [x, x, x[x >= -1]]
            for some, same in zip(found, expected, strict=True):
                np.testing.assert_array_equal(*(np.asarray(y, np.float32) for y in (some, same)))
    tx = optaxclip.clip_by_second_moment()
    updates, state = tx.update(x, tx.init(x))
    np.testing.assert_array_equal(np.asarray(updates, np.float32), np.asarray(x, np.float32))
    assert np.isfinite(state.moments).all()


def test_clip_replaces_infinity_by_largest_float16_below_bound():
    x = jnp.asarray([6e4, jnp.inf, -jnp.inf, jnp.nan], jnp.float16)
    updates, _ = optaxclip.clip(1e5).update(x, None)
    np.testing.assert_array_equal(updates, np.float16([6e4, 65504, -65504, np.nan]))

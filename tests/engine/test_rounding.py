"""One factor, one rounding: what a clip does to each entry."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optaxclip
import optaxclip._engine.scale as engine_scale
from optaxclip import scopes

pytestmark = pytest.mark.usefixtures("optimized")
BF16, F16, F32 = jnp.bfloat16, np.float16, np.float32


def wide(x):
    return np.asarray(x, np.float64)


@pytest.mark.parametrize("size", [5, 300])
@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=["float32", "bfloat16", "float16"])
def test_every_entry_is_multiplied_and_rounded_once(dtype, size):
    x = np.random.default_rng(0).standard_normal(size).astype(dtype)
    limit = jnp.asarray(0.7, dtype)
    (clipped,), info = optaxclip.clip_tree([x], limit, scope=scopes.tree())
    assert info.factor.dtype == info.norm.dtype == F32
    exact = wide(x) * min(1, float(limit) / np.linalg.norm(wide(x)))
    by_factor = (wide(x) * float(info.factor)).astype(dtype)
    ulp = float(jnp.finfo(dtype).eps) * 2.0 ** np.floor(np.log2(np.abs(wide(clipped))))
    assert np.all(np.abs(wide(clipped) - wide(by_factor)) <= ulp)
    assert np.mean(np.asarray(clipped) == by_factor) > (0.95 if size == 300 else 0)
    # A slack of some float32 roundings keeps large groups below the limit.
    assert np.all(np.abs(wide(clipped) - exact) <= ulp + 1e-6 * np.abs(exact))


def test_direction_and_order_do_not_matter():
    rng = np.random.default_rng(0)
    tree = [rng.standard_normal(size).astype(F32) * size for size in (2, 70, 500)]
    (forward, info), (backward, _) = (
        optaxclip.clip_tree(t, 0.3, scope=scopes.tree()) for t in (tree, tree[::-1])
    )
    for x, clipped, other in zip(tree, forward, backward[::-1], strict=True):
        np.testing.assert_allclose(clipped, other, rtol=3e-7)
        np.testing.assert_allclose(np.asarray(clipped) / x, float(info.factor), rtol=2e-7)


def test_strict_rounding_gives_the_nearest_that_is_no_larger():
    x = np.random.default_rng(0).normal(size=300).astype(F32)
    x[::3] = x[::3].astype(F16)  # which need no rounding
    x[:2] = 0, -0.0
    strictly = jax.jit(engine_scale._rounded, static_argnums=(1, 2))
    found = np.asarray(strictly(x, jnp.dtype(F16), True))
    np.testing.assert_array_equal(found[::3], x[::3])
    np.testing.assert_array_equal(np.signbit(found), np.signbit(x))
    assert np.all(np.abs(wide(found)) <= np.abs(wide(x)))
    assert np.all(wide(np.nextafter(np.abs(found), F16(np.inf))) > np.abs(wide(x)))

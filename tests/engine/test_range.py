"""Thresholds and norms at the edges of what dtypes hold, beside NumPy in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiling import AS_USERS

import optaxclip
from optaxclip import norms, ops, scopes

pytestmark = pytest.mark.usefixtures("optimized")
RNG = np.random.default_rng(0)


def test_strict_clip_uses_slack_of_leaf_dtype(x64):
    """A float32 leaf is multiplied in float32, though norms are float64 as the other leaf's is."""
    trees = {
        "narrow": RNG.normal(size=(200, 100)).astype(np.float32),
        "wide": 1 + RNG.random(size=(200, 3)),
    }

    def clip(tree):
        return optaxclip.clip_tree(tree, 1.0, scope=scopes.leaf(), strict=True)[0]

    for leaf in jax.tree.leaves(jax.jit(jax.vmap(clip))(trees)):
        found = np.linalg.norm(np.asarray(leaf, np.float64), axis=1)
        assert np.all((found <= 1) & (found > 1 - 1e-5))


def test_linf_norm_of_complex_leaf_saturates():
    grads = [jnp.asarray([3e38 + 3e38j], jnp.complex64), jnp.ones(1)]
    tx = optaxclip.clip_by(scopes.tree(), 1.0, norm="linf")
    updates, state = tx.update(grads, tx.init(grads))
    assert state.info.norm == np.finfo(np.float32).max
    assert not np.any(np.isnan(updates[0]))
    np.testing.assert_allclose(np.abs(np.complex128(updates[0])), 1, rtol=1e-6)
    highest = ops.global_norm([jnp.array([3 + 4j])], norm=norms.lp(64))
    np.testing.assert_allclose(highest, 5, rtol=1e-6)


def test_power_of_two_factor_scales_elements():
    """Where the ratio of the multiplier is 1, its power of two still counts."""
    powers = np.float32([2.0**100, 2.0**120, 2.0**126])
    for dtype in (jnp.float32, jnp.bfloat16):
        leaves = np.stack([powers, 0 * powers], axis=1).astype(dtype)
        clipped = jax.jit(jax.vmap(lambda x: optaxclip.clip_tree(x, 1.0, scope=scopes.tree())[0]))
        np.testing.assert_array_equal(np.float32(clipped(leaves)), [[1, 0]] * 3, err_msg=f"{dtype}")


def test_thresholds_of_orders_below_one():
    orders = (0.1, 0.25, 0.5, 0.9)
    trees = RNG.normal(size=(200, 64)).astype(np.float32)

    def clip(tree):
        each = [norms.lp(p) for p in orders]
        options = {"scope": scopes.tree(), "strict": True}
        return [optaxclip.clip_tree(tree, 1.0, norm=n, **options)[0] for n in each]

    for p, clipped in zip(orders, jax.jit(jax.vmap(clip))(trees), strict=True):
        found = np.sum(np.abs(np.asarray(clipped, np.float64)) ** p, axis=1) ** (1 / p)
        assert np.all(found <= 1), p
        assert np.all(found > 1 - 1e-3), p


@pytest.mark.slow
@pytest.mark.parametrize("norm", ["l2", norms.lp(3)], ids=str)
@pytest.mark.parametrize("scope", [scopes.tree(), scopes.leaf()], ids=["tree", "leaf"])
@pytest.mark.parametrize("size", [5, 7])
def test_mask_policy_keeps_bfloat16_subnormals(size, scope, norm):
    bits = np.array([0x80, 0x8001, 0x7F, 0x7F, 0, 0x41, 0x8042], np.uint16)[:size]
    tiny = bits.view(jnp.bfloat16)
    tx = optaxclip.clip_by(scope, 1.0, norm=norm, nonfinite="mask")
    grads = {"tiny": tiny, "some": tiny.copy(), "bad": tiny.copy()}
    grads["some"][4], grads["bad"][4] = 0.5, np.nan
    update = jax.jit(tx.update, compiler_options=AS_USERS)
    updates, _ = update(grads, tx.init(grads))
    for name, changed in {"tiny": 0, "some": 0x3F00, "bad": 0}.items():
        expected, found = bits.copy(), np.asarray(updates[name]).view(np.uint16)
        expected[4] = changed
        np.testing.assert_array_equal(found, expected, err_msg=name)


def test_linf_derivative_selects_largest_element():
    """Where it is divided by itself."""
    derivative = jax.jit(jax.grad(functools.partial(ops.global_norm, norm="linf")))
    for largest in (4.0, -0.5, 3.0):
        found, _ = derivative([jnp.array([0.25, largest, 0.0]), jnp.zeros((0, 3))])
        np.testing.assert_allclose(found, [0, np.sign(largest), 0], rtol=1e-6)


def test_linf_norm_keeps_smallest_normal_number():
    tiny = jnp.finfo(jnp.float32).tiny
    assert ops.global_norm([jnp.array([0, -tiny])], norm="linf") == tiny


def test_normalize_enlarges_tiny_elements_among_large_elements():
    grads = np.float32([4, 1.5 * jnp.finfo(jnp.float32).tiny])
    options = {"scope": scopes.tree(), "response": "normalize"}
    found, _ = optaxclip.clip_tree(grads, 400.0, **options)
    np.testing.assert_allclose(found, 100 * grads, rtol=2e-6)


@pytest.mark.by_day(1)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16, jnp.float64])
@pytest.mark.parametrize("norm", ["l1", "l2", "linf"])
def test_subnormal_elements_on_cpu_match_documentation(x64, dtype, norm):
    """XLA on CPU computes with those of the dtype that it computes in as with 0."""
    x = jnp.full(4, float(jnp.finfo(dtype).tiny) / 64, dtype)
    found, info = jax.jit(lambda x: optaxclip.clip_tree(x, 1e-37, scope=scopes.tree(), norm=norm))(
        x
    )
    if dtype == jnp.float16:
        np.testing.assert_allclose(info.norm, float(x[0]) * {"l1": 4, "l2": 2, "linf": 1}[norm])
    else:
        assert info.norm == 0
        np.testing.assert_array_equal(np.asarray(found), np.asarray(x))

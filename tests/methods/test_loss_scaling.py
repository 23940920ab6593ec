"""The scale of the loss: what is measured, what is skipped, and how it changes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.serialization import from_bytes, to_bytes
from flax.training.dynamic_scale import DynamicScale
from jax.experimental.sparse import BCOO
from methods_table import avals

import optaxclip
from optaxclip import accumulate, monitor, scale_loss, skip_above, skip_nonfinite

pytestmark = pytest.mark.usefixtures("standard_promotion")

PARAMS = {"w": jnp.arange(1.0, 5.0), "b": jnp.ones(2)}
ADAM = optax.adam(0.1)


def chain():
    return optax.chain(optaxclip.clip_by_global_norm(1.0), ADAM)


def times(tree, by):
    return jax.tree.map(lambda x: x * by, tree)


def as_float16(tree):
    return jax.tree.map(lambda x: x.astype(jnp.float16), tree)


def scales_of(tx, finite):
    """The scale of each step and of the one after the last; gradients are finite as said."""

    def step(state, is_finite):
        scale = monitor.loss_scale(state)
        grads = jnp.where(is_finite, scale, jnp.inf) * jnp.ones(2)
        updates, state = tx.update(grads, state)
        return state, (scale, monitor.loss_scale(state), updates[0])

    _, (before, after, updates) = jax.lax.scan(step, tx.init(jnp.ones(2)), finite)
    return jnp.append(before, after[-1]), updates


def scales_of_jmp(finite, scale, period):
    jmp = pytest.importorskip("jmp", reason="of dm-haiku, which the extra recipes brings")
    rule = jmp.DynamicLossScale(jnp.float32(scale), period=period)

    def step(rule, is_finite):
        return rule.adjust(is_finite), rule.loss_scale

    last, scales = jax.lax.scan(step, rule, finite)
    return jnp.append(scales, last.loss_scale)


def scales_of_flax(finite, scale, interval):
    rule = DynamicScale(growth_interval=interval, scale=scale, minimum_scale=1.0)

    def step(rule, is_finite):
        bad = jnp.where(is_finite, 1.0, jnp.inf)
        return rule.value_and_grad(lambda x: x * bad)(1.0).dynamic_scale, rule.scale

    rule = rule.replace(fin_steps=jnp.int32(0), scale=jnp.float32(scale))
    last, scales = jax.lax.scan(step, rule, finite)
    return jnp.append(scales, last.scale)


@pytest.mark.slow
def test_scale_loss_matches_jmp_and_flax():
    finite = np.random.default_rng(0).random((4, 200)) < [[0.9], [0.97], [1.0], [0.3]]

    @jax.jit
    @jax.vmap
    def run(finite):
        ours = {n: scale_loss(optax.sgd(1.0), growth_interval=n, initial=8) for n in (5, 6)}
        return (
            {n: scales_of(tx, finite) for n, tx in ours.items()},
            scales_of_jmp(finite, 8.0, 5),
            scales_of_flax(finite, 8.0, 5),
        )

    ours, of_jmp, of_flax = run(finite)
    assert ours[5][0].max() == 2.0**24 < of_jmp.max()
    at_top = np.maximum.accumulate(of_jmp, axis=1) > 2.0**24
    np.testing.assert_array_equal(ours[5][0][~at_top], of_jmp[~at_top])
    assert at_top.mean() < 0.5
    # Flax counts the good steps from 0 and grows at the one after, so its interval is one longer.
    at_top = np.maximum.accumulate(of_flax, axis=1) > 2.0**24
    np.testing.assert_array_equal(ours[6][0][~at_top], of_flax[~at_top])
    np.testing.assert_array_equal(ours[5][1], np.where(finite, -1.0, 0.0))


def test_loss_scale_stays_between_minimum_and_maximum():
    """150 bad batches, and as many steps as the recipe with a bare product did not survive."""
    few = scale_loss(optax.identity(), growth_interval=1000)
    finite = np.ones(112_003 + 150, bool)
    finite[:150] = False
    (scales, updates), (others, _) = jax.jit(
        lambda finite: (
            scales_of(few, finite),
            scales_of(scale_loss(optax.identity(), minimum=2**-3, maximum=2**20), finite[:200]),
        )
    )(finite)
    assert scales[15] == scales[150] == 1
    assert np.all(updates[150:] == 1)
    assert scales[1150] == 2
    assert scales[-1] == scales.max() == 2.0**24
    assert others.min() == others[-1] == 0.125


def test_loss_scale_outside_bounds_returns_to_bounds():
    tx = scale_loss(optax.sgd(1.0), maximum=2.0**16)
    stored = np.float32([2.0**24, 0.0, np.inf, np.nan, 3.0])
    is_read_as = np.float32([2.0**24, 1, 1, 1, 2])

    @jax.jit
    @jax.vmap
    def step(stored, grad):
        state = tx.init(jnp.ones(2))._replace(loss_scale=stored)
        scale = monitor.loss_scale(state)
        updates, state = tx.update(jnp.full(2, grad), state)
        return scale, updates[0], monitor.loss_scale(state)

    scale, updates, then = step(stored, is_read_as)
    np.testing.assert_array_equal(scale, is_read_as)
    np.testing.assert_array_equal(updates, -1)
    np.testing.assert_array_equal(then, np.minimum(is_read_as, 2.0**16))
    assert monitor.loss_scale(tx.init(jnp.ones(2))._replace(loss_scale=8.0)) == 8


@functools.cache
def compiled(tx, **options):
    return jax.jit(tx.update, **options)


def run(tx, trees, by=None, params=PARAMS):
    """Updates and states of all steps, whose gradients are those of the loss times its scale."""
    state, rows = tx.init(params), []
    for tree in trees:
        scaled = times(tree, monitor.loss_scale(state)) if by is None else times(tree, by)
        updates, state = compiled(tx)(scaled, state, params)
        rows.append((updates, state))
    return rows


INSIDE = {
    "clip": chain,
    "zclip and record": lambda: optax.chain(monitor.record(9), optaxclip.zclip(), ADAM),
    "skip": lambda: skip_above(chain(), 3.0),
    "agc": lambda: optax.chain(optaxclip.adaptive_grad_clip(0.1), ADAM),
    "MultiSteps": lambda: optax.MultiSteps(chain(), 2).gradient_transformation(),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", INSIDE)
def test_scale_loss_leaves_inner_transformations_bitwise_unchanged(name):
    rng = np.random.default_rng(1)
    trees = [times(jax.tree.map(jnp.ones_like, PARAMS), rng.uniform(0.1, 3)) for _ in range(6)]
    trees[3:3] = [times(PARAMS, jnp.nan)] * 2
    found = run(scale_loss(INSIDE[name](), growth_interval=2), trees)
    plain = run(skip_nonfinite(INSIDE[name](), name="scale_loss"), trees, by=1.0)
    for (updates, state), (wanted, without) in zip(found, plain, strict=True):
        jax.tree.map(np.testing.assert_array_equal, (updates, state.skip), (wanted, without))
    scales = [int(np.log2(monitor.loss_scale(state))) for _, state in found]
    assert scales == [15, 16, 16, 15, 14, 14, 15, 15]
    assert [int(state.good_steps) for _, state in found] == [1, 0, 1, 0, 0, 1, 0, 1]


def loss_fn(params, x, y, scale=1.0, dtype=jnp.float16):
    half = jax.tree.map(lambda p: p.astype(dtype), params)
    loss = jnp.mean((x.astype(dtype) @ half["w"] - y.astype(dtype)) ** 2)
    return loss.astype(jnp.float32) * scale


def test_scale_loss_divides_float16_gradients_in_float32():
    tiny, tx = np.float32(2.0**-30), scale_loss(optax.sgd(1.0, momentum=0.9), initial=2.0**16)
    scaled = as_float16(times(PARAMS, tiny * 2.0**16))
    for params in (PARAMS, None):
        updates, state = compiled(tx)(scaled, tx.init(PARAMS), params)
        jax.tree.map(np.testing.assert_array_equal, updates, times(PARAMS, -tiny))
        assert state.info.norm == optaxclip.ops.global_norm(times(PARAMS, tiny))
    # Parameters in float16 get updates in float16; what is inside is in float32.
    narrow = tx.init(as_float16(PARAMS))
    assert avals(narrow) == avals(tx.init(PARAMS))
    updates, state = compiled(tx)(scaled, narrow, as_float16(PARAMS))
    jax.tree.map(np.testing.assert_array_equal, updates, as_float16(times(PARAMS, -tiny)))
    assert avals(state) == avals(narrow)
    jax.tree.map(
        np.testing.assert_array_equal, state.skip.inner_state[0].trace, times(PARAMS, tiny)
    )
    mixed = {"w": scaled["w"], "b": jnp.ones(2, jnp.bfloat16)}
    updates, _ = jax.eval_shape(tx.update, mixed, jax.eval_shape(tx.init, mixed), mixed)
    assert [x.dtype for x in jax.tree.leaves(updates)] == [jnp.bfloat16, jnp.float16]
    fp8 = jax.tree.map(lambda x: x.astype(jnp.float8_e4m3fn), PARAMS)
    updates, _ = compiled(tx)(fp8, tx.init(PARAMS), PARAMS)
    jax.tree.map(np.testing.assert_array_equal, updates, times(PARAMS, -(2.0**-16)))


@pytest.mark.slow
def test_scale_loss_works_in_optax_partition():
    """As for fp8 in Flax, where the "gradients" of some leaves are their new values."""
    labels = {"w": "gradient", "b": "new value"}
    tx = optax.partition({"gradient": scale_loss(ADAM), "new value": optax.identity()}, labels)
    updates, state = compiled(tx)(PARAMS | {"w": PARAMS["w"] * jnp.inf}, tx.init(PARAMS), PARAMS)
    np.testing.assert_array_equal(updates["b"], PARAMS["b"])
    assert not jnp.any(updates["w"])
    assert monitor.loss_scale(state) == 2.0**14
    assert not monitor.step_was_applied(state)


@pytest.mark.slow
def test_scale_loss_accepts_sparse_gradients():
    tx, dense = scale_loss(optax.identity(), initial=2.0**4), jnp.float16([[0, 8], [4, 0]])
    grads = {"w": BCOO.fromdense(dense)}
    for params, dtype in (({"w": dense}, jnp.float16), (None, jnp.float32)):
        updates, state = compiled(tx)(grads, tx.init({"w": dense}), params)
        assert updates["w"].dtype == dtype
        np.testing.assert_array_equal(updates["w"].todense(), dense / 16)
        assert state.info.norm == np.float32(80**0.5 / 16)


def test_scale_loss_survives_checkpoints_and_donation():
    tx = scale_loss(chain(), growth_interval=2)
    step, state = compiled(tx, donate_argnums=1), tx.init(PARAMS)
    start, seen = avals(state), []
    for i in range(5):
        old = state
        grads = times(PARAMS, jnp.inf if i == 2 else 1.0)
        _, state = step(grads, state, PARAMS)
        assert old.loss_scale.is_deleted()
        assert avals(state) == start
        state = from_bytes(tx.init(PARAMS), to_bytes(state))
        state = jax.tree.map(jnp.asarray, state)
        seen.append(monitor.loss_scale(state))
    assert step._cache_size() == 1
    assert np.log2(seen).tolist() == [15, 16, 15, 15, 16]
    mapped = optax.tree_map_params(tx, lambda x: 2 * x, state)
    jax.tree.map(
        np.testing.assert_array_equal,
        optax.tree.get(mapped, "mu"),
        times(optax.tree.get(state, "mu"), 2),
    )
    assert monitor.loss_scale(mapped) == 2.0**16


def test_scale_loss_accepts_injected_hyperparams():
    make = optax.inject_hyperparams(functools.partial(scale_loss, optax.sgd(1.0)))
    tx = make(growth_interval=2, factor=4.0, maximum=2.0**18)
    step, state, seen = compiled(tx), tx.init(PARAMS), []
    for i in range(6):
        if i == 4:
            state.hyperparams["factor"] = jnp.float32(8.0)
        _, state = step(times(PARAMS, jnp.nan if i == 5 else 1.0), state, PARAMS)
        seen.append(monitor.loss_scale(state))
    assert np.log2(seen).tolist() == [15, 17, 17, 18, 18, 15]
    assert step._cache_size() == 1


@pytest.mark.slow
def test_scale_loss_works_with_accumulate():
    x = jax.random.normal(jax.random.key(0), (8, 4))
    y = x.sum(1)
    grad_fn = accumulate.value_and_grad(
        loss_fn, batch_argnums=(1, 2), microbatch_size=2, reject_rule=None
    )
    tx = scale_loss(chain(), initial=2.0**10)

    @jax.jit
    def step(state, x):
        scale = monitor.loss_scale(state)
        (_, grads, _) = grad_fn(PARAMS, x, y, scale)
        return tx.update(grads, state, PARAMS)

    _, state = step(tx.init(PARAMS), x)
    norm = optaxclip.ops.global_norm(jax.grad(loss_fn)(PARAMS, x, y, dtype=jnp.float32))
    np.testing.assert_allclose(state.info.norm, norm, rtol=0.01)
    updates, state = step(state, x.at[5].set(1e4))  # overflows in one microbatch
    assert not jnp.any(updates["w"])
    assert monitor.loss_scale(state) == 2.0**9


WRONG = {
    "initial": [0.0, -2.0, 3.0, jnp.inf, jnp.nan, 2.0**127, 0.5, 2.0**25],
    "factor": [1.0, 0.5, 3, jnp.float32(1.5)],
    "minimum": [0, 2.0**-127],
    "maximum": [1e9, 2.0**127],
    "growth_interval": [0, -1],
}
WRONG_TYPES = {name: ["a", None, np.ones(2)] for name in (*WRONG, "inner")}


def test_scale_loss_widens_only_moments_with_smaller_range():
    formats = ("bfloat16", "float16", "float32", "float8_e4m3fn")
    params = {name: jax.ShapeDtypeStruct((2,), name) for name in formats}
    tx = scale_loss(optax.sgd(1.0, momentum=0.9))
    for state in (jax.eval_shape(tx.init, params), tx.init(params)):
        found = [x.dtype.name for x in jax.tree.leaves(optax.tree.get(state, "trace"))]
        assert found == ["bfloat16", *["float32"] * 3]


def test_scale_loss_accepts_extreme_powers_of_two():
    for initial in (2.0**-126, 2.0**126):
        scale_loss(ADAM, initial=initial, minimum=2.0**-126, maximum=2.0**126)


def test_scale_loss_accepts_traced_factor():
    def init(factor):
        return scale_loss(ADAM, factor=factor).init(PARAMS).loss_scale

    assert jax.eval_shape(init, jnp.float32(4)).shape == ()


@pytest.mark.parametrize("name", WRONG_TYPES)
def test_scale_loss_rejects_invalid_arguments(name):
    for kind, values in ((ValueError, WRONG.get(name, ())), (TypeError, WRONG_TYPES[name])):
        for value in values:
            with pytest.raises(kind, match=rf"^{name} must be "):
                scale_loss(**{"inner": ADAM, name: value})
    with pytest.raises(ValueError, match="initial must be between minimum and maximum, got"):
        scale_loss(ADAM, minimum=2.0**16)

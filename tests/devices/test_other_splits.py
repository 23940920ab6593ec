"""Arrays of one step that are split differently, or over axes of both kinds."""

import jax
import numpy as np
import optax
import pytest
from compiling import collectives, most_gathered
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from methods_table import DISTINCT, METHODS

import optaxclip
from optaxclip import monitor, scopes, thresholds

KINDS = (AxisType.Explicit, AxisType.Auto)
CLIPS = {
    "clip_by_global_norm": lambda: optaxclip.clip_by_global_norm(0.5),
    "mask": lambda: optaxclip.clip_by_global_norm(0.5, nonfinite="mask"),
    "zclip": lambda: optaxclip.zclip(max_norm=0.5),
    "clip_by_block_rms": lambda: optaxclip.clip_by_block_rms(0.5),
    "scale_by_stable_adam": optaxclip.scale_by_stable_adam,
    "clip": lambda: optaxclip.clip(0.5),
    "clip_by_second_moment": lambda: optaxclip.clip_by_second_moment(warmup_steps=0),
    "scale_loss": lambda: optaxclip.scale_loss(optax.trace(0.9), initial=2.0),
}


def gradients(*shape):
    rng = np.random.default_rng(0)
    return {"w": rng.normal(size=shape).astype(np.float32)}


@pytest.mark.by_day(1)
@pytest.mark.parametrize("name", CLIPS)
@pytest.mark.parametrize("kinds", [KINDS, KINDS[::-1]], ids=["explicit first", "automatic first"])
def test_clips_gather_nothing_over_mixed_axis_types(name, kinds):
    tx, whole = CLIPS[name](), gradients(64, 64)
    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=kinds)
    expected = jax.jit(tx.update)(whole, tx.init(whole), whole)[0]["w"]
    with jax.set_mesh(mesh):
        grads = jax.device_put(whole, NamedSharding(mesh, P("a", "b")))
        state = tx.init(grads)
        step = jax.jit(tx.update).lower(grads, state, grads).compile()
        found = step(grads, state, grads)[0]["w"]
    assert most_gathered(step) == 0
    assert collectives(step).get("all-reduce", 0) <= 4
    assert found.sharding.is_equivalent_to(grads["w"].sharding, 2)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


STEPS = {
    "clip_by_second_moment": lambda: optaxclip.clip_by_second_moment(warmup_steps=0),
    "skip_nonfinite": lambda: optaxclip.skip_nonfinite(optax.trace(0.9)),
    "skip_above": lambda: optaxclip.skip_above(optax.trace(0.9), 100.0),
    "scale_loss": lambda: optaxclip.scale_loss(optax.trace(0.9), initial=1.0),
}


@pytest.mark.by_day(1)
@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("specs", [(P(), P("x")), (P("x"), P())], ids=["gradients", "state"])
def test_states_accept_different_sharding_from_gradients(name, specs):
    mesh, tx, whole = jax.make_mesh((8,), ("x",)), STEPS[name](), gradients(16, 4)

    def two_steps(grads, state):
        for _ in range(2):
            updates, state = tx.update(grads, state)
        return updates

    expected = jax.jit(two_steps)(whole, tx.init(whole))["w"]
    with jax.set_mesh(mesh):
        params, grads = (jax.device_put(whole, NamedSharding(mesh, spec)) for spec in specs)
        found = jax.jit(two_steps)(grads, tx.init(params))["w"]
    np.testing.assert_allclose(found, expected, rtol=1e-6)


HISTORIES = {
    "record": lambda: monitor.record(8),
    "record, leaves": lambda: monitor.record(8, scope=scopes.leaf(), stats=("norm", "max")),
    "skip_above": lambda: optaxclip.skip_above(optax.trace(0.9), thresholds.window(1.0, 8)),
    "median": lambda: optaxclip.clip_by_median_norm(window=8),
    "percentile": lambda: optaxclip.clip_by(scopes.leaf(), thresholds.percentile(50.0, 8)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", HISTORIES)
def test_histories_accept_sharding_over_mesh(name):
    mesh, tx, grads = jax.make_mesh((8,), ("x",)), HISTORIES[name](), gradients(16, 4)
    sizes = np.arange(1, 20, dtype=np.float32) % 7

    def placed(x):
        return jax.device_put(x, NamedSharding(mesh, P("x") if x.shape[:1] == (8,) else P()))

    def steps(grads, state):
        def step(state, size):
            return tx.update({"w": size * grads["w"]}, state)[::-1]

        return jax.lax.scan(step, state, sizes)

    state, whole = tx.init(grads), jax.device_put(grads, NamedSharding(mesh, P()))
    expected = jax.jit(steps)(grads, state)
    found = jax.jit(steps)(whole, jax.tree.map(placed, state))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6), found, expected)
    splits = jax.tree.map(lambda x: "x" in x.sharding.spec, found[0])
    assert splits == jax.tree.map(lambda x: x.shape[:1] == (8,), state)
    assert any(jax.tree.leaves(splits))


@pytest.mark.slow
def test_methods_treat_nonfinite_elements_equally_on_mesh():
    """The compiler's maximum over devices loses a NaN on a CPU (JAX 0.10.2): none may be taken."""
    rng = np.random.default_rng(0)
    shapes = {"w": (16, 24), "b": (8,), "v": (16,)}
    params, tree = ({x: rng.normal(size=y).astype("f") for x, y in shapes.items()} for _ in "pt")
    tree["w"][1, 6], tree["v"][4] = np.nan, np.inf
    # The heads' logits, of which a maximum is taken in the table, are the user's.
    methods = {x: METHODS[x].make() for x in DISTINCT if x != "clip_attention_logits"}

    @jax.jit
    def step(tree, params):
        return {x: tx.update(tree, tx.init(params), params) for x, tx in methods.items()}

    mesh = jax.make_mesh((8,), ("x",), (AxisType.Auto,))
    found = step(*jax.device_put((tree, params), NamedSharding(mesh, P("x"))))
    pairs = zip(jax.tree.leaves_with_path(found), jax.tree.leaves(step(tree, params)), strict=True)
    for (path, x), expected in pairs:
        where = jax.tree_util.keystr(path)
        np.testing.assert_allclose(x, expected, rtol=1e-4, atol=1e-5, err_msg=where)

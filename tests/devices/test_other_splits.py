"""Arrays of one step that are split differently, or over axes of both kinds."""

import jax
import numpy as np
import optax
import pytest
from compiling import collectives, most_gathered
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import optaxclip

KINDS = (AxisType.Explicit, AxisType.Auto)
CLIPS = {
    "clip_by_global_norm": lambda: optaxclip.clip_by_global_norm(0.5),
    "mask": lambda: optaxclip.clip_by_global_norm(0.5, nonfinite="mask"),
    "zclip": lambda: optaxclip.zclip(max_norm=0.5),
    "clip_by_block_rms": lambda: optaxclip.clip_by_block_rms(0.5),
    "scale_by_stable_adam": optaxclip.scale_by_stable_adam,
    "hyperball": lambda: optaxclip.hyperball(0.1),
}


def gradients(*shape):
    rng = np.random.default_rng(0)
    return {"w": rng.normal(size=shape).astype(np.float32)}


@pytest.mark.parametrize("name", CLIPS)
@pytest.mark.parametrize("kinds", [KINDS, KINDS[::-1]], ids=["explicit first", "automatic first"])
def test_leaves_that_are_split_over_axes_of_both_kinds_are_not_gathered(name, kinds):
    tx, whole = CLIPS[name](), gradients(64, 64)
    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=kinds)
    expected = jax.jit(tx.update)(whole, tx.init(whole), whole)[0]["w"]
    with jax.set_mesh(mesh):
        grads = jax.device_put(whole, NamedSharding(mesh, P("a", "b")))
        state = tx.init(grads)
        step = jax.jit(tx.update).lower(grads, state, grads).compile()
        found = step(grads, state, grads)[0]["w"]
    assert most_gathered(step) == 0
    assert collectives(step)["all-reduce"] <= 4
    assert found.sharding.is_equivalent_to(grads["w"].sharding, 2)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


STEPS = {
    "clip_by_second_moment": lambda: optaxclip.clip_by_second_moment(warmup_steps=0),
    "skip_nonfinite": lambda: optaxclip.skip_nonfinite(optax.trace(0.9)),
    "skip_above": lambda: optaxclip.skip_above(optax.trace(0.9), 100.0),
    "reset_state": lambda: optaxclip.reset_state(optax.trace(0.9), every=2, only=("trace",)),
}


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("specs", [(P(), P("x")), (P("x"), P())], ids=["gradients", "state"])
def test_gradients_and_states_may_be_split_differently(name, specs):
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

"""A wrong shape or dtype inside is caught, unless Chex's assertions are off."""

import chex
import jax
import jax.numpy as jnp
import pytest

import optaxclip
import optaxclip._engine.clip as step
import optaxclip._engine.measure as measuring
import optaxclip._engine.record as record
import optaxclip.accumulate.loop as loop
import optaxclip.per_example._aggregate as aggregate
import optaxclip.per_example._batched_clip as batched_clip
import optaxclip.per_example._clip_sum as clip_sum
from optaxclip import accumulate, ops, per_example, scopes

GRADS = {"a": jnp.ones((3, 2)), "b": jnp.ones(4)}


def longer(x):
    return jnp.concatenate([x, x])


def thresholds_longer(found):
    thresholds, state = found
    return type(thresholds)(*map(longer, thresholds)), state


def each_longer(found):
    return type(found)(*map(longer, found))


def with_longer_norms(norms):
    return lambda leaves: each_longer(norms(leaves))


def with_narrow_norms(norms):
    return lambda leaves: jax.tree.map(jnp.float16, norms(leaves))


SLIPS = {
    "norms": (step, "measure", each_longer),
    "norms of a device": (measuring._NormFn, "differentiable", with_longer_norms),
    "dtypes of norms": (measuring._NormFn, "differentiable", with_narrow_norms),
    "thresholds": (step, "update_rule", thresholds_longer),
    "multipliers": (step, "compute_multiplier", each_longer),
    "leaves": (step, "scale", longer),
    "dtypes of leaves": (step, "scale", lambda x: x.astype(jnp.float16)),
    "columns of leaves": (step.Plan, "slice_for_leaves", lambda parts: parts[::-1]),
    "record": (record, "_worst_by_leaf", lambda row: jax.tree.map(longer, row)),
}


def make_slip(monkeypatch, place, name, change):
    right = getattr(place, name)
    monkeypatch.setattr(place, name, lambda *args, **more: change(right(*args, **more)))


@pytest.mark.by_day(1)
@pytest.mark.parametrize("slip", SLIPS)
def test_assertions_catch_wrong_shapes_and_dtypes(slip, monkeypatch):
    make_slip(monkeypatch, *SLIPS[slip])
    tx = optaxclip.clip_by(scopes.unit(), 1.0)
    state = tx.init(GRADS)
    jax.clear_caches()
    with pytest.raises(AssertionError, match=r"shape|type"):
        jax.eval_shape(tx.update, GRADS, state)


def each_half(leaves):
    return [leaf.astype(jnp.float16) for leaf in leaves]


def of_means(means, change):
    return means._replace(leaves=change(means.leaves))


def value_and_grad(tree):
    def loss(tree, x):
        return jnp.sum(tree["a"]) * jnp.mean(x)

    return accumulate.value_and_grad(loss, microbatch_size=2)(tree, jnp.ones(4))


def noisy(tree):
    tx = optaxclip.per_example_clip_and_aggregate(1.0, 0)
    return tx.update(tree, tx.init(tree))


# The ends of functions over trees: what a slip is made in, which, and a call.
ENDS = {
    "ops, shapes": (ops, "clip_tree", lambda x: (jax.tree.map(longer, x[0]), x[1])),
    "ops, dtypes": (ops, "put_leaves", lambda tree: jax.tree.map(jnp.float16, tree)),
    "ops, norm": (ops, "group_norms", jnp.atleast_1d),
    "sums, shapes": (batched_clip, "compute_weighted_sums", lambda leaves: [*map(longer, leaves)]),
    "sums, dtypes": (batched_clip, "compute_weighted_sums", each_half),
    "sums, groups": (clip_sum.ExampleClip, "sums", lambda x: x._replace(norms=[x.norms])),
    "sums, numbers": (clip_sum.ExampleClip, "sums", lambda x: x._replace(num_dropped=x.norms)),
    "aggregate, shapes": (aggregate, "_divide_and_cast", lambda leaves: [*map(longer, leaves)]),
    "aggregate, dtypes": (aggregate, "_divide_and_cast", each_half),
    "accumulate, shapes": (
        loop,
        "scan_on_mesh",
        lambda x: ((of_means(x[0][0], lambda leaves: [*map(longer, leaves)]), x[0][1]), x[1]),
    ),
    "accumulate, dtypes": (
        loop,
        "scan_on_mesh",
        lambda x: ((of_means(x[0][0], each_half), x[0][1]), x[1]),
    ),
    "accumulate, rows": (
        loop,
        "scan_on_mesh",
        lambda x: (x[0], (x[1][0]._replace(norm=x[1][0].norm[None, None]), x[1][1])),
    ),
}
CALLS = {
    "ops, shapes": lambda tree: ops.clip_by_norm(tree, 1.0),
    "ops, dtypes": lambda tree: ops.clip_by_value(tree, -1.0, 1.0),
    "ops, norm": ops.global_norm,
    "sums": lambda tree: per_example.clip_sum(tree, 1.0),
    "aggregate": noisy,
    "accumulate": value_and_grad,
}


@pytest.mark.by_day(1)
@pytest.mark.parametrize("slip", ENDS)
def test_assertions_check_outputs_of_public_functions(slip, monkeypatch):
    call, tree = CALLS.get(slip, CALLS.get(slip.split(",")[0])), {"a": jnp.ones((3, 2))}
    jax.clear_caches()
    jax.eval_shape(call, tree)
    make_slip(monkeypatch, *ENDS[slip])
    jax.clear_caches()
    with pytest.raises(AssertionError, match=r"shape|type|struct"):
        jax.eval_shape(call, tree)


def test_chex_disable_asserts_disables_assertions(monkeypatch):
    monkeypatch.setattr(step, "scale", lambda leaf, *args, **more: longer(leaf))
    tx = optaxclip.clip_by_global_norm(1.0)
    state = tx.init(GRADS)
    jax.clear_caches()
    chex.disable_asserts()
    try:
        clipped, _ = jax.eval_shape(tx.update, GRADS, state)
    finally:
        chex.enable_asserts()
        jax.clear_caches()
    assert clipped["a"].shape == (6, 2)

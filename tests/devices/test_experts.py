"""Expert layers split over eight devices: a norm for each expert, or one over all."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import optaxclip
from optaxclip import scopes

EXPERTS = 16
SPECS = {"experts": P("expert"), "router": P()}
LABELS = {"experts": "experts", "router": "rest"}
EACH = scopes.leaf(stacked={"experts": 1, "router": 0})
CLIPS = {
    "each": functools.partial(optaxclip.clip_by, EACH, 5.0),
    "matrices": functools.partial(optaxclip.clip_by, scopes.axes((-2, -1)), 5.0),
    "over all": functools.partial(optaxclip.clip_by_group_norm, 5.0, LABELS),
    "beside Muon": functools.partial(
        optaxclip.clip_by,
        scopes.muon({"experts": None, "router": optax.contrib.MuonDimensionNumbers()}),
        {"adam": 5.0, "muon": np.inf},
    ),
}


def grads(seed=0):
    rng = np.random.default_rng(seed)
    experts = rng.normal(size=(EXPERTS, 4, 3)) * np.arange(1, EXPERTS + 1)[:, None, None]
    tree = {"experts": experts, "router": rng.normal(size=(4, EXPERTS))}
    return jax.tree.map(jnp.float32, tree)


def norms(tree):
    """Of each expert, of all, of the router; in float64."""
    experts = np.asarray(tree["experts"], np.float64)
    each = np.sqrt(np.sum(experts**2, axis=(1, 2)))
    return each, np.linalg.norm(each), np.linalg.norm(np.asarray(tree["router"], np.float64))


@functools.cache
def mesh(kind):
    return jax.make_mesh((8,), ("expert",), axis_types=(getattr(AxisType, kind),))


def check(name, clipped, info):
    """Against what is measured here, not against our own clip on one device."""
    before, after = norms(grads()), norms(clipped)
    if name in ("each", "matrices"):
        thresholds = np.minimum(before[0], 5.0), np.minimum(before[2], 5.0)
        np.testing.assert_allclose(after[0], thresholds[0], rtol=3e-6)
        np.testing.assert_allclose(after[2], thresholds[1], rtol=3e-6)
    else:
        np.testing.assert_allclose(after[1], 5.0, rtol=3e-6)
        kept = before[2] if name == "beside Muon" else min(before[2], 5.0)
        np.testing.assert_allclose(after[2], kept, rtol=3e-6)
    wanted = {
        "each": [*before[0], before[2]],
        "matrices": [before[0].max(), before[2]],
        "over all": before[1:],
        "beside Muon": before[1:],
    }
    np.testing.assert_allclose(info.norm, wanted[name], rtol=1e-6)


def gathered(compiled):
    """The entries of what is gathered, at most."""
    shapes = re.findall(r"f32\[([\d,]*)\]\S* all-gather\(", compiled.as_text())
    return max((np.prod([int(n) for n in shape.split(",")]) for shape in shapes), default=0)


@pytest.mark.by_day(1)
@pytest.mark.parametrize("name", CLIPS)
@pytest.mark.parametrize("kind", ["Auto", "Explicit", "Auto, specs"])
def test_experts_under_jit_clip_without_gathering_gradients(name, kind):
    given, kind = "specs" in kind, kind.split(",")[0]
    shardings = {leaf: NamedSharding(mesh(kind), spec) for leaf, spec in SPECS.items()}
    placed = jax.device_put(grads(), shardings)
    tx = CLIPS[name](**({"specs": shardings} if given else {}))
    update = jax.jit(tx.update).lower(placed, tx.init(placed)).compile()
    clipped, state = update(placed, tx.init(placed))
    check(name, clipped, state.info)
    assert clipped["experts"].sharding.is_equivalent_to(placed["experts"].sharding, 3)
    # Of every expert each device has what its norm and its record are made of, three numbers at
    # once at most; of the gradients nothing is gathered.
    assert gathered(update) <= (3 * EXPERTS if name == "each" else 0)


@pytest.mark.by_day(1)
@pytest.mark.parametrize("name", CLIPS)
@pytest.mark.parametrize("tracked", [True, False])
def test_experts_in_shard_map_clip_separately_or_together(name, tracked):
    tx = CLIPS[name](specs=SPECS)
    update = jax.shard_map(
        tx.update,
        mesh=mesh("Auto"),
        in_specs=(SPECS, P()),
        out_specs=(SPECS, P()),
        check_vma=tracked,
    )
    clipped, state = jax.jit(update)(grads(), tx.init(grads()))
    check(name, clipped, state.info)


STACKED = {"experts": 1, "router": 0}
RULE = optaxclip.thresholds.ema(0.5, 1.1, patience=None)
WITH_MEMORY = {
    "each": functools.partial(optaxclip.clip_by, EACH, RULE),
    "units": functools.partial(optaxclip.clip_by, scopes.unit(stacked=STACKED), RULE),
    "largest entries": functools.partial(optaxclip.clip_by_moving_max, stacked=STACKED),
    "Adam": functools.partial(optaxclip.scale_by_stable_adam, stacked=STACKED),
}


def after_three_steps(update, state):
    """The last gradients, updates and state."""
    for seed in range(3):
        tree = jax.tree.map(lambda x, s=seed: x * (1 + s), grads(seed))
        updates, state = update(tree, state, grads())
    return tree, updates, state


@functools.cache
def on_one_device(name):
    tx = WITH_MEMORY[name](specs=None)
    state = tx.init(grads())
    return state, *after_three_steps(jax.jit(tx.update), state)


@pytest.mark.by_day(1)
@pytest.mark.parametrize("name", WITH_MEMORY)
@pytest.mark.parametrize("tracked", [True, False])
def test_experts_in_shard_map_keep_separate_histories(name, tracked):
    """Two experts of a device are not taken for the first two of all, nor is their past."""
    state, tree, *expected = on_one_device(name)
    split = jax.tree.map(lambda x: P("expert") if x.shape == (EXPERTS, 4, 3) else P(), state)
    update = jax.jit(
        jax.shard_map(
            WITH_MEMORY[name](specs=SPECS).update,
            mesh=mesh("Auto"),
            in_specs=(SPECS, split, SPECS),
            out_specs=(SPECS, split),
            check_vma=tracked,
        )
    )
    _, *found = after_three_steps(update, state)
    compare = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-7)
    jax.tree.map(compare, found, expected)
    assert not np.allclose(expected[0]["experts"], tree["experts"])


def test_sharded_stack_without_specs_raises():
    tx = CLIPS["each"]()
    update = jax.shard_map(
        tx.update, mesh=mesh("Auto"), in_specs=(SPECS, P()), out_specs=(SPECS, P())
    )
    with pytest.raises(ValueError, match=r"specs is required .*; pass a pytree of PartitionSpec"):
        jax.eval_shape(update, grads(), tx.init(grads()))

"""Events by every way in which leaves may be split: as in one piece, without a collective more."""

import functools

import jax
import numpy as np
import optax
import pytest
from cases import slow_unless
from compiling import collectives, most_gathered
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import optaxclip
from optaxclip import monitor

SPECS = {"b": P(), "m": P(None, "x"), "w": P("x")}


def trees():
    """Three steps: one that is clipped, one that is not finite on one device, one that is small."""
    rng = np.random.default_rng(0)
    shapes = {"b": (6,), "m": (12, 8), "w": (8, 24)}
    grads = {x: rng.normal(size=(3, *shape)).astype(np.float32) for x, shape in shapes.items()}
    grads["m"][0] *= 3
    grads["w"][1, 5, 3] = np.nan
    for leaf in grads.values():
        leaf[2] *= 1e-3
    return grads


def run(grads, with_events=True, **told):
    """The state after three steps."""
    clips = (optaxclip.clip_by_global_norm(1.0, **told), optaxclip.clip_by_norm(0.5, **told))
    tx = optaxclip.skip_nonfinite(optax.chain(*clips, optax.sgd(0.1)), **told)
    tx = monitor.events(tx, 4, **told) if with_events else tx
    start = tx.init(jax.tree.map(lambda x: x[0], grads))
    return jax.lax.scan(lambda state, x: (tx.update(x, state)[1], None), start, grads)[0]


@functools.cache
def expected():
    return monitor.history(jax.jit(run)(trees()))


def assert_as_in_one_piece(state):
    found = monitor.history(state)
    assert found["verdict"].tolist() == ["clipped", "skipped", "taken"]
    assert found["worst"].tolist() == ["m", "w", "w"]
    for field in found.dtype.names:
        if found[field].dtype.kind == "U":
            assert found[field].tolist() == expected()[field].tolist()
        else:
            np.testing.assert_allclose(found[field], expected()[field], 1e-6, err_msg=field)


def on(kind):
    mesh = jax.make_mesh((8,), ("x",), (kind,))
    specs = {x: NamedSharding(mesh, spec) for x, spec in SPECS.items()}
    stacked = {x: NamedSharding(mesh, P(None, *spec)) for x, spec in SPECS.items()}
    return mesh, specs, stacked


WAYS = [(AxisType.Auto, True), (AxisType.Auto, False), (AxisType.Explicit, False)]
WAYS = slow_unless(lambda kind, told: kind == AxisType.Explicit, WAYS)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "told"), WAYS)
def test_events_on_mesh_match_single_device(kind, told):
    mesh, specs, stacked = on(kind)
    options = {"specs": specs} if told else {}
    grads = jax.device_put(trees(), stacked)
    with jax.set_mesh(mesh):
        compiled = {}
        for each in (True, False):
            step = functools.partial(run, with_events=each, **options)
            compiled[each] = jax.jit(step).lower(grads).compile()
        state = compiled[True](grads)
    assert_as_in_one_piece(state)
    assert set(collectives(compiled[True])) <= {"all-reduce"}
    assert collectives(compiled[True]) == collectives(compiled[False])
    assert most_gathered(compiled[True]) == most_gathered(compiled[False])
    assert all(x.is_fully_replicated for x in jax.tree.leaves(state))


@pytest.mark.slow
@pytest.mark.parametrize("way", slow_unless("tracked".__eq__, ["tracked", "untracked"]))
def test_events_in_shard_map_match_single_device(way):
    mesh, _, _ = on(AxisType.Auto)
    specs = {x: P(None, *spec) for x, spec in SPECS.items()}
    inside = jax.shard_map(
        functools.partial(run, specs=SPECS),
        mesh=mesh,
        in_specs=(specs,),
        out_specs=P(),
        check_vma=way == "tracked",
    )
    assert_as_in_one_piece(jax.jit(inside)(trees()))

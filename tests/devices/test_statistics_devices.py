"""Statistics of a record, by every way in which leaves may be split: as in one piece."""

import functools
import itertools

import jax
import numpy as np
import pytest
from cases import slow_unless
from compiling import collectives, most_gathered
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from optaxclip import monitor, scopes
from optaxclip.monitor._record import STATISTICS

STATS = tuple(STATISTICS)
SPECS = {"b": P(), "m": P(None, "x"), "w": P("x")}
KINDS = {"automatic": AxisType.Auto, "explicit": AxisType.Explicit, "shard_map": AxisType.Auto}
SCOPES = {
    "tree": None,
    "leaf": scopes.leaf(),
    "layers": scopes.leaf(stacked={"b": 0, "m": 0, "w": 1}),
    "group": scopes.group(lambda path, _: "vector" if path == "b" else "matrix"),
    "axes": scopes.axes(-1),
}
TWO = ("layers", "group")
"""Those of which a part of a leaf, and several leaves, are one group."""


def trees(dtype=np.float32):
    """Gradients with zeros, and parameters."""
    rng = np.random.default_rng(0)
    shapes = {"b": (6,), "m": (12, 8), "w": (8, 24)}
    params, grads = ({x: rng.normal(size=y).astype(dtype) for x, y in shapes.items()} for _ in "pg")
    grads["w"][3, :2] = 0
    grads["m"][:, 5] = 0
    return grads, params


def recorded(names, grads, params, **options):
    """The last step's statistics of these scopes."""
    found = {}
    for name in names:
        tx = monitor.record(1, scope=SCOPES[name], stats=STATS, **options)
        found[name] = tx.update(grads, tx.init(params), params)[1].last
    return found


@functools.cache
def in_one_piece(scope):
    return jax.jit(functools.partial(recorded, [scope]))(*trees())[scope]


def assert_as_in_one_piece(found):
    for scope, of_scope in found.items():
        for stat, x in of_scope.items():
            expected = in_one_piece(scope)[stat]
            np.testing.assert_allclose(x, expected, 1e-6, 1e-6, err_msg=f"{scope}, {stat}")


def on(kind, spec=SPECS):
    mesh = jax.make_mesh((8,), ("x",), (KINDS[kind],))
    return mesh, jax.tree.map(
        lambda x: NamedSharding(mesh, x), spec, is_leaf=lambda x: type(x) is P
    )


MESHES = slow_unless(
    lambda kind, told, names: told == (kind == "automatic") and names == TWO,
    itertools.product(("automatic", "explicit"), (False, True), (TWO, tuple(SCOPES))),
)


@pytest.mark.by_day(1)
@pytest.mark.parametrize(("kind", "told", "names"), MESHES)
def test_statistics_on_mesh_match_single_device(kind, told, names):
    mesh, places = on(kind)
    grads, params = jax.device_put(trees(), (places, places))
    options = {"specs": places} if told else {}
    with jax.set_mesh(mesh):
        compiled = jax.jit(functools.partial(recorded, names, **options)).lower(grads, params)
        compiled = compiled.compile()
        found = compiled(grads, params)
    assert_as_in_one_piece(found)
    # Where only the compiler knows what is split, the norms of layers are gathered, no leaf is.
    allowed = {"all-reduce"} if told or kind == "explicit" else {"all-reduce", "all-gather"}
    assert set(collectives(compiled)) <= allowed
    assert most_gathered(compiled) <= 6 * 8  # six sums for eight norms; the leaves have 96 and 192
    assert all(x.is_fully_replicated for x in jax.tree.leaves(found))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["automatic", "explicit"])
def test_statistics_accept_params_sharded_unlike_gradients(kind):
    mesh, of_grads = on(kind)
    _, of_params = on(kind, {"b": P(), "m": P(), "w": P(None, None)})
    grads, params = jax.device_put(trees(), (of_grads, of_params))
    with jax.set_mesh(mesh):
        found = jax.jit(functools.partial(recorded, ("tree", "leaf")))(grads, params)
    assert_as_in_one_piece(found)


@pytest.mark.by_day(1)
@pytest.mark.parametrize(
    ("way", "names"),
    slow_unless(
        lambda _, names: names == TWO,
        itertools.product(("tracked", "untracked"), (TWO, tuple(SCOPES))),
    ),
)
def test_statistics_in_shard_map_match_single_device(way, names):
    mesh, _ = on("shard_map")
    inside = functools.partial(recorded, names, specs=SPECS)
    inside = jax.shard_map(
        inside, mesh=mesh, in_specs=(SPECS, SPECS), out_specs=P(), check_vma=way == "tracked"
    )
    assert_as_in_one_piece(jax.jit(inside)(*trees()))


@pytest.mark.slow
def test_statistics_read_sharding_from_types():
    mesh, _ = on("shard_map")
    inside = functools.partial(recorded, ("tree", "leaf", "group"))
    inside = jax.shard_map(inside, mesh=mesh, in_specs=(SPECS, SPECS), out_specs=P())
    assert_as_in_one_piece(jax.jit(inside)(*trees()))


def test_metrics_report_nan_of_sharded_seed():
    mesh, _ = on("automatic")
    tx = monitor.record(1, scope=scopes.leaf())
    grads = {"b": np.ones((8, 3), "f"), "w": np.ones((8, 3), "f")}
    grads["w"][2] = np.nan

    def states(grads):
        return jax.vmap(lambda x: tx.update(x, tx.init(x))[1])(grads)

    log = jax.jit(lambda grads: monitor.metrics(states(grads), top=2))
    found = log(jax.device_put(grads, NamedSharding(mesh, P("x"))))
    np.testing.assert_equal(found, log(grads))
    assert np.isnan(found["record/norm"])
    assert found["record/top/0/index"] == 1

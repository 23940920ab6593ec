"""Histograms, by every way in which leaves may be split: the counts are as in one piece."""

import functools

import jax
import numpy as np
import pytest
from compiling import collectives
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import optaxclip._backend.exponent_counts as exponent_counts
from optaxclip import monitor, scopes

SPECS = {"b": P(), "m": P(None, "x"), "s": P("y"), "w": P("x", "y")}
SCOPES = {
    "leaf": scopes.leaf(),
    "tree": scopes.tree(),
    "layers": scopes.leaf(stacked={"b": 0, "m": 1, "s": 0, "w": 1}),
    "units": scopes.unit(),
}


def entries():
    rng = np.random.default_rng(0)
    shapes = {"b": (6,), "m": (3, 8), "s": (8,), "w": (8, 24)}
    return {x: np.ldexp(rng.normal(size=y), rng.integers(-30, 9, y)) for x, y in shapes.items()}


TREE = {name: x.astype(np.float32) for name, x in entries().items()}


def counted(tree, **options):
    found = {}
    for name, scope in SCOPES.items():
        tx = monitor.histogram(scope=scope, **options)
        found[name] = tx.update(tree, tx.init(tree))[1]
    return found


@functools.cache
def in_one_piece():
    return jax.tree.map(np.asarray, jax.jit(counted)(TREE))


def assert_as_in_one_piece(found):
    jax.tree.map(np.testing.assert_array_equal, found, in_one_piece())


def mesh_of(kind):
    return jax.make_mesh((2, 2), ("x", "y"), axis_types=(kind, kind), devices=jax.devices()[:4])


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_histogram_on_mesh_matches_single_device(kind):
    mesh = mesh_of(kind)
    tree = {x: jax.device_put(y, NamedSharding(mesh, SPECS[x])) for x, y in TREE.items()}
    with jax.set_mesh(mesh):
        compiled = jax.jit(counted).lower(tree).compile()
        assert_as_in_one_piece(compiled(tree))
    assert set(collectives(compiled)) == {"all-reduce"}


@pytest.mark.parametrize("is_tracked", [True, False])
def test_histogram_in_shard_map_matches_single_device(is_tracked):
    count = functools.partial(counted, specs=SPECS)
    mesh = mesh_of(AxisType.Auto)
    how = {"mesh": mesh, "in_specs": (SPECS,), "out_specs": P(), "check_vma": is_tracked}
    compiled = jax.jit(jax.shard_map(count, **how)).lower(TREE).compile()
    assert_as_in_one_piece(compiled(TREE))
    # The units' counts are those of the leaves, and taken once.
    assert collectives(compiled) == {"all-reduce": len(SCOPES) - 1}


@pytest.mark.parametrize("kind", ["explicit", "shard_map"])
def test_histogram_counts_sharded_leaves_in_chunks(monkeypatch, kind):
    monkeypatch.setattr(exponent_counts, "CHUNK_SIZE", 20)
    tree = {"w": np.repeat(TREE["w"], 3, axis=0)[:, :22]}
    tx = monitor.histogram()

    def count(tree):
        return tx.update(tree, tx.init(tree))[1].counts

    mesh = mesh_of(AxisType.Explicit if kind == "explicit" else AxisType.Auto)
    mapped = jax.shard_map(count, mesh=mesh, in_specs=P("x", "y"), out_specs=P())
    with jax.set_mesh(mesh):
        split = jax.device_put(tree, NamedSharding(mesh, P("x", "y")))
        found = jax.jit(count if kind == "explicit" else mapped)(split)
    monkeypatch.undo()
    np.testing.assert_array_equal(found, jax.jit(count)(tree))


def test_histogram_counts_along_named_vmap_axis():
    """Each of four has a quarter of each row."""
    tree = {"w": TREE["w"]}
    parts = {"w": TREE["w"].reshape(8, 4, 6).swapaxes(0, 1)}

    def count(tree, **options):
        tx = monitor.histogram(**options)
        return tx.update(tree, tx.init(tree))[1].counts

    found = jax.jit(jax.vmap(functools.partial(count, axis_name="x"), axis_name="x"))(parts)
    np.testing.assert_array_equal(found, np.broadcast_to(jax.jit(count)(tree), found.shape))

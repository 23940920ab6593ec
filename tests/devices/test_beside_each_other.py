"""Leaves that are split beside leaves that are not, with and without specs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.sparse import BCOO
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import optaxclip
from optaxclip import scopes


def mesh_of_four():
    return jax.make_mesh((4,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))


@pytest.mark.slow
@pytest.mark.parametrize("spec", [P("i"), P(None, "i")], ids=["over what is summed", "over units"])
def test_unit_scope_with_specs_matches_single_device(spec):
    place = NamedSharding(mesh_of_four(), spec)
    x = jnp.arange(32.0).reshape(4, 8)
    expected, alone = optaxclip.clip_tree(x, 1.0, scope=scopes.unit())
    clip = jax.jit(lambda x: optaxclip.clip_tree(x, 1.0, scope=scopes.unit(), specs=place))
    found, info = clip(jax.device_put(x, place))
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    np.testing.assert_allclose(info.norm, alone.norm, rtol=1e-6)


def test_unit_info_finds_worst_columns_of_sharded_leaves():
    mesh = jax.make_mesh((2, 2), ("i", "j"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    specs = {"x": P(None, "i"), "y": P(None, "j")}
    clip = functools.partial(optaxclip.clip_tree, thresholds=5.0, scope=scopes.unit(), specs=specs)
    inside = jax.shard_map(clip, mesh=mesh, in_specs=(specs,), out_specs=(specs, P()))
    columns = jnp.array([[0.0, 3, 6, 9], [0, 4, 8, 12]])
    info = jax.jit(inside)({"x": columns, "y": columns})[1]
    np.testing.assert_array_equal(info.norm, [15, 15])
    np.testing.assert_array_equal(info.fraction, [0.5, 0.5])


def test_global_norm_includes_sparse_leaf_on_explicit_mesh():
    mesh = jax.make_mesh((4,), ("i",), axis_types=(jax.sharding.AxisType.Explicit,))
    sparse = BCOO((jnp.array([3.0, 4.0]), jnp.array([[1], [2]])), shape=(5,))
    grads = {"sparse": sparse, "x": jax.device_put(jnp.ones(8), NamedSharding(mesh, P("i")))}
    tx = optaxclip.clip_by_global_norm(33**0.5 / 2)
    with jax.set_mesh(mesh):
        updates, state = jax.jit(tx.update)(grads, tx.init(grads))
    np.testing.assert_allclose(state.info.norm, 33**0.5, rtol=1e-6)
    np.testing.assert_allclose(updates["sparse"].data, [1.5, 2], rtol=3e-6)
    np.testing.assert_allclose(updates["x"], 0.5, rtol=3e-6)


def test_global_norm_accepts_specs_with_sparse_leaf():
    place = NamedSharding(mesh_of_four(), P("i"))
    sparse = BCOO((jnp.array([3.0, 4.0]), jnp.array([[1], [2]])), shape=(5,))
    grads = {"sparse": sparse, "x": jax.device_put(jnp.ones(8), place)}
    tx = optaxclip.clip_by_global_norm(33**0.5 / 2, specs={"sparse": P(), "x": place})
    updates, state = jax.jit(tx.update)(grads, tx.init(grads))
    np.testing.assert_allclose(state.info.norm, 33**0.5, rtol=1e-6)
    np.testing.assert_allclose(updates["sparse"].data, [1.5, 2], rtol=3e-6)
    np.testing.assert_allclose(updates["x"], 0.5, rtol=3e-6)

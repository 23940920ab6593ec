"""The method "ghost" where batches and parameters are split over devices, and over seeds."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import slow_unless
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from optaxclip import per_example

METHODS = ("ghost", "vmap")
RNG = np.random.default_rng(0)
SHAPES = {"b": (64,), "e": (64, 64), "l": (2, 64, 64), "v": (64, 8)}
PARAMS = {name: RNG.normal(size=x).astype(np.float32) / 8 for name, x in SHAPES.items()}
BATCH = (RNG.integers(0, 64, (16, 4)), RNG.normal(size=(16, 8)).astype(np.float32))
SPLIT = {
    "b": PartitionSpec("data"),
    "e": PartitionSpec("data"),
    "l": PartitionSpec(None, "data"),
    "v": PartitionSpec("data"),
}


def loss_fn(params, x, y, *, whole=lambda x: x, rows=lambda e, x: e[x]):
    params = jax.tree.map(whole, params)
    h = jnp.tanh(rows(params["e"], x) + params["b"][None])
    h, _ = lax.scan(lambda h, w: (jnp.tanh(h @ w), None), h, params["l"])
    return jnp.mean(jnp.square(h @ params["v"] - y[None]))


def explicit_loss(*args):
    """The same, as a program on an explicit mesh says it."""

    def whole(x):
        return jax.sharding.reshard(x, PartitionSpec())

    def rows(e, x):
        return e.at[x].get(out_sharding=PartitionSpec())

    return loss_fn(*args, whole=whole, rows=rows)


def clipped(loss, size=None):
    options = {"microbatch_size": size, "specs": PartitionSpec()}
    return per_example.clipped_grad(loss, 1.0, method="ghost", **options)


@functools.cache
def expected():
    return jax.jit(per_example.clipped_grad(loss_fn, 1.0))(PARAMS, *BATCH)


def assert_expected(found):
    np.testing.assert_allclose(found.norms, expected().norms, rtol=1e-4)
    assert found.num_clipped == expected().num_clipped > 0
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-3),
        found.grads,
        expected().grads,
    )


def placed(mesh, params):
    rows = {name: NamedSharding(mesh, spec) for name, spec in params.items()}
    batch = [jax.device_put(x, NamedSharding(mesh, PartitionSpec("data"))) for x in BATCH]
    return jax.device_put(PARAMS, rows), *batch


@pytest.mark.slow
@pytest.mark.parametrize("size", slow_unless(lambda size: size == 8, [None, 8, 5]))
def test_ghost_on_automatic_mesh_matches_single_device(size):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    assert_expected(jax.jit(clipped(loss_fn, size))(*placed(mesh, SPLIT)))


@pytest.mark.parametrize(
    ("is_split", "size"),
    slow_unless(lambda *case: case == (True, None), itertools.product((True, False), (None, 8))),
)
def test_ghost_on_explicit_mesh_matches_single_device(is_split, size):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Explicit,))
    specs = SPLIT if is_split else dict.fromkeys(SPLIT, PartitionSpec())
    with jax.set_mesh(mesh):
        params, *batch = placed(mesh, specs)
        result = jax.jit(clipped(explicit_loss, size))(params, *batch)
    assert_expected(result)
    for name, x in result.grads.items():
        assert x.sharding.is_equivalent_to(params[name].sharding, x.ndim)


@pytest.mark.slow
@pytest.mark.parametrize("check_vma", [True, False])
def test_ghost_in_shard_map_matches_single_device(check_vma):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))

    def fn(*args):
        found = clipped(loss_fn, 1)(*args)
        summed = lax.psum(found._replace(norms=None, losses=None, bound=None), "data")
        return summed._replace(norms=found.norms, losses=found.losses, bound=found.bound)

    whole, split = PartitionSpec(), PartitionSpec("data")
    specs = per_example.PerExampleResult(whole, whole, whole, split, whole, split, whole, whole)
    mapped = jax.shard_map(
        fn, mesh=mesh, in_specs=(whole, split, split), out_specs=specs, check_vma=check_vma
    )
    assert_expected(jax.jit(mapped)(PARAMS, *BATCH))


@pytest.mark.slow
def test_ghost_supports_vmap_over_seeds():
    seeds = jax.tree.map(lambda x: np.stack([x, x * np.float32(1.5)]), PARAMS)
    found = jax.jit(jax.vmap(clipped(loss_fn, 8), (0, None, None)))(seeds, *BATCH)
    assert_expected(jax.tree.map(lambda x: x[0], found))
    assert np.all(found.norms[0] != found.norms[1])


def test_moved_parameters_on_mesh_with_two_axes():
    """Their programs name a mesh whose axes are explicit, and automatic inside of the sums."""
    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(AxisType.Explicit,) * 2)
    rng = np.random.default_rng(3)
    params = {name: rng.normal(size=(8, 8)).astype(np.float32) for name in "ew"}
    batch = rng.integers(0, 8, (14, 4)), rng.normal(size=(14, 8)).astype(np.float32)

    def loss(params, x, y):
        h = jnp.tanh(params["e"].at[x].get(out_sharding=PartitionSpec()))
        w = params["w"].T.reshape(2, 4, 8)[::-1].reshape(8, 8)
        return jnp.mean(jnp.square(h @ w - y[None]))

    with jax.set_mesh(mesh):
        placed = [jax.device_put(x, PartitionSpec("a")) for x in batch]
        params = jax.device_put(params, PartitionSpec())
        for size in (None, 3):
            options = {"microbatch_size": size}
            clips = [per_example.clipped_grad(loss, 0.1, method=m, **options) for m in METHODS]
            ghost, vmap = jax.jit(lambda *args, fns=clips: [fn(*args) for fn in fns])(
                params, *placed
            )
            for name in "ew":
                np.testing.assert_allclose(ghost.grads[name], vmap.grads[name], atol=1e-3)

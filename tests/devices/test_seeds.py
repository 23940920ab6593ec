"""Seeds that `vmap` trains side by side, split over an explicit mesh, which is JAX's default."""

import contextlib
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cases import slow_unless
from compiling import collectives
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from methods_table import DISTINCT, METHODS, ONE_OF_EACH, TYPICAL, random_tree

from optaxclip import (
    clip_by_global_norm,
    clip_by_group_norm,
    clip_by_norm,
    monitor,
    ops,
    per_example,
    scopes,
    skip_nonfinite,
)

SEEDS = 8
STATISTICS = ("norm", "max", "mean_abs", "zero_fraction", "share", "param_norm", "cosine_param")


def of_method(name):
    def train(grads, params):
        tx = METHODS[name].make()

        def step(state, _):
            updates, state = tx.update(grads, state, params)
            return state, updates

        state, updates = jax.lax.scan(step, tx.init(params), length=2)
        return updates, state

    return train


def of_wrapper(make):
    def train(grads, params):
        tx = make()
        return tx.update(grads, tx.init(params), params)

    return train


def loss(params, example):
    return sum(jnp.sum(x**2) for x in jax.tree.leaves(params)) * example


def of_examples(grads, params):
    del grads
    return per_example.clipped_grad(loss, 1.0)(params, jnp.arange(4.0))


def judged():
    clips = clip_by_global_norm(1.0), clip_by_norm(0.1)
    skip = skip_nonfinite(optax.chain(*clips, optax.sgd(0.1)))
    return optax.chain(monitor.record(2, scope=scopes.leaf()), skip)


def of_metrics(grads, params):
    return monitor.metrics(of_wrapper(judged)(grads, params)[1], top=2)


OTHERS = {
    "events": of_wrapper(lambda: monitor.events(judged(), 2)),
    "metrics": of_metrics,
    "record": of_wrapper(lambda: monitor.record(2, scope=scopes.leaf(), stats=STATISTICS)),
    "skip_nonfinite": of_wrapper(lambda: skip_nonfinite(optax.trace(0.9))),
    "ops": lambda grads, _: (
        ops.global_norm(grads),
        ops.clip_by_global_norm(grads, 1.0),
        ops.clip_by_norm(grads, 1.0, axes=-1),
        ops.clip_by_average_norm(grads, 0.1),
        jax.grad(lambda x: loss(ops.clip_cotangent(x, clip_norm=1.0, axes=-1), 1.0))(grads),
    ),
    "per_example": of_examples,
}
TWO = ["clip_by_group_norm_dict", "leaf_rms_of_weights"]
SOME_OF_EACH_SCOPE = ["clip_by_global_norm", "adagc", "adaptive_grad_clip", "muon"]
WAYS = {
    "jit of vmap": lambda train: jax.jit(jax.vmap(train)),
    "with the name of the axis": lambda train: jax.jit(jax.vmap(train, spmd_axis_name="seeds")),
    "vmap of jit": lambda train: jax.vmap(jax.jit(train)),
    "vmap alone": jax.vmap,
}


def assert_as_on_one_device(names, way, is_mesh_set, fsdp=1):
    cases = {name: of_method(name) if name in METHODS else OTHERS[name] for name in names}

    def train(grads, params):
        return {name: case(grads, params) for name, case in cases.items()}

    trees = random_tree(0, SEEDS), random_tree(1, SEEDS)
    expected = jax.jit(jax.vmap(train))(*trees)
    mesh = jax.make_mesh((SEEDS // fsdp, fsdp), ("seeds", "fsdp"))
    specs = {"w": P("seeds", "fsdp"), "b": P("seeds"), "v": P("seeds", "fsdp")}
    shardings = {name: NamedSharding(mesh, spec) for name, spec in specs.items()}
    split = jax.device_put(trees, (shardings, shardings))
    with jax.set_mesh(mesh) if is_mesh_set else contextlib.nullcontext():
        step = WAYS[way](train)
        found = step(*split)
        if way == "jit of vmap" and fsdp == 1:
            assert collectives(step.lower(*split).compile()) == {}

    def check(path, x, y):
        where = jax.tree_util.keystr(path)
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=2e-6, err_msg=where)
        assert x.sharding.spec[:1] == ("seeds",) or "[0]" not in where, where

    jax.tree_util.tree_map_with_path(check, found, expected)


@pytest.mark.by_day(1)
@pytest.mark.parametrize(
    ("name", "is_mesh_set"),
    slow_unless(
        lambda name, is_set: name in TYPICAL and not is_set,
        [(name, is_set) for name in DISTINCT for is_set in (False, True)],
    ),
)
def test_methods_vmap_sharded_seeds(name, is_mesh_set):
    assert_as_on_one_device([name], "jit of vmap", is_mesh_set)


# A mesh that is set is a further case of the same.
with_a_mesh_or_not = pytest.mark.parametrize(
    "is_mesh_set", slow_unless(lambda is_mesh_set: not is_mesh_set, [False, True])
)


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
@with_a_mesh_or_not
def test_wrappers_and_functions_vmap_sharded_seeds(name, is_mesh_set):
    assert_as_on_one_device([name], "jit of vmap", is_mesh_set)


@with_a_mesh_or_not
def test_metrics_summarize_sharded_seeds(is_mesh_set):
    """Also a NaN of one seed, which the compiler's maximum over devices would lose."""
    groups = clip_by_group_norm(0.1, {"b": "a", "v": "b", "w": "a"})
    leaves = monitor.record(2, scope=scopes.leaf())
    tx = monitor.events(optax.chain(leaves, groups, clip_by_global_norm(0.1)), 2)
    grads = random_tree(0, SEEDS)
    grads["w"] = grads["w"].at[3].set(np.nan)
    split = NamedSharding(jax.make_mesh((SEEDS,), ("seeds",)), P("seeds"))
    with jax.set_mesh(split.mesh) if is_mesh_set else contextlib.nullcontext():
        grads = jax.device_put(grads, split)
        state = jax.jit(jax.vmap(lambda x: tx.update(x, tx.init(x))[1]))(grads)
        found = monitor.metrics(state, since=state, top=2)
    expected = monitor.scalars(jax.device_get(state), since=state, top=2)
    assert np.isnan(expected["record/norm"])
    for name, x in found.items():  # the host has the name of the leaf in place of its index
        if not name.endswith("/index"):
            np.testing.assert_allclose(x, expected[name], 1e-6, err_msg=name)
    of_one = monitor.history(jax.tree.map(lambda x: x[3], jax.device_get(state)), name="events")
    assert of_one["worst"].tolist() == ["a"]


@pytest.mark.slow
@with_a_mesh_or_not
def test_clips_accept_leaves_shared_by_sharded_seeds(is_mesh_set):
    mesh, same = jax.make_mesh((SEEDS,), ("seeds",)), random_tree(1)

    def train(w):
        grads = same | {"w": w}
        return {name: of_wrapper(METHODS[name].make)(grads, same)[0] for name in SOME_OF_EACH_SCOPE}

    mapped = random_tree(0, SEEDS)["w"]
    expected = jax.jit(jax.vmap(train))(mapped)
    with jax.set_mesh(mesh) if is_mesh_set else contextlib.nullcontext():
        found = jax.jit(jax.vmap(train))(jax.device_put(mapped, NamedSharding(mesh, P("seeds"))))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, 1e-5, 2e-6), found, expected)


@pytest.mark.slow
@with_a_mesh_or_not
def test_seeds_accept_sharded_params(is_mesh_set):
    assert_as_on_one_device([*ONE_OF_EACH, "zclip"], "jit of vmap", is_mesh_set, fsdp=2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "names"),
    slow_unless(lambda _, names: names is TWO, itertools.product(WAYS, (TWO, ONE_OF_EACH))),
)
def test_seeds_support_all_vmap_and_jit_orders(way, names):
    assert_as_on_one_device(names, way, True)

"""Units follow from whole leaves, not from what a device holds; what is sent is their norms."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiling import collectives, most_gathered
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import optaxclip
from optaxclip import scopes

WHOLE = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
COLUMNS = np.linalg.norm(np.asarray(WHOLE, np.float64), axis=0)
METHODS = {
    "unit": functools.partial(optaxclip.clip_by, scopes.unit(), 0.5),
    "agc": functools.partial(optaxclip.adaptive_grad_clip, 0.5, eps=1.0),
}
each_method = pytest.mark.parametrize("method", METHODS)


def clip(method, x, **options):
    tx = METHODS[method](**options)
    # Parameters whose units have norm 1.
    return tx.update(x, tx.init(x), x / 100)[0]


def over_devices(fn, spec, **options):
    mesh = jax.make_mesh((8,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    return jax.shard_map(fn, mesh=mesh, in_specs=spec, out_specs=spec, **options)


@pytest.mark.by_day(1)
@each_method
def test_unit_scope_with_specs_measures_global_columns(method):
    run = jax.jit(over_devices(functools.partial(clip, method, specs=P("i")), P("i")))
    np.testing.assert_allclose(run(WHOLE), WHOLE * (0.5 / COLUMNS), rtol=1e-5)


@pytest.mark.by_day(1)
@each_method
def test_unit_scope_without_specs_raises(method):
    with pytest.raises(ValueError, match="pass a pytree of PartitionSpec as specs"):
        over_devices(functools.partial(clip, method), P("i"))(WHOLE)
    named = functools.partial(clip, method, axis_name="i")
    with pytest.raises(ValueError, match="pass a pytree of PartitionSpec as specs"):
        over_devices(named, P("i"), check_vma=False)(WHOLE)
    with pytest.raises(ValueError, match="pass a pytree of PartitionSpec as specs"):
        jax.pmap(named, axis_name="i")(WHOLE[:, None])


@pytest.mark.by_day(1)
@each_method
def test_unit_scope_accepts_replicated_leaf_without_specs(method):
    run = jax.jit(over_devices(functools.partial(clip, method), P()))
    np.testing.assert_allclose(run(WHOLE), WHOLE * (0.5 / COLUMNS), rtol=1e-5)


def test_unit_scope_accepts_axis_name_for_unambiguous_shapes():
    """Where a part is a matrix so is the whole, and a vector is one unit."""
    tx = optaxclip.clip_by(scopes.unit(), 0.5, axis_name="i")
    grads = {"b": WHOLE[:, 0], "w": np.concatenate([WHOLE, WHOLE])}
    run = jax.jit(over_devices(lambda x: tx.update(x, None)[0], P("i"), check_vma=False))
    clipped = run(grads)
    np.testing.assert_allclose(clipped["b"], grads["b"] * (0.5 / COLUMNS[0]), rtol=1e-5)
    np.testing.assert_allclose(clipped["w"], grads["w"] * (0.5**1.5 / COLUMNS), rtol=1e-5)


def mesh(kind="Auto"):
    return jax.make_mesh((4, 2), ("a", "b"), axis_types=(getattr(AxisType, kind),) * 2)


@pytest.mark.by_day(1)
@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_adaptive_grad_clip_gathers_norms_but_no_leaves(kind):
    """Where only the compiler knows how leaves are split, norms are gathered, but no leaf."""
    specs = {"q": P(None, "a"), "k": P(None, "a"), "o": P("a", None), "v": P("b", "a")}
    leaves = {x: jnp.ones((64, 32)) for x in specs}
    places = {x: NamedSharding(mesh(kind), spec) for x, spec in specs.items()}
    placed, tx = jax.device_put(leaves, places), optaxclip.adaptive_grad_clip(0.01)
    update = jax.jit(tx.update).lower(placed, tx.init(placed), placed).compile()
    assert set(collectives(update)) <= {"all-reduce", *(["all-gather"] if kind == "Auto" else [])}
    # Of four leaves with 32 norms each, of gradients and parameters; a leaf has 2048 entries.
    assert most_gathered(update) <= 2 * 4 * 32


def test_adaptive_grad_clip_constrains_sharding_of_norms():
    leaf = jax.device_put(jnp.ones((64, 32)), NamedSharding(mesh(), P(None, "a")))
    tx = optaxclip.adaptive_grad_clip(0.01)
    program = str(jax.jit(tx.update).trace(leaf, tx.init(leaf), leaf).jaxpr)
    # The sums of gradients and of parameters, in the ways of three platforms, and the
    # multipliers.
    assert program.count("sharding_constraint[") == 2 * 3 + 1


@pytest.mark.slow
def test_adaptive_grad_clip_keeps_seeds_on_separate_devices():
    leaves = jnp.asarray(np.random.default_rng(0).normal(size=(4, 16, 6)), jnp.float32)
    placed = jax.device_put(leaves, NamedSharding(mesh(), P("a")))
    tx = optaxclip.adaptive_grad_clip(0.3)
    update = jax.jit(jax.vmap(lambda x: tx.update(x, tx.init(x), x)))
    compiled = update.lower(placed).compile()
    assert not collectives(compiled)
    pairs = zip(*map(jax.tree.leaves, (compiled(placed), update(leaves))), strict=True)
    for found, expected in pairs:
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-7)

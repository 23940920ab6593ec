"""Hyperball over many devices gives the numbers of one, with one all-reduce."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiling import collectives
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import optaxclip

SPECS = {"w": P("data", "model"), "layers": P(None, "data"), "experts": P("model", None, "data")}
SHAPES = {"w": (8, 6), "layers": (3, 8, 4), "experts": (4, 4, 8)}
STACKED = {"w": 0, "layers": 1, "experts": 1}
RNG = np.random.default_rng(0)
PARAMS, GRADS = (
    {name: RNG.normal(size=shape).astype("f4") for name, shape in SHAPES.items()} for _ in range(2)
)


def step(params, grads, state=None, **specs):
    tx = optaxclip.hyperball(0.3, stacked=STACKED, **specs)
    state = tx.init(params) if state is None else state
    return tx.update(grads, state, params)


def grown(tree):
    """Weights that have left the sphere of their state."""
    return jax.tree.map(lambda x: 2 * x, tree)


@functools.cache
def on_one_device():
    _, state = step(PARAMS, GRADS)
    state = jax.tree.map(np.asarray, state)  # as nothing of it is to be donated
    return state, step(grown(PARAMS), GRADS, state)


def assert_as_on_one_device(found):
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-6, atol=2e-6),
        found,
        on_one_device()[1],
    )


def mesh(kind=AxisType.Auto):
    return jax.make_mesh((4, 2), ("data", "model"), axis_types=(kind,) * 2)


def largest_sent(compiled):
    """The most entries of an array that a collective gives."""
    kinds = "all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter"
    results = re.findall(rf" = (.*?) (?:{kinds})\(", compiled.as_text())
    shapes = [shape for result in results for shape in re.findall(r"f\d+\[([\d,]*)\]", result)]
    return max(math.prod(int(n) for n in shape.split(",") if n) for shape in shapes)


@pytest.mark.by_day(1)
@pytest.mark.parametrize("way", ["automatic", "automatic, specs", "explicit"])
def test_under_jit(way):
    on = mesh(AxisType.Explicit if way == "explicit" else AxisType.Auto)
    shardings = {name: NamedSharding(on, spec) for name, spec in SPECS.items()}
    specs = {"specs": shardings} if "specs" in way else {}
    params, grads = (jax.device_put(tree, shardings) for tree in (grown(PARAMS), GRADS))
    state = jax.device_put(on_one_device()[0], NamedSharding(on, P()))
    with jax.set_mesh(on):
        run = functools.partial(step, **specs)
        compiled = jax.jit(run, donate_argnums=(0, 2)).lower(params, grads, state).compile()
        found = compiled(params, grads, state)
    if way == "automatic":
        # For each expert three sums at three scales go to every device; of weights nothing does.
        assert largest_sent(compiled) <= 9 * SHAPES["experts"][0]
    else:
        assert collectives(compiled) == {"all-reduce": 1}
    for name, x in found[0].items():
        assert x.sharding.is_equivalent_to(shardings[name], x.ndim)
    assert_as_on_one_device(found)


@pytest.mark.by_day(1)
@pytest.mark.parametrize("tracked", [True, False])
def test_in_shard_map(tracked):
    run = jax.shard_map(
        functools.partial(step, specs=SPECS),
        mesh=mesh(),
        in_specs=(SPECS, SPECS, P()),
        out_specs=(SPECS, P()),
        check_vma=tracked,
    )
    operands = grown(PARAMS), GRADS, on_one_device()[0]
    compiled = jax.jit(run).lower(*operands).compile()
    assert collectives(compiled) == {"all-reduce": 1}
    assert_as_on_one_device(compiled(*operands))


def test_a_state_made_on_devices_has_the_radii_of_one():
    shardings = {name: NamedSharding(mesh(), spec) for name, spec in SPECS.items()}
    tx = optaxclip.hyperball(0.3, stacked=STACKED)
    placed = jax.jit(tx.init)(jax.device_put(PARAMS, shardings))
    local = jax.shard_map(
        optaxclip.hyperball(0.3, stacked=STACKED, specs=SPECS).init,
        mesh=mesh(),
        in_specs=(SPECS,),
        out_specs=P(),
    )
    for state in (placed, jax.jit(local)(PARAMS)):
        np.testing.assert_allclose(state.radius, tx.init(PARAMS).radius, rtol=1e-6)


@pytest.mark.parametrize("way", ["traced", pytest.param("compiled", marks=pytest.mark.slow)])
def test_derivatives_where_axes_are_explicit(way):
    def loss(grads, params):
        updates, _ = step(params, grads)
        return sum(jnp.sum(updates[name] * PARAMS[name]) for name in SHAPES)

    on = mesh(AxisType.Explicit)
    shardings = {name: NamedSharding(on, spec) for name, spec in SPECS.items()}
    with jax.set_mesh(on):
        trees = [jax.device_put(tree, shardings) for tree in (GRADS, PARAMS)]
        if way == "traced":
            found = jax.eval_shape(jax.grad(loss), *trees)
            assert {name: x.shape for name, x in found.items()} == SHAPES
            return
        found = jax.jit(jax.grad(loss))(*trees)
    for name, expected in jax.grad(loss)(GRADS, PARAMS).items():
        np.testing.assert_allclose(found[name], expected, rtol=1e-5, atol=1e-6)

"""Norms of units over many devices: they are sent, the units stay where they are."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiling import collectives, most_gathered
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import optaxclip


def mesh(kind="Auto"):
    return jax.make_mesh((4, 2), ("a", "b"), axis_types=(getattr(AxisType, kind),) * 2)


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_units_stay_where_they_are(kind):
    """Where only the compiler knows how leaves are split, norms are gathered, but no leaf."""
    specs = {"q": P(None, "a"), "k": P(None, "a"), "o": P("a", None), "v": P("b", "a")}
    leaves = {x: jnp.ones((64, 32)) for x in specs}
    places = {x: NamedSharding(mesh(kind), spec) for x, spec in specs.items()}
    placed, tx = jax.device_put(leaves, places), optaxclip.adaptive_grad_clip(0.01)
    update = jax.jit(tx.update).lower(placed, tx.init(placed), placed).compile()
    assert set(collectives(update)) <= {"all-reduce", *(["all-gather"] if kind == "Auto" else [])}
    # Of four leaves with 32 norms each, of gradients and parameters; a leaf has 2048 entries.
    assert most_gathered(update) <= 2 * 4 * 32


def test_seeds_on_devices_of_their_own_stay_there():
    leaves = jnp.asarray(np.random.default_rng(0).normal(size=(4, 16, 6)), jnp.float32)
    placed = jax.device_put(leaves, NamedSharding(mesh(), P("a")))
    tx = optaxclip.adaptive_grad_clip(0.3)
    update = jax.jit(jax.vmap(lambda x: tx.update(x, tx.init(x), x)))
    compiled = update.lower(placed).compile()
    assert not collectives(compiled)
    pairs = zip(*map(jax.tree.leaves, (compiled(placed), update(leaves))), strict=True)
    for found, expected in pairs:
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-7)

"""How far updates move the weights, in parts of their norm."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from optaxclip import monitor, scopes

PARAMS = {"b": jnp.zeros(2), "v": jnp.full(4, 0.5, jnp.bfloat16), "w": jnp.array([[3.0, 4.0]])}
UPDATES = {"b": jnp.zeros(2), "v": jnp.full(4, 0.25, jnp.bfloat16), "w": jnp.array([[0.0, 0.5]])}


def recorded(scope, *steps, params=PARAMS):
    """The history after these updates."""
    tx = optax.chain(optax.identity(), monitor.record(3, scope=scope, stats="ratio"))
    state, update = tx.init(params), jax.jit(tx.update)
    for updates in steps:
        found, state = update(updates, state, params)
        jax.tree.map(np.testing.assert_array_equal, found, updates)
    return monitor.history(state)


def test_record_ratio_compares_updates_with_params():
    steps = (
        UPDATES,
        UPDATES | {"b": jnp.full(2, 0.5), "v": UPDATES["v"] * 4},
        UPDATES | {"w": None},
    )
    expected = [[0, 0.5, 0.1], [np.inf, 2, 0.1], [0, 0.5, np.nan]]
    np.testing.assert_allclose(recorded(scopes.leaf(), *steps), expected, rtol=1e-6)
    norms = np.sqrt([0.5**2 + 0.5**2, 0.5 + 2**2 + 0.5**2])
    np.testing.assert_allclose(recorded(scopes.tree(), *steps[:2]), norms / np.sqrt(26), rtol=1e-6)


def test_record_ratio_survives_extremes_and_nonfinite_updates():
    params = {"far": jnp.full(1, 1e30), "near": jnp.full(1, 1e-30), "bad": jnp.ones(1)}
    updates = {"far": jnp.full(1, 1e33), "near": jnp.full(1, 1e-33), "bad": jnp.full(1, jnp.nan)}
    found = recorded(scopes.leaf(), updates, params=params)
    np.testing.assert_allclose(found, [[np.nan, 1e3, 1e-3]], rtol=1e-6)


@pytest.mark.by_day(1)
@pytest.mark.parametrize("per_leaf", [True, False])
def test_record_ratio_accepts_sharded_leaves(per_leaf):
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    params = {"b": jnp.arange(8.0), "w": jnp.arange(16.0)}

    def recorded_of(split, **options):
        tx = monitor.record(3, scope=scopes.leaf() if per_leaf else None, **options)

        def update(updates, params):
            return tx.update(updates, tx.init(params), params)[1]

        in_shards = jax.shard_map(
            update, mesh=mesh, in_specs=(split, split), out_specs=P(), check_vma=False
        )
        return monitor.history(jax.jit(in_shards)(jax.tree.map(lambda x: x / 4, params), params))

    split = {"b": P(), "w": P("x")}
    found = recorded_of(split, stats="ratio", specs=split)
    np.testing.assert_allclose(found, [[0.25, 0.25]] if per_leaf else [0.25], rtol=1e-6)
    norms = np.array([np.linalg.norm(x) / 4 for x in params.values()])
    norms = [norms] if per_leaf else [np.hypot(*norms)]
    np.testing.assert_allclose(recorded_of(split, specs=split), norms, rtol=1e-6)
    np.testing.assert_allclose(recorded_of(P("x"), axis_name="x"), norms, rtol=1e-6)


def test_record_ratio_requires_params():
    tx = monitor.record(stats="ratio", name="moves")
    with pytest.raises(
        ValueError,
        match=r"moves: params are required .*\['ratio'\]; call update\(updates, state, params\)",
    ):
        tx.update(UPDATES, tx.init(PARAMS))
    with pytest.raises(ValueError, match=r"moves: leaf 'w' of params must have .*but is missing"):
        tx.update(UPDATES, tx.init(PARAMS), {"b": PARAMS["b"], "v": PARAMS["v"]})

"""Levanter's checkpoints hold every state of ours."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optaxclip
from optaxclip import monitor, scopes, thresholds

PARAMS = {"w": jnp.ones((3, 2)), "b": jnp.ones(3)}
TX = optax.chain(
    monitor.record(3, scope=scopes.leaf()),
    optaxclip.skip_nonfinite(
        optax.chain(
            optaxclip.adagc(),
            optaxclip.clip_by(scopes.unit(), thresholds.zscore()),
            optaxclip.clip_by_group_norm(1.0, {"w": "matrix", "b": "vector"}),
            optax.adam(0.1),
        )
    ),
)


@pytest.mark.slow
def test_levanter_checkpoints_restore_states(imported, tmp_path):
    stores = imported("levanter.tensorstore_serialization")
    _, state = TX.update(PARAMS, TX.init(PARAMS), PARAMS)
    mesh = jax.make_mesh((1,), ("data",))
    with mesh:
        stores.tree_serialize_leaves_tensorstore(str(tmp_path), state)
        restored = stores.tree_deserialize_leaves_tensorstore(
            str(tmp_path), TX.init(PARAMS), axis_mapping={}, mesh=mesh
        )
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    jax.tree.map(np.testing.assert_array_equal, restored, state)
    assert monitor.history_names(restored) == ("b", "w")

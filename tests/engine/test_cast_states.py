"""States that a trainer stores in a narrow format."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from methods_table import METHODS, avals, random_tree

import optaxclip
from optaxclip import monitor, scopes, thresholds

RULE = thresholds.ema(0.9, 2.0)
TRANSFORMATIONS = {name: method.make() for name, method in METHODS.items()} | {
    "record": monitor.record(3, scope=scopes.leaf(), stats=("norm", "ratio")),
    "skip_nonfinite": optaxclip.skip_nonfinite(optax.identity()),
    "skip_above": optaxclip.skip_above(optax.identity(), RULE),
}


@pytest.mark.by_day(3)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_update_keeps_dtypes_of_cast_states(name, dtype):
    tx, tree = TRANSFORMATIONS[name], random_tree(0)

    def narrow(x):
        return x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x

    def steps(state):
        return jax.lax.scan(lambda s, _: (tx.update(tree, s, tree)[1], None), state, length=2)[0]

    state = jax.tree.map(narrow, tx.init(tree))
    # Rules mix a state that the trainer cast with norms in float32.
    with jax.numpy_dtype_promotion("standard"):
        assert avals(jax.eval_shape(steps, state)) == avals(state)


def test_thresholds_are_those_of_a_wide_state_but_for_rounding():
    tx, threshold_values = optaxclip.zclip(warmup_steps=3), []
    for dtype in (jnp.float32, jnp.bfloat16):
        state = tx.init(jnp.ones(3))
        for step in range(8):
            statistic = jax.tree.map(lambda x, dtype=dtype: x.astype(dtype), state.rule.statistic)
            state = state._replace(rule=state.rule._replace(statistic=statistic))
            with jax.numpy_dtype_promotion("standard"):
                state = tx.update(jnp.full(3, 1.0 + 0.1 * step), state)[1]
        threshold_values.append(state.info.threshold)
    np.testing.assert_allclose(*threshold_values, rtol=0.03)


def test_cast_counter_raises():
    tx = optaxclip.clip_by_global_norm(1.0)
    state = optax.tree_utils.tree_cast(tx.init(jnp.ones(3)), jnp.bfloat16)
    with pytest.raises(
        TypeError, match="counters in the state must be integers, but have dtype bfloat16"
    ):
        tx.update(jnp.ones(3), state)

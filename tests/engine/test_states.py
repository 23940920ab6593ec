"""States as they are handed on: donated from the first step, for more steps than can be counted."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cases import slow_unless
from flax import nnx
from jax.experimental import checkify
from methods_table import (
    DISTINCT,
    GRADS,
    METHODS,
    PARAMS,
    assert_same,
    avals,
    random_tree,
)
from parts_table import NUMBER, RULES, SCOPES, TRANSFORMATIONS, WRAPPERS

import optaxclip
from optaxclip import scopes, thresholds

# All together are slow to compile; most of those without memory have the same state.
SOME = ["clip_by_global_norm", "skip_above", "skip_above_loss", *WRAPPERS]
SOME += [name for name in DISTINCT if METHODS[name].has_memory]
COSTLY = {"muon", "per_example", "record", "record_per_leaf"}  # and their states are as others'
SOME = [name for name in SOME if name not in COSTLY]
ALL = [*TRANSFORMATIONS]


def arrays(tree):
    """All arrays, of keys what they are made of."""
    leaves = (x for x in jax.tree.leaves(tree) if isinstance(x, jax.Array))
    return [
        jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
        for x in leaves
    ]


@pytest.mark.by_day(40)
@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("rule", RULES)
def test_init_shares_no_arrays_between_states(rule, scope):
    tx = optaxclip.clip_by(SCOPES[scope], RULES[rule]())
    fresh = tx.init(PARAMS)
    places = [x.unsafe_buffer_pointer() for x in arrays(fresh)]
    assert len(set(places)) == len(places)
    jax.tree.map(lambda x: x.delete(), fresh)
    jax.block_until_ready((tx.init(PARAMS), PARAMS, NUMBER))


def test_init_of_wrappers_shares_no_arrays():
    inner, rule = optax.sgd(0.1, momentum=0.9), thresholds.zscore()
    tx = optaxclip.skip_above(inner, rule, loss_threshold=rule)
    places = [x.unsafe_buffer_pointer() for x in arrays(tx.init(PARAMS))]
    assert len(set(places)) == len(places)


def gradients(names):
    """Some of its own for each transformation; those of two examples for two of them."""
    copies = {name: jax.tree.map(jnp.copy, GRADS) for name in names}
    return copies | {name: random_tree(2, 2) for name in copies if name.startswith("per_example")}


def all_steps(grads, states, params):
    """One step of these transformations, each with updates and a state of its own."""
    return {
        name: TRANSFORMATIONS[name].update(grads[name], state, params)
        for name, state in states.items()
    }


@functools.cache
def donating(compiled):
    return compiled(all_steps, donate_argnums=(0, 1))


def run(step, states, number_of_steps):
    for _ in range(number_of_steps):
        results = step(gradients(states), states, PARAMS)
        states = {name: state for name, (_, state) in results.items()}
    return results


def fresh_states(names):
    return {name: TRANSFORMATIONS[name].init(PARAMS) for name in names}


@pytest.mark.parametrize(
    ("compiled", "names"),
    slow_unless(
        lambda compiled, names: names is SOME, [(jax.jit, SOME), (jax.jit, ALL), (nnx.jit, ALL)]
    ),
    ids=["jit-some", "jit-all", "nnx.jit-all"],
)
@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
def test_states_and_updates_accept_donation_from_first_step(compiled, names):
    for _ in range(2):
        states = fresh_states(names)
        run(donating(compiled), states, 2)
        kept = {name for name in names if not all(x.is_deleted() for x in arrays(states[name]))}
        assert not kept


LARGEST = 2**31 - 1


def counted(states, count):
    """The same states after so many steps."""
    return jax.tree.map(lambda x: jnp.full_like(x, count) if x.dtype == jnp.int32 else x, states)


@pytest.mark.parametrize(
    "names", slow_unless(lambda names: names is SOME, [SOME, ALL]), ids=["some", "all"]
)
@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
def test_counters_saturate_without_changing_updates(names):
    step, found = donating(jax.jit), []
    # Rings have 2, 4 and 5 places, which come round together.
    for count in (LARGEST, LARGEST - 20 * 10**7):
        last = run(step, fresh_states(names), 6)
        states = {name: counted(state, count) for name, (_, state) in last.items()}
        found.append(run(step, states, 7))
    for name in names:
        (updates, state), (expected, expected_state) = (results[name] for results in found)
        counts = [x for x in jax.tree.leaves(state) if x.dtype == jnp.int32]
        # The marks of `events` have a number below 0.
        assert all(np.all((x > LARGEST - 6) | (x < 14)) and np.all(x >= -1) for x in counts), name
        assert_same(updates, expected)
        assert_same(arrays(counted(state, 0)), arrays(counted(expected_state, 0)))


@pytest.mark.by_day(1)
@pytest.mark.parametrize("scope", [scopes.leaf(), scopes.unit()], ids=["leaf", "unit"])
def test_missing_group_keeps_previous_info(scope):
    tx = optaxclip.clip_by(scope, {"a": 1.0, "b": 0.5})
    grads = {"a": jnp.ones((3, 2)), "b": jnp.ones((3, 2))}
    _, before = tx.update(grads, tx.init(grads))
    updates, after = tx.update({"a": 2 * grads["a"], "b": None}, before)
    assert updates["b"] is None
    for name in ("norm", "threshold", "factor", "num_clipped", "num_nonfinite"):
        of_b = [getattr(state.info, name)[1] for state in (before, after)]
        np.testing.assert_array_equal(*of_b, err_msg=name)
    np.testing.assert_array_equal(after.info.fraction, [1, 0])
    np.testing.assert_array_equal(after.info.num_clipped, [2, 1])


def test_missing_unit_keeps_state_shapes():
    tx = optaxclip.clip_by(scopes.unit(), thresholds.ema(0.9, 2.0))
    grads = {"a": jnp.ones((3, 2)), "b": jnp.ones((3, 4)), "c": jnp.ones((3, 2))}
    state = tx.init(grads)
    after = jax.eval_shape(tx.update, grads | {"b": None}, state)[1]
    assert avals(after) == avals(state)


def test_missing_group_triggers_no_checkify_error():
    tx, grads = optaxclip.clip_by_norm(1.0, nonfinite="error"), {"a": jnp.ones(2), "b": jnp.ones(3)}
    step = checkify.checkify(lambda x: tx.update({"a": x, "b": None}, tx.init(grads))[0])
    error, updates = jax.jit(step)(grads["a"])
    assert error.get() is None
    np.testing.assert_allclose(updates["a"], np.full(2, 0.5**0.5), rtol=1e-6)


def test_step_without_leaves_records_zero_norm():
    tx = optaxclip.clip_by_global_norm(1.0, nonfinite="mask")
    _, before = tx.update({"a": jnp.ones(4)}, None)
    _, after = tx.update({"a": None}, before)
    info = after.info
    assert (info.norm, info.threshold, info.factor, info.fraction) == (0, 1, 1, 0)
    assert (info.num_clipped, info.num_nonfinite) == (1, 0)


def step_of(tx, host=False):
    """An eager step, with all that some transformation wants, of NumPy arrays or of JAX's."""

    def step(grads, state):
        trees = (grads, state, PARAMS)
        grads, state, params = jax.tree.map(np.asarray, trees) if host else trees
        return tx.update(grads, state, params, value=np.float32(1.0))

    return step


# Those with noise have a key in their state, which is no array of NumPy.
WITHOUT_KEYS = {x: tx for x, tx in TRANSFORMATIONS.items() if not x.startswith("per_example")}
WITHOUT_KEYS |= {
    f"skip, {rule}": optaxclip.skip_above(optax.sgd(0.1, momentum=0.9), RULES[rule]())
    for rule in RULES
    if rule != "of a user"  # which hands back what it is given
}
WITHOUT_KEYS |= {
    "skip, mean_over_rms": optaxclip.skip_above(optax.sgd(0.1), thresholds.mean_over_rms()),
    "skip, loss": optaxclip.skip_above(optax.sgd(0.1), 1.0, loss_threshold=thresholds.zscore()),
    "error": optaxclip.clip_by(scopes.leaf(), thresholds.zscore(), nonfinite="error"),
}


# `test_contract.py` has the methods. A skip does the same with the state of each rule.
@pytest.mark.by_day(1)
@pytest.mark.parametrize(
    "name",
    slow_unless(
        lambda name: not name.startswith("skip, ") or name in ("skip, zscore", "skip, loss"),
        [name for name in WITHOUT_KEYS if name not in METHODS],
    ),
)
def test_update_accepts_states_of_numpy_arrays(name):
    tx = WITHOUT_KEYS[name]
    state = restored = tx.init(PARAMS)
    for seed in (1, 2):
        updates, state = step_of(tx)(random_tree(seed), state)
        found, restored = step_of(tx, host=True)(random_tree(seed), restored)
        assert_same((found, restored), (updates, state))


@pytest.mark.parametrize("name", WITHOUT_KEYS)
def test_init_accepts_shapes(name):
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), PARAMS)
    assert_same(WITHOUT_KEYS[name].init(shapes), WITHOUT_KEYS[name].init(PARAMS))


@pytest.mark.by_day(15)
@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_states_have_no_field_called_count(name):
    # `scale_by_stable_adam` is an Adam itself.
    after = optax.scale(0.1) if name.startswith("scale_by_stable_adam") else optax.adam(0.1)
    tx = optax.chain(TRANSFORMATIONS[name], after)
    state = optax.tree.set(tx.init(PARAMS), count=jnp.int32(3))
    assert optax.tree.get(state, "count") == 3

"""A threshold for each group by name: numbers, schedules and rules side by side."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.tree_util import Partial
from methods_table import assert_same, at, label

import optaxclip
from optaxclip import scopes, thresholds

NAMES = ("constant", "past", "relative", "schedule")
THRESHOLDS = {
    "schedule": optax.linear_schedule(2.0, 0.5, 6),
    "past": thresholds.percentile(50.0, window=3),
    "relative": thresholds.relative_to_params(0.5),
    "constant": 1.0,
}


def trees(seed, *leading):
    rng = np.random.default_rng(seed)
    return {name: np.float32(rng.normal(size=(*leading, 3))) for name in NAMES}


def steps(count):
    """Every other one is small."""
    sizes = np.float32([0.1, 3.0] * (count // 2))[:, None]
    return {name: sizes * x for name, x in trees(1, count).items()}


PARAMS, STEPS = trees(0), steps(8)


def thresholds_and_updates(tx, steps, params):
    @jax.jit
    def run(steps, params):
        def step(state, grads):
            updates, state = tx.update(grads, state, params)
            return state, (updates, state.info)

        return jax.lax.scan(step, tx.init(params), steps)

    return run(steps, params)


@functools.cache
def alone(name):
    """The updates and the record of one group by itself."""
    tx = optaxclip.clip_by(scopes.tree(), THRESHOLDS[name])
    return thresholds_and_updates(tx, STEPS[name], PARAMS[name])[1]


@pytest.mark.slow
@pytest.mark.parametrize("scope", [scopes.leaf(), scopes.axes(-1)], ids=["vector", "dict"])
def test_thresholds_by_name_match_separate_clips(scope):
    state, (updates, info) = thresholds_and_updates(
        optaxclip.clip_by(scope, THRESHOLDS), STEPS, PARAMS
    )
    assert set(state.rule) == set(NAMES)
    for i, name in enumerate(NAMES):
        expected, of_one = alone(name)
        np.testing.assert_allclose(updates[name], expected, rtol=1e-6)
        np.testing.assert_allclose(info.threshold[:, i], of_one.threshold, rtol=1e-6)
        assert 0 < info.num_clipped[-1, i] < 8


def test_threshold_by_name_accepts_single_group():
    rule = thresholds.percentile(50.0, window=3)
    by_name, alone = (optaxclip.clip_by(scopes.tree(), x) for x in ({"tree": rule}, rule))
    state, found = thresholds_and_updates(by_name, STEPS, PARAMS)
    assert_same(found, thresholds_and_updates(alone, STEPS, PARAMS)[1])
    assert list(state.rule) == ["tree"]


def test_missing_group_keeps_rule_state():
    tx = optaxclip.clip_by(scopes.leaf(), {"a": 1.0, "b": thresholds.zscore(warmup_steps=1)})
    params = {"a": jnp.ones(2), "b": jnp.ones(2)}
    _, before = tx.update(params, tx.init(params))
    updates, after = tx.update({"a": jnp.ones(2), "b": None}, before)
    assert updates["b"] is None
    assert_same(after.rule, before.rule)


@pytest.mark.by_day(1)
@pytest.mark.parametrize("tree", [{}, (), {"w": None}])
def test_empty_tree_needs_no_rules(tree):
    rules = {"a": 1.0, "b": thresholds.zscore(), "c": thresholds.relative_to_params(0.1)}
    for record in ({}, {"record": False}):
        some = {"a": 1.0, "b": 2.0} if record else rules
        tx = optaxclip.clip_by_group_norm(some, lambda path, leaf: "a", **record)
        state = tx.init(tree)
        updates, after = jax.jit(tx.update)(tree, state, tree)
        jax.tree.map(np.testing.assert_array_equal, updates, tree)
        assert jax.tree.structure(after) == jax.tree.structure(state)


def test_clip_tree_matches_first_update_of_clip_by():
    tree, info = optaxclip.clip_tree(at(STEPS, 0), THRESHOLDS, scope=scopes.leaf(), params=PARAMS)
    clip = optaxclip.clip_by(scopes.leaf(), THRESHOLDS)
    assert_same(tree, clip.update(at(STEPS, 0), clip.init(PARAMS), PARAMS)[0])
    assert info.threshold[NAMES.index("schedule")] == 2.0


def test_rule_may_wrap_schedule():
    """Whose state is none of its own, but part of it."""
    inner = thresholds.schedule(optax.linear_schedule(2.0, 1.0, 10))

    def update(inner, norms, state, param_norms):
        threshold_values, state = inner.update(norms, state["inner"], param_norms)
        return threshold_values, {"inner": state}

    init = Partial(lambda inner, norms: {"inner": inner.init(norms)}, inner)
    tx = optaxclip.clip_by(scopes.tree(), optaxclip.ThresholdRule(init, Partial(update, inner)))
    state = tx.init(PARAMS)
    for _ in range(2):
        _, state = tx.update(PARAMS, state)
    assert (state.info.threshold, state.rule["inner"]) == (np.float32(1.9), 2)


@pytest.mark.by_day(1)
@pytest.mark.parametrize("value", [-1.0, jnp.float32(-1)], ids=["python", "jax"])
def test_negative_schedule_acts_as_zero(value):
    tx = optaxclip.clip_by(scopes.tree(), lambda count: value)
    updates, state = tx.update(PARAMS, tx.init(PARAMS))
    assert state.info.threshold == 0
    assert_same(updates, jax.tree.map(jnp.zeros_like, PARAMS))


LABELLED = {"w": jnp.full((2, 2), 3.0), "b": jnp.full(4, 4.0)}


@pytest.mark.parametrize("record", [True, False])
@pytest.mark.parametrize("wrapper", ["masked", "partition"])
def test_a_part_of_a_tree_leaves_the_thresholds_of_the_rest_unused(wrapper, record):
    """But each of its groups needs one, and in a whole tree a name without leaves is an error."""

    def part(threshold_values):
        tx = optaxclip.clip_by(scopes.group(label), threshold_values, record=record)
        if wrapper == "masked":
            return optax.masked(tx, {"w": True, "b": False})
        return optax.partition({"x": tx, "y": optax.identity()}, {"w": "x", "b": "y"})

    tx = part({"matrix": 1.0, "vector": 2.0})
    updates, _ = tx.update(LABELLED, tx.init(LABELLED), LABELLED)
    np.testing.assert_allclose(updates["w"], np.full((2, 2), 0.5), rtol=1e-6)
    np.testing.assert_array_equal(updates["b"], LABELLED["b"])
    with pytest.raises(
        ValueError, match=r"groups \['matrix'\], got \['mtarix', 'vector'\]; pass one"
    ):
        part({"mtarix": 1.0, "vector": 2.0}).update(LABELLED, tx.init(LABELLED), LABELLED)
    whole = optaxclip.clip_by(scopes.group(label), dict.fromkeys(("matrix", "vector", "vectro"), 1))
    with pytest.raises(ValueError, match="thresholds must have the groups"):
        whole.init(LABELLED)

"""Records of statistics: what they refuse, log, and keep through checkpoints and wrappers."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import serialization

import optaxclip
from optaxclip import monitor, scopes
from optaxclip.monitor._find_states import find
from optaxclip.monitor._record import RecordState

PARAMS = {"body": jnp.ones((2, 3)), "head": jnp.ones(2)}
GRADS = {"body": jnp.zeros((2, 3)).at[1, 0].set(4.0), "head": jnp.array([3.0, 0.0])}
LAYERS = scopes.leaf(stacked={"body": 1, "head": 0})


def after(tx, *steps):
    state = tx.init(PARAMS)
    for grads in steps:
        state = jax.jit(tx.update)(grads, state, PARAMS)[1]
    return state


def test_param_statistics_require_params():
    tx = monitor.record(3, stats=("norm", "cosine_param", "ratio"), name="mine")
    needed = re.escape("mine: params are required for the statistics ['cosine_param', 'ratio']")
    with pytest.raises(ValueError, match=f"^{needed}"):
        tx.update(GRADS, tx.init(PARAMS))
    for stat in ("cosine_param", "param_norm", "ratio"):
        with pytest.raises(
            ValueError, match=rf"^record: params are required .* statistics \['{stat}'\]; call"
        ):
            monitor.record(3, stats=stat).update(GRADS, monitor.record(3, stats=stat).init(PARAMS))
    with pytest.raises(ValueError, match=r"mine: leaf 'head' of params must have the same shape"):
        tx.update(GRADS, tx.init(PARAMS), {"body": PARAMS["body"]})


def test_record_rejects_state_of_other_record():
    state = monitor.record(3, stats="max").init(PARAMS)
    said = re.escape("statistics ['norm'], got ['max']; initialize a new state if the state comes")
    with pytest.raises(ValueError, match=f"^record: .* must contain the {said}"):
        monitor.record(3).update(GRADS, state)


def test_history_selects_statistic():
    state = after(monitor.record(3, stats=("max", "norm")), GRADS)
    np.testing.assert_array_equal(monitor.history(state), [5.0])
    np.testing.assert_array_equal(monitor.history(state, stat="max"), [4.0])
    state = after(monitor.record(3, stats=("max", "mean_abs")), GRADS)
    said = r"stat must be one of \['max', 'mean_abs'\], got "
    with pytest.raises(ValueError, match=said + "None$"):
        monitor.history(state)
    with pytest.raises(ValueError, match=said + r"'mean_ab'; did you mean 'mean_abs'\?"):
        monitor.history(state, stat="mean_ab")


def test_statistics_metrics_accept_vmapped_states():
    tx = monitor.record(2, scope=LAYERS, stats=("max", "share"))
    sizes = jnp.array([1.0, 3.0, 2.0])
    step = jax.vmap(lambda x: tx.update(jax.tree.map(lambda g: g * x, GRADS), tx.init(PARAMS))[1])
    states = jax.jit(step)(sizes)
    assert monitor.scalars(states)["record/max"] == 12.0
    assert jax.jit(monitor.metrics)(states)["record/max"] == 12.0


def test_statistics_survive_lost_names():
    stats = ("max", "norm", "share")
    tx = optax.chain(monitor.record(3, scope=LAYERS, stats=stats), optax.sgd(0.1))
    state = after(tx, GRADS, GRADS)
    mapped = optax.tree_map_params(tx, lambda x: x, state)
    restored = serialization.from_bytes(state, serialization.to_bytes(state))
    for each in (mapped, serialization.to_state_dict(state), restored):
        np.testing.assert_array_equal(
            monitor.history(each, stat="max"), monitor.history(state, stat="max")
        )
        assert monitor.scalars(each) == monitor.scalars(state)
    after_a_step = jax.jit(tx.update)(GRADS, mapped, PARAMS)[1]
    assert monitor.history_names(after_a_step) == ("body/0", "body/1", "head")


@pytest.mark.by_day(1)
@pytest.mark.parametrize("scope", [scopes.leaf(), scopes.axes(0)], ids=["leaf", "axes"])
def test_statistics_report_nonfinite_and_missing_leaves(scope):
    stats = ("norm", "max", "mean_abs", "share", "ratio", "cosine_param")
    tx = monitor.record(2, scope=scope, stats=stats)
    bad = {"body": GRADS["body"].at[0, 1].set(jnp.nan), "head": GRADS["head"]}
    state = after(tx, bad)
    found = monitor.metrics(state)
    assert all(jnp.isnan(found[f"record/{stat}"]) for stat in stats)
    np.testing.assert_equal(monitor.scalars(state), {k: float(x) for k, x in found.items()})
    missing = after(tx, {"body": None, "head": GRADS["head"]})
    assert monitor.scalars(missing)["record/max"] == 3
    assert np.isnan(monitor.history(missing, stat="max")[0, 0])
    assert np.isnan(monitor.scalars(after(tx, {"body": None, "head": None}))["record/max"])


def test_zero_fraction_of_nothing_hides_no_layer():
    tx = monitor.record(scope=scopes.leaf(), stats="zero_fraction")
    grads = {"a": jnp.zeros((0, 3)), "b": jnp.array([0.0, 1.0]), "c": jnp.zeros(())}
    state = tx.update(grads, tx.init(grads))[1]
    np.testing.assert_array_equal(monitor.history(state), [[0, 0.5, 1]])
    state = tx.update(grads | {"c": jnp.ones(())}, state)[1]
    assert monitor.scalars(state)["record/zero_fraction"] == 0.5


@pytest.mark.parametrize("wrap", [optaxclip.skip_nonfinite, lambda tx: optaxclip.skip_above(tx, 9)])
def test_record_inside_skip_keeps_step_numbers(wrap):
    """It counted only the steps that were taken."""
    stages = (monitor.record(4), monitor.histogram(3, scope=scopes.tree()), optax.sgd(0.1))
    tx = wrap(monitor.events(optaxclip.skip_nonfinite(optax.chain(*stages)), 4))
    update, state, steps = jax.jit(tx.update), tx.init(jnp.zeros(1)), []
    for x in (jnp.nan, 1.0, 2.0, jnp.nan, jnp.inf, 5.0):
        state = update(jnp.array([x]), state)[1]
        steps.append(monitor.histograms(state)["tree"].step)
    np.testing.assert_array_equal(monitor.history(state, "record"), [2, jnp.nan, jnp.nan, 5])
    assert monitor.scalars(state)["record/steps"] == 6
    (record,) = find(state, RecordState).values()
    assert record.num_skipped == 3
    found = monitor.history(state, "events")
    assert found["step"].tolist() == [2, 3, 4, 5]
    assert found["verdict"].tolist() == ["taken", "skipped", "skipped", "taken"]
    # What is skipped is counted at the next step.
    assert steps == [-1, 1, 1, 1, 1, 5]
    state = update(jnp.array([jnp.nan]), state)[1]
    assert np.isnan(monitor.scalars(state)["record/norm"])

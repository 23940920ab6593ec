"""Resetting the moments of an optimizer: which parts, when, and what is as before."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from methods_table import GRADS, PARAMS, assert_close, avals, label, random_tree

import optaxclip
from optaxclip import monitor, thresholds
from optaxclip.methods import parts

pytestmark = pytest.mark.usefixtures("standard_promotion")

ADAM = optax.adam(0.1)


@functools.cache
def compiled(tx):
    return jax.jit(tx.update)


def run(tx, sequence, state=None, params=PARAMS, **extra):
    """The updates of all steps, and the states after them."""
    step, states, updates = compiled(tx), [], []
    state = tx.init(params) if state is None else state
    for grads in sequence:
        update, state = step(grads, state, params, **extra)
        updates, states = [*updates, update], [*states, state]
    assert step._cache_size() == 1
    return updates, states


def sequence(length):
    return [random_tree(seed) for seed in range(length)]


def moments(state):
    return [optax.tree.get(state, "mu"), optax.tree.get(state, "nu")]


def is_zero(tree):
    return not any(np.any(x) for x in jax.tree.leaves(tree))


def test_after_a_reset_adam_begins_anew():
    trees = sequence(7)
    updates, states = run(optaxclip.reset_state(ADAM, every=3), trees)
    parts = [trees[:3], trees[3:6], trees[6:]]
    expected = [update for part in parts for update in run(ADAM, part)[0]]
    for found, wanted in zip(updates, expected, strict=True):
        assert_close(found, wanted)
    assert [is_zero(moments(state)) for state in states] == [i in (2, 5) for i in range(7)]
    assert [int(optax.tree.get(state, "count")) for state in states] == [1, 2, 0, 1, 2, 0, 1]
    assert [int(state.num_resets) for state in states] == [0, 0, 1, 1, 1, 2, 2]
    assert [int(state.since) for state in states] == [1, 2, 0, 1, 2, 0, 1]
    assert avals(states[-1]) == avals(optaxclip.reset_state(ADAM, every=3).init(PARAMS))


def test_the_warm_up_rises_from_zero_to_one():
    plain = run(optaxclip.reset_state(ADAM, every=5), sequence(12))[0]
    found = run(optaxclip.reset_state(ADAM, every=5, warmup=4), sequence(12))[0]
    factors = [(1 - math.cos(math.pi * t / 4)) / 2 for t in range(4)]
    for i, factor in enumerate([*[1] * 5, *factors, 1, *factors[:2]]):
        wanted = jax.tree.map(lambda x, by=factor: x * by, plain[i])
        assert_close(found[i], wanted)


@pytest.mark.by_day(1)
@pytest.mark.parametrize(
    ("when", "resets"),
    [
        (20.0, [4]),
        (optax.piecewise_constant_schedule(0.1, {2: 1e6}), [0, 1]),
        (thresholds.zscore(z_thresh=6.0, warmup_steps=3), [4]),
        (thresholds.relative_to_params(2.0), [4]),
    ],
)
def test_after_a_spike_nothing_of_it_is_left(when, resets):
    trees = [GRADS, GRADS, *sequence(6)[2:]]
    trees[4] = jax.tree.map(lambda x: 1000 * x, trees[4])
    tx = optaxclip.reset_state(ADAM, when=when)
    updates, states = run(tx, trees)
    assert [i for i, state in enumerate(states) if is_zero(moments(state))] == resets
    assert_close(updates[-1], run(ADAM, trees[resets[-1] + 1 :])[0][-1])
    info = monitor.read(states[-1])["judge/reset_state"]
    assert (int(info.num_clipped), int(info.num_nonfinite)) == (len(resets), 0)
    assert states[-1].judge.steps == len(trees)


@pytest.mark.by_day(1)
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_not_finite_is_forgotten_where_a_rule_judges(value):
    bad = GRADS | {"b": GRADS["b"].at[0].set(value)}
    rule = thresholds.zscore(z_thresh=1e3)
    updates, states = run(optaxclip.reset_state(ADAM, when=rule), [GRADS, bad, GRADS])
    assert_close(updates[-1], run(ADAM, [GRADS])[0][-1])
    assert states[1].judge.info.num_nonfinite == 1
    norm = np.sqrt(sum(np.sum(np.square(np.float64(x))) for x in jax.tree.leaves(GRADS)))
    np.testing.assert_allclose(states[2].judge.info.norm, norm, rtol=1e-6)


def test_every_counts_from_a_reset_by_the_rule():
    trees = sequence(6)
    trees[1] = jax.tree.map(lambda x: 1000 * x, trees[1])
    _, states = run(optaxclip.reset_state(ADAM, every=3, when=100.0), trees)
    assert [int(state.since) for state in states] == [1, 0, 1, 2, 0, 1]


INSIDE = {
    "chain": lambda tx: optax.chain(optaxclip.clip_by_global_norm(1.0), tx),
    "named_chain": lambda tx: optax.named_chain(("clip", optax.clip(1.0)), ("adam", tx)),
    "partition": lambda tx: optax.partition(
        {"matrix": tx, "vector": optax.sgd(0.1)}, lambda tree: jax.tree.map_with_path(of, tree)
    ),
    "masked": lambda tx: optax.masked(tx, {"w": True, "b": False, "v": True}),
    "skip": optaxclip.skip_nonfinite,
    "inject": lambda tx: optax.chain(
        tx,
        optax.inject_hyperparams(optax.scale)(step_size=0.5),
        optax.scale_by_schedule(lambda n: n),
    ),
}


def of(path, leaf):
    return label(jax.tree_util.keystr(path, simple=True, separator="/"), leaf)


@functools.cache
def without_reset(name):
    return INSIDE[name](ADAM)


@pytest.mark.by_day(1)
@pytest.mark.parametrize("name", INSIDE)
@pytest.mark.parametrize("around", [True, False])
def test_in_and_around_other_wrappers(name, around):
    trees, reset = sequence(5), functools.partial(optaxclip.reset_state, every=3, warmup=1)
    tx = reset(without_reset(name)) if around else INSIDE[name](reset(ADAM))
    updates, states = run(tx, trees)
    assert [is_zero(moments(state)) for state in states] == [False, False, True, False, False]
    plain, fresh = (run(without_reset(name), part) for part in (trees[:3], trees[3:]))
    assert_close(updates[:3], plain[0])
    keep = "w" if name == "partition" else "v"
    if name == "inject":  # the schedule goes on
        wanted = jax.tree.map(lambda x: 4 * x, fresh[0][1])
        assert_close(updates[4], wanted)
        assert int(states[4].inner_state[2].count if around else states[4][2].count) == 5
    else:
        assert_close(updates[4][keep], fresh[0][1][keep])
    if name in ("partition", "masked"):
        assert is_zero(updates[3]["b"]) == around or name == "masked"
    assert is_zero(updates[3][keep])


def test_inside_of_multi_steps_a_step_is_a_batch():
    trees = sequence(12)
    tx = optax.MultiSteps(optaxclip.reset_state(ADAM, every=2), 3).gradient_transformation()
    states = run(tx, trees)[1]
    inner = [state.inner_opt_state for state in states]
    assert [int(state.num_resets) for state in inner] == [0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 2]
    around = optaxclip.reset_state(optax.MultiSteps(ADAM, 3), every=4)
    states = run(around, trees)[1]
    assert [int(state.num_resets) for state in states[3::4]] == [1, 2, 3]
    accumulated = [is_zero(state.inner_state.acc_grads) for state in states]
    assert accumulated == [i % 3 == 2 for i in range(12)]


OTHERS = {
    "trace": (optax.sgd(0.1, momentum=0.9), ["trace"]),
    "lion": (optax.lion(0.1), ["mu"]),
    "adam, mu alone": (optax.adam(0.1), ["mu"]),
    "adafactor": (optax.adafactor(0.1, min_dim_size_to_factor=2), ["v_row", "v_col", "v"]),
    "stable": (optaxclip.scale_by_stable_adam(), ["mu", "nu"]),
    "second moment": (optaxclip.clip_by_second_moment(threshold=2.0), ["moments"]),
    "muon": (optax.contrib.muon(0.1), ["mu", "nu"]),
}


@pytest.mark.by_day(1)
@pytest.mark.parametrize("name", OTHERS)
def test_parts_of_other_optimizers(name):
    inner, only = OTHERS[name]
    trees = sequence(4)
    updates, states = run(optaxclip.reset_state(inner, every=2, only=only), trees)
    for part in only:
        found = optax.tree.get_all_with_path(states[1], part)
        assert found
        assert all(is_zero(x) for _, x in found)
        assert not all(is_zero(x) for _, x in optax.tree.get_all_with_path(states[2], part))
    if name not in ("adam, mu alone", "adafactor"):
        assert_close(updates[3], run(inner, trees[2:])[0][1])
    if name == "adam, mu alone":
        assert not is_zero(optax.tree.get(states[1], "nu"))


def test_names_of_parameters_are_not_those_of_parts():
    params = {"mu": jnp.ones(3), "nu": {"count": jnp.ones(2)}}
    tx = optaxclip.reset_state(optax.chain(optax.trace(0.9), ADAM), every=1)
    make = optax.inject_hyperparams(lambda nu: optax.chain(optax.scale(nu), ADAM))
    injected = optaxclip.reset_state(make(nu=0.5), every=1)
    states = [run(each, [params], params=params)[1][0] for each in (tx, injected)]
    assert not is_zero(states[0].inner_state[0].trace["mu"])
    assert not is_zero(states[0].inner_state[0].trace["nu"])
    assert states[1].inner_state.hyperparams["nu"] == 0.5
    assert int(states[1].inner_state.count) == 1
    for state in states:
        adam = optax.tree.get(state, "ScaleByAdamState")
        assert is_zero([adam.mu, adam.nu, adam.count])


def test_parts_of_a_state_may_be_the_keys_of_a_dict():
    state = {"mu": {"w": 1.0}, "nu": {"mu": 2.0, "w": 3.0}, "steps": 4, "other": {"count": 5}}
    flags, leaves, _ = parts.marked(state, ["mu"], ({"w": 0.0, "mu": 0.0},))
    marked = [leaf for flag, leaf in zip(flags, leaves, strict=True) if flag]
    assert marked == [1.0, 4]
    assert parts.names_in(state, {"w": 0.0, "mu": 0.0}) == ["mu", "nu"]
    # A key that is no string, as in a list of states, is no name.
    flags, *_ = parts.marked([{"nu": 1.0}, {"mu": 2.0}], ["mu"], ())
    assert flags == [False, True]


def test_numbers_that_change():
    make = optax.inject_hyperparams(functools.partial(optaxclip.reset_state, ADAM))
    tx, trees = make(every=5, warmup=4), sequence(12)
    found = run(tx, trees)[0]
    assert_close(found, run(optaxclip.reset_state(ADAM, every=5, warmup=4), trees)[0])
    state = tx.init(PARAMS)
    state.hyperparams["every"] = jnp.asarray(2)
    resets = [int(each.inner_state.num_resets) for each in run(tx, trees[:4], state)[1]]
    assert resets == [0, 1, 1, 2]
    assert_close(run(make(every=5), trees)[0], run(optaxclip.reset_state(ADAM, every=5), trees)[0])

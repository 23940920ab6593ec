"""The named adaptive methods, as transformations of real trees."""

import functools
import inspect

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference_rules as published
from reference_rules import assert_close, at, drive, factors, random_norms, stack

import optaxclip
from optaxclip import clip_by, scopes, thresholds

STEPS = 60
PUBLISHED = {"patience": None, "floor": 0.0}
SHAPES = {"b": (70,), "v": (80, 1), "w": (15, 6)}


def per_leaf(reference):
    """A rule for one norm, for each column of norms."""

    def run(norms):
        threshold_values = [reference(column)[:2] for column in norms.T]
        return published.Trace(*np.stack(threshold_values, axis=-1))

    return run


METHODS = {
    "autoclip": (
        optaxclip.autoclip,
        {"percentile": 30.0, "window": 20},
        lambda n: published.percentile(n, 30.0, 20, inclusive=True, needed=1),
    ),
    "zclip": (
        optaxclip.zclip,
        {"z_thresh": 0.3, "warmup_steps": 10, "max_norm": 15.0},
        lambda n: published.zclip(n, 10, 15.0, z_thresh=0.3),
    ),
    "adagc": (
        optaxclip.adagc,
        {"lambda_rel": 1.05, "beta": 0.98, "lambda_abs": 3.0, "warmup_steps": 10, "patience": None},
        lambda n: published.adagc(n, absolute=3.0, warmup=10),
    ),
    "clip_by_median_norm": (
        optaxclip.clip_by_median_norm,
        {"scale": 1.2, "window": 15},
        lambda n: published.scaled_adam(n, 1.2, 15),
    ),
    "clip_by_quantile": (
        optaxclip.clip_by_quantile,
        {"init_threshold": 0.5},
        lambda n: published.andrew(n, 0.5, 0.2, 0.5),
    ),
    "clip_by_ema_norm": (
        optaxclip.clip_by_ema_norm,
        {"ratio": 1.2},
        per_leaf(lambda n: published.olmo(n, 1.2)),
    ),
    "clip_by_window_norm": (
        optaxclip.clip_by_window_norm,
        {"num_std": 1.0, "window": 20},
        lambda n: published.window(n, 1.0, 20, ddof=0, min_std=1e-6, needed=10),
    ),
}
PER_LEAF = ("adagc", "clip_by_ema_norm")
each_method = pytest.mark.parametrize("name", METHODS)


def make(name, **options):
    factory, usual, _ = METHODS[name]
    return factory(**usual | options)


def random_trees(seed=0, steps=STEPS):
    """Gradients whose norms jump, leaf by leaf, with a leading axis of steps."""
    rng, norms = np.random.default_rng(seed), random_norms(seed, steps, len(SHAPES))
    tree = {}
    for i, (name, shape) in enumerate(SHAPES.items()):
        flat = rng.normal(size=(steps, int(np.prod(shape))))
        flat *= norms[:, i : i + 1] / np.linalg.norm(flat, axis=1, keepdims=True)
        tree[name] = np.float32(flat.reshape(steps, *shape))
    return tree


GRADS = random_trees()
FRESH = at(GRADS, 0)


def leaf_norms(grads):
    """[steps, leaves], float64."""
    flat = [np.float64(grads[name]).reshape(len(grads[name]), -1) for name in SHAPES]
    return np.stack([np.linalg.norm(x, axis=1) for x in flat], axis=1)


def run(update, grads, state):
    """Updates and states of all steps."""
    rows = []
    for i in range(len(grads["w"])):
        updates, state = update(at(grads, i), state)
        rows.append((updates, state))
    return stack(rows)


@functools.cache
def compiled(name):
    """The published method: its compiled update, a fresh state, and all steps on `GRADS`."""
    taken = inspect.signature(METHODS[name][0]).parameters
    tx = make(name, **{key: value for key, value in PUBLISHED.items() if key in taken})
    update, fresh = jax.jit(tx.update), tx.init(FRESH)
    return update, fresh, run(update, GRADS, fresh)


@pytest.mark.by_day(1)
@each_method
def test_adaptive_methods_match_published_factors(name):
    updates, states = compiled(name)[2]
    norms = leaf_norms(GRADS)
    norms = norms if name in PER_LEAF else np.linalg.norm(norms, axis=1)
    trace = METHODS[name][2](norms)
    expected = factors(norms, trace.trigger, trace.target)
    assert 0.05 < np.mean(expected < 1) < 0.95
    np.testing.assert_allclose(states.info.norm, norms, rtol=1e-6)
    np.testing.assert_allclose(states.info.threshold, trace.trigger, rtol=1e-5)
    np.testing.assert_allclose(states.info.factor, expected, rtol=1e-5)
    for i, leaf in enumerate(SHAPES):
        column = expected[:, i] if name in PER_LEAF else expected
        scaled = np.float64(GRADS[leaf]) * column.reshape(-1, *(1,) * len(SHAPES[leaf]))
        np.testing.assert_allclose(updates[leaf], scaled, rtol=2e-5)
    clipped = np.cumsum(norms > trace.trigger, axis=0)
    np.testing.assert_array_equal(states.info.num_clipped, clipped)
    assert list(states.info.names) == (list(SHAPES) if name in PER_LEAF else ["tree"])


def test_zclip_with_large_norms_clips_only_spikes():
    rng = np.random.default_rng(0)
    norms = np.float32(20.0 * np.exp(0.2 * rng.normal(size=200)))
    norms[[60, 120]] = 500.0
    tx, constant = optaxclip.zclip(), optaxclip.clip_by_global_norm(1.0)

    def step(states, grad):
        pairs = [
            clip.update(grad, state) for clip, state in zip((tx, constant), states, strict=True)
        ]
        return [state for _, state in pairs], [updates for updates, _ in pairs]

    fresh = [clip.init(jnp.zeros(1)) for clip in (tx, constant)]
    ours, at_one = jax.jit(lambda: jax.lax.scan(step, fresh, jnp.asarray(norms)[:, None])[1])()
    ours = np.ravel(ours)
    assert np.all(np.abs(ours - np.ravel(at_one)) > 1.0)
    clipped = np.flatnonzero(ours < norms)
    assert {60, 120} <= set(clipped.tolist())
    assert len(clipped) < 10
    assert ours[[60, 120]].max() < 50.0


def test_adagc_warmup_matches_clip_by_global_norm():
    updates, states = compiled("adagc")[2]
    plain = optax.clip_by_global_norm(3.0)
    update, state = jax.jit(plain.update), plain.init(FRESH)
    for i in range(10):
        assert_close(at(updates, i), update(at(GRADS, i), state)[0])
    spread = np.ptp(states.info.factor, axis=1)
    assert np.all(spread[:10] < 1e-6)
    assert spread[10] > 0.1


CHANGES = {
    "autoclip": {"percentile": 90.0, "floor": 3.0, "max_norm": 1.0},
    "zclip": {"z_thresh": 2.0, "alpha": 0.5, "max_norm": 0.5, "warmup_steps": 60, "patience": 1},
    "adagc": {"lambda_rel": 2.0, "lambda_abs": 1.0, "beta": 0.5, "warmup_steps": 40},
    "clip_by_median_norm": {"scale": 0.7, "max_norm": 1.0},
    "clip_by_quantile": {"target": 0.9, "learning_rate": 1.0},
    "clip_by_ema_norm": {"ratio": 0.7, "decay": 0.5},
    "clip_by_window_norm": {"num_std": 0.0, "max_norm": 1.0},
}


@pytest.mark.by_day(1)
@each_method
def test_injected_hyperparams_change_without_recompilation(name):
    factory, usual, _ = METHODS[name]
    usual = usual if "max_norm" not in CHANGES[name] else {"max_norm": 9.0} | usual
    tx = optax.inject_hyperparams(factory, static_args={"window"} & {*usual})(**usual)
    update, start = jax.jit(chex.assert_max_traces(tx.update, n=1)), tx.init(FRESH)
    for i in range(5):
        _, start = update(at(GRADS, i), start)
    rest = at(GRADS, np.s_[5:22])
    untouched = run(update, rest, start)
    for number, value in CHANGES[name].items():
        changed = jnp.full_like(start.hyperparams[number], value)
        state = start._replace(hyperparams=start.hyperparams | {number: changed})
        found = run(update, rest, state)
        plain = factory(**usual | {number: value})
        expected = run(plain.update, rest, start.inner_state)
        assert_close((found[0], found[1].inner_state), expected)
        assert np.any(found[0]["w"] != untouched[0]["w"]), number


RULES = {
    "percentile": thresholds.percentile(60.0, 10, warmup_steps=2),
    "median": thresholds.median(1.2, 10, every_step=True),
    "window": thresholds.window(1.0, 10),
    "ema": thresholds.ema(0.9, 1.2),
    "zscore": thresholds.zscore(0.9, 1.0, 5),
    "log_tracker": thresholds.log_tracker(0.5, 1.0),
    "quantile": thresholds.quantile(init_threshold=1.0),
}


def by_label(path, leaf):
    return "matrix" if path == "w" else "vector"


# The scope, the group of each leaf, and whether the columns of the matrix are groups of their own.
SCOPES = {
    "leaf": (scopes.leaf(), {"b": "b", "v": "v", "w": "w"}, False),
    "label": (scopes.group(by_label), {"b": "vector", "v": "vector", "w": "matrix"}, False),
    "unit": (scopes.unit(), {"b": "b", "v": "v", "w": "w"}, True),
}


COMBINATIONS = {
    "unit": ["percentile", "median", "zscore"],
    "label": ["window", "log_tracker"],
    "leaf": ["ema", "quantile"],
}


@pytest.mark.by_day(1)
@pytest.mark.parametrize(
    ("scope", "rule"), [(scope, rule) for scope in COMBINATIONS for rule in COMBINATIONS[scope]]
)
def test_rules_apply_to_groups_separately(scope, rule):
    scope, labels, columns = SCOPES[scope]
    tx = clip_by(scope, RULES[rule])
    updates, _ = run(jax.jit(tx.update), GRADS, tx.init(FRESH))
    norms = {}
    for leaf, label in labels.items():
        over = (1,) if columns and leaf == "w" else (1, 2)[: len(SHAPES[leaf])]
        square = np.sum(np.float64(GRADS[leaf]) ** 2, axis=over).reshape(STEPS, -1)
        norms[label] = np.float32(np.hypot(norms.get(label, 0), np.sqrt(square)))
    first = dict(zip(norms, np.cumsum([0, *(x.shape[1] for x in norms.values())]), strict=False))
    threshold_values = drive(RULES[rule], np.hstack([*norms.values()]))[:2]
    trigger, target = map(np.asarray, threshold_values)
    for leaf, label in labels.items():
        own = np.s_[:, first[label] : first[label] + norms[label].shape[1]]
        factor = factors(norms[label], trigger[own], target[own])
        assert np.any(factor < 1)
        factor = factor.reshape(STEPS, *(1,) * (len(SHAPES[leaf]) - 1), -1)
        np.testing.assert_allclose(updates[leaf], GRADS[leaf] * factor, rtol=1e-4, atol=1e-6)


def test_adagc_records_applied_warmup_thresholds():
    """Each leaf's share of the threshold of the global norm; the norm itself would say nothing."""
    tx = optaxclip.adagc(lambda_abs=10.0)
    grads = {"a": jnp.array([3.0]), "b": jnp.array([4.0])}
    state = tx.init(grads)
    for by in (1.0, 4.0, 0.0):
        _, state = tx.update(jax.tree.map(lambda x, by=by: x * by, grads), state)
        if by:
            np.testing.assert_allclose(state.info.threshold, [6, 8], rtol=1e-6)
        np.testing.assert_allclose(state.info.factor, 0.5 if by == 4 else 1, rtol=1e-6)
        assert state.info.num_clipped.tolist() == [int(by != 1)] * 2
    np.testing.assert_allclose(state.info.threshold, 10)

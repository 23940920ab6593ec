"""Skipping steps: what is left as it was, what is counted, and the way out."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from reference_rules import assert_close, assert_same, at, stack

import optaxclip
import optaxclip.transforms.skip as skip
from optaxclip import skip_above, skip_nonfinite, thresholds

pytestmark = pytest.mark.usefixtures("standard_promotion")

PARAMS = {"w": jnp.arange(80.0).reshape(8, 10), "b": jnp.ones(70)}
PUBLISHED = {"patience": None, "floor": 0.0}
AXLEARN = {"debias": True, "record": "accepted", **PUBLISHED}
S = [1.0, 1.2, 0.8, 1.0, 5.0, 1.1]


def grads_of_norm(norm, seed=0):
    """Gradients of this global norm; a NaN or infinite one sits in a single entry."""
    rng = np.random.default_rng(seed)
    flat = rng.normal(size=150)
    flat *= (norm if np.isfinite(norm) else 1.0) / np.linalg.norm(flat)
    flat[3] = flat[3] if np.isfinite(norm) else norm
    return {"w": np.float32(flat[70:].reshape(8, 10)), "b": np.float32(flat[:70])}


def trees(norms):
    """Gradients of these norms, with a leading axis of steps."""
    return stack([grads_of_norm(norm, step) for step, norm in enumerate(norms)])


def run(tx, norms, update=None, only=slice(None)):
    """All updates and states; of some steps only."""
    update, grads, rows = update or jax.jit(tx.update), at(trees(norms), only), []
    state = tx.init(PARAMS)
    for i in range(len(grads["w"])):
        updates, state = update(at(grads, i), state, PARAMS)
        rows.append((updates, state))
    return stack(rows)


def assert_zero(updates):
    assert not any(map(np.any, jax.tree.leaves(updates)))


INNER = {
    "no state": optax.identity(),
    "adam": optax.adam(0.1),
    "chain": optax.chain(
        optax.inject_hyperparams(optaxclip.zclip)(warmup_steps=2),
        optax.masked(optax.scale_by_adam(), {"w": True, "b": False}),
        optax.sgd(optax.linear_schedule(0.1, 0.0, 9), momentum=0.9),
    ),
    "steps of two": optax.MultiSteps(optax.adam(0.1), 2),
    "skips": skip_above(optax.adam(0.1), thresholds.window(3.0, 4)),
}
WRAPPERS = {
    "nonfinite": (skip_nonfinite, [np.nan, np.inf, -np.inf]),
    "above": (functools.partial(skip_above, threshold=2.0), [2.01, np.nan, np.inf]),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("wrapper", "inner"), [*(("above", inner) for inner in INNER), ("nonfinite", "adam")]
)
def test_skipped_step_changes_only_counts(wrapper, inner):
    (wrap, bad), skipped = WRAPPERS[wrapper], np.array([1, 0, 0, 1, 1, 0, 0, 0], bool)
    tx, norms = wrap(INNER[inner]), np.zeros(8)
    norms[skipped], norms[~skipped] = bad, [1.0, 0.5, 1.5, 1.0, 1.2]
    updates, states = run(tx, norms)
    assert_zero(at(updates, skipped))
    for step in np.flatnonzero(skipped):
        before = tx.init(PARAMS) if step == 0 else at(states, step - 1)
        assert_same(at(states, step).inner_state, before.inner_state)
        assert_same(optax.apply_updates(PARAMS, at(updates, step)), PARAMS)
    np.testing.assert_array_equal(states.num_skipped, np.cumsum(skipped))
    np.testing.assert_array_equal(states.info.factor, ~skipped)
    alone = run(INNER[inner], norms, compiled(inner), ~skipped)[0]
    assert_close(at(updates, ~skipped), alone)


@functools.cache
def compiled(inner):
    return jax.jit(INNER[inner].update)


@pytest.mark.parametrize(
    ("number", "threshold", "parts", "blamed"),
    [
        (5.0, 2.0, [3.0, 4.0, 1.0], [True, True, False]),
        # If no part is above the threshold, the largest is the reason, however small it is.
        (0.5, 0.45, [0.3, 0.4, 0.0], [False, True, False]),
        (0.4, 0.45, [0.3, 0.26, 0.0], [False] * 3),  # the loss alone was the reason
        (np.inf, 2.0, [np.inf, 3.0, np.nan], [True, False, True]),
    ],
)
def test_offending_parts_explain_skipped_norm(number, threshold, parts, blamed):
    number, threshold, parts = map(jnp.float32, (number, threshold, parts))
    is_bad = ~jnp.isfinite(number)
    found = skip.RuleResult(number, threshold, (), ~is_bad & (number > threshold), is_bad)
    assert found.find_bad_leaves(parts).tolist() == blamed


def test_skip_nonfinite_without_names_accepts_missing_leaf():
    """Names are lost where an older state is mapped, and come back at a step with all leaves."""
    tx = skip_nonfinite(optax.sgd(1.0))
    state = tx.init(PARAMS)
    lost = state._replace(leaves=type(state.leaves)())
    for grads, names in (PARAMS | {"b": None}, ()), (PARAMS, ("b", "w")):
        _, after = jax.eval_shape(tx.update, grads, lost)
        assert tuple(after.leaves) == names
        assert after.is_bad_leaf.shape == (2,)


@pytest.mark.by_day(1)
@pytest.mark.parametrize("jit", [False, True])
def test_skip_nonfinite_keeps_random_key(jit):
    """Beside what has no numbers, which `jit` does not take."""
    odd = None if jit else np.zeros(2, jax.dtypes.float0)
    inner = optax.GradientTransformation(
        lambda params: (jax.random.key(0), odd),
        lambda grads, state, params: (grads, (jax.random.key(1), odd)),
    )
    tx = skip_nonfinite(inner)
    update = jax.jit(tx.update) if jit else tx.update
    for norm, seed in ((np.nan, 0), (1.0, 1)):
        _, state = update(grads_of_norm(norm), tx.init(PARAMS), PARAMS)
        assert state.inner_state[0] == jax.random.key(seed)
        assert state.inner_state[1] is odd


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_skips_report_counts_and_reasons(wrapper):
    norms = [1.0, np.nan, 3.0, 4.0, np.inf, 1.0, np.nan]
    _, states = run(WRAPPERS[wrapper][0](optax.sgd(0.1)), norms)
    info, bad, above = states.info, np.array([0, 1, 0, 0, 1, 0, 1]), np.zeros(7)
    threshold, in_a_row = np.inf, bad
    if wrapper == "above":
        threshold, in_a_row, above[2:4] = 2.0, [0, 1, 2, 3, 4, 0, 1], 1
    np.testing.assert_array_equal(info.fraction, above)
    np.testing.assert_array_equal(info.num_clipped, np.cumsum(above))
    np.testing.assert_array_equal(info.num_nonfinite, np.cumsum(bad))
    np.testing.assert_array_equal(states.num_skipped, np.cumsum(above + bad))
    np.testing.assert_array_equal(states.consecutive, in_a_row)
    np.testing.assert_array_equal(info.threshold, [threshold] * 7)
    np.testing.assert_allclose(info.norm, norms, rtol=1e-6)


@pytest.mark.parametrize(
    ("tx", "norm", "taken"),
    [
        (skip_above(optax.sgd(0.1), 1.0), 5.0, [20, 41]),
        (skip_above(optax.sgd(0.1), 1.0, None), 5.0, []),
        (skip_nonfinite(optax.sgd(0.1)), np.nan, []),
    ],
)
def test_max_consecutive_limits_skipped_steps(tx, norm, taken):
    _, states = run(tx, [norm] * 50)
    assert np.flatnonzero(states.info.factor).tolist() == taken
    assert states.num_skipped[-1] == 50 - len(taken)


@pytest.mark.by_day(1)
@pytest.mark.parametrize(("most", "taken"), [(1, [2, 5, 7]), (3, [5])])
def test_skip_above_never_applies_nonfinite_step(most, taken):
    norms = [5.0, np.nan, 5.0, np.nan, np.inf, 5.0, 5.0, 5.0, 5.0]
    updates, states = run(skip_above(optax.adam(0.1), 1.0, most), norms)
    assert np.flatnonzero(states.info.factor).tolist() == taken
    assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves((updates, states.inner_state)))


def test_skip_nonfinite_matches_apply_if_finite_after_maximum():
    norms = [1.0, np.nan, 1.0, *[np.nan, np.inf] * 2, 1.0, *[np.nan] * 4]
    ours, states = run(skip_nonfinite(optax.sgd(0.1), 2), norms)
    theirs, _ = run(optax.apply_if_finite(optax.sgd(0.1), 2), norms)
    assert_close(ours, theirs)
    assert np.flatnonzero(states.info.factor).tolist() == [0, 2, 5, 6, 7, 10, 11]
    assert np.isnan(ours["b"][-1, 3])


MEAN = thresholds.ema(0.9, 2.0, **AXLEARN)
STDDEV = thresholds.zscore(0.9, 2.0, 3, option="percentile", **AXLEARN)
OLMO_CORE = thresholds.window(2.0, 6, ddof=1, min_std=0.0, warmup_steps=2, **PUBLISHED)
THRESHOLDS = {
    "constant": (2.0, S, [4]),
    "paxml, but for norms at the threshold": (np.float32(1.0), [0.5, 1.5, 0.5], [1]),
    "schedule": (lambda count: 3.0 / (count + 1), [2.9, 1.6, 0.9, 0.8, 0.5], [1, 3]),
    "axlearn, mean": (MEAN, S, [4]),
    "axlearn, stddev": (STDDEV, S, [4]),
    "OLMo-core": (OLMO_CORE, [*S, 5.0, 1.0], [4, 6]),
}


@pytest.mark.by_day(1)
@pytest.mark.parametrize("name", THRESHOLDS)
def test_every_kind_of_threshold(name):
    threshold, norms, skipped = THRESHOLDS[name]
    _, states = run(skip_above(optax.sgd(1.0), threshold), norms)
    assert np.flatnonzero(states.info.factor == 0).tolist() == skipped
    assert states.num_skipped[-1] == states.info.num_clipped[-1] == len(skipped)


def test_skip_above_around_clip_reproduces_axlearn():
    inner = optax.chain(optaxclip.clip_by_global_norm(1.0), optax.sgd(1.0))
    updates, states = run(skip_above(inner, MEAN), S)
    shares = -updates["w"][:, 0, 0] / trees(S)["w"][:, 0, 0]
    np.testing.assert_allclose(shares, [1, 0.833333, 1, 1, 0, 0.909091], atol=5e-7, rtol=2e-6)
    assert states.rule.num_recorded.tolist() == [1, 2, 3, 4, 4, 5]


def test_a_threshold_relative_to_the_parameters():
    tx = skip_above(optax.sgd(1.0), thresholds.relative_to_params(0.1))
    size = np.sqrt(sum(np.sum(np.square(x)) for x in PARAMS.values()))
    _, states = run(tx, [0.09 * size, 0.11 * size])
    assert states.info.factor.tolist() == [1, 0]
    with pytest.raises(ValueError, match="params"):
        tx.update(grads_of_norm(1.0), tx.init(PARAMS))


@pytest.mark.parametrize(("given", "taken"), [(5.0, 0), (0.5, 1), (np.nan, 0), (jnp.inf, 0)])
def test_skip_above_uses_known_norm(given, taken):
    tx = skip_above(optax.sgd(1.0), 1.0, known_norm="grad_norm")
    updates, state = tx.update(grads_of_norm(0.7), tx.init(PARAMS), PARAMS, grad_norm=given)
    assert state.info.factor == taken
    np.testing.assert_array_equal(state.info.norm, np.float32(given))
    assert np.any(updates["w"] != 0) == taken


def test_skip_above_passes_all_arguments_to_optimizer():
    seen = []

    def update(updates, state, params=None, *, value, extra=None):
        seen.append((updates, params, value, extra))
        return updates, state

    inner = optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)
    tx = skip_above(inner, 1.0)
    for norm in (np.inf, 3.0):
        updates, _ = tx.update(grads_of_norm(norm), tx.init(PARAMS), PARAMS, value=1.0)
        assert_same(seen[-1][0], grads_of_norm(norm))
        assert_zero(updates)
    tx.update(grads_of_norm(0.5), tx.init(PARAMS), PARAMS, value=2.0, extra=3.0)
    assert_same(seen[-1][:2], (grads_of_norm(0.5), PARAMS))
    assert seen[-1][2:] == (2.0, 3.0)
    tx = skip_above(optax.sgd(1.0), 1.0)  # takes no extra arguments
    tx.update(grads_of_norm(0.5), tx.init(PARAMS), PARAMS, value=2.0)


@pytest.mark.by_day(1)
@pytest.mark.parametrize("threshold", [2.0, thresholds.percentile(50.0, 4, warmup_steps=1)])
@pytest.mark.parametrize("jit", [False, True])
def test_skip_above_triggers_no_debug_nans(threshold, jit):
    """But for a gradient that is not finite, and what an optimizer makes of it."""
    tx = skip_above(optax.adam(0.1), threshold)
    update, state = jax.jit(tx.update) if jit else tx.update, tx.init(PARAMS)
    # An infinite threshold means that there is none, as in the warm-up of a rule.
    with jax.debug_nans(True), jax.debug_infs(threshold == 2.0):
        for norm in (0.0, 1.0, 9.0, 0.0):
            _, state = update(grads_of_norm(norm), state, PARAMS)
    assert state.num_skipped >= 1


@pytest.mark.by_day(1)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
def test_skip_nonfinite_treats_huge_gradient_as_finite(dtype):
    with jax.enable_x64(True):
        tx, grads = skip_nonfinite(optax.sgd(1.0)), jnp.full(4, jnp.finfo(dtype).max / 2, dtype)
        assert jax.jit(tx.update)(grads, tx.init(grads))[1].num_skipped == 0


SKIP = functools.partial(skip_above, threshold=2.0)
NESTED = {
    "in a chain": lambda inner: optax.chain(SKIP(inner), optax.scale(1.0)),
    "in apply_if_finite": lambda inner: optax.apply_if_finite(SKIP(inner), 3),
    "around apply_if_finite": lambda inner: SKIP(optax.apply_if_finite(inner, 3)),
    "in partition": lambda inner: optax.partition({"all": SKIP(inner)}, {"w": "all", "b": "all"}),
    "twice": lambda inner: SKIP(skip_nonfinite(inner)),
}


@pytest.mark.by_day(1)
@pytest.mark.parametrize("name", NESTED)
def test_skip_above_combines_with_other_wrappers(name):
    norms, skipped = [1.0, np.nan, 0.5, 3.0, 1.0], np.array([0, 1, 0, 1, 0], bool)
    updates, _ = run(NESTED[name](INNER["adam"]), norms)
    assert_zero(at(updates, skipped))
    alone = run(INNER["adam"], norms, compiled("adam"), ~skipped)[0]
    assert_close(at(updates, ~skipped), alone)


def test_skip_above_inside_multi_steps_skips_mean():
    # Not for what is not finite: MultiSteps then keeps a NaN in its sum for ever.
    tx = optax.MultiSteps(skip_above(optax.adam(0.1), 2.0), 2)
    updates, states = run(tx, [1.0, 9.0, 1.0, 1.0])
    assert states.inner_opt_state.num_skipped.tolist() == [0, 1, 1, 1]
    assert states.inner_opt_state.inner_state[0].count.tolist() == [0, 0, 0, 1]
    assert_zero(at(updates, [0, 1, 2]))

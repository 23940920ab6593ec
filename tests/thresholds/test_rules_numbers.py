"""Numbers of a rule that act by themselves, and norms far from 1."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from methods_table import stack
from reference_rules import drive

import optaxclip
from optaxclip import per_example, responses, scopes, thresholds
from optaxclip.thresholds._adaptive import safe_hypot
from optaxclip.thresholds._constant import check_loss_threshold
from optaxclip.thresholds._rule import check_threshold_value

NORMS = np.array([1.0, 3.0, 2.0, 2.5, 1.5], np.float32)


@functools.partial(jax.jit, static_argnames="make")
def thresholds_of(norms, make):
    """The triggers and targets of a rule, norm after norm."""
    rule = make()

    def step(state, norm):
        threshold_values, state = rule.update(norm, state, None)
        return state, (threshold_values.trigger, threshold_values.target)

    return jax.lax.scan(step, rule.init(norms[0]), norms)[1]


def average(decay):
    """Before each norm, that of the norms so far; of none, the norm itself."""
    before, found = NORMS[0], []
    for norm in NORMS:
        found.append(before)
        before = decay * before + (1 - decay) * norm
    return np.array(found)


def test_ema_accepts_separate_target_decay_and_ratio():
    ema = functools.partial(thresholds.ema, 0.9, 100.0)
    for make, target in {
        functools.partial(ema, target_decay=0.5): 100 * average(0.5),
        functools.partial(ema, target_ratio=0.5): average(0.9) / 2,
        ema: 100 * average(0.9),
    }.items():
        triggers, targets = thresholds_of(NORMS, make)
        np.testing.assert_allclose(triggers, 100 * average(0.9), rtol=1e-6)
        np.testing.assert_allclose(targets, target, rtol=1e-6)


def test_ema_starts_average_with_first_recorded_norm():
    @jax.jit
    @jax.vmap
    def triggers(skip_steps):
        return drive(thresholds.ema(0.9, 100.0, skip_steps=skip_steps), NORMS)[0]

    for skipped, found in enumerate(triggers(jnp.arange(4))):
        average, expected = NORMS[skipped], [*NORMS[: skipped + 1]]
        for norm in NORMS[skipped + 1 :]:
            expected.append(average)
            average = 0.9 * average + 0.1 * norm
        np.testing.assert_allclose(found, 100 * np.array(expected), rtol=1e-6)


def test_rules_accept_norms_keyword():
    for rule in (thresholds.constant(1.0), thresholds.schedule(float), thresholds.ema(0.9, 1.5)):
        shape = jax.tree.structure(rule.init(jnp.zeros(3)))
        assert jax.tree.structure(rule.init(norms=jnp.zeros(3))) == shape


WITHOUT_MEMORY = {
    "ema": functools.partial(thresholds.ema, 0.0, 2.0, record="raw"),
    "ema, debiased": functools.partial(thresholds.ema, 0.0, 2.0, record="raw", debias=True),
    "zscore": functools.partial(thresholds.zscore, 0.0, 2.0, 1, record="raw"),
    "zscore, debiased": functools.partial(
        thresholds.zscore, 0.0, 2.0, 1, record="raw", debias=True
    ),
    "adagc": functools.partial(thresholds.adagc, beta=0.0, warmup_steps=0),
    "normalizing": functools.partial(thresholds.mean_over_rms, 0.0, 0.0),
}


@pytest.mark.by_day(2)
@pytest.mark.parametrize("make", WITHOUT_MEMORY.values(), ids=WITHOUT_MEMORY)
def test_zero_decay_uses_only_last_norm(make):
    # This rule judges a norm by averages that include it.
    at = 2 if make.func is thresholds.mean_over_rms else 3
    fallen, steady = (thresholds_of(np.float32([norm, norm, 1, 1]), make) for norm in (1e10, 1))
    for some, others in zip(fallen, steady, strict=True):
        np.testing.assert_allclose(some[at], others[at], rtol=1e-6)


OF_ANY_SIZE = {
    "ema": functools.partial(thresholds.ema, 0.9, 1.5),
    "two averages": functools.partial(thresholds.ema, 0.9, 1.5, target_decay=0.5, debias=True),
    "window": functools.partial(thresholds.window, window=3, min_std=0.0),
    "percentile": functools.partial(thresholds.percentile, 50, window=3),
    "zscore": functools.partial(thresholds.zscore, 0.9, 2.5, 3),
    "zscore, debiased": functools.partial(
        thresholds.zscore, 0.9, 2.0, 2, option="mean", debias=True
    ),
    "adagc": functools.partial(thresholds.adagc, warmup_steps=0),
}
SEQUENCES = [1, 0.9, 0.95, 1, 0.92], [1, 0.1, 1, 0.1, 1], [1e-3, 1.1e-3, 9e-4, 1, 1e-3]


def test_rules_scale_with_norms_across_float_range():
    """In a compiled step of one norm, where XLA rewrites quotients of quotients."""
    rules = {name: make(floor=0.0) for name, make in OF_ANY_SIZE.items()}

    @jax.jit
    def step(norm, states):
        return {name: rules[name].update(norm, state, None) for name, state in states.items()}

    def threshold_values(norms):
        states, found = {name: rule.init(norms[0]) for name, rule in rules.items()}, []
        for norm in norms:
            after = step(norm, states)
            states = {name: state for name, (_, state) in after.items()}
            found.append(
                {
                    name: np.float64(threshold_values)
                    for name, (threshold_values, _) in after.items()
                }
            )
        return stack(found)

    most = np.finfo(np.float32).max
    for norms in np.float32(1.7) * np.float32(SEQUENCES):
        expected = threshold_values(norms * np.float32(2.0**60))
        for size in (2.0**-70, 2.0**126, 2.0**127):
            for name, found in threshold_values(norms * np.float32(size)).items():
                # The published score adds 1e-6 to the deviation.
                if name != "zscore" or size > 1:
                    wanted = expected[name] / 2.0**60 * size
                    wanted = np.where(wanted > most, np.inf, wanted)
                    np.testing.assert_allclose(found, wanted, rtol=2e-5, err_msg=name)


def test_zscore_adds_constant_to_deviation_of_small_norms():
    """Its deviation has 1e-6 added, as published, so that thresholds do not scale."""
    norms = np.float32(1e-6) * NORMS
    trigger, _ = thresholds_of(
        norms, functools.partial(thresholds.zscore, warmup_steps=2, floor=0.0)
    )
    start, std = np.mean(norms[:2]), np.std(norms[:2])
    assert np.all(np.isinf(trigger[:2]))
    np.testing.assert_allclose(trigger[2], start + 2.5 * (std + 1e-6), rtol=1e-5)


KINDS = [np.float64, jnp.bfloat16, jnp.float32]
GIVEN = {
    "ema": {"decay": 0.5, "ratio": 2.0, "target_decay": 0.5, "target_ratio": 1.5},
    "zscore": {"alpha": 0.5, "z_thresh": 2.0},
    "log_tracker": {"decay": 0.5, "num_std": 4.0, "min_threshold": 0.5},
    "adagc": {"lambda_rel": 1.5, "lambda_abs": 1.0, "beta": 0.5},
    "quantile": {"target": 0.5, "learning_rate": 0.25, "init_threshold": 0.5},
    "percentile": {"percentile": 50.0, "floor": 0.5},
    "window": {"num_std": 2.0, "min_std": 0.5},
    "median": {"scale": 2.0, "max_norm": 4.0},
}
NEEDS_DIGITS = {"decay", "target_decay", "mean_decay", "square_decay", "alpha", "beta", "target"}
NEEDS_DIGITS |= {"percentile"}
WITHOUT_A_CAP = {"mean_over_rms": {"mean_decay": 0.5, "square_decay": 0.5, "eps": 0.5}}


@pytest.mark.by_day(1)
@pytest.mark.parametrize("name", GIVEN | WITHOUT_A_CAP)
def test_rule_arguments_accept_any_dtype(name):
    given = (GIVEN | WITHOUT_A_CAP)[name]

    def threshold_values(numbers):
        rule, norm = getattr(thresholds, name)(**numbers), jnp.ones(2)
        first = rule.init(norm)
        threshold_values, state = rule.update(norm, first, None)
        assert jax.tree.map(jax.typeof, state) == jax.tree.map(jax.typeof, first)
        return threshold_values

    for bits in (32, 64):
        with jax.enable_x64(bits == 64):
            # A norm in float64 is compared as it is; what it is brought to is float32.
            expected = [jnp.ones(2).dtype, jnp.float32]
            for kind in KINDS:
                wide = np.float32 if kind is jnp.bfloat16 else kind
                numbers = {
                    key: wide(x) if key in NEEDS_DIGITS else kind(x) for key, x in given.items()
                }
                found = jax.eval_shape(lambda numbers=numbers: threshold_values(numbers))
                assert [threshold.dtype for threshold in found] == expected
                found = jax.eval_shape(threshold_values, jax.tree.map(jnp.asarray, numbers))
                assert [threshold.dtype for threshold in found] == expected


@pytest.mark.parametrize("name", GIVEN | WITHOUT_A_CAP)
def test_equal_rules_have_equal_tree_structure(name):
    one, other = (jax.tree.structure(getattr(thresholds, name)()) for _ in range(2))
    assert (one, hash(one)) == (other, hash(other))


@pytest.mark.usefixtures("x64")
def test_float64_gradients_combine_with_float32_params():
    params, grads = jnp.ones(3, jnp.float32), jnp.ones(3, jnp.float64)
    tx = optaxclip.adaptive_grad_clip(0.5)
    updates, _ = jax.eval_shape(tx.update, grads, tx.init(params), params)
    assert updates.dtype == jnp.float64


def test_adaptive_grad_clip_accepts_schedule():
    tx = optaxclip.adaptive_grad_clip(lambda count: 0.5 / (1 + count.astype(jnp.float32)))
    params, grads = np.float32([3.0, 4.0]), np.float32([30.0, 40.0])
    state = tx.init(params)
    for share in (0.5, 0.25):
        updates, state = tx.update(grads, state, params)
        np.testing.assert_allclose(updates, share * params, rtol=3e-6)


def test_a_threshold_by_name_for_the_whole_tree_and_for_units():
    grads = {"w": np.float32([3.0, 4.0])}
    for scope, name in {scopes.tree(): "tree", scopes.axes(0): "w"}.items():
        tx = optaxclip.clip_by(scope, {name: 1.0})
        updates, state = tx.update(grads, tx.init(grads))
        np.testing.assert_allclose(updates["w"], [0.6, 0.8], rtol=3e-6)
        assert np.ravel(state.info.threshold) == 1


@pytest.mark.by_day(2)
@pytest.mark.parametrize("name", GIVEN | WITHOUT_A_CAP)
def test_rules_apply_floor_and_max_norm(name):
    options, threshold = ({}, 2.0) if name in WITHOUT_A_CAP else ({"max_norm": 0.5}, 0.5)
    rule = getattr(thresholds, name)(floor=2.0, **options)

    @jax.jit
    def last_of_two(one):
        before = rule.init(one)
        if name in WITHOUT_A_CAP:
            _, before = rule.update(4 * one, before, None)
        return before, *rule.update(one, before, None)

    before, threshold_values, state = last_of_two(np.float32(1))
    assert (threshold_values.trigger, threshold_values.target) == (threshold, threshold)
    assert state.num_recorded == before.num_recorded


def test_window_warms_up_for_half_window():
    triggers, _ = thresholds_of(NORMS, functools.partial(thresholds.window, window=6))
    assert np.isinf(triggers).tolist() == [True, True, True, False, False]
    shortest, _ = thresholds_of(NORMS, functools.partial(thresholds.window, window=2))
    assert np.isinf(shortest).tolist() == [True, False, False, False, False]
    # Of one norm there is no deviation yet.
    np.testing.assert_allclose(shortest[1], 1 + 3e-6, rtol=1e-7)


@pytest.mark.by_day(1)
@pytest.mark.parametrize("kind", KINDS)
def test_quantile_limit_arguments_accept_any_dtype(kind):
    names = (
        "target",
        "learning_rate",
        "init_threshold",
        "count_noise",
        "min_threshold",
        "max_threshold",
    )
    with jax.enable_x64(True):
        numbers = dict.fromkeys(names, kind(0.5)) | {"target": np.float32(0.5)}
        rule = per_example.quantile_threshold(**numbers)
        count, key = jnp.zeros((), jnp.int32), jax.random.key(0)
        state = jax.eval_shape(rule.init)
        after = jax.eval_shape(lambda state: rule.update(state, count, 8, key, batch_size=8), state)
        for numbers in ((kind(0.5), kind(2)), (jnp.asarray(kind(0.5)), jnp.asarray(kind(2)))):
            assert per_example.adjust_noise_multiplier(*numbers).dtype == jnp.float32
    assert (after.shape, after.dtype) == (state.shape, state.dtype) == ((), jnp.float32)


def test_the_log_tracker_has_a_least_threshold():
    make = functools.partial(thresholds.log_tracker, 0.5, 2.0, min_threshold=3.0)
    trigger, target = thresholds_of(jnp.ones(10), make)
    np.testing.assert_allclose([trigger[-1], target[-1]], [3, 0], rtol=1e-6)
    # The weights of two norms sum to 0.75, which is not above it.
    assert np.isinf(trigger).tolist() == [True] * 3 + [False] * 7


@pytest.mark.parametrize("debias", [False, True])
def test_ema_with_unit_decay_keeps_first_norm(debias):
    make = functools.partial(thresholds.ema, 1.0, 2.0, debias=debias, record="raw", floor=0.0)
    trigger, _ = thresholds_of(NORMS * 3, make)
    np.testing.assert_allclose(trigger[1:], 6, rtol=1e-6)


def test_a_norm_at_its_threshold_is_not_above_it():
    rule = thresholds.percentile(50.0, 3, warmup_steps=0, record="accepted", patience=None)
    one, update = np.float32(1), jax.jit(rule.update)
    state = rule.init(one)
    for threshold in (np.inf, 1):
        threshold_values, state = update(one, state, None)
        assert threshold_values.trigger == threshold
    assert (state.num_recorded, state.num_consecutive_clipped) == (2, 0)


def test_additive_quantile_stops_at_zero():
    make = functools.partial(thresholds.quantile, 0.5, 4.0, 1.0, geometric=False, floor=0.0)
    np.testing.assert_array_equal(thresholds_of(NORMS, make)[0], [1, 0, 2, 0, 2])


@pytest.mark.by_day(1)
@pytest.mark.parametrize("rise", [False, True])
def test_quantile_returns_from_range_limits(rise):
    """Each step multiplies by about e; 200 of them one way, then 200 the other way."""

    def of_norms(threshold, is_above):
        rule = thresholds.quantile(0.5, 2.0, floor=0.0, init_threshold=1.0)
        state = rule.update(jnp.where(is_above, 3e38, 0.0), threshold, None)[1]
        return state, state.statistic

    def of_examples(threshold, is_above):
        rule = per_example.quantile_threshold(0.5, 2.0)
        threshold = rule.update(threshold, jnp.where(is_above, 0, 8), 8, batch_size=8)
        return threshold, threshold

    @jax.jit
    def run(start):
        is_above = (jnp.arange(400) < 200) == rise
        starts = thresholds.quantile(0.5, 2.0, init_threshold=start).init(jnp.zeros(())), start
        pairs = zip((of_norms, of_examples), starts, strict=True)
        return [jax.lax.scan(step, start, is_above)[1] for step, start in pairs]

    for threshold_values in run(jnp.float32(1)):
        assert np.all((threshold_values > 0) & np.isfinite(threshold_values))
        assert threshold_values[-1] > 1e30 if not rise else threshold_values[-1] < 1e-30
    for end in (0, np.inf):
        assert all(np.all(threshold_values == end) for threshold_values in run(jnp.float32(end)))


def test_adagc_accepts_no_groups():
    rule, none = thresholds.adagc(), jnp.zeros(0)
    threshold_values, state = jax.eval_shape(rule.update, none, rule.init(none), None)
    assert threshold_values.target.shape == state.num_recorded.shape == (0,)


def test_adagc_without_warmup_passes_first_norm():
    triggers, _ = thresholds_of(NORMS, functools.partial(thresholds.adagc, 1.5, warmup_steps=0))
    np.testing.assert_allclose(triggers[:2], [np.inf, 1.5])


def test_mean_over_rms_eps_lowers_target():
    _, targets = thresholds_of(NORMS, functools.partial(thresholds.mean_over_rms, eps=1.0))
    np.testing.assert_allclose(targets[0], 0.5, rtol=1e-6)


OF_LOSSES = {
    "a multiple": (thresholds.median(1.5, 8, every_step=True), -1),
    "constant": (thresholds.constant(3.0), 3),
    "schedule": (thresholds.schedule(lambda count: 3.0), 3),
    "function": (lambda count: -1.0, -1),
    "whole": (-(2**40), -(2.0**40)),
    "large": (-1e300, -np.inf),
}


@pytest.mark.by_day(2)
@pytest.mark.parametrize("name", OF_LOSSES)
def test_the_threshold_of_a_first_loss_below_zero(name):
    threshold, expected = OF_LOSSES[name]
    trigger, _, _ = drive(check_loss_threshold(threshold), jnp.full(1, -2.0))
    assert trigger.tolist() == [expected]


@pytest.mark.parametrize("sign", [1, -1])
def test_check_threshold_converts_large_integers_to_floats(sign):
    for number, kind in ((2**31 - 1, int), (2**31, float), (2**40, float), (10**400, float)):
        found = check_threshold_value(sign * number, "threshold", allow_any_number=True)
        assert type(found) is kind
        assert found == (sign * number if number < 10**400 else sign * np.inf)
    for make in (thresholds.zscore, thresholds.window, thresholds.percentile, thresholds.adagc):
        jax.eval_shape(lambda rule: rule, make(warmup_steps=2**40, patience=2**40))


def test_zscore_without_warmup_starts_with_first_norm():
    make = functools.partial(thresholds.zscore, 0.9, 2.0, 0, option="percentile")
    np.testing.assert_allclose(thresholds_of(NORMS + 3, make)[0][:2], [np.inf, 4], rtol=1e-6)


def test_safe_hypot_survives_extreme_values():
    x, y = np.float32([-3e30, 3e-30, 0, -3e-30]), np.float32([4e30, -4e-30, -5, 0])
    np.testing.assert_allclose(safe_hypot(x, y), [5e30, 5e-30, 5, 3e-30], rtol=1e-6)


WITHOUT_THRESHOLD = {
    "share": functools.partial(thresholds.relative_to_params, np.inf),
    "adagc": functools.partial(thresholds.adagc, lambda_abs=np.inf),
    "log_tracker": functools.partial(thresholds.log_tracker, 0.0, 1e6, reject=False),
    "zscore": functools.partial(thresholds.zscore, z_thresh=np.inf, warmup_steps=1),
}


def test_infinite_rules_pass_derivative_of_norm():
    def brought_to(norm, make):
        rule = make()
        state = rule.init(norm)
        for size in (1.0, 2.0):
            threshold_values, state = rule.update(size * norm, state, norm)
        return responses.clip(2 * norm, *threshold_values)

    @jax.jit
    def slopes(norm):
        of_norm = jax.value_and_grad(brought_to)
        return {name: of_norm(norm, make) for name, make in WITHOUT_THRESHOLD.items()}

    for name, found in slopes(jnp.float32(5)).items():
        np.testing.assert_array_equal(found, [10, 2], err_msg=name)

"""Thresholds whose value is known only inside a step, and values that hardly any user wants."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from methods_table import GRADS, METHODS, PARAMS, SHAPES, label, random_tree
from wrong_values import WRONG_VALUES

import optaxclip
from optaxclip import ThresholdRule, Thresholds, clip_by, scopes, skip_above, thresholds


def own(trigger, target):
    """A user's rule with one threshold, which may be negative."""

    def update(norms, state, _):
        return Thresholds(jnp.full_like(norms, trigger), jnp.full_like(norms, target)), state

    return ThresholdRule(lambda norms: (), update)


# By rule: how it is made, and its numbers, each of which is -1 in a row of its own.
RULES = {
    "constant": (thresholds.constant, {"threshold": 1.0}),
    "given": (lambda x, y: thresholds.fixed(Thresholds(x, y)), {"x": 1.0, "y": 0.5}),
    "schedule": (lambda x: thresholds.schedule(lambda count: x), {"x": 1.0}),
    "relative_to_params": (thresholds.relative_to_params, {"ratio": 0.1, "eps": 1e-3}),
    "percentile": (
        functools.partial(thresholds.percentile, window=4, warmup_steps=1, inclusive=True),
        {"percentile": 40.0, "max_norm": 9.0, "floor": 1e-8},
    ),
    "window": (
        functools.partial(thresholds.window, window=4, record="clipped", warmup_steps=1),
        {"num_std": 1.0, "min_std": 1e-6, "max_norm": 9.0, "floor": 1e-8},
    ),
    "median": (
        functools.partial(thresholds.median, window=4, every_step=True),
        {"scale": 0.5, "max_norm": 9.0, "floor": 1e-8},
    ),
    "ema": (
        functools.partial(thresholds.ema, warmup_steps=1),
        {"ratio": 0.5, "target_ratio": 0.4, "max_norm": 9.0, "floor": 1e-8},
    ),
    "zscore": (
        functools.partial(thresholds.zscore, warmup_steps=1),
        {"z_thresh": 0.5, "max_norm": 9.0, "floor": 1e-8},
    ),
    "log_tracker": (
        functools.partial(thresholds.log_tracker, 0.1, reject=False),
        {"num_std": 1.0, "min_threshold": 0.1, "max_norm": 9.0, "floor": 1e-8},
    ),
    "adagc": (
        functools.partial(thresholds.adagc, warmup_steps=2),
        {"lambda_rel": 0.5, "lambda_abs": 1.0, "max_norm": 9.0, "floor": 0.0},
    ),
    "quantile": (
        functools.partial(thresholds.quantile, geometric=False),
        {"init_threshold": 0.5, "learning_rate": 0.2, "max_norm": 9.0, "floor": 1e-8},
    ),
    "mean_over_rms": (thresholds.mean_over_rms, {"eps": 1e-8, "floor": 1e-8}),
    "own": (own, {"trigger": 1.0, "target": 0.5}),
}
NUM_STEPS = 5


def rows_of(numbers):
    """The numbers, f32[rows]: in each row another number is -1, and in the last all are."""
    negative = np.vstack([np.eye(len(numbers), dtype=bool), np.ones(len(numbers), bool)])
    usual = np.float32([*numbers.values()])
    return dict(zip(numbers, np.where(negative, np.float32(-1), usual).T, strict=True))


@functools.partial(jax.jit, static_argnames=("name", "response"))
def products_by_rule(rows, name, response):
    """The inner products of gradients and updates, f32[rows, steps]."""
    grads = jnp.array([3.0, 4.0])

    def of_row(numbers):
        tx = clip_by(scopes.tree(), RULES[name][0](**numbers), response=response)

        def step(state, size):
            updates, state = tx.update(size * grads, state, grads)
            return state, jnp.vdot(updates, grads)

        sizes = jnp.linspace(1, 2, NUM_STEPS)
        return jax.lax.scan(step, tx.init(grads), sizes)[1]

    return jax.vmap(of_row)(rows)


@pytest.mark.parametrize("name", RULES)
def test_negative_numbers_of_rules_flip_no_gradient(name):
    response = "normalize" if name in ("mean_over_rms", "given") else "clip"
    rows = rows_of(RULES[name][1])
    products = np.asarray(products_by_rule(rows, name, response))
    for k, row in enumerate(products):
        case = {argument: float(value[k]) for argument, value in rows.items()}
        assert np.isfinite(row).all(), case
        assert (row >= 0).all(), case


# The methods with code of their own; `constant`, which all others take, is in the table above.
NEGATIVE = [name for name, x in METHODS.items() if x.has_memory] + ["clip", "adaptive_grad_clip"]


def test_negative_numbers_of_methods_flip_no_gradient():
    sequence = random_tree(2, NUM_STEPS)

    @jax.jit
    def run(number):
        def updates_of(tx):
            def step(state, grads):
                updates, state = tx.update(grads, state, PARAMS)
                return state, updates

            return jax.lax.scan(step, tx.init(PARAMS), sequence)[1]

        return {name: updates_of(METHODS[name].make(number)) for name in NEGATIVE}

    for name, updates in run(jnp.float32(-1)).items():
        for leaf in SHAPES:
            found = np.asarray(updates[leaf])
            assert np.isfinite(found).all(), name
            assert (np.vdot(found, sequence[leaf]) >= 0).all(), name


def test_negative_second_moment_threshold_acts_as_zero():
    @jax.jit
    def run(threshold, eps):
        def updates_of(tx):
            state = tx.init(jnp.zeros(3))
            for size in (1.0, 2.0):
                updates, state = tx.update(jnp.array([size, -1.0, 0.0]), state)
            return updates

        moments = optaxclip.clip_by_second_moment(threshold=threshold, warmup_steps=1)
        return updates_of(moments), updates_of(optaxclip.scale_by_stable_adam(eps=eps))

    clipped, directions = run(jnp.float32(-1), jnp.float32(-5))
    np.testing.assert_array_equal(clipped, [0, 0, 0])
    assert directions[0] > 0 > directions[1]


def test_schedule_below_zero_injected_into_zclip_acts_as_zero():
    schedule = optax.linear_schedule(2.0, -1.0, 2)
    tx, grads = optax.inject_hyperparams(optaxclip.zclip)(max_norm=schedule), jnp.array([3.0, 4.0])
    update, state = jax.jit(tx.update), tx.init(grads)
    for expected in ([1.2, 1.6], [0.3, 0.4], [0, 0], [0, 0]):
        updates, state = update(grads, state)
        np.testing.assert_allclose(updates, expected, rtol=1e-6)
    assert state.inner_state.info.threshold == 0


def test_loss_thresholds_may_be_negative():
    def skips(threshold, loss):
        tx = skip_above(optax.sgd(1.0), jnp.inf, loss_threshold=threshold)
        return tx.update(jnp.ones(1), tx.init(jnp.ones(1)), value=loss)[1].num_skipped

    @jax.jit
    def both(threshold):
        rules = [threshold, own(threshold, threshold)]
        return [[skips(rule, loss) for loss in (-2.0, -0.5)] for rule in rules]

    np.testing.assert_array_equal(both(jnp.float32(-1)), [[0, 1], [0, 1]])


def maker(name):
    module = thresholds if name.startswith("thresholds.") else optaxclip
    return getattr(module, name.rpartition(".")[2])


def test_array_thresholds_are_checked_like_numbers():
    names = ("thresholds.", "clip_by_moving_max", "clip_by_second", "normalize_by")
    for name in WRONG_VALUES:
        required = {"ratio": 1.0} if name == "thresholds.relative_to_params" else {}
        for argument, values in WRONG_VALUES[name].items() if name.startswith(names) else ():
            for value in (x for x in values if isinstance(x, (int, float))):
                with pytest.raises((ValueError, TypeError), match=f"^{argument} must"):
                    maker(name)(**required | {argument: jnp.asarray(value)})


MAKERS = {
    "threshold": lambda x: clip_by(scopes.tree(), x),
    "threshold['matrix']": lambda x: clip_by(scopes.group(label), {"matrix": x, "vector": 1.0}),
    "max_norm": optaxclip.clip_by_global_norm,
    "max_delta": optaxclip.clip,
    "clipping": optaxclip.adaptive_grad_clip,
    "threshold of block RMS": optaxclip.clip_by_block_rms,
    "clipping_threshold": lambda x: optaxclip.scale_by_stable_adam(clipping_threshold=x),
    "norm": optaxclip.normalize_by_global_norm,
    "ratio": thresholds.relative_to_params,
}


@pytest.mark.parametrize("argument", MAKERS)
def test_negative_and_nan_arrays_are_refused(argument):
    for value in (-1.0, -1, math.nan):
        for kind in (jnp.asarray, lambda x: x):
            with pytest.raises(ValueError, match="must not be negative or NaN"):
                MAKERS[argument](kind(value))


ZEROS = MAKERS | {
    "threshold of moments": lambda x: optaxclip.clip_by_second_moment(threshold=x),
    "threshold of a skip": lambda x: skip_above(optax.sgd(0.1), x),
    "cap": lambda x: optaxclip.zclip(max_norm=x),
}


@pytest.mark.parametrize("argument", ZEROS)
def test_zero_threshold_warns(argument):
    off = "None" if argument == "cap" else r"math\.inf"
    for zero in (0, 0.0, jnp.float32(0), np.float16(0)):
        said = (
            rf"is 0, so all gradients become zero and .* trained; pass {off} to disable clipping$"
        )
        with pytest.warns(UserWarning, match=said) as warned:
            ZEROS[argument](zero)
        assert len(warned) == 1


def test_zero_threshold_warns_once():
    with pytest.warns(UserWarning, match="is 0") as warned:
        tx = clip_by(scopes.group(label), {"matrix": 0.0, "vector": 1.0})
    assert len(warned) == 1
    tx.update(GRADS, tx.init(PARAMS))  # any warning is an error


# By method: the numbers near the upper end of their range.
DECAYS = {
    "zclip": ("alpha",),
    "adagc": ("beta",),
    "autoclip": ("percentile",),
    "clip_by_moving_max": ("decay",),
    "clip_by_ema_norm": ("decay",),
    "clip_by_quantile": ("target",),
    "clip_by_second_moment": ("decay",),
    "normalize_by_norm_history": ("mean_decay", "square_decay"),
    "scale_by_stable_adam": ("b1", "b2"),
    "thresholds.adagc": ("beta",),
    "thresholds.ema": ("decay", "target_decay"),
    "thresholds.log_tracker": ("decay",),
    "thresholds.mean_over_rms": ("mean_decay", "square_decay"),
    "thresholds.percentile": ("percentile",),
    "thresholds.quantile": ("target",),
    "thresholds.zscore": ("alpha",),
}


@pytest.mark.parametrize("name", DECAYS)
def test_decays_with_few_digits_are_refused(name):
    said = r"must have at least float32 precision, got .*; pass hyperparam_dtype=jnp\.float32"
    for argument in DECAYS[name]:
        for dtype in (jnp.bfloat16, jnp.float16):
            with pytest.raises(TypeError, match=f"^{argument} {said}"):
                maker(name)(**{argument: jnp.asarray(0.5, dtype)})
            with pytest.raises(TypeError, match=f"^{argument} {said}"):
                jax.eval_shape(
                    lambda x, argument=argument: maker(name)(**{argument: x}),
                    jax.ShapeDtypeStruct((), dtype),
                )


@pytest.mark.parametrize("name", [name for name in DECAYS if "." not in name])
def test_injected_decays_learn_with_bfloat16_parameters(name):
    params = jnp.ones(2, jnp.bfloat16)
    static = ("window",) if name == "autoclip" else ()
    make = functools.partial(optax.inject_hyperparams, maker(name), static_args=static)
    usual = {argument: 99.9 if argument == "percentile" else 0.999 for argument in DECAYS[name]}
    with pytest.raises(TypeError, match=r"hyperparam_dtype=jnp\.float32"):
        make()(**usual).init(params)
    tx = make(hyperparam_dtype=jnp.float32)(**usual)
    state = jax.eval_shape(tx.init, params)
    for argument in usual:
        assert state.hyperparams[argument].dtype == jnp.float32
    assert jax.eval_shape(tx.update, params, state)[0].dtype == jnp.bfloat16

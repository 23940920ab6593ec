"""What is passed in the wrong place, uncalled, or of another: a short error, at once."""

import functools
import inspect
import warnings
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cases import slow_unless
from jax.sharding import AxisType
from public_names import GIVEN, public

import optaxclip
from optaxclip import clip_by, clip_tree, ops, scopes, thresholds

SGD = optax.sgd(0.1)
RULES = {
    "adagc": thresholds.adagc(),
    "constant": 1.0,
    "ema": thresholds.ema(),
    "log_tracker": thresholds.log_tracker(),
    "mean_over_rms": thresholds.mean_over_rms(),
    "median": thresholds.median(window=4, every_step=True),
    "percentile": thresholds.percentile(window=4),
    "periodic_median": thresholds.median(window=4),
    "quantile": thresholds.quantile(init_threshold=1.0),
    "schedule": optax.linear_schedule(1.0, 0.5, 3),
    "window": thresholds.window(3.0, 4),
    "zscore": thresholds.zscore(),
}


@pytest.mark.parametrize("count", [1, jnp.int32(1), 10**12], ids=["one", "array", "huge"])
def test_counts_accept_minimum_and_larger_integers(count):
    skip = optaxclip.skip_above(SGD, 1.0, count)
    tx = optaxclip.scale_loss(skip, growth_interval=count)
    params = jnp.ones(2)
    jax.eval_shape(lambda params: tx.update(params, tx.init(params), params), params)


def test_threshold_errors_explain_disabling_clipping():
    for threshold in (None, -1.0, np.nan):
        with pytest.raises((TypeError, ValueError), match=r"pass math\.inf to disable clipping"):
            optaxclip.clip_by_global_norm(threshold)
    others = [
        lambda: optaxclip.clip_by_global_norm("1"),
        lambda: optaxclip.scale_by_stable_adam(eps=None),
        lambda: optaxclip.scale_by_stable_adam(eps=-1.0),
        lambda: thresholds.zscore(floor=-1.0),
        lambda: ops.clip_by_global_norm({}, {}),
    ]
    for make in others:
        with pytest.raises((TypeError, ValueError)) as raised:
            make()
        assert "math.inf" not in str(raised.value)


PARAMS = {"a": jnp.ones(3)}


def of_rule(rule, how):
    if how == "skip":
        return optaxclip.skip_above(SGD, RULES[rule])
    return clip_by(scopes.leaf(), RULES[rule])


@functools.cache
def state_of(rule, how):
    return of_rule(rule, how).init(PARAMS)


@pytest.mark.by_day(1)
@pytest.mark.parametrize(
    ("rule", "how", "number"),
    slow_unless(
        lambda rule, how, number: (
            number == 2 and (how == "eager" or rule in ("constant", "schedule", "zscore"))
        ),
        product(RULES, ["eager", "jit", "skip"], [2, len(RULES) - 1]),
    ),
)
def test_state_of_other_rule_raises_and_names_both(rule, how, number):
    """The other states are those of the `number` rules that come next in `RULES`."""
    params, tx = PARAMS, of_rule(rule, how)
    update = tx.update if how == "eager" else jax.jit(tx.update)
    update(params, tx.init(params))
    names = {
        "constant": r"no arrays \(like the state of a constant threshold\)",
        "schedule": r"arrays of shapes \[\(\)\]",
    }
    own = names.get(rule, f"the state of {rule} with arrays")
    place = [*RULES].index(rule)
    for other in [*RULES, *RULES][place + 1 :][:number]:
        held = names.get(other, f"the state of {other} with arrays")
        said = f"for this threshold, state must contain {own}.*, but contains {held}.*new state"
        with pytest.raises(ValueError, match=said):
            update(params, state_of(other, how))


def test_state_of_other_window_or_loss_rule_raises():
    params = {"a": jnp.ones(3)}
    short, long = (clip_by(scopes.tree(), thresholds.percentile(window=n)) for n in (4, 5))
    with pytest.raises(
        ValueError, match=r"for this threshold, .*\(5,\)\], but contains .*\(4,\)\]"
    ):
        long.update(params, short.init(params))
    # Other numbers of the same rule are no other rule.
    other = clip_by(scopes.tree(), thresholds.percentile(50.0, window=4))
    other.update(params, short.init(params))
    with_loss = functools.partial(optaxclip.skip_above, SGD, 1.0)
    state = with_loss(loss_threshold=thresholds.zscore()).init(params)
    with pytest.raises(
        ValueError, match=r"must contain the state of window .*, but contains the state of zscore"
    ):
        with_loss(loss_threshold=thresholds.window(3.0, 4)).update(params, state, value=1.0)


def test_skip_nonfinite_explains_wrapping_running_optimizer():
    params, optimizer = {"a": jnp.ones(3)}, optax.sgd(0.1, momentum=0.5)
    old = optimizer.update(params, optimizer.init(params))[1]
    tx = optaxclip.skip_nonfinite(optimizer)
    said = r"opt_state = tx\.init\(params\)\._replace\(inner_state=old_opt_state\)"
    with pytest.raises(ValueError, match=said):
        tx.update(params, old)
    updates, state = tx.update(params, tx.init(params)._replace(inner_state=old))
    np.testing.assert_allclose(updates["a"], -0.15, rtol=1e-6)
    assert state.num_skipped == 0


def test_vmap_axis_name_in_tracked_region_raises():
    mesh = jax.make_mesh((2,), ("x",), (AxisType.Auto,))

    def clipped(axis_name, check_vma):
        tx = optaxclip.clip_by_global_norm(1.0, axis_name=axis_name)
        over_rows = jax.vmap(lambda x: tx.update(x, tx.init(x))[0], axis_name="rows")
        spec = jax.P(None, "x")
        return jax.jit(
            jax.shard_map(over_rows, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=check_vma)
        )(jnp.ones((3, 4)))

    with pytest.raises(ValueError, match=r"axis_name must .* got \['rows'\].* use check_vma=False"):
        clipped("rows", check_vma=True)
    found = clipped(("rows", "x"), check_vma=False)
    np.testing.assert_allclose(found, np.full((3, 4), 12**-0.5), rtol=1e-6)


OF_A_STATE = (
    "clip_tree",
    "monitor.dtype_fit",
    "monitor.histograms",
    "monitor.history",
    "monitor.history_names",
)


def test_name_arguments_reject_invalid_names():
    for path, fn in public().items():
        if path in OF_A_STATE or not inspect.isfunction(fn):
            continue
        if "name" not in inspect.signature(fn).parameters:
            continue
        given = {"inner": SGD} if path == "monitor.events" else GIVEN.get(path, {})
        for wrong in (None, 3, ""):
            with pytest.raises((TypeError, ValueError), match=r"^name must be a"):
                fn(**given, name=wrong)


def private(key):
    return optaxclip.per_example_clip_and_aggregate(1.0, 1.0, key)


WITHOUT_A_THRESHOLD = (
    *("zclip", "adagc", "clip_by_quantile", "clip_by_ema_norm", "clip_by_median_norm"),
    *("clip_by_window_norm", "clip_by_moving_max", "normalize_by_norm_history"),
)


@pytest.mark.parametrize("name", WITHOUT_A_THRESHOLD)
def test_a_number_alone_is_no_threshold_of_what_finds_its_own(name):
    make = getattr(optaxclip, name)
    said = rf"^{name}\(\) accepts only keyword arguments, got 1.0; use clip_by_global"
    with pytest.raises(TypeError, match=said) as raised:
        make(1.0)
    takes_cap = "max_norm" in inspect.signature(make).parameters
    assert ("or max_norm=1.0 for an upper bound" in str(raised.value)) == takes_cap
    with pytest.raises(
        TypeError, match=r"accepts only keyword arguments, got 1\.0; pass .* as keyword arguments"
    ):
        optaxclip.clip_by_second_moment(1.0)


@pytest.mark.parametrize("number", [0.95, np.float32(0.5), 0.01])
def test_fractional_percentile_warns(number):
    share = f"a number from 0 to 100, got .*; pass {100 * number:g} if you mean the fraction "
    for make in (optaxclip.autoclip, optaxclip.thresholds.percentile):
        with pytest.warns(UserWarning, match=share) as warned:
            make(percentile=number)
        assert warned[0].filename == __file__


def test_other_percentiles_do_not_warn():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for percentile in (0, 0.0, 1, 1.0, 95, np.float64(99.5), jnp.float32(0.5)):
            optaxclip.autoclip(percentile)


@pytest.mark.parametrize("key", [3, np.int32(3), jax.random.key(3), jax.random.PRNGKey(3)])
def test_key_accepts_integers_and_keys(key):
    private(key).init(jnp.ones(2))


WHOLE = {"a": jnp.arange(3), "b": np.array([True])}


@pytest.mark.by_day(1)
@pytest.mark.parametrize(
    "clip",
    [
        lambda tree: optaxclip.clip(1.0).update(tree, None),
        lambda tree: optaxclip.clip_by_global_norm(1.0).update(tree, None),
        lambda tree: clip_tree(tree, 1.0, scope=scopes.tree()),
    ],
)
def test_tree_without_float_leaves_warns(clip):
    with pytest.warns(
        UserWarning, match="has no floating-point leaves to clip, only .* 'int32'"
    ) as warned:
        clip(WHOLE)
    assert warned[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        without_gradients = {"a": np.zeros(2, jax.dtypes.float0)}
        for tree in ({}, None, WHOLE | {"c": jnp.ones(1)}, without_gradients):
            clip(tree)
        optaxclip.clip_by_global_norm(1.0).init(WHOLE)

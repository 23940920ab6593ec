"""What is passed in the wrong place, uncalled, or of another: a short error, at once."""

import functools
import inspect
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
from optaxclip import clip_by, monitor, ops, per_example, responses, scopes, thresholds

GRADS = {f"layer{i}": jnp.ones((50, 50)) for i in range(20)}
SGD = optax.sgd(0.1)
AGGREGATE = per_example.per_example_clip_and_aggregate
RULES = {
    "adagc": thresholds.adagc(),
    "constant": 1.0,
    "ema": thresholds.ema(),
    "log_tracker": thresholds.log_tracker(),
    "mean_over_rms": thresholds.mean_over_rms(),
    "median": thresholds.median(window=4, every_step=True),
    "percentile": thresholds.percentile(window=4),
    "periodic_median": thresholds.median(window=4),
    "quantile": thresholds.quantile(init_limit=1.0),
    "schedule": optax.linear_schedule(1.0, 0.5, 3),
    "window": thresholds.window(3.0, 4),
    "zscore": thresholds.zscore(),
}
MISTAKES = {
    "swapped": (lambda: ops.clip_by_global_norm(1.0, GRADS), "clip_norm must be .* of type dict"),
    "swapped bounds": (lambda: ops.clip_by_value(-1.0, 1.0, GRADS), "clip_value_max .* type dict"),
    "scope's name": (lambda: clip_by("leaf", 1.0), "must be from optaxclip.scopes.* got 'leaf'"),
    "scope's name at once": (
        lambda: optaxclip.clip_tree(GRADS, 1.0, scope="leaf"),
        "must be from optaxclip.scopes.* got 'leaf'",
    ),
    "scope uncalled": (lambda: clip_by(scopes.leaf, 1.0), r"call it, as in scopes\.leaf\(\)"),
    "scope's name for examples": (
        lambda: per_example.clip_sum(GRADS, 1.0, scope="leaf"),
        "must be from optaxclip.scopes.* got 'leaf'",
    ),
    "scope of examples uncalled": (
        lambda: per_example.clipped_grad(jnp.dot, 1.0, scope=scopes.leaf),
        r"call it, as in scopes\.leaf\(\)",
    ),
    "zero for a scope": (
        lambda: AGGREGATE(1.0, 0.0, scope=0.0),
        "must be from optaxclip.scopes.* 0.0",
    ),
    **{
        f"{name} uncalled": (
            lambda name=name: clip_by(scopes.tree(), 1.0, response=getattr(responses, name)),
            rf"response must be what {name} returns, .* as in responses\.{name}\(\)",
        )
        for name in ("auto_s", "band", "clip_with_eps")
    },
    "a list of responses": (
        lambda: clip_by(scopes.tree(), 1.0, response=["clip"]),
        r"response must be one of .* got \['clip'\]",
    ),
    "response of examples uncalled": (
        lambda: per_example.clip_sum(GRADS, 1.0, response=responses.band),
        r"call it, as in responses\.band\(\)",
    ),
    "method for a limit": (
        lambda: optaxclip.clip_by_norm(optaxclip.zclip),
        "max_norm must be a number, a schedule or a rule, got the function zclip of optaxclip",
    ),
    "scope second": (lambda: clip_by(1.0, scopes.leaf()), r"clip_by\(scopes.leaf.*got 1.0"),
    "two scopes": (lambda: clip_by(scopes.leaf(), scopes.tree()), "limit must .* got a scope"),
    "scope for a limit": (lambda: clip_by(scopes.leaf(), scopes.leaf), "limit must .* got a scope"),
    "rule uncalled": (
        lambda: clip_by(scopes.tree(), thresholds.zscore),
        r"call it, as in thresholds\.zscore\(\)",
    ),
    "one rule of many": (
        lambda: clip_by(scopes.group("a"), {"a": thresholds.ema}),
        r"limit\['a'\] .* thresholds\.ema\(\)",
    ),
    "rule of a skip": (lambda: optaxclip.skip_above(SGD, thresholds.ema), r"thresholds\.ema\(\)"),
    "rule of the loss": (
        lambda: optaxclip.skip_above(SGD, 1.0, loss_limit=thresholds.window),
        r"loss_limit .* thresholds\.window\(\)",
    ),
    "unknown keyword": (
        lambda: clip_by(scopes.tree(), 1.0, foo=1),
        r"keyword argument 'foo'\. It takes \['scope', 'limit', ",
    ),
    "misspelt keyword": (
        lambda: clip_by(scopes.tree(), 1.0, respons="clip"),
        r"argument 'respons'; did you mean 'response'\? It takes \[",
    ),
    "array that decides a program": (
        lambda: optaxclip.clip_by_block_rms(1.0, stacked=jnp.ones(2)),
        r"stacked must not be a JAX array .* static_args=\('stacked',\)",
    ),
    "axes in an array": (
        lambda: optaxclip.clip_by_norm(1.0, axes=jnp.int32(0)),
        r"axes must not be a JAX array .* static_args=\('axes',\)",
    ),
    "axis in an array": (
        lambda: optaxclip.adaptive_grad_clip(0.1, axis=jnp.int32(0)),
        r"axis must not be a JAX array .* static_args=\('axis',\)",
    ),
    "no name": (
        lambda: clip_by(scopes.tree(), 1.0, name=None),
        "name must be .* got None",
    ),
    "empty name": (lambda: monitor.record(name=""), "name must be a non-empty string, got ''"),
    "no name of moments": (lambda: optaxclip.clip_by_second_moment(name=None), "name must be a"),
    "never": (lambda: optaxclip.skip_nonfinite(SGD, 0), "max_consecutive .* at least 1, got 0"),
    "a flag": (lambda: optaxclip.skip_nonfinite(SGD, True), "max_consecutive .* got True"),
    "half a step": (lambda: optaxclip.skip_above(SGD, 1.0, jnp.float32(2)), "dtype float32"),
    "many": (lambda: optaxclip.skip_above(SGD, 1.0, jnp.ones(2, int)), r"of shape \(2,\)"),
    "traced never": (lambda: optaxclip.skip_above(SGD, 1.0, jnp.int32(0)), "at least 1, got 0"),
    "empty batch": (
        lambda: AGGREGATE(1.0, 0.0, batch_size=0),
        "batch_size must be from 1 .* got 0",
    ),
    "negative batch": (lambda: AGGREGATE(1.0, 0.0, batch_size=-3), "batch_size .* got -3"),
    "word for a batch": (lambda: AGGREGATE(1.0, 0.0, batch_size="a"), "batch_size .* of type str"),
    "labels of others": (
        lambda: optaxclip.clip_by_group_norm(1.0, {"x": "a"}).init(GRADS),
        r"labels has the leaves 'x' \(dict\), the gradients have .* 'layer0', .*, \.\.\. \(dict\)",
    ),
    "labels too deep": (
        lambda: optaxclip.clip_by_group_norm(1.0, {"w": {"k": "a"}}).init({"w": jnp.ones(2)}),
        r"labels has the leaves 'w/k' .* have the leaves 'w' .* a function \(path, leaf\)",
    ),
    "stacks of others": (
        lambda: clip_by(scopes.leaf(stacked={"x": 1}), 1.0).init(GRADS),
        "stacked must be a pytree prefix of the gradients",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_short_error_at_once(mistake):
    make, message = MISTAKES[mistake]
    with pytest.raises((TypeError, ValueError), match=message) as raised:
        make()
    assert len(str(raised.value)) < 320


@pytest.mark.parametrize("count", [1, jnp.int32(1), 10**12], ids=["one", "array", "huge"])
def test_a_count_may_be_the_least_and_any_that_is_larger(count):
    skip = optaxclip.skip_above(SGD, 1.0, count)
    scaled = optaxclip.scale_loss(skip, growth_interval=count)
    tx = optaxclip.reset_state(scaled, every=count, only=("consecutive",))
    params = jnp.ones(2)
    jax.eval_shape(lambda params: tx.update(params, tx.init(params), params), params)


def test_how_to_switch_clipping_off_is_said_where_one_might_want_it():
    for limit in (None, -1.0, np.nan):
        with pytest.raises((TypeError, ValueError), match=r"to switch clipping off pass math\.inf"):
            optaxclip.clip_by_global_norm(limit)
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
def test_a_state_of_another_rule_is_refused_and_both_are_named(rule, how, number):
    """The other states are those of the `number` rules that come next in `RULES`."""
    params, tx = PARAMS, of_rule(rule, how)
    update = tx.update if how == "eager" else jax.jit(tx.update)
    update(params, tx.init(params))
    names = {"constant": "nothing, as for a constant", "schedule": r"arrays of the shapes \[\(\)\]"}
    own = names.get(rule, f"the state of {rule}, arrays")
    place = [*RULES].index(rule)
    for other in [*RULES, *RULES][place + 1 :][:number]:
        held = names.get(other, f"the state of {other}, arrays")
        said = f"another limit: it holds {held}.* this limit keeps {own}.*fresh state"
        with pytest.raises(ValueError, match=said):
            update(params, state_of(other, how))


def test_a_state_of_another_window_or_of_another_loss_is_refused():
    params = {"a": jnp.ones(3)}
    short, long = (clip_by(scopes.tree(), thresholds.percentile(window=n)) for n in (4, 5))
    with pytest.raises(ValueError, match=r"\(4,\)\], and this limit keeps .* \(5,\)\]"):
        long.update(params, short.init(params))
    # Other numbers of the same rule are no other rule.
    other = clip_by(scopes.tree(), thresholds.percentile(50.0, window=4))
    other.update(params, short.init(params))
    with_loss = functools.partial(optaxclip.skip_above, SGD, 1.0)
    state = with_loss(loss_limit=thresholds.zscore()).init(params)
    with pytest.raises(ValueError, match=r"holds the state of zscore.* keeps the state of window"):
        with_loss(loss_limit=thresholds.window(3.0, 4)).update(params, state, value=1.0)


def test_a_skip_around_an_optimizer_that_already_runs():
    params, optimizer = {"a": jnp.ones(3)}, optax.sgd(0.1, momentum=0.5)
    old = optimizer.update(params, optimizer.init(params))[1]
    tx = optaxclip.skip_nonfinite(optimizer)
    said = r"opt_state = tx\.init\(params\)\._replace\(inner_state=old_opt_state\)"
    with pytest.raises(ValueError, match=said):
        tx.update(params, old)
    updates, state = tx.update(params, tx.init(params)._replace(inner_state=old))
    np.testing.assert_allclose(updates["a"], -0.15, rtol=1e-6)
    assert state.num_skipped == 0


def test_the_axis_of_a_vmap_where_jax_has_no_sum_over_it():
    mesh = jax.make_mesh((2,), ("x",), (AxisType.Auto,))

    def clipped(axis_name, check_vma):
        tx = optaxclip.clip_by_global_norm(1.0, axis_name=axis_name)
        over_rows = jax.vmap(lambda x: tx.update(x, tx.init(x))[0], axis_name="rows")
        spec = jax.P(None, "x")
        return jax.jit(
            jax.shard_map(over_rows, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=check_vma)
        )(jnp.ones((3, 4)))

    with pytest.raises(ValueError, match=r"axis_name names \['rows'\].* pass check_vma=False"):
        clipped("rows", check_vma=True)
    found = clipped(("rows", "x"), check_vma=False)
    np.testing.assert_allclose(found, np.full((3, 4), 12**-0.5), rtol=1e-6)


OF_A_STATE = ("clip_tree", "monitor.history", "monitor.history_names")


def test_names_are_checked_by_all_that_take_one():
    for path, fn in public().items():
        if path in OF_A_STATE or not inspect.isfunction(fn):
            continue
        if "name" not in inspect.signature(fn).parameters:
            continue
        given = {"inner": SGD} if path == "monitor.events" else GIVEN.get(path, {})
        for wrong in (None, 3, ""):
            with pytest.raises((TypeError, ValueError), match=r"^name must be a"):
                fn(**given, name=wrong)

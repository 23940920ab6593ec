"""Wrong arguments of clips, scopes, rules, skips and `ops`, with what the errors say."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from jax.experimental.sparse import BCOO

import optaxclip
from optaxclip import (
    clip_by,
    clip_by_global_norm,
    clip_tree,
    monitor,
    ops,
    responses,
    scopes,
    skip_above,
    skip_nonfinite,
    thresholds,
)

ONE = {"b": jnp.ones(1)}
GRADS = {f"layer{i}": jnp.ones((50, 50)) for i in range(20)}
SPARSE = BCOO((jnp.ones(1), jnp.zeros((1, 2), int)), shape=(2, 2))
SGD = optax.sgd(0.1)
LEAF, TREE = scopes.leaf(), scopes.tree()
STATE = clip_by(LEAF, 1.0).init
RELATIVE = thresholds.relative_to_params(0.01)
RANK_6, W = jnp.ones((2,) * 6), {"w": jnp.ones((2, 3))}
AGC = optaxclip.adaptive_grad_clip(0.1)
SPAM, stable = optaxclip.clip_by_second_moment(), optaxclip.scale_by_stable_adam


def injected(scope):
    return optax.inject_hyperparams(clip_by)(scope, 1.0).init(jnp.ones(1))


def by_labels(labels, tree=ONE):
    return optaxclip.clip_by_group_norm(1.0, labels).init(tree)


def outside_of_lookahead():
    tx = optax.chain(optaxclip.adagc(), optax.lookahead(SGD, 5, 0.5))
    tx.update(ONE, tx.init(optax.LookaheadParams.init_synced(ONE)))


def cotangent(**options):
    return ops.clip_cotangent({"h": np.ones((2, 2))}, **options)


def scoped(scope, tree=W, threshold=1.0):
    clip_by(scope, threshold).init(tree)


def told(make=None, **extra):
    wrapped = {"inner": SGD, "threshold": 1.0} if make else {"max_norm": 1.0}
    tx = (make or clip_by_global_norm)(**wrapped, known_norm="grad_norm")
    tx.update(ONE, tx.init(ONE), ONE, **extra)


TYPE_ERRORS = {
    r"lp\(\) got an unexpected keyword argument 'q'; it accepts \['p'\]": lambda: (
        optaxclip.norms.lp(q=2)
    ),
    "clip_norm must be a number or scalar array, got <function": lambda: ops.clip_by_norm(
        jnp.ones(1), lambda count: 1.0
    ),
    "z_thresh must be a number or scalar array, got <function": lambda: thresholds.zscore(
        z_thresh=lambda count: 2.0
    ),
    r"a scope must be called with a tree, got .*; with optax\.inject_hyperparams, pass "
    r"static_args=\(\"scope\",\)$": lambda: injected(TREE),
    r"a scope must be called with a tree, got .*; with optax\.inject_hyperparams, pass "
    r"static_args=\(\"scope\",\)": lambda: injected(scopes.unit()),
    "'f' .* eqx.filter": lambda: ops.global_norm({"f": jnp.tanh, "w": jnp.ones(1)}),
    "window must be an int >= 1": lambda: optaxclip.autoclip(window=1.5),
    r"tree must be the gradients, got 1\.0 and .* first, .* "
    r"clip_by_global_norm\(grads, 1\.0\)": lambda: ops.clip_by_global_norm(1.0, GRADS),
    r"tree must be the gradients, got -1\.0 and a threshold that contains arrays; ": lambda: (
        ops.clip_by_value(-1.0, 1.0, GRADS)
    ),
    "clip_norm must be .* of type dict": lambda: ops.clip_by_global_norm(jnp.ones(2), GRADS),
    "clip_value_max .* type dict": lambda: ops.clip_by_value(jnp.ones(2), 1.0, GRADS),
    r"got 1.0 of type float; .* clip_by\(scopes.leaf": lambda: clip_by(1.0, LEAF),
    r"^lp\(\) takes only p by position, got 2 .*; remove the extra arguments$": lambda: (
        optaxclip.norms.lp(1, 2)
    ),
    r"^tree\(\) accepts only keyword arguments, got 2; remove the extra arguments$": lambda: (
        scopes.tree(2)
    ),
    r"clip\(\) takes only max_delta by position, "
    r"got 2 .*; .* clip_by_value\(min_value": lambda: optaxclip.clip(-1.0, 1.0),
    r"takes only max_norm by position, got 2 .*; pass eps, norm, ": lambda: clip_by_global_norm(
        1.0, 2.0
    ),
    r"accepts only keyword arguments, got 1\.0; pass threshold, decay, ": lambda: (
        optaxclip.clip_by_second_moment(1.0)
    ),
    r"^inner must be an Optax .*, got ThresholdRule\(.*; pass the optimizer as the first "
    "argument$": lambda: skip_above(thresholds.zscore(), SGD),
    r"max_consecutive must .*; combine .* optax\.chain\(clip, optimizer\)": lambda: skip_nonfinite(
        optaxclip.zclip(), SGD
    ),
    r"threshold must .*; combine transformations with ": lambda: skip_above(optaxclip.zclip(), SGD),
    r"skip_nonfinite\(\) requires the arguments \['inner'\]; call "
    r"skip_nonfinite\(optax": lambda: optax.chain(skip_nonfinite(), SGD),
    r"requires the arguments \['threshold'\]; .* skip_above\(optax\.adam\(1e-3\), "
    r"threshold\)": lambda: skip_above(1.0),
    r"^clip_by_global_norm\(\) requires the arguments \['max_norm'\]; call "
    r"clip_by_global_norm\(max_norm\)$": clip_by_global_norm,
    r"^constant\(\) requires the arguments \['threshold'\]": thresholds.constant,
    r"update\(\) requires a state; call tx\.update\(grads, "
    r"state, params\), .* tx\.init\(params\)": lambda: clip_by(LEAF, 1.0).update(ONE),
    r"keyword argument 'foo'; it accepts \['scope', 'threshold', ": lambda: clip_by(
        TREE, 1.0, foo=1
    ),
    r"argument 'respons'; did you mean 'response'\? \(accepted: \[": lambda: clip_by(
        TREE, 1.0, respons="clip"
    ),
    "'clip_norm'; did you mean 'max_norm'": lambda: clip_by_global_norm(clip_norm=1.0),
    "'max_norm'; did you mean 'threshold'": lambda: optaxclip.clip_by_block_rms(max_norm=1.0),
    "'clip_value'; did you mean 'max_delta'": lambda: optaxclip.clip(clip_value=1.0),
    "'max_grad_norm'; did you mean 'threshold'": lambda: skip_above(SGD, max_grad_norm=1.0),
    r"keyword argument 'stacked'; it accepts \['lambda_rel'": lambda: optaxclip.adagc(stacked=1),
    r"keyword argument 'debias'; it accepts \['alpha', ": lambda: optaxclip.zclip(debias=True),
    r"keyword argument 'inclusive'; it accepts \['ratio', ": lambda: optaxclip.clip_by_ema_norm(
        inclusive=True
    ),
    r"'scope'; use clip_by\(scope, threshold, .* \(accepted: \['max_norm'": lambda: (
        optaxclip.clip_by_norm(1.0, scope=1)
    ),
    "must come from optaxclip.scopes.* got 'leaf' of": lambda: clip_by("leaf", 1.0),
    "must come from optaxclip.scopes.* got 'leaf'": lambda: clip_tree(GRADS, 1.0, scope="leaf"),
    r"scope must .* use scopes\.leaf\(\)": lambda: clip_by(scopes.leaf, 1.0),
    r"from optaxclip\.scopes, got <function .* two arguments; .* scopes\.group\(fn\)": lambda: (
        clip_by(lambda path, leaf: "a", 1.0)
    ),
    r"must return a scopes\.Grouping, but this one returned 'a' .*; if it returns labels, use "
    r"scopes\.group\(fn\)": lambda: clip_by(lambda tree: "a", 1.0).init(ONE),
    "labels must be strings, got None for leaf 'b'": lambda: by_labels(lambda path, leaf: None),
    "norm must be a name .* got 2; for this norm, pass norm='l2'": lambda: clip_by_global_norm(
        1.0, norm=2
    ),
    "norm must be a name .* got inf; for this norm, pass norm='linf'": lambda: clip_by_global_norm(
        1.0, norm=math.inf
    ),
    r"norm must be a name .* got 3; for this norm, pass norm=norms\.lp\(3\)": lambda: (
        clip_by_global_norm(1.0, norm=3)
    ),
    r"norm must be a name or an optaxclip\.norms\.Norm, got -1$": lambda: clip_by_global_norm(
        1.0, norm=-1
    ),
    r"norm must be the result of calling lp, .* norms\.lp\(\)": lambda: clip_by_global_norm(
        1.0, norm=optaxclip.norms.lp
    ),
    r"response must be the result of calling auto_s, .* use responses\.auto_s\(\)": lambda: clip_by(
        TREE, 1.0, response=responses.auto_s
    ),
    r"response must be the result of calling band, .* use responses\.band\(\)": lambda: clip_by(
        TREE, 1.0, response=responses.band
    ),
    r"response must be the result of calling clip_with_eps, .* use "
    r"responses\.clip_with_eps\(\)": lambda: clip_by(TREE, 1.0, response=responses.clip_with_eps),
    "max_norm must be a number, a schedule, or a rule, got the "
    "optaxclip function zclip; pass": lambda: optaxclip.clip_by_norm(optaxclip.zclip),
    "threshold must .* got a scope; pass the scope as the first": lambda: clip_by(LEAF, TREE),
    "threshold must .* got a scope; pass": lambda: clip_by(LEAF, scopes.leaf),
    r"threshold must .* use thresholds\.zscore\(\)": lambda: clip_by(TREE, thresholds.zscore),
    r"threshold\['a'\] .* thresholds\.ema\(\)": lambda: clip_by(
        scopes.group("a"), {"a": thresholds.ema}
    ),
    r"threshold .* thresholds\.ema\(\)": lambda: skip_above(SGD, thresholds.ema),
    r"loss_threshold .* thresholds\.window\(\)": lambda: skip_above(
        SGD, 1.0, loss_threshold=thresholds.window
    ),
    r"or a rule, got 'zscore'; use thresholds\.zscore\(\.\.\.\)$": lambda: clip_by(LEAF, "zscore"),
    r"stacked must not be a JAX array, .* static_args=\('stacked',\)": lambda: (
        optaxclip.clip_by_block_rms(1.0, stacked=jnp.ones(2))
    ),
    r"axes must not be a JAX array, .* static_args=\('axes',\)": lambda: optaxclip.clip_by_norm(
        1.0, axes=jnp.int32(0)
    ),
    r"axis must not be a JAX array, .* static_args=\('axis',\)": lambda: (
        optaxclip.adaptive_grad_clip(0.1, axis=jnp.int32(0))
    ),
    "max_consecutive .* got True": lambda: skip_nonfinite(SGD, True),
    "max_consecutive .* dtype float32": lambda: skip_above(SGD, 1.0, jnp.float32(2)),
    "^name must be .* got None": lambda: clip_by(TREE, 1.0, name=None),
    "^name must be a non-empty string, got ''": lambda: monitor.record(name=""),
    "^name must be a": lambda: optaxclip.clip_by_second_moment(name=None),
    "clip_norm must be a number.*str": lambda: cotangent(clip_norm="1"),
    "clip_value must be a number.*str": lambda: cotangent(clip_value="1"),
    "axes must be an int": lambda: cotangent(clip_norm=1.0, axes="0"),
    "axis_name must be a name": lambda: cotangent(clip_norm=1.0, axis_name=3),
    "x must be a pytree of arrays, but leaf 'h' is '3'": lambda: ops.clip_cotangent(
        {"h": "3"}, clip_norm=1.0
    ),
    "inner must be an Optax transformation.*, got 3; pass the optimizer as the first argument$": (
        lambda: skip_nonfinite(3)
    ),
    "inner must be an Optax transformation.* Dense": lambda: skip_nonfinite(nn.Dense(3)),
    r"^inner must be an Optax transformation such .* <function adam": lambda: skip_nonfinite(
        optax.adam
    ),
    r"^inner must be an Optax transformation such .* 'adam'": lambda: skip_nonfinite("adam"),
    r"^inner must be an Optax transformation such .* None": lambda: skip_nonfinite(None),
    "^loss_threshold must be a number": lambda: skip_above(SGD, 1.0, loss_threshold="a"),
    "labels must be strings, got 1": lambda: scoped(scopes.group({"w": 1})),
    "axes must be an int or a sequence of ints, got 0.5": lambda: scoped(scopes.axes(0.5)),
    r"max_norm\['a'\] must be a number.*'1'": lambda: optaxclip.clip_by_group_norm(
        {"a": "1", "b": thresholds.zscore()}, {"w": "a"}
    ),
    "^grad_norm must be a number": lambda: told(grad_norm="50"),
    "^grad_norm must be a number or": lambda: told(skip_above, grad_norm="50"),
    "known_norm must be the name of an extra argument": lambda: clip_by_global_norm(
        1.0, known_norm=1
    ),
    "eps must be a number": lambda: stable(eps="small"),
    r"leaf 'w' must be dense, but is a BCOO array; .*todense": lambda: SPAM.init({"w": SPARSE}),
    r"leaf 'w' must be dense, but .*todense\(": lambda: stable().init({"w": SPARSE}),
}
VALUE_ERRORS = {
    "max_norm .* got -1.0; .* math.inf": lambda: clip_by_global_norm(-1.0),
    r"shape \(2,\); pass a dict to set a threshold per group": lambda: clip_by_global_norm(
        np.ones(2)
    ),
    "^mine: params are required .*; call update": lambda: clip_tree(
        ONE, RELATIVE, scope=LEAF, name="mine"
    ),
    r"groups \['b'\], got \['a'\]; pass one": lambda: clip_by(LEAF, {"a": 1.0}).init(ONE),
    r"groups \['b'\], got \['a', 'b'\]; pass one": lambda: clip_tree(
        ONE, {"a": 1.0, "b": 1.0}, scope=LEAF
    ),
    r"clip_norm must be a scalar, got an array of shape \(2,\)$": lambda: ops.clip_by_norm(
        jnp.ones(1), np.ones(2)
    ),
    r"sparse leaf '0' requires axes 0 to 1, "
    r"got 1; pass leaf\.todense\(\)": lambda: ops.clip_by_norm([SPARSE], 1.0, axes=1),
    r"norms in state must be 1, but is 3, .* call update under jax\.vmap too": lambda: clip_by(
        LEAF, 1.0
    ).update([jnp.ones(1)], jax.vmap(STATE)([jnp.ones(3)])),
    r"labels must be a pytree prefix of the gradients \(a dict with .* "
    r"'layer0', .*, \.\.\.\), but is a dict with the leaves 'x'": lambda: by_labels(
        {"x": "a"}, GRADS
    ),
    r"with the leaves 'w'\), but is .* 'w/k'; .* a function that maps \(path, leaf\)": lambda: (
        by_labels({"w": {"k": "a"}}, {"w": jnp.ones(2)})
    ),
    "stacked must be a pytree prefix of the gradients": lambda: clip_by(
        scopes.leaf(stacked={"x": 1}), 1.0
    ).init(GRADS),
    r"but contain \['b'\]; put .* inside optax\.lookahead, .*lookahead\(optax": (
        outside_of_lookahead
    ),
    r"norm must be one of .* got 'L2'; did you mean 'l2'\?": lambda: clip_by_global_norm(
        1.0, norm="L2"
    ),
    r"norm must be one of .* got 'inf'; did you mean 'linf'\?": lambda: clip_by_global_norm(
        1.0, norm="inf"
    ),
    r"response must be one of .* got \['clip'\]": lambda: clip_by(TREE, 1.0, response=["clip"]),
    r"alpha must be between 0 and 1, got 2\.5; use z_thresh to pass a": lambda: thresholds.zscore(
        2.5
    ),
    r"decay must be between 0 and 1, got 1\.1; use ratio for a multiple": lambda: thresholds.ema(
        1.1
    ),
    r"decay must be between 0 and 1, got 3\.0; use num_std to pass a": lambda: (
        thresholds.log_tracker(3.0)
    ),
    "axis_name must name a mapped axis, got 'x'; wrap the call in pmap": lambda: ops.global_norm(
        ONE, axis_name="x"
    ),
    "max_consecutive .* >= 1, got 0": lambda: skip_nonfinite(SGD, 0),
    r"max_consecutive .* of shape \(2,\)": lambda: skip_above(SGD, 1.0, jnp.ones(2, int)),
    "max_consecutive must be at least 1, got 0": lambda: skip_above(SGD, 1.0, jnp.int32(0)),
    "clip_cotangent requires exactly one of clip_norm and clip_value, "
    "but neither was passed": cotangent,
    "clip_cotangent requires exactly one of clip_norm and clip_value, "
    "but both were passed": lambda: cotangent(clip_norm=1.0, clip_value=1.0),
    r"clip_norm must be a scalar.*\(2,\)": lambda: cotangent(clip_norm=np.ones(2)),
    r"clip_value must be a scalar.*\(2,\)": lambda: cotangent(clip_value=np.ones(2)),
    r"axes must be between -2 and 1 for leaf 'h' of shape \(2, 2\), got \(2,\)": lambda: cotangent(
        clip_norm=1.0, axes=2
    ),
    "nonfinite must be one of": lambda: cotangent(clip_norm=1.0, nonfinite="off"),
    "specs must be a pytree prefix": lambda: cotangent(clip_norm=1.0, specs={"k": jax.P()}),
    "axes cannot be combined with clip_value=1.0; use clip_norm": lambda: cotangent(
        clip_value=1.0, axes=0
    ),
    "nonfinite cannot be combined with clip_value": lambda: cotangent(
        clip_value=1.0, nonfinite="zero"
    ),
    "axis_name, specs cannot be combined": lambda: cotangent(
        clip_value=1.0, axis_name="x", specs=jax.P()
    ),
    "^loss_threshold must not be NaN; pass None": lambda: skip_above(
        SGD, 1.0, loss_threshold=np.nan
    ),
    "^loss_threshold must be a scalar": lambda: skip_above(SGD, 1.0, loss_threshold=np.ones(2)),
    "^loss_threshold must support negative losses, but the rule log_tracker does not; use": (
        lambda: skip_above(SGD, 1.0, loss_threshold=thresholds.log_tracker())
    ),
    "^loss_threshold must not depend on the parameters, got a rule .*; use": lambda: skip_above(
        SGD, 1.0, loss_threshold=RELATIVE
    ),
    "^max_factor must be": lambda: responses.band(min_factor=2.0, max_factor=1.0),
    r"response must be one of .*'clip'.* got 'soft'": lambda: clip_by(TREE, 1.0, response="soft"),
    r"'a/0/w' has 6 dimensions.*; pass axis$": lambda: scoped(
        scopes.unit(), {"a": [{"w": RANK_6}]}
    ),
    r"'w' has 6 dimensions.*; pass axis$": lambda: scoped(
        scopes.unit(stacked=1), {"w": RANK_6[None]}
    ),
    r"layer/w' has 6 dimensions.*; pass axis$": lambda: AGC.init({"layer": {"w": RANK_6}}),
    "^adaptive_grad_clip: params are required .*; call update": lambda: AGC.update(
        ONE, AGC.init(ONE)
    ),
    r"leaf 'b' of params must have the same shape as the update, \(1,\), .*\(3,\)": lambda: (
        AGC.update(ONE, AGC.init(ONE), {"b": jnp.ones(3)})
    ),
    "labels must be a pytree prefix.* 'v'": lambda: scoped(scopes.group({"v": "a"})),
    "labels must be a pytree prefix.* 'w/x'": lambda: scoped(scopes.group({"w": {"x": "a"}})),
    "stacked must be a pytree prefix": lambda: scoped(scopes.leaf({"v": 1})),
    r"between 0 and 2 for leaf 'w' of shape \(2, 3\), got 3": lambda: scoped(scopes.leaf(3)),
    r"between 0 and 2 for leaf 'w' of shape \(2, 3\), got -1": lambda: scoped(scopes.leaf(-1)),
    r"between 0 and 2 for leaf 'w' of shape \(2, 3\), got 0.5": lambda: scoped(scopes.leaf(0.5)),
    r"between 0 and 2 for leaf 'w' of shape \(2, 3\), got 3$": lambda: scoped(
        scopes.unit(stacked=3)
    ),
    r"axes must be between -2 and 1 for leaf 'w' of shape \(2, 3\), got \(2,\)": lambda: scoped(
        scopes.axes(2)
    ),
    r"axes must be .* for leaf 'w' of shape \(2, 3\), got \(0, -3\)": lambda: scoped(
        scopes.axes((0, -3))
    ),
    r"axes must be between -1 and 0 for leaf 'w' of shape \(3,\), got \(1,\)": lambda: scoped(
        scopes.unit(axis=1, stacked=1)
    ),
    r"thresholds must have the groups \['tree'\], got \['a'\]": lambda: clip_tree(
        ONE, {"a": 1.0}, scope=TREE
    ),
    r"clip_by: .* passed to init lacked, but contain \['b'\]": lambda: clip_by(LEAF, 1.0).update(
        ONE, STATE(W)
    ),
    r"clip_by: .* but contain \['b'\]; "
    "initialize the state with all params": lambda: clip_by(LEAF, 1.0).update(ONE, STATE({})),
    r"^sparse leaf 'w' must form a single group, but .* \(0,\)": lambda: scoped(
        scopes.unit(), {"w": SPARSE}
    ),
    "^sparse leaf 'w' requires axes 0 to 1, got 0": lambda: scoped(scopes.axes(0), {"w": SPARSE}),
    "^sparse leaf 'w' must form a single group": lambda: scoped(
        scopes.leaf(stacked=1), {"w": SPARSE}
    ),
    r"must have the groups \['a'\], got \['a', 'b'\]": lambda: scoped(
        scopes.group({"w": "a"}), threshold={"a": 1.0, "b": thresholds.zscore()}
    ),
    "clip_by: params are required .* relative to the parameters; call ": lambda: clip_by(
        LEAF, {"b": RELATIVE}
    ).update(ONE, clip_by(LEAF, {"b": RELATIVE}).init(ONE)),
    "grad_norm is required because known_norm='grad_norm'; call": told,
    "grad_norm is required .*; call update": lambda: told(grad_norm=None),
    "^grad_norm must be a scalar": lambda: told(grad_norm=jnp.ones(2)),
    "grad_norm is required": lambda: told(skip_above),
    "grad_norm is required .*; call update\\(grads": lambda: told(skip_above, grad_norm=None),
    "^grad_norm must be a scalar, ": lambda: told(skip_above, grad_norm=jnp.ones(2)),
    r"b1 must be at least 0 and below 1, got 1.0": lambda: stable(b1=1.0),
    r"b1 must be below 1 after rounding to float32, got .*; use 0.99999994 or less$": lambda: (
        stable(b1=1 - 1e-9)
    ),
    "eps must not be negative": lambda: stable(eps=-1.0),
    "b2 must be at least 0": lambda: stable(b2=-0.1),
    "clipping_threshold must be a scalar": lambda: stable(clipping_threshold=jnp.ones(2)),
    r"updates contain the leaves \['v'\], which were not passed to init; reinit": lambda: (
        SPAM.update({"w": jnp.ones(2), "v": jnp.ones(1)}, SPAM.init({"w": jnp.ones(2)}))
    ),
    "state must be of type SecondMomentState": lambda: SPAM.update(ONE, optax.EmptyState()),
}

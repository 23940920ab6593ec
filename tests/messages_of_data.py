"""Wrong sweeps, states and records, with what the errors say."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from methods_table import GRADS

import optaxclip
from optaxclip import monitor, ops, scopes, tuning

STEPS = 60
DATA = np.ones((STEPS, 3), np.float32)
KEYS = jax.random.split(jax.random.key(0))
ZERO = jnp.float32(0)

SGD = optax.sgd(0.1)


def init_fn(key):
    return jax.random.normal(key, (3,))


def step_fn(params, target, threshold):
    loss, grads = jax.value_and_grad(lambda p: jnp.sum((p - target) ** 2))(params)
    clipped, norm = ops.clip_by_global_norm(grads, threshold)
    return params - 0.1 * clipped, loss, norm


def swept(thresholds=(1.0,), steps=STEPS, step=step_fn, key=0, data=DATA, **options):
    return tuning.sweep(init_fn, step, list(thresholds), steps, key=key, data=data, **options)


def of_several(*stages):
    return optax.chain(*stages).init(GRADS)


def donated():
    tx = optax.chain(optaxclip.clip_by_norm(1.0), monitor.record(3))
    state = tx.init(GRADS)
    jax.jit(tx.update, donate_argnums=1)(GRADS, state)
    return state


def another_record(before, after):
    state = monitor.record(**before).init(GRADS)
    monitor.record(**before).update(GRADS, state, value=1.0)
    monitor.record(**after).update(GRADS, state, value=1.0)


def without_record():
    return optax.chain(optaxclip.clip_by_norm(1.0), optax.adam(1e-3)).init(GRADS)


TYPE_ERRORS = {
    r"three values .* but returned 2 values": lambda: swept(step=lambda p, _, __: (p, ZERO)),
    r"three values \(state, loss, norm\), but returned a single ShapeDtypeStruct": lambda: swept(
        step=lambda p, _, __: p
    ),
    "a state with the same structure, shapes, and dtypes as its input": lambda: swept(
        step=lambda p, _, __: (p[:2], ZERO, ZERO)
    ),
    r"structure, shapes, and dtypes as its input \(.*\), but returned": lambda: swept(
        step=lambda p, _, __: ((p,), ZERO, ZERO)
    ),
    r"scalar loss.* but returned arrays of shapes \(3,\)": lambda: swept(
        step=lambda p, _, __: (p, p, ZERO)
    ),
    r"scalar or one-dimensional norm, but .* shapes \(\) and \(1, 3\)": lambda: swept(
        step=lambda p, _, __: (p, p[0], p[None])
    ),
    **{
        f"{argument} must be an int >= 1, got {wrong!r}": (
            lambda argument=argument, wrong=wrong: swept(**{argument: wrong})
        )
        for argument in ("steps",)
        for wrong in (True, 5.0, "5")
    },
    **{
        rf"key must be a single JAX PRNG key or an int seed, got {shown}": (
            lambda key=key: swept(key=key)
        )
        for shown, key in {
            "None": None,
            "'a'": "a",
            "0.5": 0.5,
            "True": True,
            r"Array\(\[1\., 1\.": jnp.ones(3),
            r"Array\(\(2,\)": KEYS,
            r"Array\(\[\[": jax.random.key_data(KEYS),
        }.items()
    },
    r"stats must be a name or a sequence of names, got \(1,\)": lambda: monitor.record(stats=(1,)),
    r"stats must be a name or a sequence of names, got \('norm', 1\)": lambda: monitor.record(
        stats=("norm", 1)
    ),
    r"stats must be a name or a sequence of names, got None": lambda: monitor.record(stats=None),
    r"scope must come from optaxclip.scopes": lambda: monitor.record(scope="leaf"),
    r"use scopes.leaf\(\)": lambda: monitor.record(scope=scopes.leaf),
    r"'per_leaf'; pass scope=scopes.leaf\(\) ": lambda: monitor.record(per_leaf=True),
    "'ratio'; pass stats='ratio' ": lambda: monitor.record(ratio=True),
    "inner must be an Optax transformation": lambda: monitor.events(1000),
    "every must be an int": lambda: monitor.histogram(every=1.5),
    "max_lost_fraction must be a number, got 'all'": lambda: monitor.dtype_fit(
        (), max_lost_fraction="all"
    ),
}
VALUE_ERRORS = {
    "thresholds must be one or more positive numbers": lambda: swept([]),
    r"thresholds must be one or more positive numbers, got \[0\.0\]": lambda: swept([0.0]),
    r"thresholds must be one or more positive numbers, got \[nan\]": lambda: swept([np.nan]),
    "thresholds must be one or more positive numbers, got 1.0": lambda: tuning.sweep(
        init_fn, step_fn, 1.0, STEPS, key=0, data=DATA
    ),
    "steps must be an int >= 1, got 0": lambda: swept(steps=0),
    r"leading axis of at least 60 steps, got shape \(\)": lambda: swept(data=[DATA, 1.0]),
    r"leading axis of at least 61 steps, got shape \(60, 3\)": lambda: swept(steps=STEPS + 1),
    r"at least one array whose leading axis .* got None.*np\.arange\(60\)": lambda: swept(
        data=None
    ),
    r"data must contain at least one array .* got \{\}.*np\.arange\(60\)": lambda: swept(data={}),
    r"opt_state contains no record; add monitor\.record\(\) to": lambda: monitor.history(
        without_record()
    ),
    r"contains no record; add monitor\.record\(\) to": lambda: monitor.history_names(
        without_record()
    ),
    r"one record, but name=None matches 2 of \['record', 'events'\]; pass one of these "
    r"names to hist": lambda: monitor.history(
        of_several(monitor.record(2), monitor.events(optaxclip.clip_by_norm(1.0)))
    ),
    r"name='record' matches 2 of \['record', 'record'\]; give them different": lambda: (
        monitor.history(of_several(monitor.record(2), monitor.record(2)), "record")
    ),
    r"name must be one of \['a'\], got 3": lambda: monitor.history(
        of_several(monitor.record(2, name="a")), 3
    ),
    r"contains no histogram; add monitor\.histogram\(\) to": lambda: monitor.histograms(
        without_record()
    ),
    r"name must be one of \['a'\], got 'b'": lambda: monitor.histograms(
        of_several(monitor.histogram(name="a")), "b"
    ),
    r"one histogram, but name=None matches 2 of \['a', 'histogram'\]; pass one of these "
    r"names to hist": lambda: monitor.dtype_fit(
        of_several(monitor.histogram(name="a"), monitor.histogram())
    ),
    "histograms: opt_state must be a single state, but contains 2 states": lambda: (
        monitor.histograms(jax.vmap(monitor.histogram().init)(jnp.ones((2, 3))))
    ),
    "every must be an int >= 1, got 0": lambda: monitor.histogram(every=0),
    r"of must be one of \['updates', 'params'\], got 'grads'": lambda: monitor.histogram(
        of="grads"
    ),
    "params are required when of='params'; call": lambda: (
        tx := monitor.histogram(of="params")
    ).update(GRADS, tx.init(GRADS)),
    r"no count above the overflow threshold of float16, only above \[\]": lambda: monitor.Histogram(
        np.ones(2, int), np.array([1.0, 2.0, 2.0**20]), 0, 0, 0
    ).overflow_fraction("float16"),
    r"max_lost_fraction must be in \[0, 1\), got 1": lambda: monitor.dtype_fit(
        (), max_lost_fraction=1
    ),
    r"record: the ring buffer in the state must have shape \(6,\), but has shape \(5,\)": lambda: (
        another_record({"window": 5}, {"window": 6})
    ),
    r"ring buffer in the state must have shape \(5,\), but has shape \(6,\)": lambda: (
        another_record({"window": 6}, {"window": 5})
    ),
    r"ring buffer in the state must have shape \(4,\), but has shape \(3,\)": lambda: (
        another_record({"window": 3, "loss": True}, {"window": 4, "loss": True})
    ),
    r"ring buffer in the state must have shape \(5,\), but has shape \(5, 3\)": lambda: (
        another_record({"window": 5, "scope": scopes.leaf()}, {"window": 5})
    ),
    r"must have shape \(3, 2\), but has shape \(5, 2\); use the same window": lambda: (
        another_record(
            {"window": 5, "stats": ("norm", "max")}, {"window": 3, "stats": ("norm", "max")}
        )
    ),
    "arrays that were donated .*; use the state returned by that step": lambda: monitor.scalars(
        donated()
    ),
    "^opt_state contains arrays that were donated to a compiled step; use": lambda: monitor.history(
        donated()
    ),
    "contains arrays that were donated .*; use the state returned by that": lambda: monitor.metrics(
        donated()
    ),
    r"'norm', 'max',.*'maxx'; did you mean 'max'": lambda: monitor.record(stats=("norm", "maxx")),
    r"stats must be one or more of \['norm'.*got 'kurtosis'$": lambda: monitor.record(
        stats="kurtosis"
    ),
    r"stats must be one or more distinct names from \['norm'.* got \(\)": lambda: monitor.record(
        stats=()
    ),
    r"distinct names from .* got \('max', 'max'\)": lambda: monitor.record(stats=("max", "max")),
    "window must be an int >= 1, got 0": lambda: monitor.record(0, stats="max"),
    "^loss=True cannot be combined with scope or stats": lambda: monitor.record(
        loss=True, stats=("max",)
    ),
    "^loss=True cannot be combined with scope or stats; chain a second": lambda: monitor.record(
        loss=True, scope=scopes.leaf(stacked=1)
    ),
    "window must be an int >= 1, got 0$": lambda: monitor.events(SGD, 0),
    "norm must be one of .*'l7'": lambda: monitor.events(SGD, norm="l7"),
}

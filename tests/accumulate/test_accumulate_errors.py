"""What `accumulate.value_and_grad` cannot make sense of: an error that names it."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optaxclip
from optaxclip import accumulate, thresholds

X = jnp.ones((6, 2))
W = jnp.ones(2)


def loss_fn(w, x):
    return jnp.mean(x @ w)


MADE = {
    "size 0": ({"microbatch_size": 0}, ValueError, "microbatch_size must be an int of at least 1"),
    "size 2.0": ({"microbatch_size": 2.0}, TypeError, "microbatch_size must be an int"),
    "argnums": ({"argnums": "w"}, TypeError, "argnums must be an int or several, got 'w'"),
    "both": ({"batch_argnums": 0}, ValueError, "batch_argnums=0 and argnums=0 both name the"),
    "no loss": ({"loss_fn": 3}, TypeError, "loss_fn must be a function, got 3"),
    "weight": ({"weight": 2.0}, TypeError, "weight must be a function, got 2.0"),
    "reject": ({"reject": "nan"}, ValueError, "reject must be 'nonfinite', None, or a rule"),
    "rule": ({"reject": thresholds.zscore}, TypeError, "reject must be what zscore returns"),
    "rules": ({"reject": {"w": 1.0}}, TypeError, "reject must be one rule"),
    "negative": ({"reject": -1.0}, ValueError, "reject must not be negative"),
    "clip": ({"clip": "norm"}, TypeError, "clip must be a number"),
    "clip below 0": ({"clip": -1.0}, ValueError, "clip must not be negative"),
    "clips": ({"clip": {"w": 1.0}}, TypeError, "clip must be a transformation, or one limit"),
    "method": (
        {"clip": optaxclip.zclip},
        TypeError,
        r"clip must be what .* as in optaxclip\.zclip",
    ),
    "clip_by": ({"clip": optaxclip.clip_by}, TypeError, r"call it, as in optaxclip\.clip_by\(\)"),
    "method rejects": ({"reject": optaxclip.zclip}, TypeError, "reject must be .* function zclip"),
    "uncalled": ({"clip": thresholds.ema}, TypeError, "clip must be what ema returns"),
    "bfloat16": ({"dtype": jnp.bfloat16}, ValueError, "dtype must be float32 or wider"),
    "int32": ({"dtype": jnp.int32}, ValueError, "dtype must be float32 or wider"),
    "measure": ({"measure": 0}, TypeError, "measure must be True or False"),
    "unmeasured": ({"measure": False}, ValueError, "measure=False leaves nothing to judge"),
    "axis_name": ({"axis_name": 3}, TypeError, "axis_name must be a name"),
}


@pytest.mark.parametrize("name", MADE)
def test_when_made(name):
    options, kind, message = MADE[name]
    with pytest.raises(kind, match=message):
        accumulate.value_and_grad(**{"loss_fn": loss_fn, "microbatch_size": 2, **options})


def other_tree(clip):
    return optax.stateless(lambda updates, _: {"w": updates})


def to_ints(name):
    return optax.stateless(lambda updates, _: updates | {name: updates[name].astype(int)})


CALLED = {
    "no divisor": (
        {"microbatch_size": 4},
        (W, X),
        ValueError,
        "must divide the batch, got 4 for 6 examples: pass 3, ",
    ),
    "too large": ({"microbatch_size": 12}, (W, X), ValueError, "got 12 for 6 examples: pass 6, "),
    "prime": ({"microbatch_size": 2}, (W, X[:5]), ValueError, "got 2 for 5 examples: pass 1, "),
    "empty": ({}, (W, X[:0]), ValueError, "the batch has no examples"),
    "no leaves": ({}, (W, {}), ValueError, "the batch has no examples"),
    "no batch": ({}, (W,), ValueError, "batch_argnums .* must be positions among 1 arguments"),
    "scalar": ({}, (W, 3.0), ValueError, r"the batch must have leaves \[examples"),
    "uneven": ({}, (W, (X, X[:2])), ValueError, r"the batch must have leaves \[examples"),
    "argnums": ({"batch_argnums": -2}, (W, X), ValueError, "batch_argnums must name arguments"),
    "parameters alone": (
        {"loss_fn": lambda w: w[0], "batch_argnums": None},
        (W,),
        ValueError,
        r"argnums \(0,\), at least one; got \(\) of 1 arguments",
    ),
    "state": (
        {},
        (W, X),
        ValueError,
        r"must be of type AccumulateState, got .* Pass accumulated\.state of the last step",
    ),
    "weight below 0": ({"weight": lambda x: -1.0}, (W, X), ValueError, "above 0, got -1.0"),
    "weight 0": ({"weight": lambda x: 0}, (W, X), ValueError, "above 0, got 0 for every"),
    "weight NaN": ({"weight": lambda x: np.nan}, (W, X), ValueError, "above 0, got nan"),
    "weights": ({"weight": lambda x: x[:, 0]}, (W, X), ValueError, r"scalar.*\(2,\).*; sum it"),
    "no weight": ({"weight": lambda x: None}, (W, X), TypeError, "a real number, got None"),
    "vector": ({"loss_fn": lambda w, x: x @ w}, (W, X), ValueError, r"scalar.*shape \(2,\)"),
    "ints": ({"loss_fn": lambda w, x: 3}, (W, X), TypeError, "a real float, got shape"),
    "text": (
        {"loss_fn": lambda w, x: "no"},
        (W, X),
        TypeError,
        "loss_fn must return a real loss, got 'no'",
    ),
    "nothing": ({"loss_fn": lambda w, x: None}, (W, X), TypeError, "loss_fn must return"),
    "aux": ({"has_aux": True}, (W, X), TypeError, r"must return \(loss, aux\)"),
    "no aux": (
        {"loss_fn": lambda w, x: (loss_fn(w, x), 1)},
        (W, X),
        TypeError,
        "pass has_aux=True",
    ),
    "clip": ({"clip": other_tree(1)}, (W, X), ValueError, "clip must return a tree like the"),
    "clip to ints": (
        {"loss_fn": lambda p, x: loss_fn(p["v"] + p["w"], x), "clip": to_ints("w")},
        ({"v": W, "w": W}, X),
        ValueError,
        "clip must return a tree like the gradients",
    ),
}


@pytest.mark.parametrize("name", CALLED)
def test_when_called(name):
    options, args, kind, message = CALLED[name]
    make = accumulate.value_and_grad(**{"loss_fn": loss_fn, "microbatch_size": 2, **options})
    with pytest.raises(kind, match=message):
        jax.jit(make)(*args, **({"state": 3} if name == "state" else {}))


@pytest.mark.by_day(1)
@pytest.mark.parametrize("weights", [[0.0, 0.0, 0.0], [1.0, -1.0, 1.0], [1.0, np.nan, 1.0]])
@pytest.mark.parametrize("options", [{}, {"reject": None, "measure": False}])
def test_weights_that_are_known_too_late_give_nan(weights, options):
    """All 0, negative, NaN: of a traced weight there is no telling beforehand."""

    def loss(w, x, weights):
        return jnp.mean(x) * w

    made = accumulate.value_and_grad(
        loss, batch_argnums=(1, 2), microbatch_size=1, weight=lambda x, w: jnp.sum(w), **options
    )
    value, grads, _ = jax.jit(made)(jnp.float32(2.0), X[:3], jnp.asarray(weights, jnp.float32))
    assert np.isnan(value)
    assert np.isnan(grads)

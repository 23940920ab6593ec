"""What users of other libraries bring: names, checkpoints without our states, injected values."""

import operator
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from methods_table import GRADS, METHODS, PARAMS, assert_close, random_tree

import optaxclip
from optaxclip import monitor

SGD = optax.sgd(0.1, momentum=0.9)
TRANSFORMATIONS = {
    **{name: METHODS[name].make() for name in ("clip", "zclip", "adaptive_grad_clip")},
    "clip_by_value": optaxclip.clip_by_value(-1.0, 1.0),
    "skip_nonfinite": optaxclip.skip_nonfinite(SGD),
    "skip_above": optaxclip.skip_above(SGD, 1.0),
    "record": monitor.record(2),
    "per_example_clip_and_aggregate": optaxclip.per_example_clip_and_aggregate(1.0, 0.0),
}
FOREIGN = [optax.EmptyState(), (), (optax.EmptyState(),), SGD.init(PARAMS), {"count": 0}]


@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_foreign_state_raises_with_remedy(name):
    message = rf"(?s)^{name}: state must be .*tx\.init\(params\)"
    for state in FOREIGN:
        with pytest.raises(ValueError, match=message):
            TRANSFORMATIONS[name].update(GRADS, state, PARAMS)


def test_optax_checkpoint_keeps_other_stages():
    theirs = optax.chain(optax.clip_by_global_norm(1.0), SGD)
    ours = optax.chain(optaxclip.clip_by_global_norm(1.0), SGD)
    step = jax.jit(theirs.update)
    _, old = step(GRADS, theirs.init(PARAMS), PARAMS)
    assert isinstance(old[0], optax.EmptyState)
    expected, _ = step(GRADS, old, PARAMS)
    found, _ = jax.jit(ours.update)(GRADS, (ours.init(PARAMS)[0], *old[1:]), PARAMS)
    assert_close(found, expected)


STATIC = [
    (optaxclip.autoclip, {}, "window"),
    (optaxclip.clip_by_median_norm, {}, "window"),
    (optaxclip.clip_by_window_norm, {}, "window"),
    (monitor.record, {}, "window"),
    (optaxclip.clip_by_norm, {"max_norm": 1.0, "axes": 0}, "axes"),
    (optaxclip.adaptive_grad_clip, {"clipping": 1.0, "axis": 0}, "axis"),
    (
        optaxclip.per_example_clip_and_aggregate,
        {"threshold": 1.0, "noise_multiplier": 0.0},
        "noise_multiplier",
    ),
]


NAMES = [factory.__name__ for factory, *_ in STATIC]


@pytest.mark.parametrize(("factory", "arguments", "static"), STATIC, ids=NAMES)
def test_static_arguments_explain_inject_hyperparams(factory, arguments, static):
    params = random_tree(0, 2)
    grads = jax.tree.map(lambda x: x[None], params) if "threshold" in arguments else params
    tx = optax.inject_hyperparams(factory)(**arguments)
    with pytest.raises((TypeError, ValueError), match=rf"static_args=\(.{static}.,\)"):
        jax.eval_shape(tx.update, grads, tx.init(params), params)
    tx = optax.inject_hyperparams(factory, static_args=(static,))(**arguments)
    found, _ = jax.eval_shape(tx.update, grads, jax.eval_shape(tx.init, params), params)
    assert jax.tree.structure(found) == jax.tree.structure(params)


@pytest.mark.slow
@pytest.mark.parametrize("key", [0, jax.random.PRNGKey(0)], ids=["int", "array"])
def test_inject_hyperparams_accepts_noise_and_key(key):
    make = optaxclip.per_example_clip_and_aggregate
    tx, grads = optax.inject_hyperparams(make)(1.0, 0.5, key), random_tree(0, 2)
    state = tx.init(grads)
    found, _ = jax.jit(tx.update)(grads, state)
    plain = make(1.0, 0.5, key)
    expected, _ = jax.jit(plain.update)(grads, plain.init(grads))
    assert_close(found, expected)


def test_inject_hyperparams_accepts_max_consecutive():
    tx = optax.inject_hyperparams(lambda k: optaxclip.skip_nonfinite(SGD, k))(2)
    state, update = tx.init(jnp.ones(1)), jax.jit(tx.update)
    for _ in range(3):
        updates, state = update(np.float32([jnp.nan]), state)
    assert np.isnan(updates[0])


def test_foreign_names_lead_to_replacement():
    with pytest.raises(AttributeError, match=r"use optaxclip\.clip_by_global_norm\(max_norm\)$"):
        _ = optaxclip.clip_grad_norm_
    assert len(optaxclip._OTHER_LIBRARIES) > 9
    for name, call in optaxclip._OTHER_LIBRARIES.items():
        with pytest.raises(AttributeError, match=re.escape(f"{name!r}; use optaxclip.{call}")):
            getattr(optaxclip, name)
        assert callable(operator.attrgetter(call.partition("(")[0])(optaxclip))


def test_unknown_name_suggests_similar_one():
    with pytest.raises(AttributeError, match=r"has no attribute 'zclipp'$") as raised:
        _ = optaxclip.zclipp
    assert (raised.value.name, raised.value.obj) == ("zclipp", optaxclip)

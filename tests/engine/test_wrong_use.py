"""What is called in a wrong way after it was made right: the message says what to do."""

import jax.numpy as jnp
import optax
import pytest
from flax.training.train_state import TrainState
from methods_table import GRADS, METHODS, PARAMS

import optaxclip
from optaxclip import monitor, scopes, skip_above, thresholds


@pytest.mark.by_day(20)
@pytest.mark.parametrize("name", METHODS)
def test_update_rejects_state_as_gradients(name):
    if name in ("clip_attention_logits", "skip_above_loss"):
        pytest.skip("the table wraps its update")
    tx = METHODS[name].make()
    state = tx.init(PARAMS)
    said = r"updates must be gradients, got a state of type \w+State; call update\(grads, "
    with pytest.raises(ValueError, match=said):
        tx.update(state, GRADS, PARAMS)
    with pytest.raises(ValueError, match=said):
        tx.update((state, optax.EmptyState()), "b", PARAMS)  # as Optax's chain would pass them


def test_update_rejects_state_of_other_transformation():
    other = optax.adam(1e-3).init(GRADS)
    for name, method in METHODS.items():
        if name != "muon":  # which the table wraps in another transformation
            with pytest.raises(ValueError, match=r"state must be of type [A-Z]"):
                method.make().update(GRADS, other, PARAMS)


def test_init_rejects_non_array_leaves():
    wrong = {"w": "text"}
    said = "must be a pytree of arrays, but leaf 'w' is 'text' of type str"
    for name, method in METHODS.items():
        if name != "clip_attention_logits":  # which the table wraps
            with pytest.raises(TypeError, match=rf"^params {said}"):
                method.make().init(wrong)
    attention = optaxclip.clip_attention_logits(heads=lambda path, leaf: optaxclip.Heads(0))
    with pytest.raises(TypeError, match=rf"^params {said}"):
        attention.init(wrong)


def test_update_of_wrappers_rejects_swapped_arguments():
    made = [monitor.record(), monitor.noise_scale()]
    made += [optaxclip.clip_by_norm(1.0, record=False), optaxclip.clip(1.0, record=False)]
    made += [optaxclip.scale_loss(optax.sgd(0.1)), monitor.events(optaxclip.clip_by_norm(1.0))]
    params = {"w": jnp.ones((2, 3))}
    for tx in made:
        with pytest.raises(
            ValueError, match=r"updates must be gradients, got a state of type \w+; call update"
        ):
            tx.update(tx.init(params), params, params)


def test_skip_above_without_loss_explains_train_state():
    rule = thresholds.window(2.0, 4, warmup_steps=2)
    tx = skip_above(optax.sgd(0.1), jnp.inf, loss_threshold=rule)
    state = TrainState.create(apply_fn=None, params={"w": jnp.ones(3)}, tx=tx)
    said = (
        r"value or loss is required; call update\(grads, state, params, value=loss\)\. Flax's "
        r"apply_gradients does not pass extra arguments, so call "
        r"state\.tx\.update instead$"
    )
    with pytest.raises(ValueError, match=said):
        state.apply_gradients(grads=state.params)
    with pytest.raises(ValueError, match=said):
        state.apply_gradients(grads=state.params, value=1.0)


def test_record_accepts_missing_leaves():
    tx = monitor.record(3, scope=scopes.leaf(), stats=("norm", "max"))
    state = tx.init(GRADS)
    tx.update(GRADS | {"b": None}, state)
    unit = monitor.record(3, scope=scopes.unit())
    unit.update(GRADS, unit.init(GRADS))


ITERATORS = {
    "generator": lambda: (leaf for leaf in GRADS.values()),
    "iterator": lambda: iter(GRADS.values()),
    "values": GRADS.values,
    "generator in a dict": lambda: GRADS | {"w": (x for x in GRADS["w"])},
}


@pytest.mark.filterwarnings("ignore:Python iterable type:DeprecationWarning")  # of JAX 0.10.2
@pytest.mark.parametrize("name", METHODS)
def test_iterators_in_place_of_gradients_are_refused(name):
    if name in ("clip_attention_logits", "hyperball"):
        pytest.skip("the table wraps its update")
    tx = METHODS[name].make()
    fixed = METHODS[name]
    states = [tx.init(PARAMS)]
    if not (fixed.has_memory or fixed.counts or fixed.shares == "step" or name == "reset_state"):
        states.append(None)
    for state in states:
        for make in ITERATORS.values():
            with pytest.raises(TypeError, match=r"^updates must be a .*; use a list or a dict"):
                tx.update(make(), state, PARAMS)


@pytest.mark.filterwarnings("ignore:Python iterable type:DeprecationWarning")  # of JAX 0.10.2
def test_skips_check_gradients_before_optimizers():
    adam, said = optax.adam(1e-3), r"^updates must be a pytree of arrays, .*; use a list or a dict"
    skips = [optaxclip.skip_nonfinite(adam), skip_above(adam, 1.0)]
    for tx in [*skips, skip_above(adam, 1.0, check="updates"), optaxclip.scale_loss(adam)]:
        with pytest.raises(TypeError, match=said):
            tx.update(ITERATORS["generator"](), tx.init(PARAMS), PARAMS)

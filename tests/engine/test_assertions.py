"""A wrong shape or dtype inside of the engine is caught, unless Chex's assertions are off."""

import chex
import jax
import jax.numpy as jnp
import pytest

import optaxclip
import optaxclip._engine.measure as measuring
import optaxclip._engine.record as record
import optaxclip._engine.step as step
from optaxclip import scopes

GRADS = {"a": jnp.ones((3, 2)), "b": jnp.ones(4)}


def longer(x):
    return jnp.concatenate([x, x])


def limits_longer(found):
    limits, state = found
    return type(limits)(*map(longer, limits)), state


def each_longer(found):
    return type(found)(*map(longer, found))


SLIPS = {
    "norms": (step, "measure", each_longer),
    "norms of a device": (measuring, "_measured", each_longer),
    "dtypes of norms": (measuring, "_measured", lambda x: jax.tree.map(jnp.float16, x)),
    "limits": (step, "limits_of", limits_longer),
    "multipliers": (step, "multiplier", each_longer),
    "leaves": (step, "scale", longer),
    "dtypes of leaves": (step, "scale", lambda x: x.astype(jnp.float16)),
    "columns of leaves": (step.Groups, "by_leaf", lambda parts: parts[::-1]),
    "record": (record, "_of_worst", lambda columns: tuple(map(longer, columns))),
}


@pytest.mark.parametrize("slip", SLIPS)
def test_a_slip_is_caught(slip, monkeypatch):
    place, name, change = SLIPS[slip]
    right = getattr(place, name)
    monkeypatch.setattr(place, name, lambda *args, **more: change(right(*args, **more)))
    tx = optaxclip.clip_by(scopes.unit(), 1.0)
    state = tx.init(GRADS)
    jax.clear_caches()
    with pytest.raises(AssertionError, match=r"shape|type"):
        jax.eval_shape(tx.update, GRADS, state)


def test_assertions_can_be_switched_off(monkeypatch):
    monkeypatch.setattr(step, "scale", lambda leaf, *args, **more: longer(leaf))
    tx = optaxclip.clip_by_global_norm(1.0)
    state = tx.init(GRADS)
    jax.clear_caches()
    chex.disable_asserts()
    try:
        clipped, _ = jax.eval_shape(tx.update, GRADS, state)
    finally:
        chex.enable_asserts()
        jax.clear_caches()
    assert clipped["a"].shape == (6, 2)

"""Numbers of a rule that act by themselves, and norms far from 1."""

import functools

import jax
import numpy as np
import pytest

from optaxclip import thresholds

NORMS = np.array([1.0, 3.0, 2.0, 2.5, 1.5], np.float32)


@functools.partial(jax.jit, static_argnames="make")
def limits_of(norms, make):
    """The triggers and targets of a rule, norm after norm."""
    rule = make()

    def step(state, norm):
        limits, state = rule.update(norm, state, None)
        return state, (limits.trigger, limits.target)

    return jax.lax.scan(step, rule.init(norms[0]), norms)[1]


def average(decay):
    """Before each norm, that of the norms so far; of none, the norm itself."""
    before, found = NORMS[0], []
    for norm in NORMS:
        found.append(before)
        before = decay * before + (1 - decay) * norm
    return np.array(found)


def test_the_target_may_differ_in_its_decay_or_in_its_ratio():
    ema = functools.partial(thresholds.ema, 0.9, 100.0)
    for make, target in {
        functools.partial(ema, target_decay=0.5): 100 * average(0.5),
        functools.partial(ema, target_ratio=50.0): 50 * average(0.9),
        ema: 100 * average(0.9),
    }.items():
        triggers, targets = limits_of(NORMS, make)
        np.testing.assert_allclose(triggers, 100 * average(0.9), rtol=1e-6)
        np.testing.assert_allclose(targets, target, rtol=1e-6)


RULES = {
    "ema": functools.partial(thresholds.ema, 0.9, 1.5),
    "ema, debiased": functools.partial(thresholds.ema, 0.9, 1.5, debias=True),
    "window": functools.partial(thresholds.window, window=3, min_std=0.0),
    "percentile": functools.partial(thresholds.percentile, 50, window=3),
}


@pytest.mark.parametrize("name", RULES)
def test_small_norms_are_judged_as_large_ones_are(name):
    make = functools.partial(RULES[name], floor=0.0)
    small, large = (limits_of(NORMS * scale, make) for scale in (np.float32(2**-40), 1))
    np.testing.assert_allclose(np.multiply(small, 2.0**40), large, rtol=1e-6)


def test_the_score_of_small_norms_starts_from_nothing():
    """Its deviation has 1e-6 added, as published, so that limits do not scale."""
    norms = np.float32(1e-6) * NORMS
    trigger, _ = limits_of(norms, functools.partial(thresholds.zscore, warmup_steps=2, floor=0.0))
    start, std = np.mean(norms[:2]), np.std(norms[:2])
    assert np.all(np.isinf(trigger[:2]))
    np.testing.assert_allclose(trigger[2], start + 2.5 * (std + 1e-6), rtol=1e-5)

"""An audit of a private step by one run: it leaks no more than the accountant says."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from optaxclip import per_example

CANARIES, DELTA, THRESHOLD = 2000, 1e-5, 1.0


def p_value(guesses, right, epsilon):
    """How likely it is that so many guesses are right if the step is (`epsilon`, `DELTA`)-private.

    Source: Steinke, Nasr and Jagielski, 2023, Privacy auditing with one (1) training run, arXiv
    2305.08846, theorem 5.2, as computed in its appendix D.
    """
    chance = 1 / (1 + np.exp(-epsilon))
    beyond = stats.binom.sf(right - 1, guesses, chance)
    within = np.cumsum(stats.binom.pmf(right - np.arange(1, right + 1), guesses, chance))
    return beyond + np.max(within / np.arange(1, right + 1)) * DELTA * 2 * CANARIES


def lower_bound(scores, is_in):
    """The largest epsilon that a run refutes with 95 % confidence, over numbers of guesses."""
    order = np.argsort(scores)
    found = [0.0]
    for each in (50, 100, 200, 400, 700, 1000):
        right = np.sum(~is_in[order[:each]]) + np.sum(is_in[order[-each:]])
        epsilons = np.linspace(0.05, 12, 240)
        refuted = [x for x in epsilons if p_value(2 * each, right, x) < 0.05 / 6]
        found.append(max(refuted, default=0.0))
    return max(found)


def loss_fn(params, x, d, row, e):
    """A layer whose positions may cancel, and a row of a table for each canary."""
    return jnp.vdot(x @ params["w"], d) + jnp.vdot(params["rows"][row], e)


def drawn():
    """Canaries, each of which has a row of its own; every tenth is extreme beside it."""
    rng = np.random.default_rng(0)
    x, d = rng.normal(size=(2, CANARIES, 8, 32)) * 0.05
    x[::10, 4:], d[::10, 4:] = x[::10, :4], -d[::10, :4] * (1 + 1e-6)
    d[5::10] *= 1e-26
    e = 10 * rng.normal(size=(CANARIES, 4))
    return [*(v.astype(np.float32) for v in (x, d)), np.arange(CANARIES), e.astype(np.float32)]


@functools.partial(jax.jit, static_argnums=(0, 1))
def step(method, size, noise_multiplier, is_padding, key, batch):
    """One private step: canaries that are padding are out."""
    params = {"w": jnp.zeros((32, 32)), "rows": jnp.zeros((CANARIES, 4))}
    clip = per_example.clipped_grad(loss_fn, THRESHOLD, method=method, microbatch_size=size)
    result = clip(params, *batch, is_padding=is_padding)
    return per_example.noisy_mean(result, noise_multiplier, key, CANARIES / 2)


@pytest.mark.slow
@pytest.mark.parametrize("size", [None, 128])
@pytest.mark.parametrize("method", ["ghost", "vmap"])
def test_private_step_audit_stays_below_accountant_epsilon(method, size):
    accounting = pytest.importorskip("dp_accounting")
    batch = drawn()
    for noise_multiplier in (1.0, 2.0):
        accountant = accounting.pld.PLDAccountant()
        accountant.compose(accounting.GaussianDpEvent(noise_multiplier))
        epsilon, bounds = accountant.get_epsilon(DELTA), []
        for share in (1, 0.2):
            # With a fifth of the noise that is accounted for, the audit has to notice.
            is_in = np.random.default_rng(1).random(CANARIES) < 0.5
            noise = np.float32(noise_multiplier * share)
            found = step(method, size, noise, ~is_in, jax.random.key(2), batch)
            scores = np.sum(np.asarray(found["rows"]) * batch[-1], 1)
            bounds.append(lower_bound(scores, is_in))
        assert bounds[0] <= epsilon < bounds[1], (bounds, epsilon)
        assert bounds[0] > epsilon / 10, "an audit that finds nothing"

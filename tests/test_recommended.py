"""Checks the study that recommends a method."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from benchmarks.research.recommended import judging, runs


def test_choose_clip_matches_candidates():
    grads = {"head": jnp.arange(6.0).reshape(2, 3), "bias": jnp.ones(3)}

    def clip(tx: optax.GradientTransformation) -> Any:
        return tx.update(grads, tx.init(grads), grads)[0]

    @jax.jit
    def clip_all():
        chosen = jax.vmap(lambda method: clip(runs.choose_clip(method)))
        return chosen(jnp.arange(len(runs.CLIPS))), [clip(tx) for tx in runs.CLIPS.values()]

    chosen, alone = clip_all()
    for i, expected in enumerate(alone):
        jax.tree.map(lambda x, y, i=i: np.testing.assert_array_equal(x[i], y), chosen, expected)


def test_gains_count_lost_runs_as_zero():
    outcome = runs.Outcome(np.full(4, 2.0), np.array([0.5, 3.0, np.nan, np.inf]), None)
    np.testing.assert_array_equal(runs.compute_gains(outcome), [1.5, 0, 0, 0])


@pytest.mark.parametrize(
    ("normalized", "expected"), [(90.0, runs.NORMALIZE), (81.0, runs.ONE), (70.0, runs.ONE)]
)
def test_decide_needs_more_than_noise(normalized: float, expected: str):
    noise = np.array([-9.0, 9, -6, 6, -3, 3, -1, 1])
    percent = {runs.NONE: 100 + 0 * noise, runs.ONE: 80 + noise, runs.NORMALIZE: normalized - noise}
    cells = {
        (optimizer, task, fault, method): percent.get(method, 60 + noise)
        for optimizer in runs.JUDGED
        for task in ("one", "another")
        for fault in runs.KINDS
        for method in runs.METHODS
    }
    # A task without all judged optimizers does not count.
    cells["adamw", "third", "none", runs.NORMALIZE] = 0 * noise
    assert judging.decide(cells)[0] == expected

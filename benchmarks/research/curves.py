"""Computes final losses and recovery times from held-out losses."""

import numpy as np
from numpy.typing import ArrayLike

LATEST, MARGIN = 3, 0.05
"""The number of averaged evaluations, and the margin above the earlier loss for a recovery."""


def average_last(losses: np.ndarray) -> np.ndarray:
    """Returns the final losses of runs [..., evaluations]."""
    return losses[..., -LATEST:].mean(-1)


def count_recovery_steps(
    losses: np.ndarray, onset: ArrayLike, every: int, margin: ArrayLike = MARGIN
) -> np.ndarray:
    """Counts the steps from the first bad step until the loss has recovered.

    The loss has recovered when, after its peak, the mean of the latest losses is at most `margin`
    above the mean before the bad step. The result is 0 if it never was higher, and infinite if it
    does not recover or was non-finite before.

    Args:
      losses: Held-out losses [..., evaluations], the first of them after `every` steps.
      onset: The number of steps before the first bad step, int[...].
      every: The number of steps between evaluations.
      margin: The margin in the unit of the loss, float[...].

    Raises:
      ValueError: If there are fewer than `LATEST` evaluations before or none after an onset.
    """
    onset, margin = np.asarray(onset)[..., None], np.asarray(margin)[..., None]
    first = onset // every  # The first evaluation that the bad step can affect.
    if np.any((first < LATEST) | (first >= losses.shape[-1])):
        raise ValueError(
            f"onset must leave {LATEST} evaluations before and one after it, one every {every} "
            f"steps, got {np.unique(onset).tolist()} for {losses.shape[-1]} evaluations"
        )
    losses = np.where(np.isfinite(losses), losses, np.inf)
    means = np.stack([losses[..., i : losses.shape[-1] - LATEST + i + 1] for i in range(LATEST)])
    means = means.mean(0)
    # The last mean before the onset.
    first = np.broadcast_to(first - LATEST, (*means.shape[:-1], 1))
    before = np.take_along_axis(means, first, -1)
    number = np.arange(means.shape[-1])
    is_here = number >= first
    is_low = means <= before + margin
    peak = np.argmax(np.where(is_here, means, -np.inf), -1)[..., None]
    is_back = is_here & is_low & (number >= peak)
    steps = (np.argmax(is_back, -1)[..., None] - first) * every - onset % every
    steps = np.where((is_low | ~is_here).all(-1), 0, steps[..., 0])
    return np.where(is_back.any(-1) & np.isfinite(before[..., 0]), steps, np.inf)

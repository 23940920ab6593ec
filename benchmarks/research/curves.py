"""What is read off held-out losses: where a run ends, and how soon after bad data it is back."""

import numpy as np
from numpy.typing import ArrayLike

LATEST, MARGIN = 3, 0.05
"""Evaluations that are averaged, and how much above the loss before is as good as back."""


def last(losses: np.ndarray) -> np.ndarray:
    """The loss at the end of each run [..., evaluations]."""
    return losses[..., -LATEST:].mean(-1)


def steps_to_recover(
    losses: np.ndarray, onset: ArrayLike, every: int, margin: ArrayLike = MARGIN
) -> np.ndarray:
    """Steps from the first bad step until the loss is back, for each run.

    It is back when, after its peak, the mean of the latest losses is at most `margin` above that
    before the bad step; 0 if it never was higher, infinite if it does not come back or was not
    finite before.

    Args:
      losses: held-out losses [..., evaluations], the first of them after `every` steps.
      onset: how many steps came before the first bad one, int[...].
      every: steps from one evaluation to the next.
      margin: in the loss's unit, float[...].

    Raises:
      ValueError: if fewer than `LATEST` evaluations come before an onset, or none after it.
    """
    onset, margin = np.asarray(onset)[..., None], np.asarray(margin)[..., None]
    first = onset // every  # the first evaluation that the bad step can have changed
    if np.any((first < LATEST) | (first >= losses.shape[-1])):
        raise ValueError(
            f"onset must leave {LATEST} evaluations before and one after it, one every {every} "
            f"steps, got {np.unique(onset).tolist()} for {losses.shape[-1]} evaluations"
        )
    losses = np.where(np.isfinite(losses), losses, np.inf)
    means = np.stack([losses[..., i : losses.shape[-1] - LATEST + i + 1] for i in range(LATEST)])
    means = means.mean(0)
    first = np.broadcast_to(first - LATEST, (*means.shape[:-1], 1))  # of the last one before
    before = np.take_along_axis(means, first, -1)
    number = np.arange(means.shape[-1])
    is_here = number >= first
    is_low = means <= before + margin
    peak = np.argmax(np.where(is_here, means, -np.inf), -1)[..., None]
    is_back = is_here & is_low & (number >= peak)
    steps = (np.argmax(is_back, -1)[..., None] - first) * every - onset % every
    steps = np.where((is_low | ~is_here).all(-1), 0, steps[..., 0])
    return np.where(is_back.any(-1) & np.isfinite(before[..., 0]), steps, np.inf)

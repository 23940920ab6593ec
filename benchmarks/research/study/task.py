"""Defines the interface of tasks."""

from collections.abc import Callable
from typing import Any, NamedTuple

from jax import Array

Params = Any
Batch = Any


class Task(NamedTuple):
    """A network and its data, as functions of keys, so that a seed determines a run.

    Attributes:
      initial: Returns parameters from a key.
      batch: Returns a batch from parameters, a key and a bool[], which is true if labels, tokens or
        rewards are scrambled. All leaves have a leading example axis. Only policies use the
        parameters.
      losses: Returns the loss of every example from parameters and a batch, float32[examples].
      held_out: Returns the held-out loss of parameters, float32[].
      examples: The number of examples in a batch.
      unit: The unit of the loss.
      optimizers: The names of the optimizers.
      noise: For private training, the standard deviation of the noise divided by the threshold of
        the per-example norms. Otherwise None.
    """

    initial: Callable[[Array], Params]
    batch: Callable[[Params, Array, Array], Batch]
    losses: Callable[[Params, Batch], Array]
    held_out: Callable[[Params], Array]
    examples: int
    unit: str
    optimizers: tuple[str, ...]
    noise: float | None = None

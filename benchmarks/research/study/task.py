"""What the study asks of a task: a network, its data, and how good it is."""

from collections.abc import Callable
from typing import Any, NamedTuple

from jax import Array

Params = Any
Batch = Any


class Task(NamedTuple):
    """A network and its data, as functions of keys: all of a run follows from its seed.

    Attributes:
      initial: gives the parameters from a key.
      batch: gives a batch from the parameters, a key and a bool[], true if the labels, tokens or
        rewards are to be scrambled. Every leaf has the axis of the examples first. Only a task that
        acts, such as a policy, looks at the parameters.
      losses: gives the loss of each example from parameters and batch, float32[examples].
      held_out: gives the loss on held-out data from the parameters, float32[]; lower is better.
      examples: how many are in a batch.
      unit: what a loss is measured in.
      optimizers: the names of those that it is trained with.
      noise: None, or, for private training, the noise's standard deviation over the threshold of
        each example's norm.
    """

    initial: Callable[[Array], Params]
    batch: Callable[[Params, Array, Array], Batch]
    losses: Callable[[Params, Batch], Array]
    held_out: Callable[[Params], Array]
    examples: int
    unit: str
    optimizers: tuple[str, ...]
    noise: float | None = None

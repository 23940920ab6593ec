"""Examples with labels, and batches of them whose labels are scrambled."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array


class Examples(NamedTuple):
    """A batch, or all that is held out.

    Attributes:
      inputs: what the network sees, `[examples, ...]`.
      labels: what it is to tell, int32[examples] or, of text, int32[examples, characters].
    """

    inputs: Array
    labels: Array


def scrambled(examples: Examples, key: Array, is_bad: Array, labels: int) -> Examples:
    """The same inputs; if the batch is bad, with labels drawn by chance below `labels`."""
    drawn = jax.random.randint(key, examples.labels.shape, 0, labels)
    return examples._replace(labels=jnp.where(is_bad, drawn, examples.labels))

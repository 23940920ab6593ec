"""Defines labeled examples, and scrambles their labels."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array


class Examples(NamedTuple):
    """Inputs `[examples, ...]`, and labels, int32[examples] or int32[examples, characters]."""

    inputs: Array
    labels: Array


def scramble(examples: Examples, key: Array, is_bad: Array, labels: int) -> Examples:
    """Replaces the labels of bad batches by random labels below `labels`."""
    random_labels = jax.random.randint(key, examples.labels.shape, 0, labels)
    return examples._replace(labels=jnp.where(is_bad, random_labels, examples.labels))

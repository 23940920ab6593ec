"""Cuts a batch into microbatches so that each device keeps its share of every microbatch."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from optaxclip._base.trees import FlatTree, is_sparse, leaf_name
from optaxclip._base.types import PyTree
from optaxclip._border.crossing import split_as


def number_of_examples(flat: FlatTree, argument: str, remedy: str = "") -> int:
    """The size of the leading axis, the same for all leaves; else `remedy` ends the message."""
    sizes: dict[str, tuple[int, ...]] = {}
    for path, leaf in zip(flat.paths, flat.leaves, strict=True):
        if is_sparse(leaf):
            raise TypeError(f"{argument} must be dense; leaf '{leaf_name(path)}' is a BCOO")
        sizes[leaf_name(path)] = np.shape(leaf)
    if len({shape[:1] for shape in sizes.values()}) > 1 or () in sizes.values():
        raise ValueError(
            f"{argument} must have leaves [examples, ...] with the same number of examples; got "
            f"shapes {sizes}{remedy}"
        )
    return next(iter(sizes.values()))[0] if sizes else 0


class Cut(NamedTuple):
    """A batch cut into microbatches: microbatch `i` has the examples `i`, `i + number`, ...

    Each microbatch takes its `size` examples from all over the batch. So if the batch is split over
    devices, each device already holds its share, and nothing is gathered. The arrays are `[size,
    number, ...]`.
    """

    strided: PyTree
    size: int
    number: int

    @classmethod
    def of(cls, batch: PyTree, size: int, number: int) -> "Cut":
        """The first `size * number` examples of arrays `[examples, ...]`."""
        batch = jax.tree.map(jnp.asarray, batch)
        strided = jax.tree.map(functools.partial(_strided, size=size, number=number), batch)
        return cls(strided, size, number)

    def microbatch(self, i: Array) -> PyTree:
        """Microbatch `i`: arrays `[size, ...]`."""
        return jax.tree.map(
            lambda x: lax.dynamic_index_in_dim(x, i, axis=1, keepdims=False), self.strided
        )


def last_examples(x: Array, rest: int) -> Array:
    """The last `rest` examples of an array `[examples, ...]`."""

    def end(x: Array) -> Array:
        return x[x.shape[0] - rest :]

    return split_as(end, lambda split: (split.examples(rest), *split.spec[1:]), x)


def in_order_of_batch(x: Array) -> Array:
    """The examples `[count * size, ...]` in the order of the batch, from `[count, size, ...]`."""

    def in_order(x: Array) -> Array:
        # Not -1, which is undefined if the examples are empty arrays.
        return jnp.swapaxes(x, 0, 1).reshape(x.shape[0] * x.shape[1], *x.shape[2:])

    return split_as(in_order, lambda split: split.spec[1:], x)


def appended(x: Array, y: Array) -> Array:
    """The examples of `x`, then those of `y`."""

    def both(x: Array, y: Array) -> Array:
        return jnp.concatenate([x, y])

    examples = x.shape[0] + y.shape[0]
    return split_as(both, lambda split: (split.examples(examples), *split.spec[1:]), x, y)


def _strided(x: Array, *, size: int, number: int) -> Array:
    def strided(x: Array) -> Array:
        return x[: number * size].reshape(size, number, *x.shape[1:])

    return split_as(strided, lambda split: (split.examples(size), None, *split.spec[1:]), x)

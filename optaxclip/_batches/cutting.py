"""Cuts a batch into microbatches so that each device keeps its share of every microbatch."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from optaxclip._base.trees import FlatTree, is_sparse, leaf_name
from optaxclip._base.types import PyTree
from optaxclip._border.crossing import constrain_out_sharding


def get_batch_size(flat: FlatTree, argument: str, remedy: str = "") -> int:
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


class MicrobatchSplit(NamedTuple):
    """A batch cut into microbatches: microbatch `i` has the examples `i`, `i + number`, ...

    Each microbatch takes its `size` examples from all over the batch. So if the batch is split over
    devices, each device already holds its share, and nothing is gathered. The arrays are `[size,
    number, ...]`.
    """

    arrays: PyTree
    size: int
    num_microbatches: int

    @classmethod
    def split(cls, batch: PyTree, size: int, number: int) -> "MicrobatchSplit":
        """The first `size * number` examples of arrays `[examples, ...]`."""
        batch = jax.tree.map(jnp.asarray, batch)
        strided = jax.tree.map(functools.partial(_take_strided, size=size, number=number), batch)
        return cls(strided, size, number)

    def microbatch(self, i: Array) -> PyTree:
        """Microbatch `i`: arrays `[size, ...]`."""
        return jax.tree.map(
            lambda x: lax.dynamic_index_in_dim(x, i, axis=1, keepdims=False), self.arrays
        )


def remainder(x: Array, rest: int) -> Array:
    """The last `rest` examples of an array `[examples, ...]`."""

    def end(x: Array) -> Array:
        return x[x.shape[0] - rest :]

    return constrain_out_sharding(
        end, lambda split: (split.axes_dividing(rest), *split.spec[1:]), x
    )


def restore_batch_order(x: Array) -> Array:
    """The examples `[count * size, ...]` in the order of the batch, from `[count, size, ...]`."""

    def restore_order(x: Array) -> Array:
        # Not -1, which is undefined if the examples are empty arrays.
        return jnp.swapaxes(x, 0, 1).reshape(x.shape[0] * x.shape[1], *x.shape[2:])

    return constrain_out_sharding(restore_order, lambda split: split.spec[1:], x)


def concatenate_examples(x: Array, y: Array) -> Array:
    """The examples of `x`, then those of `y`."""

    def both(x: Array, y: Array) -> Array:
        return jnp.concatenate([x, y])

    examples = x.shape[0] + y.shape[0]
    return constrain_out_sharding(
        both, lambda split: (split.axes_dividing(examples), *split.spec[1:]), x, y
    )


def _take_strided(x: Array, *, size: int, number: int) -> Array:
    def take_strided(x: Array) -> Array:
        return x[: number * size].reshape(size, number, *x.shape[1:])

    return constrain_out_sharding(
        take_strided, lambda split: (split.axes_dividing(size), None, *split.spec[1:]), x
    )

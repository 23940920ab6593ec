"""Scopes: which entries share one norm.

A `Scope` looks at a flattened tree once, while it is traced, and returns a `Grouping`: the names of
the groups, which group each leaf belongs to, and over which of its axes the group extends.

  scope          | one norm for
  ---------------|---------------------------------------------------------------
  `tree()`       | all leaves together
  `group(labels)`| all leaves with the same label
  `leaf()`       | each leaf; with `stacked`, each layer of a leaf that stacks layers
  `axes(axes)`   | each slice of a leaf along the axes that are left
  `unit()`       | each output unit of a weight (Brock et al., 2021, arXiv 2102.06171)
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np
from jax import Array

from optaxclip._trees import FlatTree, is_sparse, per_leaf
from optaxclip._types import NormTree, PyTree


@dataclasses.dataclass(frozen=True)
class Grouping:
    """What a scope found out about one tree; static, so part of a compiled function's key.

    Attributes:
      names: one name per group; None for the single group of the whole tree.
      index: for each measured leaf, its group.
      axes: for each measured leaf, the axes over which it is reduced.
      is_summarized: whether the groups of a leaf are too many to report one by one.
    """

    names: tuple[str, ...] | None
    index: tuple[int, ...]
    axes: tuple[tuple[int, ...], ...]
    is_summarized: bool = False

    def members(self) -> list[list[int]]:
        """For each group, the positions of its measured leaves."""
        members = [[] for _ in self.names or (None,)]
        for leaf, group in enumerate(self.index):
            members[group].append(leaf)
        return members

    def pack(self, arrays: Sequence[Any]) -> NormTree:
        """One array per group as the pytree that limit rules and `ClipInfo` see."""
        if self.names is None:
            return arrays[0]
        return dict(zip(self.names, arrays, strict=True))

    def unpack(self, tree: NormTree) -> list[Any]:
        """The inverse of `pack`; entries of groups that this tree lacks are passed over."""
        return [tree] if self.names is None else [tree[name] for name in self.names]


Scope: TypeAlias = Callable[[FlatTree], Grouping]
"""Looks at a tree of gradients and says which of its entries share a norm."""

StackedAxes: TypeAlias = PyTree | Callable[[str, Array], int]


def tree() -> Scope:
    """One norm for the whole tree."""

    def assign(flat: FlatTree) -> Grouping:
        picked = flat.picked()
        return Grouping(None, (0,) * len(picked), tuple(_all_axes(leaf) for leaf in picked))

    return assign


def group(labels: PyTree | Callable[[str, Array], str]) -> Scope:
    """One norm for all leaves that carry the same label.

    Args:
      labels: a pytree prefix of the gradients with strings for leaves, or `fn(path, leaf) -> str`,
        where the path is text such as `encoder/0/kernel`.

    Raises:
      ValueError: (when used) if the labels do not fit the tree.
      TypeError: (when used) if a label is not a string.
    """

    def assign(flat: FlatTree) -> Grouping:
        picked = flat.picked()
        found = per_leaf(labels, flat, "labels")
        for label in found:
            if not isinstance(label, str):
                raise TypeError(f"labels must be strings, got {label!r}")
        names = tuple(sorted(set(found)))
        index = tuple(names.index(label) for label in found)
        return Grouping(names, index, tuple(_all_axes(leaf) for leaf in picked))

    return assign


def leaf(stacked: StackedAxes = 0) -> Scope:
    """One norm for each leaf.

    Args:
      stacked: how many leading axes of each leaf stack separate tensors, as `scan` over layers
        makes them: an int, a pytree prefix of ints, or `fn(path, leaf) -> int`. Each index along
        them is a group of its own.

    Raises:
      ValueError: (when used) if a leaf has fewer axes than it is said to stack.
    """

    def assign(flat: FlatTree) -> Grouping:
        counts = _stacked_counts(stacked, flat)
        axes = tuple(
            _all_axes(leaf)[count:] for leaf, count in zip(flat.picked(), counts, strict=True)
        )
        return _one_group_per_leaf(flat, axes)

    return assign


def axes(axes: int | Sequence[int]) -> Scope:
    """One norm for each slice of a leaf, reduced over the given axes.

    Args:
      axes: the axes over which a norm extends; negative ones count from the end.

    Raises:
      ValueError: (when used) if a leaf lacks one of the axes.
    """

    def assign(flat: FlatTree) -> Grouping:
        named = zip(flat.names(), flat.picked(), strict=True)
        reduced = tuple(_normalized(axes, leaf, name) for name, leaf in named)
        return _one_group_per_leaf(flat, reduced, is_summarized=True)

    return assign


def unit(
    axis: int | Sequence[int] | Callable[[str, Array], int | Sequence[int]] | None = None,
    stacked: StackedAxes = 0,
) -> Scope:
    """One norm for each output unit of a weight: the fan-in of one neuron or one filter.

    Weights are taken to have their output axis last, as Flax, Haiku and Keras lay them out:

      leaf                                       | reduced over
      -------------------------------------------|---------------------
      at most one axis longer than 1             | all axes
      matrix `[in, out]`, or rank 3              | 0
      convolution `[height, width, in, out]`     | 0, 1, 2
      convolution of rank 5                      | 0, 1, 2, 3

    Args:
      axis: the axes to reduce instead, for every leaf, or `fn(path, leaf) -> axes`.
      stacked: the number of leading stacked axes, as in `leaf`; the table and `axis` then speak of
        the axes that follow them.

    Raises:
      ValueError: (when used) for a leaf of another rank without `axis`; the message names its path.
    """

    def assign(flat: FlatTree) -> Grouping:
        counts = _stacked_counts(stacked, flat)
        reduced = []
        for name, leaf, skip in zip(flat.names(), flat.picked(), counts, strict=True):
            layer = jax.ShapeDtypeStruct(np.shape(leaf)[skip:], np.float32)
            chosen = axis(name, leaf) if callable(axis) else axis
            if chosen is None:
                chosen = _fan_in_axes(layer.shape, name)
            reduced.append(tuple(skip + a for a in _normalized(chosen, layer, name)))
        return _one_group_per_leaf(flat, tuple(reduced), is_summarized=True)

    return assign


def _all_axes(leaf: Any) -> tuple[int, ...]:
    return tuple(range(np.ndim(leaf)))


def _one_group_per_leaf(
    flat: FlatTree, axes: tuple[tuple[int, ...], ...], *, is_summarized: bool = False
) -> Grouping:
    names = tuple(flat.names())
    for name, leaf, reduced in zip(names, flat.picked(), axes, strict=True):
        if is_sparse(leaf) and len(reduced) < np.ndim(leaf):
            raise ValueError(f"the sparse leaf '{name}' can only be measured as a whole")
    return Grouping(names, tuple(range(len(names))), axes, is_summarized)


def _stacked_counts(stacked: StackedAxes, flat: FlatTree) -> list[int]:
    counts = per_leaf(stacked, flat, "stacked")
    for name, leaf, count in zip(flat.names(), flat.picked(), counts, strict=True):
        if not isinstance(count, int) or not 0 <= count <= np.ndim(leaf):
            raise ValueError(
                f"stacked must be the number of leading stacked axes, from 0 to {np.ndim(leaf)} "
                f"for leaf '{name}' of shape {np.shape(leaf)}, got {count!r}"
            )
    return counts


def _normalized(axes: int | Sequence[int], leaf: Any, name: str) -> tuple[int, ...]:
    rank = np.ndim(leaf)
    chosen = (axes,) if isinstance(axes, int) else tuple(axes)
    if any(not -rank <= axis < rank for axis in chosen):
        raise ValueError(
            f"axes {chosen} do not exist in leaf '{name}', which has shape {np.shape(leaf)}"
        )
    return tuple(sorted({axis % rank for axis in chosen}))


def _fan_in_axes(shape: tuple[int, ...], name: str) -> tuple[int, ...]:
    rank = len(shape)
    if sum(size != 1 for size in shape) <= 1:
        return tuple(range(rank))
    if rank in (2, 3):
        return (0,)
    if rank in (4, 5):
        return tuple(range(rank - 1))
    raise ValueError(
        f"leaf '{name}' has rank {rank} (shape {shape}), for which no unit is defined: pass axis="
    )

"""Scopes: which entries share one norm.

A `Scope` looks at a flattened tree once, while it is traced, and returns a `Grouping`: the names of
the groups, the leaves of each, and the axes over which a leaf is reduced.

  scope          | one norm for
  ---------------|---------------------------------------------------------------
  `tree()`       | all leaves together
  `group(labels)`| all leaves with the same label
  `leaf()`       | each leaf; with `stacked`, each layer of a leaf that stacks layers
  `axes(axes)`   | each slice of a leaf along the axes that are left
  `unit()`       | each output unit of a weight (Brock et al., 2021, arXiv 2102.06171)
"""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from optaxclip._base.numerics import promoted
from optaxclip._base.trees import FlatTree, is_sparse, per_leaf
from optaxclip._base.types import NormTree, PyTree


@dataclasses.dataclass(frozen=True)
class Slot:
    """Groups that are measured together: those of one leaf, or one group of several leaves.

    Attributes:
      names: the names of its groups; of the leaf where the groups are too many to name.
      members: positions of the measured leaves; none if this step's tree lacks them.
      shape: the shape of its norms, `()` for a single group.
    """

    names: tuple[str, ...]
    members: tuple[int, ...]
    shape: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Grouping:
    """What a scope found out about one tree; static, so part of a compiled function's key.

    Attributes:
      slots: sorted by their names, which together are sorted too.
      axes: for each measured leaf, the axes over which it is reduced.
      layout: how limit rules see the norms: "scalar", one number for the whole tree; "vector", an
        array with one entry for each name; "dict", one array for each leaf.
      axis_name: the mapped axes over which every leaf is split, if the user says so.
      specs: for each measured leaf how it is split, if the user says so.
    """

    slots: tuple[Slot, ...]
    axes: tuple[tuple[int, ...], ...]
    layout: Literal["scalar", "vector", "dict"]
    axis_name: tuple[str, ...] | None = None
    specs: tuple[Any, ...] | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all entries of a `ClipInfo`."""
        return tuple(name for slot in self.slots for name in slot.names)

    def slot_of_leaf(self) -> list[int]:
        """For each measured leaf, the position of its slot."""
        slots = {i: n for n, slot in enumerate(self.slots) for i in slot.members}
        return [slots[i] for i in range(len(slots))]

    def among(self, known: Iterable[str]) -> "Grouping":
        """The same grouping with a slot without leaves for each known name that it lacks."""
        absent = set(known) - set(self.names)
        slots = [*self.slots, *(Slot((name,), ()) for name in absent)]
        return dataclasses.replace(self, slots=tuple(sorted(slots, key=lambda slot: slot.names)))

    def pack(self, arrays: Sequence[Array]) -> NormTree:
        """One array per slot as the pytree that limit rules see; NaN for slots without leaves."""
        if self.layout == "scalar":
            return arrays[0]
        present = zip(self.slots, arrays, strict=True)
        arrays = [x if slot.members else jnp.full_like(x, jnp.nan) for slot, x in present]
        if self.layout == "dict":
            return {slot.names[0]: array for slot, array in zip(self.slots, arrays, strict=True)}
        flat = promoted([jnp.ravel(array) for array in arrays])
        return jnp.concatenate(flat) if flat else jnp.zeros(0)

    def unpack(self, tree: NormTree) -> list[Array]:
        """The inverse of `pack`."""
        if self.layout == "scalar":
            return [tree]
        if self.layout == "dict":
            return [tree[slot.names[0]] for slot in self.slots]
        sizes = [len(slot.names) for slot in self.slots]
        pieces = lax.split(tree, sizes) if sizes else []
        return [piece.reshape(slot.shape) for piece, slot in zip(pieces, self.slots, strict=True)]


Scope: TypeAlias = Callable[[FlatTree], Grouping]
"""Looks at a tree of gradients and says which of its entries share a norm."""

StackedAxes: TypeAlias = PyTree | Callable[[str, Array], int]


def tree() -> Scope:
    """One norm for the whole tree.

    Example:
      >>> import jax.numpy as jnp, optaxclip
      >>> tx = optaxclip.clip_by(optaxclip.scopes.tree(), 1.0)
      >>> grads = {"w": jnp.array([3.0]), "b": jnp.array([4.0])}
      >>> print(tx.update(grads, tx.init(grads))[1].info.norm)
      5.0
    """

    def assign(flat: FlatTree) -> Grouping:
        picked = flat.picked()
        everything = Slot(("tree",), tuple(range(len(picked))))
        return Grouping((everything,), tuple(_all_axes(leaf) for leaf in picked), "scalar")

    return assign


def group(labels: PyTree | Callable[[str, Array], str]) -> Scope:
    """One norm for all leaves that carry the same label.

    Args:
      labels: a pytree prefix of the gradients with strings for leaves, or `fn(path, leaf) -> str`,
        where the path is text such as `encoder/0/kernel`.

    Raises:
      ValueError: (when used) if the labels do not fit the tree.
      TypeError: (when used) if a label is not a string.

    Example:
      >>> import jax.numpy as jnp, optaxclip
      >>> scope = optaxclip.scopes.group({"encoder": "body", "head": "head"})
      >>> tx = optaxclip.clip_by(scope, {"body": 1.0, "head": 10.0})
      >>> grads = {"encoder": [jnp.array([3.0]), jnp.array([4.0])], "head": jnp.array([8.0])}
      >>> info = tx.update(grads, tx.init(grads))[1].info
      >>> print(list(info.names), info.norm, info.limit)
      ['body', 'head'] [5. 8.] [ 1. 10.]
    """

    def assign(flat: FlatTree) -> Grouping:
        picked = flat.picked()
        found = per_leaf(labels, flat, "labels")
        for label in found:
            if not isinstance(label, str):
                raise TypeError(f"labels must be strings, got {label!r}")
        slots = tuple(
            Slot((label,), tuple(i for i, other in enumerate(found) if other == label))
            for label in sorted(set(found))
        )
        return Grouping(slots, tuple(_all_axes(leaf) for leaf in picked), "vector")

    return assign


def leaf(stacked: StackedAxes = 0) -> Scope:
    """One norm for each leaf.

    Args:
      stacked: how many leading axes of each leaf stack separate tensors, as `scan` over layers
        makes them: an int, a pytree prefix of ints, or `fn(path, leaf) -> int`. Each index along
        them is a group of its own.

    Raises:
      ValueError: (when used) if a leaf has fewer axes than it is said to stack.

    Example:
      >>> import jax.numpy as jnp, optaxclip
      >>> tx = optaxclip.clip_by(optaxclip.scopes.leaf(stacked={"layers": 1, "head": 0}), 1.0)
      >>> grads = {"layers": jnp.array([[3.0, 4.0], [0.0, 2.0]]), "head": jnp.array([6.0, 8.0])}
      >>> info = tx.update(grads, tx.init(grads))[1].info
      >>> print(list(info.names), info.norm)
      ['head', 'layers/0', 'layers/1'] [10.  5.  2.]
    """

    def assign(flat: FlatTree) -> Grouping:
        counts = _stacked_counts(stacked, flat)
        axes = tuple(
            _all_axes(leaf)[count:] for leaf, count in zip(flat.picked(), counts, strict=True)
        )
        return _one_slot_per_leaf(flat, axes, "vector")

    return assign


def axes(axes: int | Sequence[int]) -> Scope:
    """One norm for each slice of a leaf, reduced over the given axes.

    Args:
      axes: the axes over which a norm extends; negative ones count from the end.

    Raises:
      ValueError: (when used) if a leaf lacks one of the axes.

    Example:
      >>> import jax.numpy as jnp, optaxclip
      >>> rows = optaxclip.clip_by(optaxclip.scopes.axes(-1), 5.0)
      >>> grads = jnp.array([[3.0, 4.0], [6.0, 8.0]])
      >>> print(rows.update(grads, rows.init(grads))[0].round(4))
      [[3. 4.]
       [3. 4.]]
    """

    def assign(flat: FlatTree) -> Grouping:
        named = zip(flat.names(), flat.picked(), strict=True)
        reduced = tuple(_normalized(axes, leaf, name) for name, leaf in named)
        return _one_slot_per_leaf(flat, reduced, "dict")

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

    Example:
      >>> import jax.numpy as jnp, optaxclip
      >>> tx = optaxclip.clip_by(optaxclip.scopes.unit(), 5.0)
      >>> kernel = jnp.array([[3.0, 6.0], [4.0, 8.0]])  # two inputs, two outputs
      >>> print(tx.update(kernel, tx.init(kernel))[0].round(4))
      [[3. 3.]
       [4. 4.]]
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
        return _one_slot_per_leaf(flat, tuple(reduced), "dict")

    return assign


def _all_axes(leaf: Any) -> tuple[int, ...]:
    return tuple(range(np.ndim(leaf)))


def _one_slot_per_leaf(
    flat: FlatTree, axes: tuple[tuple[int, ...], ...], layout: Literal["vector", "dict"]
) -> Grouping:
    slots = []
    for i, (name, leaf, reduced) in enumerate(zip(flat.names(), flat.picked(), axes, strict=True)):
        if is_sparse(leaf) and len(reduced) < np.ndim(leaf):
            raise ValueError(f"the sparse leaf '{name}' can only be measured as a whole")
        shape = tuple(size for axis, size in enumerate(np.shape(leaf)) if axis not in reduced)
        names = _layer_names(name, shape) if layout == "vector" else (name,)
        slots.append(Slot(names, (i,), shape))
    return Grouping(tuple(sorted(slots, key=lambda slot: slot.names)), axes, layout)


def _layer_names(name: str, shape: tuple[int, ...]) -> tuple[str, ...]:
    """`name/00`, `name/01`, ... for a leaf of several layers; padded, so that they sort."""
    if not all(isinstance(size, int) for size in shape):
        raise ValueError(f"leaf '{name}' must stack a fixed number of layers, got shape {shape}")
    widths = [len(str(max(size - 1, 0))) for size in shape]
    return tuple(
        "/".join([name, *(f"{i:0{width}}" for i, width in zip(index, widths, strict=True))])
        for index in np.ndindex(*shape)
    )


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

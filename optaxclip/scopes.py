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
  `muon()`       | all leaves that `optax.contrib.muon` trains by Muon, and all others
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias

import jax
import numpy as np
from jax import Array

from optaxclip._base.grouping import Group, Grouping
from optaxclip._base.trees import FlatTree, is_sparse, per_leaf
from optaxclip._base.types import PyTree

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
        everything = Group(("tree",), tuple(range(len(picked))))
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
        found = per_leaf(labels, flat, "labels")
        for label in found:
            if not isinstance(label, str):
                raise TypeError(f"labels must be strings, got {label!r}")
        groups = tuple(
            Group((label,), tuple(i for i, other in enumerate(found) if other == label))
            for label in sorted(set(found))
        )
        return Grouping(groups, tuple(map(_all_axes, flat.picked())), "vector")

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
        return _one_group_per_leaf(flat, axes, "vector")

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
        return _one_group_per_leaf(flat, reduced, "dict")

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
        wholes = flat.whole or [np.shape(leaf) for leaf in flat.picked()]
        rows = zip(flat.names(), flat.picked(), wholes, counts, strict=True)
        for name, leaf, whole, skip in rows:
            layer = jax.ShapeDtypeStruct(np.shape(leaf)[skip:], np.float32)
            chosen = axis(name, leaf) if callable(axis) else axis
            if chosen is None:
                chosen = _fan_in_axes(whole and whole[skip:], layer.shape, name)
            reduced.append(tuple(skip + a for a in _normalized(chosen, layer, name)))
        return _one_group_per_leaf(flat, tuple(reduced), "dict")

    return assign


def muon(weight_dimension_numbers: PyTree | Callable[[PyTree], PyTree] = None) -> Scope:
    """One norm for all leaves that `optax.contrib.muon` trains by Muon, one for those of its Adam.

    Muon's updates do not depend on the scale of its gradients, so those have no place in the norm
    that clips Adam's, and need no limit of their own; `docs/muon.md` has more.

    Args:
      weight_dimension_numbers: what is given to Muon as `muon_weight_dimension_numbers`: a pytree
        prefix of the parameters with `MuonDimensionNumbers`, or None for what Adam trains, or a
        function from the parameters to one. If None, Muon trains all matrices.

    Raises:
      ValueError: (when used) if the dimension numbers do not fit the tree.

    Example:
      >>> import math, jax.numpy as jnp, optaxclip
      >>> tx = optaxclip.clip_by(optaxclip.scopes.muon(), {"adam": 1.0, "muon": math.inf})
      >>> grads = {"w": jnp.full((2, 2), 50.0), "b": jnp.array([3.0, 4.0])}
      >>> updates, state = tx.update(grads, tx.init(grads))
      >>> print(updates["w"][0], updates["b"].round(3))
      [50. 50.] [0.6 0.8]
      >>> print(list(state.info.names), state.info.norm, state.info.factor)
      ['adam', 'muon'] [  5. 100.] [0.2 1. ]
    """
    labels = muon_labels(weight_dimension_numbers)

    def assign(flat: FlatTree) -> Grouping:
        whole = jax.tree_util.tree_unflatten(flat.treedef, flat.leaves)
        return group(labels(whole))(flat)

    return assign


def muon_labels(
    weight_dimension_numbers: PyTree | Callable[[PyTree], PyTree] = None,
) -> Callable[[PyTree], PyTree]:
    """Which leaves `optax.contrib.muon` trains by Muon, and which by Adam: a function that tells.

    It is for `optax.partition` and for masks; as a scope it is `muon`.

    Args:
      weight_dimension_numbers: as in `muon`.

    Returns:
      A function from parameters, or anything with their structure and shapes, to a pytree like them
      with "muon" and "adam" for leaves.

    Raises:
      ValueError: (when used) if the dimension numbers do not fit the tree.

    Example:
      >>> import jax.numpy as jnp, optaxclip
      >>> params = {"w": jnp.ones((2, 2)), "b": jnp.ones(2), "layers": jnp.ones((3, 2, 2))}
      >>> optaxclip.scopes.muon_labels()(params)
      {'b': 'adam', 'layers': 'adam', 'w': 'muon'}
    """

    def label(params: PyTree) -> PyTree:
        chosen = weight_dimension_numbers
        if chosen is None:
            return _labels(params, lambda leaf: np.ndim(leaf) == 2)
        chosen = chosen(params) if callable(chosen) else chosen
        try:
            return jax.tree.map(
                lambda numbers, part: _labels(part, lambda _: _is_muon(numbers)),
                chosen,
                params,
                is_leaf=lambda x: x is None or hasattr(x, "reduction_axis"),
            )
        except ValueError as error:
            raise ValueError(
                "weight_dimension_numbers is not a pytree prefix of the parameters, with "
                f"MuonDimensionNumbers or None for leaves: {error}"
            ) from None

    return label


def _is_muon(numbers: Any) -> bool:
    if numbers is None or hasattr(numbers, "reduction_axis"):
        return numbers is not None
    raise ValueError(f"got {numbers!r}")


def _labels(tree: PyTree, is_muon: Callable[[Any], bool]) -> PyTree:
    return jax.tree.map(lambda x: "muon" if is_muon(x) else "adam", tree, is_leaf=is_sparse)


def _all_axes(leaf: Any) -> tuple[int, ...]:
    return tuple(range(np.ndim(leaf)))


def _one_group_per_leaf(
    flat: FlatTree, axes: tuple[tuple[int, ...], ...], layout: Literal["vector", "dict"]
) -> Grouping:
    groups = []
    for i, (name, leaf, reduced) in enumerate(zip(flat.names(), flat.picked(), axes, strict=True)):
        if is_sparse(leaf) and len(reduced) < np.ndim(leaf):
            raise ValueError(f"the sparse leaf '{name}' can only be measured as a whole")
        shape = tuple(size for axis, size in enumerate(np.shape(leaf)) if axis not in reduced)
        names = _layer_names(name, shape) if layout == "vector" else (name,)
        groups.append(Group(names, (i,), shape))
    return Grouping(tuple(sorted(groups, key=lambda group: group.names)), axes, layout)


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
        if not isinstance(count, (int, np.integer)) or not 0 <= count <= np.ndim(leaf):
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


def _fan_in_axes(
    whole: tuple[int, ...] | None, shape: tuple[int, ...], name: str
) -> tuple[int, ...]:
    """The axes of a unit, by the shape of the whole layer; `shape` is what this device holds."""
    rank = len(shape)
    if whole is None and rank > 1 and _num_long(shape) <= 1:
        raise ValueError(
            f"leaf '{name}' of shape {shape} is a part of what all devices hold, and what a unit "
            "is follows from the whole shape: pass specs= (a pytree of PartitionSpec), or axis="
        )
    if _num_long(shape if whole is None else whole) <= 1:
        return tuple(range(rank))
    if rank in (2, 3):
        return (0,)
    if rank in (4, 5):
        return tuple(range(rank - 1))
    raise ValueError(
        f"leaf '{name}' has rank {rank} (shape {shape}), for which no unit is defined: pass axis="
    )


def _num_long(shape: tuple[int, ...]) -> int:
    return sum(size != 1 for size in shape)

"""Scopes: the groups of elements that share a norm.

A `Scope` is a function from a flattened tree to a `Grouping`, which contains the names and leaves
of the groups and the axes over which norms are computed.

  scope          | groups
  ---------------|---------------------------------------------------------------
  `tree()`       | all leaves together
  `group(labels)`| leaves with the same label
  `leaf()`       | individual leaves, or individual layers of leaves that stack layers
  `axes(axes)`   | slices of leaves
  `unit()`       | output units of layers (Brock et al., 2021, arXiv 2102.06171)
  `ensemble_member()` | members of an ensemble stacked in one tree
  `muon()`       | leaves trained with Muon by `optax.contrib.muon`, and all other leaves
"""

import itertools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import jax
import numpy as np
from jax import Array

from optaxclip._base.trees import FlatTree as FlatTree
from optaxclip._base.trees import Group as Group
from optaxclip._base.trees import Grouping as Grouping
from optaxclip._base.trees import (
    broadcast_branches,
    broadcast_prefix,
    is_function,
    is_sparse,
    tree_scope,
)
from optaxclip._base.types import PyTree
from optaxclip._base.validation import short_repr, validate_call, warn

Scope: TypeAlias = Callable[[FlatTree], Grouping]
"""A function that divides the elements of a flattened tree into groups."""

StackedAxes: TypeAlias = PyTree | Callable[[str, Array], int]


@validate_call()
def tree() -> Scope:
    """Treats the whole tree as one group.

    Example:
      >>> import jax.numpy as jnp, optaxclip
      >>> tx = optaxclip.clip_by(optaxclip.scopes.tree(), 1.0)
      >>> grads = {"w": jnp.array([3.0]), "b": jnp.array([4.0])}
      >>> print(tx.update(grads, tx.init(grads))[1].info.norm)
      5.0
    """

    @tree_scope
    def assign(flat: FlatTree) -> Grouping:
        leaves = flat.inexact_leaves()
        # All axes are reduced, so the norm is a scalar.
        group = Group(("tree",), tuple(range(len(leaves))))
        return Grouping((group,), tuple([tuple(range(np.ndim(x))) for x in leaves]), "scalar")

    return assign


@validate_call()
def group(labels: PyTree | Callable[[str, Array], str]) -> Scope:
    """Groups leaves with the same label.

    Args:
      labels: A pytree prefix of the gradients with strings as leaves, or a function
        `(path, leaf) -> str`, where paths are strings such as `encoder/0/kernel`. As in
        `optax.partition`, it can also be a function from the whole tree to a pytree prefix.

    Raises:
      ValueError: If the labels are not a pytree prefix of the tree (in `init` and `update`).
      TypeError: If a label is not a string (in `init` and `update`).

    Example:
      >>> import jax.numpy as jnp, optaxclip
      >>> scope = optaxclip.scopes.group({"encoder": "body", "head": "head"})
      >>> tx = optaxclip.clip_by(scope, {"body": 1.0, "head": 10.0})
      >>> grads = {"encoder": [jnp.array([3.0]), jnp.array([4.0])], "head": jnp.array([8.0])}
      >>> info = tx.update(grads, tx.init(grads))[1].info
      >>> print(list(info.names), info.norm, info.threshold)
      ['body', 'head'] [5. 8.] [ 1. 10.]
    """

    @tree_scope
    def assign(flat: FlatTree) -> Grouping:
        by_leaf = broadcast_prefix(labels, flat, "labels")
        for label, name in zip(by_leaf, flat.names(), strict=True):
            if not isinstance(label, str):
                raise TypeError(f"labels must be strings, got {label!r} for leaf '{name}'")
        # Norms are stored in the order of the sorted names.
        groups = tuple(
            Group((label,), tuple(i for i, other in enumerate(by_leaf) if other == label))
            for label in sorted(set(by_leaf))
        )
        axes = tuple(tuple(range(np.ndim(leaf))) for leaf in flat.inexact_leaves())
        return Grouping(groups, axes, "vector", has_labels=True)

    return assign


@validate_call()
def leaf(stacked: StackedAxes = 0) -> Scope:
    """Treats each leaf as a group, or each layer of leaves that stack layers.

    Args:
      stacked: The number of leading axes that stack layers, for example for a `scan` over layers:
        an int for all leaves, a dict that maps branches to ints (0 for other branches), a pytree
        prefix of ints, or a function `(path, leaf) -> int`. Defaults to 0. An int causes a warning
        if it makes more than 4096 groups, because it probably applies to an embedding
        `[words, ...]`.

    Raises:
      ValueError: If a leaf has fewer axes than `stacked` (in `init` and `update`).

    Example:
      >>> import jax.numpy as jnp, optaxclip
      >>> tx = optaxclip.clip_by(optaxclip.scopes.leaf(stacked={"layers": 1}), 1.0)
      >>> grads = {"layers": jnp.array([[3.0, 4.0], [0.0, 2.0]]), "head": jnp.array([6.0, 8.0])}
      >>> info = tx.update(grads, tx.init(grads))[1].info
      >>> print(list(info.names), info.norm)
      ['head', 'layers/0', 'layers/1'] [10.  5.  2.]
    """

    @tree_scope
    def assign(flat: FlatTree) -> Grouping:
        counts = _count_stacked_axes(stacked, flat)
        # The stacked axes are not reduced, so a leaf [layers, ...] has norms [layers].
        axes = tuple(
            tuple(range(count, np.ndim(leaf)))
            for leaf, count in zip(flat.inexact_leaves(), counts, strict=True)
        )
        return _group_by_leaf(flat, axes, "vector")

    return assign


@validate_call()
def axes(axes: int | Sequence[int]) -> Scope:
    """Treats each slice of the leaves along the given axes as a group.

    Args:
      axes: The axes over which norms are computed. Negative numbers count from the end.

    Raises:
      ValueError: If a leaf does not have one of the axes (in `init` and `update`).
      TypeError: If an axis is not an int (in `init` and `update`).

    Example:
      >>> import jax.numpy as jnp, optaxclip
      >>> rows = optaxclip.clip_by(optaxclip.scopes.axes(-1), 5.0)
      >>> grads = jnp.array([[3.0, 4.0], [6.0, 8.0]])
      >>> print(rows.update(grads, rows.init(grads))[0].round(4))
      [[3. 4.]
       [3. 4.]]
    """

    @tree_scope
    def assign(flat: FlatTree) -> Grouping:
        named = zip(flat.names(), flat.inexact_leaves(), strict=True)
        reduced = tuple(_normalize_axes(axes, leaf, name) for name, leaf in named)
        return _group_by_leaf(flat, reduced, "dict")

    return assign


@validate_call()
def unit(
    axis: int | Sequence[int] | Callable[[str, Array], int | Sequence[int] | None] | None = None,
    stacked: StackedAxes = 0,
) -> Scope:
    """Treats the parameters of each output unit as a group.

    By default, the last axis of a leaf must be its output axis, as in Flax, Haiku, and Keras, and
    norms are computed over the axes in this table. You must pass `axis` for leaves `[out, in]`, as
    in Equinox, and for 1D convolutions `[width, in, out]`.

      leaf                                       | axes of the norms
      -------------------------------------------|---------------------
      at most one axis longer than 1             | all axes
      matrix `[in, out]`, or rank 3              | 0
      convolution `[height, width, in, out]`     | 0, 1, 2
      convolution of rank 5                      | 0, 1, 2, 3

    Args:
      axis: The axes over which norms are computed, or a function `(path, leaf) -> axes`, which can
        return None to use the table. By default, the table is used for all leaves.
      stacked: The number of leading axes that stack layers, as in `leaf`. These axes are ignored in
        the table and in `axis`.

    Raises:
      ValueError: If `axis` is required for the rank of a leaf (in `init` and `update`).

    Example:
      >>> import jax.numpy as jnp, optaxclip
      >>> tx = optaxclip.clip_by(optaxclip.scopes.unit(), 5.0)
      >>> kernel = jnp.array([[3.0, 6.0], [4.0, 8.0]])  # two inputs, two outputs
      >>> print(tx.update(kernel, tx.init(kernel))[0].round(4))
      [[3. 3.]
       [4. 4.]]
    """

    @tree_scope
    def assign(flat: FlatTree) -> Grouping:
        counts = _count_stacked_axes(stacked, flat)
        shapes, global_shapes = flat.shapes(), flat.global_shapes or [()] * len(counts)
        reduced = []
        for i, (name, leaf) in enumerate(zip(flat.names(), flat.inexact_leaves(), strict=True)):
            layer = jax.ShapeDtypeStruct(shapes[i][counts[i] :], np.float32)
            chosen = axis(name, leaf) if callable(axis) else axis
            if chosen is None:
                chosen = _fan_in_axes(layer.shape, name, is_shard=global_shapes[i] is None)
            reduced.append(tuple(counts[i] + a for a in _normalize_axes(chosen, layer, name)))
        return _group_by_leaf(flat, tuple(reduced), "dict")

    return assign


@validate_call()
def ensemble_member(axis: int = 0) -> Scope:
    """Treats each ensemble member as a group, for leaves `[members, ...]`.

    Use this scope if an ensemble or runs with different seeds are stacked in one tree. It clips
    members separately, like `jax.vmap` of the update. If you used the scope `tree`, one exploding
    member would shrink the gradients of the other members.

    Args:
      axis: The axis of the members in all leaves. Defaults to 0. Can be negative.

    Raises:
      ValueError: If a leaf does not have the axis or is sparse, or if the number of members differs
        between leaves (in `init` and `update`).
      TypeError: If the axis is not an int.

    Example:
      >>> import jax.numpy as jnp, optaxclip
      >>> tx = optaxclip.clip_by(optaxclip.scopes.ensemble_member(), 1.0)
      >>> grads = {"w": jnp.array([[3.0, 0.0], [0.3, 0.0]]), "b": jnp.array([4.0, 0.4])}
      >>> info = tx.update(grads, tx.init(grads))[1].info
      >>> print(list(info.names), info.norm)
      ['0', '1'] [5.  0.5]
    """
    # In Python, `True` is an int and would be axis 1.
    if isinstance(axis, bool) or not isinstance(axis, (int, np.integer)):
        raise TypeError(f"axis must be an int, got {axis!r}")

    @tree_scope
    def assign(flat: FlatTree) -> Grouping:
        reduced, sizes = [], {}
        rows = zip(flat.names(), flat.inexact_leaves(), flat.shapes(), strict=True)
        for name, leaf, shape in rows:
            if is_sparse(leaf):
                raise ValueError(
                    f"leaf '{name}' must be dense, but is a BCOO array; pass leaf.todense()"
                )
            (kept,) = _normalize_axes(axis, leaf, name)
            reduced.append(tuple(k for k in range(len(shape)) if k != kept))  # all other axes
            sizes[name] = shape[kept]
        if len(set(sizes.values())) > 1:
            raise ValueError(
                f"leaves must have the same size along axis {axis}, but have {short_repr(sizes)}"
            )
        indices = tuple(range(len(reduced)))
        # There is one group, `[members]`, or none if the tree has no leaves.
        groups = [Group(_layer_names("", (n,)), indices, (n,)) for n in set(sizes.values())]
        return Grouping(tuple(groups), tuple(reduced), "vector")

    return assign


@validate_call()
def muon(weight_dimension_numbers: PyTree | Callable[[PyTree], PyTree] = None) -> Scope:
    """Separates leaves trained with Muon in `optax.contrib.muon` from all other leaves.

    Muon's updates do not depend on the scale of its gradients, so these gradients should not affect
    how much Adam's gradients are clipped. Muon itself only needs clipping for spikes, which affect
    its momentum for about 100 steps (see `docs/muon.md`).

    Args:
      weight_dimension_numbers: The argument `muon_weight_dimension_numbers` of Muon, which is a
        pytree prefix of the parameters or a function from parameters to a prefix. Its leaves are
        `MuonDimensionNumbers` for Muon and None for Adam. By default, Muon trains all matrices.

    Raises:
      ValueError: If the dimension numbers do not match the tree (in `init` and `update`).

    Example:
      >>> import jax.numpy as jnp, optaxclip
      >>> tx = optaxclip.clip_by(optaxclip.scopes.muon(), {"adam": 1.0, "muon": 500.0})
      >>> grads = {"w": jnp.full((2, 2), 50.0), "b": jnp.array([3.0, 4.0])}
      >>> updates, state = tx.update(grads, tx.init(grads))
      >>> print(updates["w"][0], updates["b"].round(3))
      [50. 50.] [0.6 0.8]
      >>> print(list(state.info.names), state.info.norm, state.info.factor)
      ['adam', 'muon'] [  5. 100.] [0.2 1. ]
    """
    labels = muon_labels(weight_dimension_numbers)

    @tree_scope
    def assign(flat: FlatTree) -> Grouping:
        tree = jax.tree_util.tree_unflatten(flat.treedef, flat.leaves)
        return group(labels(tree) if flat.inexact_indices else {})(flat)

    return assign


@validate_call()
def muon_labels(
    weight_dimension_numbers: PyTree | Callable[[PyTree], PyTree] = None,
) -> Callable[[PyTree], PyTree]:
    """Returns a function that labels leaves by their optimizer in `optax.contrib.muon`.

    The scope `muon` uses these labels, and `optax.partition` accepts the function.

    Args:
      weight_dimension_numbers: The dimension numbers of Muon, as in `muon`.

    Returns:
      A function from parameters to a pytree with the same structure and the leaves "muon" and
      "adam". It also accepts trees with the structure and shapes of the parameters.

    Raises:
      ValueError: If the dimension numbers do not match the tree when the function is called.

    Example:
      >>> import jax.numpy as jnp, optaxclip
      >>> params = {"w": jnp.ones((2, 2)), "b": jnp.ones(2), "layers": jnp.ones((3, 2, 2))}
      >>> optaxclip.scopes.muon_labels()(params)
      {'b': 'adam', 'layers': 'adam', 'w': 'muon'}
    """

    def is_numbers(x: Any) -> bool:  # None labels parameters for Adam.
        return x is None or hasattr(x, "reduction_axis")

    def label_branch(numbers: Any, branch: PyTree) -> PyTree:
        if not is_numbers(numbers):
            raise ValueError(f"{numbers!r} is neither")
        label = "adam" if numbers is None else "muon"
        return jax.tree.map(lambda _: label, branch, is_leaf=is_sparse)

    def label_params(params: PyTree) -> PyTree:
        numbers = weight_dimension_numbers
        if numbers is None:
            return jax.tree.map(
                lambda x: "muon" if np.ndim(x) == 2 else "adam", params, is_leaf=is_sparse
            )
        numbers = numbers(params) if is_function(numbers, params) else numbers
        try:
            return jax.tree.map(label_branch, numbers, params, is_leaf=is_numbers)
        except ValueError as error:
            raise ValueError(
                "weight_dimension_numbers must be a pytree prefix of the parameters whose leaves "
                f"are MuonDimensionNumbers or None, but matching it failed: {error}"
            ) from None

    return label_params


def _group_by_leaf(
    flat: FlatTree, axes: tuple[tuple[int, ...], ...], layout: Literal["vector", "dict"]
) -> Grouping:
    """Makes a group, or an array of groups, of each leaf, with norms over `axes`."""
    groups = []
    shapes = flat.shapes()
    rows = zip(flat.names(), flat.inexact_leaves(), axes, strict=True)
    for i, (name, leaf, reduced) in enumerate(rows):
        # The stored elements of a sparse array cannot be sliced along an axis.
        if is_sparse(leaf) and len(reduced) < np.ndim(leaf):
            raise ValueError(
                f"sparse leaf '{name}' must form a single group, but the scope computes norms "
                f"over axes {reduced}; use scopes.leaf()"
            )
        # The norms of a leaf have the shape of its remaining axes.
        shape = tuple(size for axis, size in enumerate(shapes[i]) if axis not in reduced)
        names = _layer_names(name, shape) if layout == "vector" else (name,)
        groups.append(Group(names, (i,), shape))
    return Grouping(tuple(sorted(groups, key=lambda group: group.names)), axes, layout)


def _layer_names(name: str, shape: tuple[int, ...]) -> tuple[str, ...]:
    """Returns `name/00`, `name/01`, ..., or `name` for the shape `()`."""
    if not shape:
        return (name,)
    if not all(isinstance(size, int) for size in shape):
        raise ValueError(f"leaf '{name}' must have a fixed number of layers, but has shape {shape}")
    # Padding with zeros makes the order of sorted names the order of layers.
    widths = [len(str(max(size - 1, 0))) for size in shape]
    prefix = [name] if name else []
    return tuple(
        "/".join(prefix + [f"{i:0{width}}" for i, width in zip(index, widths, strict=True)])
        for index in itertools.product(*map(range, shape))
    )


_MANY_LAYERS = 4096


def _count_stacked_axes(stacked: StackedAxes, flat: FlatTree) -> list[int]:
    """Returns the numbers of leading axes that stack layers."""
    # A dict of ints can be incomplete. Other dicts must be complete pytree prefixes.
    counts = broadcast_branches(stacked, flat) if isinstance(stacked, Mapping) else None
    counts = broadcast_prefix(stacked, flat, "stacked") if counts is None else counts
    shapes = flat.shapes()
    for i, (leaf, count) in enumerate(zip(flat.inexact_leaves(), counts, strict=True)):
        if not isinstance(count, (int, np.integer)) or not 0 <= count <= np.ndim(leaf):
            raise ValueError(
                f"stacked must be an int between 0 and {np.ndim(leaf)} for leaf "
                f"'{flat.names()[i]}' of shape {np.shape(leaf)}, got {count!r}"
            )
    if isinstance(stacked, (int, np.integer)) and stacked:
        sizes = [math.prod(shape[:stacked]) for shape in shapes]
        # Sizes may be symbolic in `jax.export`.
        if sum(size for size in sizes if isinstance(size, int)) > _MANY_LAYERS:
            name, shape = max(zip(flat.names(), shapes, strict=True), key=lambda x: x[1][0])
            warn(
                f"stacked={stacked} creates {sum(sizes)} groups, because it also applies to leaf "
                f"'{name}' of shape {shape}; use a dict of branches, as in stacked={{'layers': 1}}"
            )
    return counts


def _normalize_axes(axes: int | Sequence[int], leaf: Any, name: str) -> tuple[int, ...]:
    """Checks the axes of a leaf and returns them as sorted non-negative ints."""
    rank = np.ndim(leaf)
    # `operator.index` rejects floats and strings.
    try:
        sequence: Any = axes if np.ndim(axes) else (axes,)
        chosen = tuple(operator.index(axis) for axis in sequence)
    except TypeError:
        raise TypeError(f"axes must be an int or a sequence of ints, got {axes!r}") from None
    if any(not -rank <= axis < rank for axis in chosen):
        raise ValueError(
            f"axes must be between {-rank} and {rank - 1} for leaf '{name}' of shape "
            f"{np.shape(leaf)}, got {chosen}"
        )
    reduced = tuple(sorted({axis % rank for axis in chosen}))
    if is_sparse(leaf) and len(reduced) < rank:
        raise ValueError(
            f"sparse leaf '{name}' requires axes 0 to {rank - 1}, got {axes!r}; pass "
            "leaf.todense() to compute norms over some of its axes"
        )
    return reduced


def _fan_in_axes(shape: tuple[int, ...], name: str, *, is_shard: bool) -> tuple[int, ...]:
    """Returns the axes over which the norms of units are computed."""
    rank = len(shape)
    num_long = sum(size != 1 for size in shape)
    # A sharded matrix can look like a vector, for example [1, out] for [8, out] on 8 devices.
    if is_shard and rank > 1 and num_long <= 1:
        raise ValueError(
            f"the global shape of leaf '{name}' is unknown, because an array of shape {shape} may "
            "be a shard; pass a pytree of PartitionSpec as specs, or pass axis"
        )
    # Biases and the scales of normalization layers are one unit.
    if num_long <= 1:
        return tuple(range(rank))
    # Dense layers `[in, out]`, and attention projections `[in, heads, out]`.
    if rank in (2, 3):
        return (0,)
    # Convolutions over two or three dimensions, `[..., in, out]`.
    if rank in (4, 5):
        return tuple(range(rank - 1))
    raise ValueError(
        f"leaf '{name}' has {rank} dimensions, but default axes are defined only for up to 5 "
        "dimensions; pass axis"
    )

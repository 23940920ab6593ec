"""Scopes over slices of leaves: axes, output units, ensemble members, and the leaves of Muon."""

import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import Array

from optaxclip._base.trees import FlatTree, Group, Grouping, is_function, is_sparse
from optaxclip._base.types import PyTree
from optaxclip._base.validation import short_repr, validate_call
from optaxclip.scopes.leaves import (
    Scope,
    StackedAxes,
    count_stacked_axes,
    group,
    group_by_leaf,
    layer_names,
    tree_scope,
)


@validate_call()
def axes(axes: int | Sequence[int]) -> Scope:
    """Groups the slices of leaves along the given axes.

    Args:
      axes: The axes over which norms are computed. Negative numbers count from the end.

    Raises:
      ValueError: If a leaf lacks one of the axes (in `init` and `update`).
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
        # Negative axes are different axes in leaves of different rank.
        named = zip(flat.names(), flat.inexact_leaves(), strict=True)
        reduced = tuple(_normalize_axes(axes, leaf, name) for name, leaf in named)
        return group_by_leaf(flat, reduced, "dict")

    return assign


@validate_call()
def unit(
    axis: int | Sequence[int] | Callable[[str, Array], int | Sequence[int] | None] | None = None,
    stacked: StackedAxes = 0,
) -> Scope:
    """Groups the parameters of output units of a layer.

    The output axis of a leaf must be the last one, as in Flax, Haiku and Keras. Pass `axis` for
    leaves `[out, in]`, as in Equinox, and for 1D convolutions, which are `[width, in, out]`. Note
    that the table would treat these as other layers, without an error.

      leaf                                       | axes of a norm
      -------------------------------------------|---------------------
      at most one axis longer than 1             | all axes
      matrix `[in, out]`, or rank 3              | 0
      convolution `[height, width, in, out]`     | 0, 1, 2
      convolution of rank 5                      | 0, 1, 2, 3

    Args:
      axis: The axes of a norm instead of the axes in the table, for all leaves, or
        `fn(path, leaf) -> axes`, which can return None to use the table. By default, the table is
        used.
      stacked: The number of leading stacked axes, as in `leaf`. The axes in the table and in `axis`
        are counted from the first axis after these.

    Raises:
      ValueError: If a leaf has another rank and `axis` is not passed (in `init` and `update`).

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
        counts = count_stacked_axes(stacked, flat)
        reduced = []
        global_shapes = flat.global_shapes or [()] * len(counts)
        rows = zip(
            flat.names(), flat.inexact_leaves(), flat.shapes(), global_shapes, counts, strict=True
        )
        for name, leaf, shape, global_shape, skip in rows:
            # A layer without the stacked axes, as the table describes it.
            layer = jax.ShapeDtypeStruct(shape[skip:], np.float32)
            # A function can return None for leaves that should use the table.
            chosen = axis(name, leaf) if callable(axis) else axis
            if chosen is None:
                chosen = _fan_in_axes(layer.shape, name, is_shard=global_shape is None)
            reduced.append(tuple(skip + a for a in _normalize_axes(chosen, layer, name)))
        return group_by_leaf(flat, tuple(reduced), "dict")

    return assign


@validate_call()
def ensemble_member(axis: int = 0) -> Scope:
    """Groups the members of an ensemble, which are the indices of an axis in all leaves.

    An ensemble, or several seeds, can be stacked in a tree, `[members, ...]`. With a single norm
    for the whole tree, a member with an exploding gradient would shrink the gradients of all other
    members. This scope clips members by their own norms, as with `jax.vmap` around the update.
    Note that a rule that compares groups, such as `thresholds.adagc`, compares members.

    Args:
      axis: The axis of the members in all leaves. Defaults to 0. Negative numbers count from the
        end.

    Raises:
      ValueError: If a leaf lacks the axis, is sparse, or has another number of members (in `init`
        and `update`).
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
        for name, leaf, shape in zip(
            flat.names(), flat.inexact_leaves(), flat.shapes(), strict=True
        ):
            if is_sparse(leaf):
                raise ValueError(
                    f"leaf '{name}' must be dense to have members, got a sparse array; pass "
                    "leaf.todense()"
                )
            (kept,) = _normalize_axes(axis, leaf, name)
            reduced.append(tuple(k for k in range(len(shape)) if k != kept))  # all other axes
            sizes[name] = shape[kept]
        if len(set(sizes.values())) > 1:
            raise ValueError(
                f"all leaves must have the same number of members along axis {axis}, got "
                f"{short_repr(sizes)}"
            )
        # A tree without leaves has no members.
        groups = ()
        for size in set(sizes.values()):
            names = tuple(name.removeprefix("/") for name in layer_names("", (size,)))
            groups = (Group(names, tuple(range(len(reduced))), (size,)),)
        return Grouping(groups, tuple(reduced), "vector")

    return assign


def _normalize_axes(axes: int | Sequence[int], leaf: Any, name: str) -> tuple[int, ...]:
    """Checks axes of a leaf, and converts them to sorted non-negative ints."""
    rank = np.ndim(leaf)
    # `operator.index` rejects floats and strings.
    try:
        sequence: Any = axes if np.ndim(axes) else (axes,)
        chosen = tuple(operator.index(axis) for axis in sequence)
    except TypeError:
        raise TypeError(f"axes must be an int or a sequence of ints, got {axes!r}") from None
    if any(not -rank <= axis < rank for axis in chosen):
        raise ValueError(
            f"axes must be from {-rank} to {rank - 1} for leaf '{name}' of shape "
            f"{np.shape(leaf)}, got {chosen}"
        )
    reduced = tuple(sorted({axis % rank for axis in chosen}))
    if is_sparse(leaf) and len(reduced) < rank:
        raise ValueError(
            f"axes must be all {rank} axes of the sparse leaf '{name}', got {axes!r}; pass "
            "leaf.todense() for norms of slices"
        )
    return reduced


def _fan_in_axes(shape: tuple[int, ...], name: str, *, is_shard: bool) -> tuple[int, ...]:
    """Returns the axes of the norms of units, from the shape of a layer, or of a shard of it."""
    rank = len(shape)
    num_long = sum(size != 1 for size in shape)
    # A sharded matrix can look like a vector, for example [1, out] for [8, out] on 8 devices.
    if is_shard and rank > 1 and num_long <= 1:
        raise ValueError(
            f"leaf '{name}' must have a known global shape to find its units, got a possible shard "
            f"of shape {shape}; pass specs= (a pytree of PartitionSpec) or axis="
        )
    # Biases and the scales of normalization layers are a single unit.
    if num_long <= 1:
        return tuple(range(rank))
    # Dense layers `[in, out]`, and attention projections `[in, heads, out]`.
    if rank in (2, 3):
        return (0,)
    # Convolutions over two or three dimensions, `[..., in, out]`.
    if rank in (4, 5):
        return tuple(range(rank - 1))
    raise ValueError(
        f"leaf '{name}' must have at most rank 5 to find its units, got rank {rank} (shape "
        f"{shape}); pass axis="
    )


@validate_call()
def muon(weight_dimension_numbers: PyTree | Callable[[PyTree], PyTree] = None) -> Scope:
    """Groups the leaves that `optax.contrib.muon` trains with Muon, and all other leaves.

    Muon's updates do not depend on the scale of its gradients. Therefore, these gradients should
    not be included in the norm by which Adam's gradients are clipped. Muon only needs a threshold
    for spikes, which affect its momentum for about a hundred steps, see `docs/muon.md`.

    Args:
      weight_dimension_numbers: The argument `muon_weight_dimension_numbers` of Muon: a pytree
        prefix of the parameters, with `MuonDimensionNumbers` for leaves that Muon trains and None
        for leaves that Adam trains. You can also use a function from the parameters to such a
        prefix. By default, Muon trains all matrices.

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
        # Muon assigns leaves by their number of axes, so labels require the whole tree.
        tree = jax.tree_util.tree_unflatten(flat.treedef, flat.leaves)
        return group(labels(tree) if flat.inexact_indices else {})(flat)

    return assign


@validate_call()
def muon_labels(
    weight_dimension_numbers: PyTree | Callable[[PyTree], PyTree] = None,
) -> Callable[[PyTree], PyTree]:
    """Returns a function that labels leaves by their optimizer in `optax.contrib.muon`.

    You can pass the function to `optax.partition`. The scope `muon` uses the same labels.

    Args:
      weight_dimension_numbers: The dimension numbers of Muon, as in `muon`.

    Returns:
      A function from parameters, or a pytree with their structure and shapes, to a pytree of the
      same structure with the leaves "muon" and "adam".

    Raises:
      ValueError: If the dimension numbers do not match the tree (when the function is called).

    Example:
      >>> import jax.numpy as jnp, optaxclip
      >>> params = {"w": jnp.ones((2, 2)), "b": jnp.ones(2), "layers": jnp.ones((3, 2, 2))}
      >>> optaxclip.scopes.muon_labels()(params)
      {'b': 'adam', 'layers': 'adam', 'w': 'muon'}
    """

    def label_leaves(tree: PyTree, is_muon: Callable[[Any], bool]) -> PyTree:
        return jax.tree.map(lambda x: "muon" if is_muon(x) else "adam", tree, is_leaf=is_sparse)

    def label_branch(numbers: Any, branch: PyTree) -> PyTree:
        if numbers is not None and not hasattr(numbers, "reduction_axis"):
            raise ValueError(f"got {numbers!r}")
        return label_leaves(branch, lambda _: numbers is not None)

    def label(params: PyTree) -> PyTree:
        chosen = weight_dimension_numbers
        if chosen is None:
            return label_leaves(params, lambda leaf: np.ndim(leaf) == 2)
        chosen = chosen(params) if is_function(chosen, params) else chosen
        # In a prefix, `None` is a value, so it must be a leaf.
        try:
            return jax.tree.map(
                label_branch,
                chosen,
                params,
                is_leaf=lambda x: x is None or hasattr(x, "reduction_axis"),
            )
        except ValueError as error:
            raise ValueError(
                "weight_dimension_numbers must be a pytree prefix of the parameters, with "
                f"MuonDimensionNumbers or None as leaves, got an error: {error}"
            ) from None

    return label

"""Scopes that divide leaves into slices along axes, or into the output units of weights."""

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
    """One norm for each slice of a leaf along the given axes.

    Args:
      axes: the axes over which a norm is taken; negative numbers count from the end.

    Raises:
      ValueError: (when used) if a leaf lacks one of the axes.
      TypeError: (when used) if an axis is not an int.

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
        return group_by_leaf(flat, reduced, "dict")

    return assign


@validate_call()
def unit(
    axis: int | Sequence[int] | Callable[[str, Array], int | Sequence[int] | None] | None = None,
    stacked: StackedAxes = 0,
) -> Scope:
    """One norm for each output unit of a layer: for all weights that lead into that unit.

    The output axis of a weight must be the last one, as in Flax, Haiku and Keras. Pass `axis` for
    weights `[out, in]`, as Equinox has, and for convolutions over one dimension, which are
    `[width, in, out]`: the table would take these for other layers, without an error.

      leaf                                       | axes of a norm
      -------------------------------------------|---------------------
      at most one axis longer than 1             | all axes
      matrix `[in, out]`, or rank 3              | 0
      convolution `[height, width, in, out]`     | 0, 1, 2
      convolution of rank 5                      | 0, 1, 2, 3

    Args:
      axis: the axes of a norm in place of those in the table, for every leaf; or
        `fn(path, leaf) -> axes`, with None for those in the table.
      stacked: the number of leading stacked axes, as in `leaf`; the axes in the table and in `axis`
        are counted from the first axis behind these.

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

    @tree_scope
    def assign(flat: FlatTree) -> Grouping:
        counts = count_stacked_axes(stacked, flat)
        reduced = []
        whole_shapes = flat.global_shapes or [()] * len(counts)
        rows = zip(
            flat.names(), flat.inexact_leaves(), flat.shapes(), whole_shapes, counts, strict=True
        )
        for name, leaf, shape, whole_shape, skip in rows:
            layer = jax.ShapeDtypeStruct(shape[skip:], np.float32)
            chosen = axis(name, leaf) if callable(axis) else axis
            if chosen is None:
                chosen = _fan_in_axes(layer.shape, name, is_part=whole_shape is None)
            reduced.append(tuple(skip + a for a in _normalize_axes(chosen, layer, name)))
        return group_by_leaf(flat, tuple(reduced), "dict")

    return assign


@validate_call()
def ensemble_member(axis: int = 0) -> Scope:
    """One norm for each member of an ensemble: for each index of one axis, over all leaves.

    An ensemble, or several seeds, may be stacked in one tree, `[members, ...]`. With one norm for
    the whole tree, a member whose gradient explodes shrinks those of all others; here each member
    is clipped by its own norm, as if `jax.vmap` were around the update. (A rule that compares
    groups, `thresholds.adagc`, compares members.)

    Args:
      axis: the axis of the members, in every leaf; negative numbers count from the end.

    Raises:
      ValueError: (when used) if a leaf lacks the axis, is sparse, or has another number of members.
      TypeError: if the axis is not an int.

    Example:
      >>> import jax.numpy as jnp, optaxclip
      >>> tx = optaxclip.clip_by(optaxclip.scopes.ensemble_member(), 1.0)
      >>> grads = {"w": jnp.array([[3.0, 0.0], [0.3, 0.0]]), "b": jnp.array([4.0, 0.4])}
      >>> info = tx.update(grads, tx.init(grads))[1].info
      >>> print(list(info.names), info.norm)
      ['0', '1'] [5.  0.5]
    """
    if isinstance(axis, bool) or not isinstance(axis, (int, np.integer)):
        raise TypeError(f"axis must be an int, got {axis!r}")

    @tree_scope
    def assign(flat: FlatTree) -> Grouping:
        reduced, sizes = [], {}
        for name, leaf, shape in zip(
            flat.names(), flat.inexact_leaves(), flat.shapes(), strict=True
        ):
            if is_sparse(leaf):
                raise ValueError(f"the sparse leaf '{name}' cannot be divided into members")
            (kept,) = _normalize_axes(axis, leaf, name)
            reduced.append(tuple(k for k in range(len(shape)) if k != kept))
            sizes[name] = shape[kept]
        if len(set(sizes.values())) > 1:
            raise ValueError(
                f"each leaf must have as many members along axis {axis}, got {short_repr(sizes)}"
            )
        groups = ()
        for size in set(sizes.values()):
            names = tuple(name.removeprefix("/") for name in layer_names("", (size,)))
            groups = (Group(names, tuple(range(len(reduced))), (size,)),)
        return Grouping(groups, tuple(reduced), "vector")

    return assign


def _normalize_axes(axes: int | Sequence[int], leaf: Any, name: str) -> tuple[int, ...]:
    rank = np.ndim(leaf)
    try:
        several: Any = axes if np.ndim(axes) else (axes,)
        chosen = tuple(operator.index(axis) for axis in several)
    except TypeError:
        raise TypeError(f"axes must be an int or a sequence of ints, got {axes!r}") from None
    if any(not -rank <= axis < rank for axis in chosen):
        raise ValueError(
            f"axes {chosen} do not exist in leaf '{name}', which has shape {np.shape(leaf)}"
        )
    reduced = tuple(sorted({axis % rank for axis in chosen}))
    if is_sparse(leaf) and len(reduced) < rank:
        raise ValueError(
            f"the sparse leaf '{name}' cannot be divided, so axes must be all {rank} of its axes, "
            f"got {axes!r}; for a norm for each slice pass leaf.todense()"
        )
    return reduced


def _fan_in_axes(shape: tuple[int, ...], name: str, *, is_part: bool) -> tuple[int, ...]:
    """The axes of a unit's norm, by the shape of its layer; of a part of it, if that is unknown."""
    rank = len(shape)
    num_long = sum(size != 1 for size in shape)
    if is_part and rank > 1 and num_long <= 1:
        raise ValueError(
            f"leaf '{name}' of shape {shape} may be one device's part of a larger leaf, and the "
            "units depend on the shape of the whole leaf: pass specs= (a pytree of "
            "PartitionSpec), or axis="
        )
    if num_long <= 1:
        return tuple(range(rank))
    if rank in (2, 3):
        return (0,)
    if rank in (4, 5):
        return tuple(range(rank - 1))
    raise ValueError(
        f"leaf '{name}' has rank {rank} (shape {shape}), and units are defined up to rank 5: pass "
        "axis="
    )


@validate_call()
def muon(weight_dimension_numbers: PyTree | Callable[[PyTree], PyTree] = None) -> Scope:
    """Two norms: one for the leaves that `optax.contrib.muon` trains by Muon, one for all others.

    Muon's updates do not depend on the scale of its gradients, so these gradients should not count
    in the norm by which Adam's gradients are clipped. Muon needs a threshold only against spikes, which
    its momentum remembers for about a hundred steps; `docs/muon.md` has more.

    Args:
      weight_dimension_numbers: the argument `muon_weight_dimension_numbers` of Muon: a pytree
        prefix of the parameters, with `MuonDimensionNumbers` for leaves that Muon trains and None
        for those that Adam trains; or a function from the parameters to such a prefix. If None,
        Muon trains all matrices.

    Raises:
      ValueError: (when used) if the dimension numbers do not fit the tree.

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
    """A function that labels each leaf "muon" or "adam", by how `optax.contrib.muon` trains it.

    The function may be passed to `optax.partition`. The scope `muon` has these labels.

    Args:
      weight_dimension_numbers: as in `muon`.

    Returns:
      A function from parameters, or a pytree with their structure and shapes, to a pytree of the
      same structure with "muon" or "adam" for each leaf.

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
        chosen = chosen(params) if is_function(chosen, params) else chosen
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

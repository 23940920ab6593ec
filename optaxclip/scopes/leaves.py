"""Scopes over whole leaves: the whole tree, labeled groups of leaves, and single leaves."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeAlias, get_args, get_type_hints

import jax
import numpy as np
import optax
from jax import Array

from optaxclip._base.trees import FlatTree, Group, Grouping, broadcast_prefix, is_sparse
from optaxclip._base.types import Path, PyTree
from optaxclip._base.validation import accepts_args, check_called, short_repr, validate_call, warn

Scope: TypeAlias = Callable[[FlatTree], Grouping]
"""A function from a tree of gradients to the groups of elements that share a norm."""

StackedAxes: TypeAlias = PyTree | Callable[[str, Array], int]


def tree_scope(scope: Scope) -> Scope:
    """Decorates a scope to explain calls with anything but a tree."""

    @functools.wraps(scope)
    def scope_fn(flat: FlatTree) -> Grouping:
        if not isinstance(flat, FlatTree):
            raise TypeError(
                f"a scope must be called with a tree, got {short_repr(flat)}, as if it were a "
                'schedule; pass static_args=("scope",) to optax.inject_hyperparams'
            )
        return scope(flat)

    return scope_fn


@validate_call()
def tree() -> Scope:
    """Groups the whole tree, with a single norm.

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
        # All leaves are in one group, and all axes are reduced, so the norm is a scalar.
        group = Group(("tree",), tuple(range(len(leaves))))
        return Grouping((group,), tuple([tuple(range(np.ndim(x))) for x in leaves]), "scalar")

    return assign


@validate_call()
def group(labels: PyTree | Callable[[str, Array], str]) -> Scope:
    """Groups leaves with the same label.

    Args:
      labels: A pytree prefix of the gradients with strings as leaves, or `fn(path, leaf) -> str`,
        where paths are strings such as `encoder/0/kernel`. It can also be a function of the whole
        tree that returns a pytree prefix, as in `optax.partition`.

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
                raise TypeError(f"labels must be strings, got {label!r} for the leaf '{name}'")
        # Names must be sorted, because norms are stored in the order of the names.
        groups = tuple(
            Group((label,), tuple(i for i, other in enumerate(by_leaf) if other == label))
            for label in sorted(set(by_leaf))
        )
        axes = tuple(tuple(range(np.ndim(leaf))) for leaf in flat.inexact_leaves())
        return Grouping(groups, axes, "vector", has_labels=True)

    return assign


@validate_call()
def leaf(stacked: StackedAxes = 0) -> Scope:
    """Groups the elements of single leaves, or of single layers of stacked leaves.

    Args:
      stacked: The number of leading axes that stack separate tensors, as created by `scan` over
        layers: an int for all leaves, a dict from branches to ints (0 for other branches), a pytree
        prefix of ints, or `fn(path, leaf) -> int`. Defaults to 0. All indices along these axes are
        separate groups. Note that an embedding `[words, ...]` is not a stack. Therefore, an int for
        all leaves causes a warning if it makes more than 4096 groups.

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
        counts = count_stacked_axes(stacked, flat)
        # The stacked axes are kept, so a leaf [layers, ...] has norms [layers].
        axes = tuple(
            tuple(range(count, np.ndim(leaf)))
            for leaf, count in zip(flat.inexact_leaves(), counts, strict=True)
        )
        return group_by_leaf(flat, axes, "vector")

    return assign


def group_by_leaf(
    flat: FlatTree, axes: tuple[tuple[int, ...], ...], layout: Literal["vector", "dict"]
) -> Grouping:
    """Makes a group, or an array of groups, for each leaf, with norms over `axes`."""
    groups = []
    shapes = flat.shapes()
    for i, (name, leaf, reduced) in enumerate(
        zip(flat.names(), flat.inexact_leaves(), axes, strict=True)
    ):
        # The stored elements of a sparse array cannot be sliced along an axis.
        if is_sparse(leaf) and len(reduced) < np.ndim(leaf):
            raise ValueError(
                f"the sparse leaf '{name}' must have a single group, got norms over the axes "
                f"{reduced}; use scopes.leaf()"
            )
        # The norms of a leaf have the shape of its remaining axes.
        shape = tuple(size for axis, size in enumerate(shapes[i]) if axis not in reduced)
        names = layer_names(name, shape) if layout == "vector" else (name,)
        groups.append(Group(names, (i,), shape))
    return Grouping(tuple(sorted(groups, key=lambda group: group.names)), axes, layout)


def layer_names(name: str, shape: tuple[int, ...]) -> tuple[str, ...]:
    """Returns `name/00`, `name/01`, ..., padded with zeros to be sorted, or `name` for `()`."""
    if not shape:
        return (name,)
    if not all(isinstance(size, int) for size in shape):
        raise ValueError(f"leaf '{name}' must have a fixed number of layers, got shape {shape}")
    # Zeros make the order of names the order of layers.
    widths = [len(str(max(size - 1, 0))) for size in shape]
    return tuple(
        "/".join([name, *(f"{i:0{width}}" for i, width in zip(index, widths, strict=True))])
        for index in itertools.product(*map(range, shape))
    )


_MANY_LAYERS = 4096
"""With an int for all leaves, more groups are unlikely to be layers."""


def count_stacked_axes(stacked: StackedAxes, flat: FlatTree) -> list[int]:
    """Returns the number of leading axes that stack layers, for all measured leaves."""
    # A dict of ints can lack branches. Other dicts must be complete pytree prefixes.
    counts = _counts_from_dict(stacked, flat) if isinstance(stacked, Mapping) else None
    counts = broadcast_prefix(stacked, flat, "stacked") if counts is None else counts
    shapes = flat.shapes()
    for i, (leaf, count) in enumerate(zip(flat.inexact_leaves(), counts, strict=True)):
        if not isinstance(count, (int, np.integer)) or not 0 <= count <= np.ndim(leaf):
            raise ValueError(
                f"stacked must be a number of leading axes, from 0 to {np.ndim(leaf)} "
                f"for leaf '{flat.names()[i]}' of shape {np.shape(leaf)}, got {count!r}"
            )
    if isinstance(stacked, (int, np.integer)) and stacked:
        sizes = [math.prod(shape[:stacked]) for shape in shapes]
        # Sizes may be symbolic in `jax.export`.
        if sum(size for size in sizes if isinstance(size, int)) > _MANY_LAYERS:
            name, shape = max(zip(flat.names(), shapes, strict=True), key=lambda x: x[1][0])
            warn(
                f"stacked={stacked} applies to all {len(sizes)} leaves, also to '{name}' of shape "
                f"{shape}, and makes {sum(sizes)} groups; name the branches that stack layers, as "
                "in stacked={'layers': 1}"
            )
    return counts


def _counts_from_dict(stacked: Mapping[Any, Any], flat: FlatTree) -> list[Any] | None:
    """Returns the numbers of the branches that contain the measured leaves, or 0.

    Returns None if the tree lacks a branch of the dict, or if the dict contains anything but dicts
    and ints. Branches can be None, or removed by a wrapper.
    """

    def path_keys(path: Path) -> list[Any]:
        fields = ("key", "name", "idx")
        return [next((getattr(x, f) for f in fields if hasattr(x, f)), x) for x in path]

    # None and masked leaves are included, because the dict may contain their branches.
    leaves = jax.tree.leaves_with_path(
        flat.tree(), is_leaf=lambda x: x is None or isinstance(x, optax.MaskedNode)
    )
    paths = [path_keys(path) for path, _ in leaves]
    for branch, _ in jax.tree.leaves_with_path(stacked):
        keys = path_keys(branch)  # A branch may be deeper or shallower than a leaf.
        if not any(keys[: len(path)] == path[: len(keys)] for path in paths):
            return None
    counts = []
    for i in flat.inexact_indices:
        count: Any = stacked
        for key in path_keys(flat.paths[i]):
            count = count.get(key, 0) if isinstance(count, Mapping) else count
        counts.append(count)
    return counts if all(isinstance(count, (int, np.integer)) for count in counts) else None


def resolve_scope(scope: Scope) -> Scope:
    """Checks that a scope is a function that is not a factory, and wraps scopes of users."""
    if not callable(scope):
        raise TypeError(
            f"scope must be from optaxclip.scopes, got {scope!r:.80} of type "
            f"{type(scope).__name__}; use, for example, clip_by(scopes.leaf(), 1.0)"
        )
    check_called(scope, "optaxclip.scopes", "scope", "scopes")
    # Our scopes return valid groupings, which need no check.
    if str(getattr(scope, "__module__", "")).startswith("optaxclip."):
        return scope
    # A function `(path, leaf) -> label` is an argument of `group`, not a scope.
    if accepts_args(scope, "path", None) and not accepts_args(scope, "tree"):
        raise TypeError(
            f"scope must be from optaxclip.scopes, got {short_repr(scope)} with two arguments; use "
            "scopes.group(fn) for a function (path, leaf) -> label"
        )
    return _UserScope(scope)


@dataclasses.dataclass(frozen=True)
class _UserScope:
    """A scope of a user with checked results. Two scopes are equal if their functions are."""

    scope: Scope

    def __call__(self, flat: FlatTree) -> Grouping:
        return _check_grouping(tree_scope(self.scope)(flat), flat)


def _check_grouping(grouping: Any, flat: FlatTree) -> Grouping:
    """Checks the result of a user's scope, and sorts the groups by their names."""
    if not isinstance(grouping, Grouping):
        raise TypeError(
            f"a scope must return an optaxclip.scopes.Grouping, got {short_repr(grouping)} of type "
            f"{type(grouping).__name__}; use scopes.group(fn) for a function that returns labels"
        )
    layouts = get_args(get_type_hints(Grouping)["layout"])
    if grouping.layout not in layouts:
        raise ValueError(
            f"the layout of a Grouping must be one of {layouts}, got {grouping.layout!r}"
        )
    for group in grouping.groups:
        if not isinstance(group, Group):
            raise TypeError(
                f"the groups of a Grouping must be scopes.Group, got {short_repr(group)}"
            )
    shapes, names = flat.shapes(), flat.names()
    # A partition of the leaves contains all indices exactly once.
    members = sorted(i for group in grouping.groups for i in group.leaf_indices)
    if len(grouping.axes) != len(shapes) or members != list(range(len(shapes))):
        raise ValueError(
            f"a scope must return a group and the axes of the norm for each of the {len(shapes)} "
            f"measured leaves, got groups of the leaves {members} and {len(grouping.axes)} axes"
        )
    for group in grouping.groups:
        for i in group.leaf_indices:
            rest = tuple(n for k, n in enumerate(shapes[i]) if k not in grouping.axes[i])
            if rest != group.shape or not {*grouping.axes[i]} <= {*range(len(shapes[i]))}:
                raise ValueError(
                    f"the group {group.names} of leaf '{names[i]}', which has shape {shapes[i]} "
                    f"and norms over the axes {grouping.axes[i]}, must have the shape {rest}, got "
                    f"{group.shape}"
                )
        # In the other layouts, a group has a single name.
        number = int(np.prod(group.shape)) if grouping.layout == "vector" else 1
        if len(group.names) != number:
            raise ValueError(f"a group must have {number} names here, got {group.names}")
    if grouping.layout == "scalar" and (len(grouping.groups) != 1 or grouping.groups[0].shape):
        raise ValueError(
            f'a Grouping must have one group in the layout "scalar", got {len(grouping.groups)}'
        )
    groups = tuple(sorted(grouping.groups, key=lambda group: group.names))
    return Grouping(groups, tuple(map(tuple, grouping.axes)), grouping.layout, grouping.has_labels)

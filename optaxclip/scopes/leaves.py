"""Checks what a user's own scope returns."""

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


def check_grouping(found: Any, flat: FlatTree) -> Grouping:
    """The groups that a user's scope found, in the order of their names."""
    if not isinstance(found, Grouping):
        raise TypeError(
            "a scope must return an optaxclip.scopes.Grouping, got "
            f"{short_repr(found)} of type {type(found).__name__}; a function that gives labels is one "
            "for scopes.group(fn)"
        )
    layouts = get_args(get_type_hints(Grouping)["layout"])
    if found.layout not in layouts:
        raise ValueError(f"the layout of a Grouping must be one of {layouts}, got {found.layout!r}")
    for group in found.groups:
        if not isinstance(group, Group):
            raise TypeError(
                f"the groups of a Grouping must be scopes.Group, got {short_repr(group)}"
            )
    shapes, names = flat.shapes(), flat.names()
    members = sorted(i for group in found.groups for i in group.leaf_indices)
    if len(found.axes) != len(shapes) or members != list(range(len(shapes))):
        raise ValueError(
            f"a scope must put each of the {len(shapes)} measured leaves into one group, and say "
            f"the axes of its norm; got the leaves {members} in groups, and {len(found.axes)} axes"
        )
    for group in found.groups:
        for i in group.leaf_indices:
            rest = tuple(n for k, n in enumerate(shapes[i]) if k not in found.axes[i])
            if rest != group.shape or not {*found.axes[i]} <= {*range(len(shapes[i]))}:
                raise ValueError(
                    f"leaf '{names[i]}' of shape {shapes[i]} with norms over the axes "
                    f"{found.axes[i]} does not fit its group {group.names}, whose shape is "
                    f"{group.shape}"
                )
        number = int(np.prod(group.shape)) if found.layout == "vector" else 1
        if len(group.names) != number:
            raise ValueError(f"a group must have {number} names here, got {group.names}")
    if found.layout == "scalar" and (len(found.groups) != 1 or found.groups[0].shape):
        raise ValueError(f'the layout "scalar" is for one group, got {len(found.groups)}')
    groups = tuple(sorted(found.groups, key=lambda group: group.names))
    return Grouping(groups, tuple(map(tuple, found.axes)), found.layout, found.has_labels)


Scope: TypeAlias = Callable[[FlatTree], Grouping]
"""A function from a tree of gradients to the groups of entries that share a norm."""


def resolve_scope(scope: Scope) -> Scope:
    """A scope that a user passed, checked to be a function, and not one that makes scopes."""
    if not callable(scope):
        raise TypeError(
            "scope must be from optaxclip.scopes, as in clip_by(scopes.leaf(), 1.0); got "
            f"{scope!r:.80} of type {type(scope).__name__}"
        )
    check_called(scope, "optaxclip.scopes", "scope", "scopes")
    if str(getattr(scope, "__module__", "")).startswith("optaxclip."):
        return scope
    if accepts_args(scope, "path", None) and not accepts_args(scope, "tree"):
        raise TypeError(
            f"scope must be from optaxclip.scopes, got {short_repr(scope)}, which takes two arguments: "
            "a function that gives each leaf (path, leaf) a label is one for scopes.group(fn)"
        )
    return _UserScope(scope)


@dataclasses.dataclass(frozen=True)
class _UserScope:
    """A user's scope, whose results are checked; two with the same function are equal."""

    scope: Scope

    def __call__(self, flat: FlatTree) -> Grouping:
        return check_grouping(tree_scope(self.scope)(flat), flat)


def tree_scope(scope: Scope) -> Scope:
    """`scope`, with an error that says what to do if it is called with anything but a tree."""

    @functools.wraps(scope)
    def scope_fn(flat: FlatTree) -> Grouping:
        if not isinstance(flat, FlatTree):
            raise TypeError(
                f"a scope was called with {short_repr(flat)}, as if it were a schedule: pass "
                'static_args=("scope",) to optax.inject_hyperparams'
            )
        return scope(flat)

    return scope_fn


StackedAxes: TypeAlias = PyTree | Callable[[str, Array], int]


@validate_call()
def tree() -> Scope:
    """One norm for the whole tree.

    Example:
      >>> import jax.numpy as jnp, optaxclip
      >>> tx = optaxclip.clip_by(optaxclip.scopes.tree(), 1.0)
      >>> grads = {"w": jnp.array([3.0]), "b": jnp.array([4.0])}
      >>> print(tx.update(grads, tx.init(grads))[1].info.norm)
      5.0
    """

    @tree_scope
    def assign(flat: FlatTree) -> Grouping:
        measured = flat.inexact_leaves()
        everything = Group(("tree",), tuple(range(len(measured))))
        return Grouping((everything,), tuple(_all_axes(leaf) for leaf in measured), "scalar")

    return assign


@validate_call()
def group(labels: PyTree | Callable[[str, Array], str]) -> Scope:
    """One norm for all leaves with the same label.

    Args:
      labels: a pytree prefix of the gradients with strings for leaves, or `fn(path, leaf) -> str`,
        where the path is text such as `encoder/0/kernel`; or, as `optax.partition` takes it, a
        function of the whole tree that returns such a prefix.

    Raises:
      ValueError: (when used) if the labels are not a pytree prefix of the tree.
      TypeError: (when used) if a label is not a string.

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
        found = broadcast_prefix(labels, flat, "labels")
        for label, name in zip(found, flat.names(), strict=True):
            if not isinstance(label, str):
                raise TypeError(f"labels must be strings, got {label!r} for the leaf '{name}'")
        groups = tuple(
            Group((label,), tuple(i for i, other in enumerate(found) if other == label))
            for label in sorted(set(found))
        )
        axes = tuple(map(_all_axes, flat.inexact_leaves()))
        return Grouping(groups, axes, "vector", has_labels=True)

    return assign


@validate_call()
def leaf(stacked: StackedAxes = 0) -> Scope:
    """One norm for each leaf.

    Args:
      stacked: how many leading axes of each leaf stack separate tensors, as `scan` over layers
        makes them: an int for all leaves; a dict that gives it for branches, 0 for those that it
        does not name; another pytree prefix of ints; or `fn(path, leaf) -> int`. Each index along
        these axes is a group of its own. An embedding `[words, ...]` is not a stack, so an int for
        all leaves gives a warning if it makes more than 4096 groups.

    Raises:
      ValueError: (when used) if a leaf has fewer axes than `stacked` says.

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
        axes = tuple(
            _all_axes(leaf)[count:]
            for leaf, count in zip(flat.inexact_leaves(), counts, strict=True)
        )
        return group_by_leaf(flat, axes, "vector")

    return assign


def _all_axes(leaf: Any) -> tuple[int, ...]:
    return tuple(range(np.ndim(leaf)))


def group_by_leaf(
    flat: FlatTree, axes: tuple[tuple[int, ...], ...], layout: Literal["vector", "dict"]
) -> Grouping:
    """A group, or an array of groups, for each leaf, with norms over these axes."""
    groups = []
    shapes = flat.shapes()
    for i, (name, leaf, reduced) in enumerate(
        zip(flat.names(), flat.inexact_leaves(), axes, strict=True)
    ):
        if is_sparse(leaf) and len(reduced) < np.ndim(leaf):
            raise ValueError(
                f"the sparse leaf '{name}' cannot be divided into groups: use scopes.leaf()"
            )
        shape = tuple(size for axis, size in enumerate(shapes[i]) if axis not in reduced)
        names = layer_names(name, shape) if layout == "vector" else (name,)
        groups.append(Group(names, (i,), shape))
    return Grouping(tuple(sorted(groups, key=lambda group: group.names)), axes, layout)


def layer_names(name: str, shape: tuple[int, ...]) -> tuple[str, ...]:
    """`name/00`, `name/01`, ... for a leaf of several layers; the zeros keep them in order."""
    if not shape:
        return (name,)
    if not all(isinstance(size, int) for size in shape):
        raise ValueError(f"leaf '{name}' must stack a fixed number of layers, got shape {shape}")
    widths = [len(str(max(size - 1, 0))) for size in shape]
    return tuple(
        "/".join([name, *(f"{i:0{width}}" for i, width in zip(index, widths, strict=True))])
        for index in itertools.product(*map(range, shape))
    )


_MANY_LAYERS = 4096
"""If one number is given for all leaves, more groups than this are unlikely to be layers."""


def count_stacked_axes(stacked: StackedAxes, flat: FlatTree) -> list[int]:
    """For each measured leaf, the checked number of leading axes that stack layers."""
    counts = _broadcast_stacked(stacked, flat) if isinstance(stacked, Mapping) else None
    counts = broadcast_prefix(stacked, flat, "stacked") if counts is None else counts
    for i, (leaf, count) in enumerate(zip(flat.inexact_leaves(), counts, strict=True)):
        if not isinstance(count, (int, np.integer)) or not 0 <= count <= np.ndim(leaf):
            raise ValueError(
                f"stacked must be the number of leading stacked axes, from 0 to {np.ndim(leaf)} "
                f"for leaf '{flat.names()[i]}' of shape {np.shape(leaf)}, got {count!r}"
            )
    if isinstance(stacked, (int, np.integer)) and stacked:
        _warn_if_too_many_layers(int(stacked), flat)
    return counts


def _broadcast_stacked(stacked: Mapping[Any, Any], flat: FlatTree) -> list[Any] | None:
    """For each measured leaf, the dict's number for its branch; 0 if the dict does not name it.

    The result is None if the dict names a branch that the tree lacks, or holds anything but dicts
    and ints. A branch may be None, or be kept back by a wrapper.
    """

    def branch_of(path: Path) -> Any:
        branch: Any = stacked
        for key in _keys(path):
            branch = branch.get(key, 0) if isinstance(branch, Mapping) else branch
        return branch

    def is_empty(x: Any) -> bool:
        return x is None or isinstance(x, optax.MaskedNode)

    named = [_keys(path) for path, _ in jax.tree.leaves_with_path(stacked)]
    paths = [_keys(path) for path, _ in jax.tree.leaves_with_path(flat.tree(), is_leaf=is_empty)]
    for name in named:
        if not any(name[: len(path)] == path[: len(name)] for path in paths):
            return None
    found = [branch_of(flat.paths[i]) for i in flat.inexact_indices]
    return found if all(isinstance(count, (int, np.integer)) for count in found) else None


def _keys(path: Path) -> list[Any]:
    """The keys, attributes and indices along a path."""
    fields = ("key", "name", "idx")
    return [next((getattr(x, f) for f in fields if hasattr(x, f)), x) for x in path]


def _warn_if_too_many_layers(stacked: int, flat: FlatTree) -> None:
    """Warns if the leaves have so many layers that some of them cannot be stacks."""
    sizes = [math.prod(shape[:stacked]) for shape in flat.shapes()]
    if sum(size for size in sizes if isinstance(size, int)) > _MANY_LAYERS:
        name, shape = max(zip(flat.names(), flat.shapes(), strict=True), key=lambda x: x[1][0])
        warn(
            f"stacked={stacked} makes {sum(sizes)} groups of {len(sizes)} leaves, as for '{name}' "
            f"of shape {shape}, too: name the branches that stack layers, as in "
            "stacked={'layers': 1}; all others are then 0"
        )

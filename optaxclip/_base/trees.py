"""Trees: named leaves, and groups of elements that share a norm."""

import collections
import dataclasses
import functools
import math
import sys
from collections.abc import Callable, ItemsView, Iterable, Iterator, Mapping, Sequence, ValuesView
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optaxclip._base.numerics import static_size_or_none
from optaxclip._base.state import RESTORE_NAMES_HINT, StaticNames
from optaxclip._base.types import Path, PyTree
from optaxclip._base.validation import accepts_args, short_repr, warn


class FlatTree(NamedTuple):
    """A tree as a list of leaves.

    Attributes:
      paths: The distinct key paths of all leaves, without the boxes that Flax puts around arrays.
        If a custom node has several children with the same key, the paths of all but the first
        child end with a number.
      leaves: All leaves. A `BCOO` is a single leaf.
      treedef: The tree structure.
      inexact_indices: The positions of the measured leaves, which are floating-point or complex.
      global_shapes: The shapes of the measured leaves before sharding, or None for unknown shapes.
        Scopes use them to find units and layers. Empty outside `shard_map`, `pmap` and
        `vmap(axis_name=)`, where leaves are not shards.
      use_keystr: If True, names use Python's notation. By default, they use it only if two names
        would otherwise be equal.
    """

    paths: list[Path]
    leaves: list[Any]
    treedef: Any
    inexact_indices: list[int]
    global_shapes: Sequence[tuple[int, ...] | None] = ()
    use_keystr: bool | None = None

    @property
    def is_masked(self) -> bool:
        """Returns `True` if a wrapper such as `optax.masked` removed some leaves."""
        nodes = jax.tree.leaves(self.tree(), is_leaf=lambda x: isinstance(x, optax.MaskedNode))
        return any(isinstance(node, optax.MaskedNode) for node in nodes)

    def inexact_leaves(self) -> list[Any]:
        """Returns the measured leaves."""
        return [self.leaves[i] for i in self.inexact_indices]

    def shapes(self) -> list[tuple[int, ...]]:
        """Returns the global shapes of the measured leaves, or their own shapes if unknown."""
        own = [np.shape(leaf) for leaf in self.inexact_leaves()]
        if not self.global_shapes:
            return own
        return [x if y is None else y for x, y in zip(own, self.global_shapes, strict=True)]

    def names(self) -> list[str]:
        """Returns the distinct names of the measured leaves."""
        paths = [self.paths[i] for i in self.inexact_indices]
        use_keystr = self.use_keystr
        if use_keystr is None:
            # The paths of None are included, because other steps may have gradients there.
            numbered = jax.tree_util.tree_unflatten(self.treedef, list(range(len(self.leaves))))
            pairs = jax.tree_util.tree_leaves_with_path(numbered, is_leaf=lambda x: x is None)
            none_paths = [path for path, x in pairs if x is None]
            names = [leaf_name(path) for path in (*self.paths, *none_paths)]
            use_keystr = len(set(names)) < len(names)
        return [jax.tree_util.keystr(path) if use_keystr else leaf_name(path) for path in paths]

    def match_name_style(self, stored: Iterable[str]) -> "FlatTree":
        """Returns this tree with names in the notation of the names in a state."""
        names = tuple(stored)
        is_keystr = bool(names) and all(name[:1] in ("[", ".") for name in names)
        return self._replace(use_keystr=True) if is_keystr else self

    def replace_leaves(self, new: Sequence[Any]) -> "FlatTree":
        """Replaces the measured leaves."""
        leaves = list(self.leaves)
        for i, leaf in zip(self.inexact_indices, new, strict=True):
            leaves[i] = leaf
        return self._replace(leaves=leaves)

    def unflatten(self, new: Sequence[Any]) -> PyTree:
        """Returns the tree with new measured leaves."""
        return self.replace_leaves(new).tree()

    def tree(self) -> PyTree:
        """Returns the tree."""
        return jax.tree_util.tree_unflatten(self.treedef, self.leaves)

    def replace_with_float0(self) -> "FlatTree":
        """Replaces all leaves by `float0` zeros, which `jax.grad` returns for integers."""
        zeros = [np.zeros(np.shape(leaf), jax.dtypes.float0) for leaf in self.leaves]
        return self._replace(leaves=zeros)


def flatten(
    tree: PyTree, argument: str, *, integer_policy: Literal["skip", "error", "measure"] = "skip"
) -> FlatTree:
    """Flattens a tree of arrays and finds the leaves to measure.

    The integer policy "skip" ignores integer, bool and PRNG-key leaves, and "error" rejects them.
    "measure" measures integers, and rejects bools and PRNG keys. `argument` names the tree in
    messages.
    """
    pairs, treedef = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_sparse)
    paths = _unique_paths([path for path, _ in pairs], tree)
    leaves = [leaf for _, leaf in pairs]
    measured = [
        i for i, leaf in enumerate(leaves) if _is_measured(leaf, paths[i], argument, integer_policy)
    ]
    if not measured and argument in ("updates", "tree"):  # These arguments are clipped.
        dtypes = {str(dtype) for dtype in map(dtype_of, leaves) if dtype != jax.dtypes.float0}
        if dtypes:
            warn(
                f"{argument} has no floating-point leaves to clip, only leaves with dtypes "
                f"{sorted(dtypes)}"
            )
    return FlatTree(paths, leaves, treedef, measured)


def _unique_paths(paths: list[Path], tree: PyTree) -> list[Path]:
    """Removes boxes from the ends of paths, and numbers equal paths."""
    # Flax NNX passes variables to `init` and their arrays to `update`, and names must be equal.
    value_key = jax.tree_util.GetAttrKey("value")

    def is_box(x: Any) -> bool:
        # A node with a single child that is named `value`, such as an `nnx.Variable`.
        children = jax.tree_util.tree_leaves_with_path(x, is_leaf=lambda child: child is not x)
        return [path for path, _ in children] == [(value_key,)]

    # The condition saves time, because finding boxes is slow.
    if any(path and path[-1] == value_key for path in paths):
        nodes = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_box)
        boxes = {path for path, node in nodes if is_box(node)}
        paths = [path[:-1] if path[:-1] in boxes else path for path in paths]
    if len(set(paths)) == len(paths):
        return paths
    seen, unique = collections.Counter[Path](), []
    for path in paths:
        number = jax.tree_util.GetAttrKey(f"#{seen[path]}")
        unique.append((*path, number) if seen[path] else path)
        seen[path] += 1
    return unique


def _is_measured(leaf: Any, path: Path, argument: str, integer_policy: str) -> bool:
    dtype = dtype_of(leaf)
    if dtype is None:
        remedy = "use eqx.filter(model, eqx.is_inexact_array) or nnx.state(module, nnx.Param)"
        if isinstance(leaf, (Iterator, ValuesView, ItemsView)):
            remedy = "use a list or a dict, because JAX does not support iterators"
        raise TypeError(
            f"{argument} must be a pytree of arrays, but leaf '{leaf_name(path)}' is "
            f"{short_repr(leaf)} of type {type(leaf).__name__}; {remedy}"
        )
    if _is_subdtype(dtype, jnp.inexact):
        return True
    if dtype == jax.dtypes.float0 or integer_policy == "skip":
        return False
    if integer_policy == "measure" and _is_subdtype(dtype, jnp.integer):
        return True
    raise TypeError(
        f"leaf '{leaf_name(path)}' of {argument} must have a floating-point dtype, but has dtype "
        f"{dtype}; cast or remove it"
    )


def dtype_of(leaf: Any) -> Any:
    """Returns the dtype of a number or an array, or None if JAX does not support the leaf."""
    dtype = getattr(leaf, "dtype", None)
    if dtype is None:
        # Python numbers are leaves too. Strings and functions have no dtype.
        is_number = isinstance(leaf, (bool, int, float, complex))
        return jnp.result_type(type(leaf)) if is_number else None
    kinds = (np.bool_, np.number, jax.dtypes.float0, jax.dtypes.prng_key)
    return dtype if any(map(functools.partial(_is_subdtype, dtype), kinds)) else None


# Cached, because `jnp.issubdtype` is slow.
_is_subdtype = functools.cache(jnp.issubdtype)


def is_sparse(leaf: Any) -> bool:
    """Returns `True` for batched-coordinate sparse arrays."""
    # Importing the module takes 0.1 seconds, and users with such arrays have imported it.
    return isinstance(leaf, getattr(sys.modules.get("jax.experimental.sparse"), "BCOO", ()))


def get_stored_values(leaf: Any) -> Any:
    """Returns the stored values of a sparse array, and other leaves unchanged."""
    return leaf.data if is_sparse(leaf) else leaf


def replace_values(leaf: Any, data: Any) -> Any:
    """Replaces a leaf by `data`, or the stored values of a sparse array by `data`."""
    if not is_sparse(leaf):
        return data
    order = {"indices_sorted": leaf.indices_sorted, "unique_indices": leaf.unique_indices}
    return type(leaf)((data, leaf.indices), shape=leaf.shape, **order)


def leaf_name(path: Path) -> str:
    """Formats a path, for example as `encoder/0/kernel`, and the empty path as `leaf`."""
    return jax.tree_util.keystr(path, simple=True, separator="/") or "leaf"


def is_function(value: Any, tree: PyTree) -> bool:
    """Returns `True` for functions, except for callable models of the same type as `tree`."""
    return callable(value) and type(value) is not type(tree)


def broadcast_prefix(
    value: PyTree | Callable[[str, Any], Any], flat: FlatTree, argument: str
) -> list[Any]:
    """Returns a value for each measured leaf of a tree.

    `value` must be a pytree prefix of the tree, a function of the tree that returns such a prefix,
    or a function `fn(path, leaf) -> value` with paths such as `encoder/0/kernel`.
    """
    if not flat.inexact_indices:
        return []
    if is_function(value, flat.tree()):
        if accepts_args(value, "path", None) or not accepts_args(value, "tree"):
            return [value(leaf_name(flat.paths[i]), flat.leaves[i]) for i in flat.inexact_indices]
        fn_of_tree: Any = value
        value = fn_of_tree(flat.tree())
    # Positions instead of leaves, because a sparse array would be a subtree.
    positions = jax.tree_util.tree_unflatten(flat.treedef, list(range(len(flat.leaves))))
    try:
        broadcast = jax.tree.broadcast(value, positions)
    except ValueError:
        raise ValueError(
            f"{argument} must be a pytree prefix of the gradients ({_summarize_tree(positions)}), "
            f"but is {_summarize_tree(value)}; use a function that maps (path, leaf) to a value"
        ) from None
    values = jax.tree.leaves(broadcast)
    return [values[i] for i in flat.inexact_indices]


def broadcast_branches(by_branch: Mapping[Any, Any], flat: FlatTree) -> list[int] | None:
    """Returns the int of its branch for each measured leaf, or 0 if the dict lacks the branch.

    Returns None if the tree lacks a branch of the dict, or if a value is not an int.
    """

    def path_keys(path: Path) -> list[Any]:
        fields = ("key", "name", "idx")
        return [next((getattr(x, f) for f in fields if hasattr(x, f)), x) for x in path]

    # The dict may contain branches that are None or masked, so these are included.
    leaves = jax.tree.leaves_with_path(
        flat.tree(), is_leaf=lambda x: x is None or isinstance(x, optax.MaskedNode)
    )
    paths = [path_keys(path) for path, _ in leaves]
    for branch, _ in jax.tree.leaves_with_path(by_branch):
        keys = path_keys(branch)  # A branch may be deeper or shallower than a leaf.
        if not any(keys[: len(path)] == path[: len(keys)] for path in paths):
            return None
    values = []
    for i in flat.inexact_indices:
        value: Any = by_branch
        for key in path_keys(flat.paths[i]):
            value = value.get(key, 0) if isinstance(value, Mapping) else value
        values.append(value)
    return values if all(isinstance(value, (int, np.integer)) for value in values) else None


def _summarize_tree(tree: PyTree) -> str:
    """Describes a tree by its type and its first leaves."""
    names = [leaf_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
    shown = f"{names[:4]}"[1:-1] + (", ..." if len(names) > 4 else "")
    return f"a {type(tree).__name__} with the leaves {shown}"


def align_params(flat: FlatTree, params: PyTree, name: str) -> FlatTree:
    """Replaces the measured leaves of the updates by the parameters at the same paths."""
    flat_params = flatten(params, "params")
    by_path = {flat_params.paths[i]: flat_params.leaves[i] for i in flat_params.inexact_indices}
    for i in flat.inexact_indices:
        path, shape = flat.paths[i], jnp.shape(flat.leaves[i])
        if path not in by_path or jnp.shape(by_path[path]) != shape:
            found = f"has shape {jnp.shape(by_path[path])}" if path in by_path else "is missing"
            raise ValueError(
                f"{name}: leaf '{leaf_name(path)}' of params must have the same shape as "
                f"the update, {shape}, but {found}; pass the params that correspond to the updates"
            )
    return flat.replace_leaves([by_path[flat.paths[i]] for i in flat.inexact_indices])


@dataclasses.dataclass(frozen=True)
class Group:
    """Elements that share a norm, or an array of such groups that together form a leaf.

    Attributes:
      names: The name of the group. For an array of groups, the names of all groups, or only the
        name of the leaf if the layout is "dict".
      leaf_indices: The positions of the group's leaves among the measured leaves. Empty if the
        current tree contains none of them.
      shape: The global shape of the norms, `()` for an individual group.
    """

    names: tuple[str, ...]
    leaf_indices: tuple[int, ...]
    shape: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Grouping:
    """The groups of a tree, as a static argument of compiled functions.

    Attributes:
      groups: The groups, sorted by their names.
      axes: For each measured leaf, the axes over which norms are computed.
      layout: How norms are returned: "scalar" for a single norm of the whole tree, "vector" for an
        array `[names]`, or "dict" for a dict with an array per leaf.
      has_labels: If True, the names are labels from the user.
    """

    groups: tuple[Group, ...]
    axes: tuple[tuple[int, ...], ...]
    layout: Literal["scalar", "vector", "dict"]
    has_labels: bool = False

    @functools.cached_property
    def names(self) -> StaticNames:
        """The names of the elements of a `ClipInfo`."""
        shapes = tuple(group.shape for group in self.groups) if self.layout == "dict" else ()
        names = tuple(name for group in self.groups for name in group.names)
        return StaticNames(names, shapes, self.has_labels)

    @property
    def has_leaves(self) -> list[bool]:
        """For each name, `True` if the group has leaves in the current tree."""
        return [bool(group.leaf_indices) for group in self.groups for _ in group.names]

    def align_with_state(self, stored: StaticNames, size: int, name: str) -> "Grouping":
        """Adds empty groups for the `size` stored names that the current tree lacks."""
        if self.layout == "scalar" or (not stored and size == len(self.names)):
            return self
        if not stored and size:
            raise ValueError(
                f"{name}: state must have the names of its {size} groups, but has lost them, for "
                f"example in optax.tree_map_params; {RESTORE_NAMES_HINT}"
            )
        if len(stored) != size:
            raise ValueError(
                f"{name}: the number of norms in state must be {len(stored)}, but is {size}, which "
                "happens if only init was called under jax.vmap; call update under jax.vmap too"
            )
        own = set(self.names)
        if unknown := sorted(own - set(stored)):
            remedy = "initialize the state with all params"
            if all(x.startswith(("fast/", "slow/")) for x in stored or ("",)):
                remedy = (
                    "put the clipping inside optax.lookahead, as in "
                    "optax.lookahead(optax.chain(clip, optimizer), 5, 0.5)"
                )
            raise ValueError(
                f"{name}: updates must not contain groups that the params passed to init lacked, "
                f"but contain {unknown}; {remedy}"
            )
        # Groups without leaves, such as parameters without gradients, keep their state.
        with_shapes = zip(stored, stored.shapes or ((),) * size, strict=True)
        absent = [Group((x,), (), shape) for x, shape in with_shapes if x not in own]
        ordered = tuple(sorted([*self.groups, *absent], key=lambda group: group.names))
        return dataclasses.replace(self, groups=ordered)

    def broadcast_to_leaves(self, arrays: Sequence[Any]) -> list[Any]:
        """Returns the value of its group for each measured leaf."""
        by_leaf: dict[int, Any] = {}
        for x, group in zip(arrays, self.groups, strict=True):
            by_leaf |= dict.fromkeys(group.leaf_indices, x)
        return [by_leaf[i] for i in range(len(by_leaf))]


NUM_NORMS_WARNING = 2**24
"""The number of norms above which their memory is large compared with the gradients."""


def tree_scope(scope: Callable[[FlatTree], Grouping]) -> Callable[[FlatTree], Grouping]:
    """Decorates a scope to reject arguments that are not trees."""

    @functools.wraps(scope)
    def scope_fn(flat: FlatTree) -> Grouping:
        if not isinstance(flat, FlatTree):
            raise TypeError(
                f"a scope must be called with a tree, got {short_repr(flat)}; with "
                'optax.inject_hyperparams, pass static_args=("scope",)'
            )
        return scope(flat)

    return scope_fn


def warn_if_many_norms(grouping: Grouping, name: str) -> None:
    """Warns if there are so many norms that the axes of the groups are probably wrong."""
    counts = [math.prod(group.shape) for group in grouping.groups]
    if any(static_size_or_none(count) is None for count in counts):
        return  # The counts are symbolic in `jax.export`.
    total = sum(counts)
    if total > NUM_NORMS_WARNING:
        largest = counts.index(max(counts))
        warn(
            f"{name}: more than {NUM_NORMS_WARNING:,} norms need a lot of memory, but the leaves "
            f"have {total:,} norms, including {counts[largest]:,} for "
            f"'{grouping.groups[largest].names[0]}'; pass axis to compute norms over more "
            "elements, or use scopes.unit(stacked=...) if leaves stack layers"
        )

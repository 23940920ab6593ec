"""Groups: which entries of a tree share a norm, as a scope finds for one tree."""

import collections
import dataclasses
import functools
import math
import sys
from collections.abc import Callable, ItemsView, Iterable, Iterator, Sequence, ValuesView
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optaxclip._base.numerics import static_size_or_none
from optaxclip._base.state import RESTORE_NAMES_HINT, StaticNames
from optaxclip._base.types import Path, PyTree
from optaxclip._base.validation import accepts_args, short_repr, warn


@dataclasses.dataclass(frozen=True)
class Group:
    """Entries that share a norm; or an array of such groups that together make up one leaf.

    Attributes:
      names: the name of the group; for an array of groups, the name of each, or in the layout
        "dict" only the leaf's name.
      members: the positions of the group's leaves among the measured leaves; empty if the tree of
        this step lacks them.
      shape: the shape of the groups' norms, counted over all devices; `()` for a single group.
    """

    names: tuple[str, ...]
    leaf_indices: tuple[int, ...]
    shape: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Grouping:
    """The groups of a tree; hashable, because compiled functions take it as a static argument.

    Attributes:
      groups: the groups, in an order in which all of their names, one after another, are sorted.
      axes: for each measured leaf, the axes over which its norms are taken.
      layout: the form in which users see norms: "scalar", one number for the whole tree; "vector",
        an array with one entry for each name; "dict", one array for each leaf.
      has_labels: whether the names are labels that a user gave.
    """

    groups: tuple[Group, ...]
    axes: tuple[tuple[int, ...], ...]
    layout: Literal["scalar", "vector", "dict"]
    has_labels: bool = False

    @functools.cached_property
    def names(self) -> StaticNames:
        """The names of all entries of a `ClipInfo`."""
        shapes = tuple(group.shape for group in self.groups) if self.layout == "dict" else ()
        names = tuple(name for group in self.groups for name in group.names)
        return StaticNames(names, shapes, self.has_labels)

    @property
    def has_leaves(self) -> list[bool]:
        """For each name, whether its group has leaves at this step."""
        return [bool(group.leaf_indices) for group in self.groups for _ in group.names]

    def align_with_state(self, stored: StaticNames, size: int, name: str) -> "Grouping":
        """This grouping, with an empty group for each name in the state that the tree lacks.

        The state has `size` groups; their names `stored` are empty if the state went through
        `optax.tree_map_params`.
        """
        if self.layout == "scalar" or (not stored and size == len(self.names)):
            return self
        if not stored and size:
            raise ValueError(
                f"{name}: the state has lost the names of its {size} groups, as after "
                f"optax.tree_map_params, and the updates have {len(self.names)}; {RESTORE_NAMES_HINT}"
            )
        if len(stored) != size:
            raise ValueError(
                f"{name}: the state has {size} entries for its {len(stored)} groups, as if it had "
                "been made under jax.vmap; make the update under jax.vmap too, or begin with a "
                "fresh state"
            )
        own = set(self.names)
        if unknown := sorted(own - set(stored)):
            fast = (
                ". Those were the two copies of optax.lookahead: put the clip inside of it, as in "
                "optax.lookahead(optax.chain(clip, optimizer), 5, 0.5)"
            )
            are_copies = all(each.startswith(("fast/", "slow/")) for each in stored or ("",))
            raise ValueError(
                f"{name}: the updates have groups {unknown} that the params given to init did not "
                f"have{fast * are_copies}"
            )
        with_shapes = zip(stored, stored.shapes or ((),) * size, strict=True)
        absent = [Group((each,), (), shape) for each, shape in with_shapes if each not in own]
        ordered = tuple(sorted([*self.groups, *absent], key=lambda group: group.names))
        return dataclasses.replace(self, groups=ordered)

    def broadcast_to_leaves(self, arrays: Sequence[Any]) -> list[Any]:
        """For each measured leaf, the value of its group, from a value for each group."""
        of_leaf: dict[int, Any] = {}
        for x, group in zip(arrays, self.groups, strict=True):
            of_leaf |= dict.fromkeys(group.leaf_indices, x)
        return [of_leaf[i] for i in range(len(of_leaf))]


NUM_NORMS_WARNING = 2**24
"""With more norms than this, a clip's own arrays take much memory beside the gradients."""


def warn_if_many_norms(grouping: Grouping, name: str) -> None:
    """Warns if there are so many norms that leaves are probably grouped by the wrong axes."""
    counts = [math.prod(group.shape) for group in grouping.groups]
    if any(static_size_or_none(count) is None for count in counts):
        return
    total = sum(counts)
    if total > NUM_NORMS_WARNING:
        most = counts.index(max(counts))
        warn(
            f"{name}: these leaves have {total:,} norms, of which "
            f"'{grouping.groups[most].names[0]}' alone has {counts[most]:,}; norms, thresholds and "
            "factors of all are kept in memory. If a norm should cover more entries, name its axes "
            "(axis=), or say which leaves stack layers: scopes.unit(stacked=...)"
        )


def is_sparse(leaf: Any) -> bool:
    """Whether a leaf is a batched-coordinate sparse array."""
    # The module is not imported for this check, which would take 0.1 seconds: a user who has such
    # an array has imported it.
    return isinstance(leaf, getattr(sys.modules.get("jax.experimental.sparse"), "BCOO", ()))


def get_stored_values(leaf: Any) -> Any:
    """The stored values of a sparse array; any other leaf as it is."""
    return leaf.data if is_sparse(leaf) else leaf


def replace_values(leaf: Any, data: Any) -> Any:
    """`data` in place of `leaf`; for a sparse array, in place of its stored values."""
    if not is_sparse(leaf):
        return data
    order = {"indices_sorted": leaf.indices_sorted, "unique_indices": leaf.unique_indices}
    return type(leaf)((data, leaf.indices), shape=leaf.shape, **order)


def leaf_name(path: Path) -> str:
    """A leaf's path as text, such as `encoder/0/kernel`; for a tree that is one leaf, `leaf`."""
    return jax.tree_util.keystr(path, simple=True, separator="/") or "leaf"


class FlatTree(NamedTuple):
    """A tree as a list of leaves.

    Attributes:
      paths: the key path of every leaf, without the boxes that Flax puts around arrays. All paths
        are different: if a custom node gives several children the same key, the second and later
        ones get a number behind it.
      leaves: every leaf; a `BCOO` is one leaf.
      treedef: the structure.
      measured: the positions of the leaves to measure, which have floating or complex entries.
      global_shapes: for each measured leaf, its whole shape over all devices; None if that is
        unknown. It is empty outside of `shard_map`, `pmap` and `vmap(axis_name=)`, because leaves
        are whole there. Scopes find units and layers by these shapes.
      are_exact: whether names are in Python's notation; None means only if two would be equal.
    """

    paths: list[Path]
    leaves: list[Any]
    treedef: Any
    inexact_indices: list[int]
    global_shapes: Sequence[tuple[int, ...] | None] = ()
    use_keystr: bool | None = None

    @property
    def is_masked(self) -> bool:
        """Whether a wrapper such as `optax.masked` or `optax.partition` keeps some leaves back."""
        nodes = jax.tree.leaves(self.tree(), is_leaf=_is_masked_node)
        return any(map(_is_masked_node, nodes))

    def inexact_leaves(self) -> list[Any]:
        """The measured leaves."""
        return [self.leaves[i] for i in self.inexact_indices]

    def shapes(self) -> list[tuple[int, ...]]:
        """The shapes of the measured leaves; the whole shapes if `global_shapes` has them."""
        own = [np.shape(leaf) for leaf in self.inexact_leaves()]
        if not self.global_shapes:
            return own
        both = zip(own, self.global_shapes, strict=True)
        return [shape if of_all is None else of_all for shape, of_all in both]

    def names(self) -> list[str]:
        """The names of the measured leaves, all different."""
        paths = [self.paths[i] for i in self.inexact_indices]
        are_exact = self.use_keystr
        if are_exact is None:
            names = [leaf_name(path) for path in (*self.paths, *self._none_paths())]
            are_exact = len(set(names)) < len(names)
        return [jax.tree_util.keystr(path) if are_exact else leaf_name(path) for path in paths]

    def match_name_style(self, stored: Iterable[str]) -> "FlatTree":
        """This tree, with names in the notation of a state, even if no two would be equal now."""
        names = tuple(stored)
        is_exact = bool(names) and all(name[:1] in ("[", ".") for name in names)
        return self._replace(use_keystr=True) if is_exact else self

    def _none_paths(self) -> list[Path]:
        """The paths at which the tree has None."""
        numbered = jax.tree_util.tree_unflatten(self.treedef, list(range(len(self.leaves))))
        pairs = jax.tree_util.tree_leaves_with_path(numbered, is_leaf=lambda x: x is None)
        return [path for path, x in pairs if x is None]

    def replace_leaves(self, new: Sequence[Any]) -> "FlatTree":
        """This `FlatTree` with other measured leaves."""
        leaves = list(self.leaves)
        for i, leaf in zip(self.inexact_indices, new, strict=True):
            leaves[i] = leaf
        return self._replace(leaves=leaves)

    def unflatten(self, new: Sequence[Any]) -> PyTree:
        """The tree, with other measured leaves."""
        return self.replace_leaves(new).tree()

    def tree(self) -> PyTree:
        """The tree."""
        return jax.tree_util.tree_unflatten(self.treedef, self.leaves)

    def replace_with_float0(self) -> "FlatTree":
        """This tree with `float0` zeros for all leaves, as `jax.grad` gives for integers."""
        zeros = [np.zeros(np.shape(leaf), jax.dtypes.float0) for leaf in self.leaves]
        return self._replace(leaves=zeros)


def _is_masked_node(x: Any) -> bool:
    return isinstance(x, optax.MaskedNode)


def flatten(
    tree: PyTree, argument: str, *, integer_policy: Literal["skip", "error", "measure"] = "skip"
) -> FlatTree:
    """Flattens a tree, which messages call `argument`, and finds the leaves to measure.

    Integer leaves are left alone ("skip"), refused ("error"), or measured like floats ("measure").
    Bool and PRNG-key leaves are refused unless it is "skip".
    """
    pairs, treedef = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_sparse)
    paths = _deduplicate_paths(_strip_boxes([path for path, _ in pairs], tree))
    leaves = [leaf for _, leaf in pairs]
    measured = [
        i for i, leaf in enumerate(leaves) if _is_measured(leaf, paths[i], argument, integer_policy)
    ]
    if not measured and argument in _GRADIENTS:
        dtypes = {str(dtype) for dtype in map(dtype_of, leaves) if dtype != jax.dtypes.float0}
        if dtypes:
            warn(
                f"{argument}: nothing is clipped, because no leaf has floating-point entries; the "
                f"leaves have the dtypes {sorted(dtypes)}"
            )
    return FlatTree(paths, leaves, treedef, measured)


_GRADIENTS = ("updates", "tree")
"""The names of the arguments that are clipped."""


def _strip_boxes(paths: list[Path], tree: PyTree) -> list[Path]:
    """The paths of leaves; the path of an array in a box ends at the box.

    Flax NNX passes variables to `init` and their arrays to `update`; both must have the same names.
    """
    if not any(path and path[-1] == _IN_BOX for path in paths):
        return paths
    nodes = jax.tree_util.tree_leaves_with_path(tree, is_leaf=_is_box)
    boxes = {path for path, node in nodes if _is_box(node)}
    return [path[:-1] if path[:-1] in boxes else path for path in paths]


_IN_BOX = jax.tree_util.GetAttrKey("value")


def _is_box(x: Any) -> bool:
    """Whether `x` is a node with one child, named `value`, such as an `nnx.Variable`."""
    children = jax.tree_util.tree_leaves_with_path(x, is_leaf=lambda child: child is not x)
    return [path for path, _ in children] == [(_IN_BOX,)]


def _deduplicate_paths(paths: list[Path]) -> list[Path]:
    if len(set(paths)) == len(paths):
        return paths
    seen = collections.Counter[Path]()
    distinct = []
    for path in paths:
        number = seen[path]
        seen[path] += 1
        distinct.append((*path, jax.tree_util.GetAttrKey(f"#{number}")) if number else path)
    return distinct


def _is_measured(leaf: Any, path: Path, argument: str, integer_policy: str) -> bool:
    dtype = dtype_of(leaf)
    if dtype is None:
        remedy = (
            "Pass the arrays alone: of an Equinox model eqx.filter(model, eqx.is_inexact_array), "
            "of an NNX module nnx.state(module, nnx.Param)"
        )
        if isinstance(leaf, (Iterator, ValuesView, ItemsView)):
            remedy = "JAX does not read iterators: pass a list or a dict of the arrays"
        raise TypeError(
            f"{argument} must be a pytree of arrays; its leaf '{leaf_name(path)}' is "
            f"{short_repr(leaf)} of type {type(leaf).__name__}. {remedy}"
        )
    if _is_inexact(dtype):
        return True
    if dtype == jax.dtypes.float0 or integer_policy == "skip":
        return False
    if integer_policy == "measure" and jnp.issubdtype(dtype, jnp.integer):
        return True
    raise TypeError(
        f"{argument} must have floating-point leaves; its leaf '{leaf_name(path)}' has dtype "
        f"{dtype}: convert it, or take it out of the tree"
    )


def dtype_of(leaf: Any) -> Any:
    """The dtype of a number, or of an array with one of JAX's dtypes; None for anything else."""
    dtype = getattr(leaf, "dtype", None)
    if dtype is None:
        is_number = isinstance(leaf, (bool, int, float, complex))
        return jnp.result_type(type(leaf)) if is_number else None
    return dtype if _is_jax_dtype(dtype) else None


# Both are cached, because `jnp.issubdtype` is slow.
@functools.cache
def _is_inexact(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.inexact)


@functools.cache
def _is_jax_dtype(dtype: Any) -> bool:
    kinds = (np.bool_, np.number, jax.dtypes.float0, jax.dtypes.prng_key)
    return any(jnp.issubdtype(dtype, kind) for kind in kinds)


def _summarize_tree(tree: PyTree) -> str:
    """The type and the first leaves of a tree, for a message."""
    names = [leaf_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
    shown = f"{names[:4]}"[1:-1] + (", ..." if len(names) > 4 else "")
    return f"the leaves {shown} ({type(tree).__name__})"


def is_function(value: Any, tree: PyTree) -> bool:
    """Returns `True` if `value` is a function, and not a pytree prefix of a callable model."""
    return callable(value) and type(value) is not type(tree)


def broadcast_prefix(
    value: PyTree | Callable[[str, Any], Any], flat: FlatTree, argument: str
) -> list[Any]:
    """One value for each measured leaf of a tree.

    They come from `fn(path, leaf) -> value`, where the path is text such as `encoder/0/kernel`; or
    from a pytree prefix of the tree whose leaves are the values, or `fn(tree)` that returns one.
    """
    if not flat.inexact_indices:
        return []
    if is_function(value, flat.tree()):
        if accepts_args(value, "path", None) or not accepts_args(value, "tree"):
            return [value(leaf_name(flat.paths[i]), flat.leaves[i]) for i in flat.inexact_indices]
        of_tree: Any = value
        value = of_tree(flat.tree())
    positions = jax.tree_util.tree_unflatten(flat.treedef, list(range(len(flat.leaves))))
    try:
        broadcast = jax.tree.broadcast(value, positions)
    except ValueError:
        raise ValueError(
            f"{argument} must be a pytree prefix of the gradients, with one value for each leaf or "
            f"for a branch of leaves; {argument} has {_summarize_tree(value)}, the gradients have "
            f"{_summarize_tree(positions)}. Or pass a function (path, leaf) -> value"
        ) from None
    values = jax.tree.leaves(broadcast)
    return [values[i] for i in flat.inexact_indices]


def align_params(flat: FlatTree, params: PyTree, name: str) -> FlatTree:
    """The tree of updates, with the parameters in place of its measured leaves."""
    found = flatten(params, "params")
    by_path = {found.paths[i]: found.leaves[i] for i in found.inexact_indices}
    for i in flat.inexact_indices:
        path, shape = flat.paths[i], jnp.shape(flat.leaves[i])
        if path not in by_path or jnp.shape(by_path[path]) != shape:
            there = f"has shape {jnp.shape(by_path[path])}" if path in by_path else "is missing"
            raise ValueError(
                f"{name}: params must match the updates; leaf '{leaf_name(path)}' of shape {shape} "
                f"{there} in params"
            )
    return flat.replace_leaves([by_path[flat.paths[i]] for i in flat.inexact_indices])

"""Flattens trees, and finds which leaves a clip measures and changes, and which it leaves alone."""

import collections
import functools
import sys
from collections.abc import Callable, ItemsView, Iterable, Iterator, Sequence, ValuesView
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optaxclip._base.arguments import accepts, short, warn
from optaxclip._base.types import Path, PyTree


def is_sparse(leaf: Any) -> bool:
    """Whether a leaf is a batched-coordinate sparse array."""
    # The module is not imported for this check, which would take 0.1 seconds: a user who has such
    # an array has imported it.
    return isinstance(leaf, getattr(sys.modules.get("jax.experimental.sparse"), "BCOO", ()))


def data_of(leaf: Any) -> Any:
    """The stored values of a sparse array; any other leaf as it is."""
    return leaf.data if is_sparse(leaf) else leaf


def with_data(leaf: Any, data: Any) -> Any:
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
    measured: list[int]
    global_shapes: Sequence[tuple[int, ...] | None] = ()
    are_exact: bool | None = None

    @property
    def is_part(self) -> bool:
        """Whether a wrapper such as `optax.masked` or `optax.partition` keeps some leaves back."""
        nodes = jax.tree.leaves(self.tree(), is_leaf=_is_kept_back)
        return any(map(_is_kept_back, nodes))

    def measured_leaves(self) -> list[Any]:
        """The measured leaves."""
        return [self.leaves[i] for i in self.measured]

    def shapes(self) -> list[tuple[int, ...]]:
        """The shapes of the measured leaves; the whole shapes if `global_shapes` has them."""
        own = [np.shape(leaf) for leaf in self.measured_leaves()]
        if not self.global_shapes:
            return own
        both = zip(own, self.global_shapes, strict=True)
        return [shape if of_all is None else of_all for shape, of_all in both]

    def names(self) -> list[str]:
        """The names of the measured leaves, all different."""
        paths = [self.paths[i] for i in self.measured]
        are_exact = self.are_exact
        if are_exact is None:
            names = [leaf_name(path) for path in (*self.paths, *self._empty_places())]
            are_exact = len(set(names)) < len(names)
        return [jax.tree_util.keystr(path) if are_exact else leaf_name(path) for path in paths]

    def named_like(self, stored: Iterable[str]) -> "FlatTree":
        """This tree, with names in the notation of a state, even if no two would be equal now."""
        names = tuple(stored)
        is_exact = bool(names) and all(name[:1] in ("[", ".") for name in names)
        return self._replace(are_exact=True) if is_exact else self

    def _empty_places(self) -> list[Path]:
        """The paths at which the tree has None."""
        numbered = jax.tree_util.tree_unflatten(self.treedef, list(range(len(self.leaves))))
        pairs = jax.tree_util.tree_leaves_with_path(numbered, is_leaf=lambda x: x is None)
        return [path for path, x in pairs if x is None]

    def replaced(self, new: Sequence[Any]) -> "FlatTree":
        """This `FlatTree` with other measured leaves."""
        leaves = list(self.leaves)
        for i, leaf in zip(self.measured, new, strict=True):
            leaves[i] = leaf
        return self._replace(leaves=leaves)

    def rebuild(self, new: Sequence[Any]) -> PyTree:
        """The tree, with other measured leaves."""
        return self.replaced(new).tree()

    def tree(self) -> PyTree:
        """The tree."""
        return jax.tree_util.tree_unflatten(self.treedef, self.leaves)

    def without_gradients(self) -> "FlatTree":
        """This tree with `float0` zeros for all leaves, as `jax.grad` gives for integers."""
        zeros = [np.zeros(np.shape(leaf), jax.dtypes.float0) for leaf in self.leaves]
        return self._replace(leaves=zeros)


def _is_kept_back(x: Any) -> bool:
    return isinstance(x, optax.MaskedNode)


def flatten(
    tree: PyTree, argument: str, *, integers: Literal["skip", "error", "measure"] = "skip"
) -> FlatTree:
    """Flattens a tree, which messages call `argument`, and finds the leaves to measure.

    Integer leaves are left alone ("skip"), refused ("error"), or measured like floats ("measure").
    Bool and PRNG-key leaves are refused unless it is "skip".
    """
    pairs, treedef = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_sparse)
    paths = _distinct(_without_boxes([path for path, _ in pairs], tree))
    leaves = [leaf for _, leaf in pairs]
    measured = [
        i for i, leaf in enumerate(leaves) if _is_measured(leaf, paths[i], argument, integers)
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


def _without_boxes(paths: list[Path], tree: PyTree) -> list[Path]:
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


def _distinct(paths: list[Path]) -> list[Path]:
    if len(set(paths)) == len(paths):
        return paths
    seen = collections.Counter[Path]()
    distinct = []
    for path in paths:
        number = seen[path]
        seen[path] += 1
        distinct.append((*path, jax.tree_util.GetAttrKey(f"#{number}")) if number else path)
    return distinct


def _is_measured(leaf: Any, path: Path, argument: str, integers: str) -> bool:
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
            f"{short(leaf)} of type {type(leaf).__name__}. {remedy}"
        )
    if _is_inexact(dtype):
        return True
    if dtype == jax.dtypes.float0 or integers == "skip":
        return False
    if integers == "measure" and jnp.issubdtype(dtype, jnp.integer):
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
    return dtype if _is_of_jax(dtype) else None


# Both are cached, because `jnp.issubdtype` is slow.
@functools.cache
def _is_inexact(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.inexact)


@functools.cache
def _is_of_jax(dtype: Any) -> bool:
    kinds = (np.bool_, np.number, jax.dtypes.float0, jax.dtypes.prng_key)
    return any(jnp.issubdtype(dtype, kind) for kind in kinds)


def _outline(tree: PyTree) -> str:
    """The type and the first leaves of a tree, for a message."""
    names = [leaf_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
    shown = f"{names[:4]}"[1:-1] + (", ..." if len(names) > 4 else "")
    return f"the leaves {shown} ({type(tree).__name__})"


def is_function(value: Any, tree: PyTree) -> bool:
    """Returns `True` if `value` is a function, and not a pytree prefix of a callable model."""
    return callable(value) and type(value) is not type(tree)


def per_leaf(value: PyTree | Callable[[str, Any], Any], flat: FlatTree, argument: str) -> list[Any]:
    """One value for each measured leaf of a tree.

    They come from `fn(path, leaf) -> value`, where the path is text such as `encoder/0/kernel`; or
    from a pytree prefix of the tree whose leaves are the values, or `fn(tree)` that returns one.
    """
    if not flat.measured:
        return []
    if is_function(value, flat.tree()):
        if accepts(value, "path", None) or not accepts(value, "tree"):
            return [value(leaf_name(flat.paths[i]), flat.leaves[i]) for i in flat.measured]
        of_tree: Any = value
        value = of_tree(flat.tree())
    positions = jax.tree_util.tree_unflatten(flat.treedef, list(range(len(flat.leaves))))
    try:
        broadcast = jax.tree.broadcast(value, positions)
    except ValueError:
        raise ValueError(
            f"{argument} must be a pytree prefix of the gradients, with one value for each leaf or "
            f"for a branch of leaves; {argument} has {_outline(value)}, the gradients have "
            f"{_outline(positions)}. Or pass a function (path, leaf) -> value"
        ) from None
    values = jax.tree.leaves(broadcast)
    return [values[i] for i in flat.measured]


def matching_params(flat: FlatTree, params: PyTree, name: str) -> FlatTree:
    """The tree of updates, with the parameters in place of its measured leaves."""
    found = flatten(params, "params")
    by_path = {found.paths[i]: found.leaves[i] for i in found.measured}
    for i in flat.measured:
        path, shape = flat.paths[i], jnp.shape(flat.leaves[i])
        if path not in by_path or jnp.shape(by_path[path]) != shape:
            there = f"has shape {jnp.shape(by_path[path])}" if path in by_path else "is missing"
            raise ValueError(
                f"{name}: params must match the updates; leaf '{leaf_name(path)}' of shape {shape} "
                f"{there} in params"
            )
    return flat.replaced([by_path[flat.paths[i]] for i in flat.measured])

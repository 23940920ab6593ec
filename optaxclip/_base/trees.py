"""Trees apart and together again: which leaves a clip measures, which it leaves alone."""

import collections
import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.sparse import BCOO

from optaxclip._base.types import Path, PyTree


def is_sparse(leaf: Any) -> bool:
    """Whether a leaf is a batched-coordinate sparse array."""
    return isinstance(leaf, BCOO)


def with_data(leaf: Any, data: Any) -> Any:
    """`data` in place of an array, or of a sparse array's values."""
    if not is_sparse(leaf):
        return data
    order = {"indices_sorted": leaf.indices_sorted, "unique_indices": leaf.unique_indices}
    return BCOO((data, leaf.indices), shape=leaf.shape, **order)


def leaf_name(path: Path) -> str:
    """A leaf's path as text, such as `encoder/0/kernel`; the root of a one-leaf tree is `leaf`."""
    # Flax NNX boxes arrays in `init` and not in `update`.
    if path and path[-1] == jax.tree_util.GetAttrKey("value"):
        path = path[:-1]
    return jax.tree_util.keystr(path, simple=True, separator="/") or "leaf"


class FlatTree(NamedTuple):
    """A tree taken apart.

    Attributes:
      paths: the key path of every leaf, all different: where a custom node gives several children
        one key, those after the first have their number behind it.
      leaves: every leaf; a `BCOO` is one leaf.
      treedef: the structure.
      measured: positions of the leaves with real or complex floating entries.
      global_shapes: for each measured leaf its shape on all devices together, None where that is
        not known; empty where leaves are no parts. What a unit or a layer is depends on it.
    """

    paths: list[Path]
    leaves: list[Any]
    treedef: Any
    measured: list[int]
    global_shapes: Sequence[tuple[int, ...] | None] = ()

    def picked(self) -> list[Any]:
        """The measured leaves."""
        return [self.leaves[i] for i in self.measured]

    def shapes(self) -> list[tuple[int, ...]]:
        """The shapes of the measured leaves, on all devices together where that is known."""
        own = [np.shape(leaf) for leaf in self.picked()]
        if not self.global_shapes:
            return own
        rows = zip(own, self.global_shapes, strict=True)
        return [shape if known is None else known for shape, known in rows]

    def names(self) -> list[str]:
        """The measured leaves' names, all different."""
        paths = [self.paths[i] for i in self.measured]
        names = [leaf_name(path) for path in paths]
        if len(set(names)) < len(names):
            return [jax.tree_util.keystr(path) for path in paths]
        return names

    def replaced(self, picked: Sequence[Any]) -> "FlatTree":
        """The same with its measured leaves replaced, all others as they were."""
        leaves = list(self.leaves)
        for i, leaf in zip(self.measured, picked, strict=True):
            leaves[i] = leaf
        return self._replace(leaves=leaves)

    def rebuild(self, picked: Sequence[Any]) -> PyTree:
        """The tree with its measured leaves replaced, all others as they were."""
        return self.replaced(picked).tree()

    def tree(self) -> PyTree:
        """The tree."""
        return jax.tree_util.tree_unflatten(self.treedef, self.leaves)

    def without_gradients(self) -> "FlatTree":
        """The same with `float0` zeros, which are the gradients of what is not measured."""
        zeros = [np.zeros(np.shape(leaf), jax.dtypes.float0) for leaf in self.leaves]
        return self._replace(leaves=zeros)


def flatten(
    tree: PyTree, argument: str, *, integers: Literal["skip", "error", "measure"] = "skip"
) -> FlatTree:
    """Takes a tree apart and finds the leaves to measure.

    Args:
      tree: any pytree.
      argument: what the tree is called in messages.
      integers: what integer leaves are: left alone ("skip"), or measured like the others, or an
        error; bool and PRNG-key leaves are left alone with "skip" and errors otherwise.

    Raises:
      TypeError: if a leaf is not an array or number, or is not allowed by `integers`.
    """
    pairs, treedef = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_sparse)
    paths, leaves = _distinct([path for path, _ in pairs]), [leaf for _, leaf in pairs]
    measured = [
        i for i, leaf in enumerate(leaves) if _is_measured(leaf, paths[i], argument, integers)
    ]
    if not measured and argument in _GRADIENTS:
        dtypes = {str(_dtype(leaf)) for leaf in leaves if _dtype(leaf) != jax.dtypes.float0}
        if dtypes:
            warnings.warn(
                f"{argument}: no leaf has floating-point entries, they have the dtypes "
                f"{sorted(dtypes)}; nothing is clipped",
                stacklevel=3,
            )
    return FlatTree(paths, leaves, treedef, measured)


_GRADIENTS = ("updates", "tree")
"""Which trees are there to be clipped."""


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
    dtype = _dtype(leaf)
    if dtype is None:
        raise TypeError(
            f"{argument} must be a pytree of arrays; its leaf '{leaf_name(path)}' is "
            f"{leaf!r:.80} of type {type(leaf).__name__}. Take out what is not an array: of an "
            "Equinox model eqx.filter(model, eqx.is_inexact_array), of an NNX module "
            "nnx.state(module)"
        )
    if jnp.issubdtype(dtype, jnp.inexact):
        return True
    if dtype == jax.dtypes.float0 or integers == "skip":
        return False
    if integers == "measure" and jnp.issubdtype(dtype, jnp.integer):
        return True
    raise TypeError(
        f"{argument} must have floating-point leaves; its leaf '{leaf_name(path)}' has dtype "
        f"{dtype}: convert it, or take it out of the tree"
    )


def _dtype(leaf: Any) -> Any:
    """The dtype of a number or of an array of a type that JAX knows, else None."""
    dtype = getattr(leaf, "dtype", None)
    if dtype is None:
        is_number = isinstance(leaf, (bool, int, float, complex))
        return jnp.result_type(type(leaf)) if is_number else None
    return dtype if _is_known(dtype) else None


@functools.cache
def _is_known(dtype: Any) -> bool:
    known = (np.bool_, np.number, jax.dtypes.float0, jax.dtypes.prng_key)
    return any(jnp.issubdtype(dtype, kind) for kind in known)


def _outline(tree: PyTree) -> str:
    """The type and the first leaves of a tree, for a message."""
    names = [leaf_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
    shown = f"{names[:4]}"[1:-1] + (", ..." if len(names) > 4 else "")
    return f"the leaves {shown} ({type(tree).__name__})"


def per_leaf(value: PyTree | Callable[[str, Any], Any], flat: FlatTree, argument: str) -> list[Any]:
    """One value for each measured leaf of a tree.

    Args:
      value: `fn(path, leaf) -> value`, where the path is text such as `encoder/0/kernel`; or a
        pytree prefix of the tree with values for leaves.
      flat: the tree.
      argument: what `value` is called in messages.

    Raises:
      ValueError: if `value` is not a prefix of the tree.
    """
    if not flat.measured:
        return []
    if callable(value):
        return [value(leaf_name(flat.paths[i]), flat.leaves[i]) for i in flat.measured]
    positions = jax.tree_util.tree_unflatten(flat.treedef, list(range(len(flat.leaves))))
    try:
        broadcast = jax.tree.broadcast(value, positions)
    except ValueError:
        raise ValueError(
            f"{argument} must be a pytree prefix of the gradients, with one value for each of "
            f"their leaves or for a whole branch; {argument} has {_outline(value)}, the gradients "
            f"have {_outline(positions)}. Or pass a function of a leaf's path and the leaf"
        ) from None
    values = jax.tree.leaves(broadcast)
    return [values[i] for i in flat.measured]

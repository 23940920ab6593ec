"""Averages of entries in a transformation's state, a tree like the parameters."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import optaxclip._base.devices as devices
from optaxclip._base.numerics import accumulation_dtype
from optaxclip._base.trees import FlatTree, flatten, is_sparse
from optaxclip._base.types import PyTree


class NamedMoments(NamedTuple):
    """A tree of averages, of which a step's gradients may lack some."""

    flat: FlatTree
    names: list[str]

    @classmethod
    def of(cls, tree: PyTree) -> "NamedMoments":
        """From the tree in a state."""
        flat = flatten(tree, "state")
        return cls(flat, flat.names())

    def of_leaves(self, gradients: FlatTree, name: str) -> list[Array]:
        """The averages of the leaves of the gradients.

        Raises:
          ValueError: if a leaf has another shape than its average, naming the transformation.
        """
        by_name = dict(zip(self.names, self.flat.picked(), strict=True))
        found = [by_name[path] for path in gradients.names()]
        rows = zip(gradients.names(), gradients.picked(), found, strict=True)
        for path, leaf, average in rows:
            if np.shape(leaf) != np.shape(average):
                raise ValueError(
                    f"{name}: leaf '{path}' of the updates has shape {np.shape(leaf)}, and in the "
                    f"params given to init it had {np.shape(average)}; begin with a fresh state"
                )
        return found

    def replaced(self, gradients: FlatTree, leaves: Sequence[Array]) -> PyTree:
        """The tree with new averages of the leaves of the gradients, all others as they were."""
        new = dict(zip(gradients.names(), leaves, strict=True))
        rows = zip(self.names, self.flat.picked(), strict=True)
        return self.flat.rebuild([new.get(name, old) for name, old in rows])


def dense(flat: FlatTree, name: str) -> FlatTree:
    """The same tree.

    Raises:
      TypeError: if a leaf is sparse.
    """
    for leaf, path in zip(flat.picked(), flat.names(), strict=True):
        if is_sparse(leaf):
            raise TypeError(
                f"{name}: leaf '{path}' is sparse, and averages are not; pass leaf.todense()"
            )
    return flat


def zero_moments(flat: FlatTree, *, real: bool = False) -> PyTree:
    """Averages before the first step; None for leaves that have none."""
    leaves: list[Any] = [None] * len(flat.leaves)
    for i, leaf in zip(flat.measured, flat.picked(), strict=True):
        dtype = wide_dtype(jnp.result_type(leaf), real=real)
        leaves[i] = jnp.zeros_like(devices.on_device(leaf), dtype=dtype)
    return jax.tree_util.tree_unflatten(flat.treedef, leaves)


def wide_dtype(dtype: jnp.dtype, *, real: bool = False) -> Any:
    """The dtype to compute with for entries of a dtype: float32 or wider, complex if they are."""
    own = accumulation_dtype(dtype)
    if real or not jnp.issubdtype(dtype, jnp.complexfloating):
        return own
    return jnp.complex128 if own == jnp.float64 else jnp.complex64

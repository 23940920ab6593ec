"""Moving averages of entries, which states keep in trees like the parameters."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import optaxclip._border.devices as devices
from optaxclip._base.numerics import accumulation_dtype
from optaxclip._base.trees import FlatTree, flatten, is_sparse
from optaxclip._base.types import PyTree


class NamedMoments(NamedTuple):
    """The averages in a state; a step's gradients may lack leaves that have an average."""

    flat: FlatTree
    names: list[str]

    @classmethod
    def create(cls, tree: PyTree) -> "NamedMoments":
        """The averages in the tree of a state."""
        flat = flatten(tree, "state")
        return cls(flat, flat.names())

    def get(self, gradients: FlatTree, name: str) -> list[Array]:
        """The average of each leaf of the gradients."""
        by_name = dict(zip(self.names, self.flat.inexact_leaves(), strict=True))
        found = [by_name[path] for path in gradients.names()]
        rows = zip(gradients.names(), gradients.inexact_leaves(), found, strict=True)
        for path, leaf, average in rows:
            if np.shape(leaf) != np.shape(average):
                raise ValueError(
                    f"{name}: leaf '{path}' has shape {np.shape(leaf)} in the updates and "
                    f"{np.shape(average)} in the params that init got; begin with a fresh state"
                )
        return found

    def replace(self, gradients: FlatTree, leaves: Sequence[Array]) -> PyTree:
        """The tree with new averages for the leaves of the gradients; all others stay."""
        new = dict(zip(gradients.names(), leaves, strict=True))
        rows = zip(self.names, self.flat.inexact_leaves(), strict=True)
        return self.flat.unflatten([new.get(name, old) for name, old in rows])


def check_dense(flat: FlatTree, name: str) -> FlatTree:
    """`flat`, checked to have no sparse leaf."""
    for leaf, path in zip(flat.inexact_leaves(), flat.names(), strict=True):
        if is_sparse(leaf):
            raise TypeError(
                f"{name}: leaf '{path}' must be dense, but is a BCOO; pass leaf.todense()"
            )
    return flat


def zero_moments(flat: FlatTree, *, real_only: bool = False) -> PyTree:
    """Averages before the first step: zeros, and None in place of leaves that are not measured."""
    leaves: list[Any] = [None] * len(flat.leaves)
    for i, leaf in zip(flat.inexact_indices, flat.inexact_leaves(), strict=True):
        dtype = wide_dtype(jnp.result_type(leaf), real=real_only)
        leaves[i] = jnp.zeros_like(devices.template_on_device(leaf), dtype=dtype)
    return jax.tree_util.tree_unflatten(flat.treedef, leaves)


def wide_dtype(dtype: jnp.dtype, *, real: bool = False) -> Any:
    """The dtype to compute with: float32 or wider; complex for complex entries unless `real`."""
    own = accumulation_dtype(dtype)
    if real or not jnp.issubdtype(dtype, jnp.complexfloating):
        return own
    return jnp.complex128 if own == jnp.float64 else jnp.complex64

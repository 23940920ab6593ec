"""The policy "mask": bad entries become 0 before anything is measured."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

import optaxclip._engine.cpu as cpu
from optaxclip._base.grouping import Grouping, OfGroups
from optaxclip._base.trees import is_sparse, with_data
from optaxclip._engine.totals import combined, stored


def mask(leaves: list[Any], grouping: Grouping) -> tuple[list[Any], OfGroups]:
    """Leaves with their non-finite entries replaced by 0, and which groups had such entries."""
    masked, bad = [], []
    for leaf, axes in zip(leaves, grouping.axes, strict=True):
        data = leaf.data if is_sparse(leaf) else leaf
        finite = jnp.isfinite(data)
        masked.append(with_data(leaf, _only_finite(data, finite)))
        found = jnp.any(~finite & stored(leaf)) if is_sparse(leaf) else jnp.any(~finite, axes)
        bad.append((found.astype(jnp.int32),))
    flags = combined(bad, grouping, leaves, by_max=True)
    return masked, [flag > 0 for (flag,) in flags]


@jax.custom_jvp
def _only_finite(x: Array, finite: Array) -> Array:
    # On bits, or XLA on CPU converts bfloat16 on the way, which loses subnormals.
    select = cpu.select_bfloat16 if x.dtype == jnp.bfloat16 else jnp.where
    return select(finite, x, jnp.zeros_like(x))


@_only_finite.defjvp
def _(primals: tuple[Array, Array], tangents: tuple[Array, Any]) -> tuple[Array, Array]:
    (x, finite), (dx, _) = primals, tangents
    return _only_finite(x, finite), jnp.where(finite, dx, jnp.zeros_like(dx))

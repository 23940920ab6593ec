"""The policy "mask": bad entries become 0 before anything is measured."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

import optaxclip._engine.cpu as cpu
from optaxclip._base.devices import anywhere
from optaxclip._base.grouping import Grouping
from optaxclip._base.trees import is_sparse, with_data
from optaxclip._engine.placement import of_groups, split_over


def mask(leaves: list[Any], grouping: Grouping) -> tuple[list[Any], list[Array]]:
    """Leaves with their non-finite entries replaced by 0, and which groups had such entries."""
    masked, bad = [], []
    for leaf, axes in zip(leaves, grouping.axes, strict=True):
        data = leaf.data if is_sparse(leaf) else leaf
        finite = jnp.isfinite(data)
        masked.append(with_data(leaf, _only_finite(data, finite)))
        bad.append(jnp.any(~finite, axis=None if is_sparse(leaf) else axes))
    of_group = [
        functools.reduce(
            jnp.logical_or, [bad[i] for i in group.members], jnp.zeros(group.shape, bool)
        )
        for group in grouping.groups
    ]
    over = of_groups(grouping, split_over(leaves, grouping))
    return masked, [anywhere(*row) for row in zip(of_group, over, strict=True)]


@jax.custom_jvp
def _only_finite(x: Array, finite: Array) -> Array:
    # On bits, or XLA on CPU converts bfloat16 on the way, which loses subnormals.
    select = cpu.select_bfloat16 if x.dtype == jnp.bfloat16 else jnp.where
    return select(finite, x, jnp.zeros_like(x))


@_only_finite.defjvp
def _(primals: tuple[Array, Array], tangents: tuple[Array, Any]) -> tuple[Array, Array]:
    (x, finite), (dx, _) = primals, tangents
    return _only_finite(x, finite), jnp.where(finite, dx, jnp.zeros_like(dx))

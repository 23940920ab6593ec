"""The policy "mask": bad entries become 0 before anything is measured."""

from typing import Any

import jax.numpy as jnp
from jax import Array

import optaxclip._border.cpu as cpu
import optaxclip._engine.powers as powers
from optaxclip._base.derivatives import custom_jvp
from optaxclip._base.trees import data_of, is_sparse, with_data
from optaxclip._border.entries import not_padding
from optaxclip._engine.groups import Groups


def mask(leaves: list[Any], groups: Groups) -> tuple[list[Any], Array]:
    """Leaves with their non-finite entries replaced by 0, and which groups had such entries."""

    def bad_groups(leaves: list[Any]) -> Array:
        rows = zip(leaves, groups.grouping.axes, strict=True)
        bad = [(_is_bad(leaf, axes).astype(jnp.int32),) for leaf, axes in rows]
        return powers.of_groups(bad, groups, by_max=True)[0] > 0

    masked = [with_data(leaf, _only_finite(data_of(leaf))) for leaf in leaves]
    return masked, groups.placement.on_each_device(bad_groups, leaves)


def _is_bad(leaf: Any, axes: tuple[int, ...]) -> Array:
    """Whether a group has an entry that is not finite."""
    if is_sparse(leaf):
        return jnp.any(~jnp.isfinite(leaf.data) & not_padding(leaf))
    return jnp.any(~jnp.isfinite(leaf), axes)


@custom_jvp()
def _only_finite(x: Array) -> Array:
    # XLA on CPU (JAX 0.10.2) converts bfloat16 before it selects, which loses subnormal numbers: so
    # its bits are selected.
    select = cpu.select_bfloat16 if x.dtype == jnp.bfloat16 else jnp.where
    return select(jnp.isfinite(x), x, jnp.zeros_like(x))


@_only_finite.defjvp
def _(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    (x,), (dx,) = primals, tangents
    return _only_finite(x), jnp.where(jnp.isfinite(x), dx, jnp.zeros_like(dx))

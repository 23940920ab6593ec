"""The policy "mask": bad entries become 0 before anything is measured."""

from typing import Any

import jax.numpy as jnp
from jax import Array

from optaxclip._base.trees import data_of, with_data
from optaxclip._border.entries import any_entry, select_exactly
from optaxclip._engine.plan import Plan


def mask(leaves: list[Any], plan: Plan) -> tuple[list[Any], Array]:
    """Leaves with their non-finite entries replaced by 0, and which groups had such entries."""

    def bad_groups(leaves: list[Any]) -> Array:
        rows = zip(leaves, plan.grouping.axes, strict=True)
        bad = [(_is_bad(leaf, axes),) for leaf, axes in rows]
        return plan.totals(bad, by_max=True)[0] > 0

    return list(map(_only_finite, leaves)), plan.placement.on_each_device(bad_groups)(leaves)


def _is_bad(leaf: Any, axes: tuple[int, ...]) -> Array:
    """Which groups have an entry that is not finite."""
    return any_entry(leaf, ~jnp.isfinite(data_of(leaf)), axes).astype(jnp.int32)


def _only_finite(leaf: Any) -> Any:
    x = data_of(leaf)
    return with_data(leaf, select_exactly(jnp.isfinite(x), x, jnp.zeros_like(x)))

"""The derivative of norms that are rescaled when they leave the range."""

from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import Array, lax

from optaxclip._groups import Groups
from optaxclip._numerics import exponent_below, power_of_two

Norms: TypeAlias = tuple[list[Array], list[Array]]
"""Mantissas and units of all blocks."""


def differentiable(
    groups: Groups,
    norms: Callable[[Groups], Norms],
    totals: Callable[[Groups, list[Array]], list[Array]],
) -> Norms:
    """Norms whose derivatives are taken of entries divided by a power of two next to the norm.

    So no derivative of a square leaves the range where that of the norm does not, and however the
    norms are found, by loops and branches too, they have derivatives in both modes.

    Args:
      groups: the leaves.
      norms: the norms.
      totals: for units of all blocks, the totals of entries divided by them.
    """

    @jax.custom_jvp
    def measured(leaves: list[Any]) -> Norms:
        return norms(groups._replace(leaves=leaves))

    @measured.defjvp
    def _(primals: tuple[list[Any]], tangents: tuple[list[Any]]) -> tuple[Norms, Norms]:
        mantissas, units = measured(*primals)
        # Their derivatives are zero, and would be multiplied by squares that leave the range.
        units = lax.stop_gradient(units)
        nearby = [_product_below(*block) for block in zip(mantissas, units, strict=True)]

        def divided(leaves: list[Any]) -> list[Array]:
            within = groups._replace(leaves=leaves)
            return within.norms(totals(within, nearby))

        _, changes = jax.jvp(divided, primals, tangents)
        blocks = zip(changes, nearby, units, strict=True)
        changes = [change * near / unit for change, near, unit in blocks]
        return (mantissas, units), (changes, [jnp.zeros_like(unit) for unit in units])

    return measured(groups.leaves)


def _product_below(mantissa: Array, unit: Array) -> Array:
    """A power of two next to a product that may leave the range."""
    most = -jnp.finfo(unit.dtype).minexp
    exponent = exponent_below(mantissa) + exponent_below(unit)
    return power_of_two(jnp.clip(exponent, -most, most), unit.dtype)

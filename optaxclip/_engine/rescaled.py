"""Norms whose entries are rescaled where their powers leave the range, and their derivative."""

import functools
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import Array, lax

from optaxclip._base.numerics import exponent_below, power_of_two, power_of_two_below
from optaxclip._engine.groups import Groups

Norms: TypeAlias = tuple[list[Array], list[Array]]
"""Mantissas and units of all blocks."""


def norms_of(
    groups: Groups,
    combined: Callable[..., list[Array]],
    rescued: Callable[[Groups], Norms],
) -> Norms:
    """The norms of all blocks, as mantissas and units.

    Args:
      groups: the leaves.
      combined: `(groups, parts, *, by_max=False)`, from one array for each leaf to one for each
        block.
      rescued: for degree 1 and 2, the norms, with a second look at those that leave the range.
    """
    norm = groups.norm
    if norm.is_max:
        mantissas = combined(groups, groups.parts(), by_max=True)
        return mantissas, [jnp.ones_like(mantissa) for mantissa in mantissas]

    def divided(
        groups: Groups, units: list[Array], sizes: list[Array] | None = None
    ) -> list[Array]:
        # Multiplied, as the compiler would multiply the divisors of a second derivative.
        scales = [1 / unit for unit in units]
        return groups.norms(combined(groups, groups.parts_scaled(scales, sizes)))

    if norm.degree in (1, 2):
        return _differentiable(groups, rescued, divided)
    # Higher powers leave the range too easily for thresholds: always rescale.
    largest = groups.largest()
    units = [power_of_two_below(x) for x in combined(groups, largest, by_max=True)]
    return divided(groups, units, largest), units


def _differentiable(
    groups: Groups,
    norms: Callable[[Groups], Norms],
    divided: Callable[[Groups, list[Array]], list[Array]],
) -> Norms:
    """Norms whose derivatives are taken of entries divided by a power of two next to the norm.

    So no derivative of a square leaves the range where that of the norm does not, and however the
    norms are found, by loops and branches too, they have derivatives in both modes.

    Args:
      groups: the leaves.
      norms: the norms.
      divided: for units of all blocks, the norms of entries divided by them.
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

        def near(leaves: list[Any]) -> list[Array]:
            return divided(groups._replace(leaves=leaves), nearby)

        _, changes = jax.jvp(near, primals, tangents)
        blocks = zip(changes, nearby, units, strict=True)
        changes = [change * power / unit for change, power, unit in blocks]
        return (mantissas, units), (changes, [jnp.zeros_like(unit) for unit in units])

    return measured(groups.leaves)


def is_any_out(scales: list[Array]) -> Array:
    """Whether anything has to be multiplied by more or less than 1."""
    return functools.reduce(_or_out, scales, jnp.zeros((), bool))


# Compiled by itself, so that it is traced once for all of them.
@jax.jit
def _or_out(flag: Array, scale: Array) -> Array:
    return flag | jnp.any(scale != 1)


def _product_below(mantissa: Array, unit: Array) -> Array:
    """A power of two next to a product that may leave the range."""
    most = -jnp.finfo(unit.dtype).minexp
    exponent = exponent_below(mantissa) + exponent_below(unit)
    return power_of_two(jnp.clip(exponent, -most, most), unit.dtype)

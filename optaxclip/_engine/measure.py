"""Measure: leaves come in, the norms of their groups go out, exact whatever the range.

  in   leaves `[...]`, floating or complex (or `BCOO`), and which of their entries share a norm
  out  for each group, or array of groups, of the grouping a `Measured` of its shape

Powers of entries leave float32's range long before norms do. So one pass over a leaf gives its
total at several scales: of the entries as they are, far down and far up. Totals of the leaves of a
group are added, then those of devices, in one collective; the total that neither overflowed nor
lost its small summands is the norm's, with its scale for a unit. Nothing is branched on or stored.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec

import optaxclip._base.devices as devices
from optaxclip._base.grouping import Grouping
from optaxclip._base.numerics import (
    exponent_below,
    power_of_two,
    power_of_two_below,
)
from optaxclip._engine.part import Part
from optaxclip._engine.placement import known_shardings, norm_spec
from optaxclip.norms import Norm


class Measured(NamedTuple):
    """The norms of a group, or of an array of groups, `mantissa * unit`.

    Attributes:
      mantissa: the norms divided by `unit`, of the shape of the groups.
      unit: powers of two, of that shape: 1, but where totals left the range of the dtype.
      slack: how much factors must be lowered against rounding; broadcasts to that shape.
    """

    mantissa: Array
    unit: Array
    slack: Array

    @property
    def norm(self) -> Array:
        """The norms; a finite one that the dtype cannot hold is its largest number."""
        norm = jnp.minimum(self.mantissa * self.unit, jnp.finfo(self.mantissa.dtype).max)
        return jnp.where(jnp.isfinite(self.mantissa), norm, self.mantissa)


def measure(leaves: list[Any], grouping: Grouping, norm: Norm) -> list[Measured]:
    """The norms of all groups, over all devices; float64 if a leaf is, else float32.

    Args:
      leaves: floating or complex arrays (or `BCOO`), in the order of the grouping.
      grouping: from a scope.
      norm: the norm.

    Returns:
      One for each array of norms, as `Grouping.joined` has them.
    """
    known = known_shardings(leaves, grouping)
    if known is None:
        return _measured(Part.of(leaves, grouping, norm))
    # Where it is known how leaves are split, one collective in the place of the compiler's many.
    mesh, specs = known
    inside = dataclasses.replace(grouping, specs=specs)
    found = [norm_spec(grouping, specs, n) for n in range(len(grouping.groups))]
    out: list[Any] = [(spec, spec, PartitionSpec()) for spec in found]
    out = [Measured(*specs) for specs in out]

    def local(leaves: list[Any]) -> list[Measured]:
        return _measured(Part.of(leaves, inside, norm))

    return devices.region(local, mesh, (list(specs),), out)(leaves)


def already_measured(
    given: Array, leaves: list[Any], grouping: Grouping, norm: Norm
) -> list[Measured]:
    """A norm of the whole tree that the caller has, float32 or float64 `[]`, as from `measure`."""
    unit = power_of_two_below(given)
    (slack,) = Part.of(leaves, grouping, norm).slacks()
    return [Measured(given / unit, unit, slack.astype(given.dtype))]


def _measured(part: Part) -> list[Measured]:
    rows = zip(*_differentiable(part), part.slacks(), strict=True)
    return [Measured(*row) for row in rows]


def _differentiable(part: Part) -> tuple[list[Array], list[Array]]:
    """Mantissas and units, whose derivatives are taken of entries divided by a power of two nearby.

    So no derivative of a power leaves the range where that of the norm does not, and however norms
    are found, they have derivatives in both modes.
    """
    # A rule that held the leaves would keep tracers beyond their trace.
    bare = part._replace(leaves=[])

    @jax.custom_jvp
    def norms(leaves: list[Any]) -> tuple[list[Array], list[Array]]:
        return bare._replace(leaves=leaves).norms()

    @norms.defjvp
    def _(primals: tuple[list[Any]], tangents: tuple[list[Any]]) -> Any:
        mantissas, units = norms(*primals)
        # Their derivatives are zero, and would be multiplied by squares that leave the range.
        units = lax.stop_gradient(units)
        nearby = [_product_below(*pair) for pair in zip(mantissas, units, strict=True)]
        nearby = bare.grouping.of_first(nearby)

        def near(leaves: list[Any]) -> list[Array]:
            return bare._replace(leaves=leaves).divided(nearby)

        _, changes = jax.jvp(near, primals, tangents)
        rows = zip(changes, nearby, units, strict=True)
        changes = [change * power / unit for change, power, unit in rows]
        return (mantissas, units), (changes, [jnp.zeros_like(unit) for unit in units])

    return norms(part.leaves)


def _product_below(mantissa: Array, unit: Array) -> Array:
    """A power of two next to a product that may leave the range."""
    most = -jnp.finfo(unit.dtype).minexp
    exponent = exponent_below(mantissa) + exponent_below(unit)
    return power_of_two(jnp.clip(exponent, -most, most), unit.dtype)

"""Respond: norms and their limits come in, what the groups are multiplied by goes out.

in   norms, triggers and targets, all of one shape
out  a `Multiplier` of that shape
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from optaxclip._base.numerics import exponent_below, power_of_two, select
from optaxclip._base.types import NonFinite
from optaxclip._engine.measure import Measured
from optaxclip.responses import Response


class Multiplier(NamedTuple):
    """What groups are multiplied by; every field has the shape of their norms.

    Attributes:
      before: a power of two that takes entries to where no product is subnormal, 1 mostly; 0 where
        the group is left as it is, bit for bit.
      quotient: the factor divided by `before`.
      is_zero: where the group is replaced by zeros, whatever it holds, if that is the policy.
    """

    before: Array
    quotient: Array
    is_zero: Array | None

    @property
    def is_identity(self) -> Array:
        """Where the group is left as it is."""
        return self.before == 0

    @property
    def factor(self) -> Array:
        """What the group is multiplied by."""
        return jnp.where(self.is_identity, 1, self.before * self.quotient)


# Compiled by itself so that it is traced once for norms of one shape.
@functools.partial(jax.jit, static_argnames=("response", "nonfinite"))
def multiplier(
    measured: Measured,
    trigger: Array,
    target: Array,
    *,
    response: Response,
    nonfinite: NonFinite,
) -> Multiplier:
    """From norms and their limits to what the groups are multiplied by.

    Args:
      measured: the norms.
      trigger: the norms above which to act.
      target: the norms to reach.
      response: the new norms from these three; or the multipliers, if it has them (`factor`).
      nonfinite: what becomes of groups whose norm is not finite.
    """
    norm = measured.norm
    arguments = (norm, trigger.astype(norm.dtype), target.astype(norm.dtype))
    new = response(*arguments)
    # A response may be one number for many norms, and limits know shapes that norms of missing
    # leaves lack.
    new, norm, mantissa, unit, slack = jnp.broadcast_arrays(
        jnp.asarray(new).astype(norm.dtype), norm, *measured
    )
    bad = ~jnp.isfinite(norm)
    replacement, zeroed = (0.0, bad) if nonfinite == "zero" else (jnp.nan, None)
    if exact := getattr(response, "factor", None):
        factor = jnp.broadcast_to(exact(*arguments), norm.shape)
        before = (factor != 1).astype(norm.dtype)
        return Multiplier(before, select(bad, replacement, factor), zeroed)
    keep = (new == norm) & ~bad
    # The factor is new / (mantissa * unit), of which no step may leave the range. On exponents, as
    # the compiler would multiply divisors first, which overflows.
    exponents = [exponent_below(x) for x in (new, mantissa, unit)]
    new_power, mantissa_power = (power_of_two(x, norm.dtype) for x in exponents[:2])
    split = _split(*exponents, lowest=jnp.finfo(norm.dtype).minexp // 2)
    inverse_before, after = (power_of_two(exponent, norm.dtype) for exponent in split)
    is_zero = mantissa == 0
    # A zero group stays zero under any limit, but a NaN limit still shows.
    numerator = select(is_zero, select(jnp.isnan(new), new, 1), new / new_power)
    denominator = select(is_zero, 1, mantissa / mantissa_power)
    numerator = numerator * (1 - slack) * after

    def unless_idle(x: Array) -> Array:
        return select(bad | keep, 1, x)

    # Divisions come last: XLA on CPU stores their results, where it would do cheaper steps once
    # more for each leaf, among the entries.
    before = (~keep).astype(norm.dtype) / unless_idle(inverse_before)
    quotient = select(bad, replacement, unless_idle(numerator)) / unless_idle(denominator)
    return Multiplier(before, quotient, zeroed)


def _split(new: Array, mantissa: Array, unit: Array, *, lowest: int) -> tuple[Array, Array]:
    """Powers of two with the quotient `new / (mantissa * unit)`, which may leave the range.

    Entries are divided by the first, multiplied by a number near 1, and by the second: what
    underflows on the way would do so in the end.

    Args:
      new: the exponent of the new norm, as `exponent_below` has it.
      mantissa: that of the norm's mantissa.
      unit: that of its unit.
      lowest: the exponent of a factor below which it is taken in two steps.

    Returns:
      Two exponents.
    """
    norm = mantissa + unit
    factor = new - norm
    down = select(factor < lowest, -(factor >> 1), 0)
    is_small = norm < 0
    return select(is_small, norm, down), select(is_small, new, factor + down)

"""Respond: takes norms and their limits, and gives what the groups are multiplied by.

in   norms, triggers and targets, all of one shape
out  a `Multiplier` of that shape
"""

import functools
from typing import NamedTuple, Protocol, runtime_checkable

import chex
import jax
import jax.numpy as jnp
from jax import Array, lax

from optaxclip._base.numerics import reciprocal_of_power
from optaxclip._base.types import NonFinite
from optaxclip._border.entries import quotients
from optaxclip._engine.measure import Measured
from optaxclip.responses import Response


class Multiplier(NamedTuple):
    """The groups' factors, each a product of two numbers, because it may leave its dtype's range.

    If both are 1, the group is left as it is, bit for bit.

    Attributes:
      power: nearly always 1; if the factor or its derivative would not be a normal number, a power
        of two near the norm's reciprocal.
      ratio: the rest of the factor; NaN or 0 for a group that is not finite.
    """

    power: Array
    ratio: Array

    @property
    def factor(self) -> Array:
        """The product."""
        return self.power * self.ratio


@runtime_checkable
class ExactFactor(Protocol):
    """A response that can also return factors instead of new norms.

    The factors are used, unless a factor or its derivative is not a normal number.
    """

    def factor(self, norm: Array, trigger: Array, target: Array) -> Array:
        """The factors, in the shape of the norms."""
        ...


# A compiled function of its own, so that it is traced once for norms of one shape.
@functools.partial(jax.jit, static_argnames=("response", "nonfinite", "strict"))
def multiplier(
    measured: Measured,
    trigger: Array,
    target: Array,
    *,
    response: Response,
    nonfinite: NonFinite,
    strict: bool,
) -> Multiplier:
    """What the groups are multiplied by, from their norms and limits.

    Args:
      measured: the norms.
      trigger: the norms above which to act.
      target: the norms to reach. An infinite target means no limit, and the group stays.
      response: computes the new norms from these three. It gets ones for a group that is not finite
        or has no limit.
      nonfinite: what becomes of groups whose norm is not finite.
      strict: whether rounding must not take a group above its new norm; then `measured` must hold
        upper bounds.
    """
    chex.assert_equal_shape([*measured, trigger, target])
    norm = measured.bound if strict else measured.norm
    is_bad = ~jnp.isfinite(norm)
    is_judged = ~is_bad & ~jnp.isinf(target)

    def of_judged(x: Array) -> Array:
        # Derivatives must be finite even on the side that is not selected.
        return jnp.where(is_judged, x.astype(norm.dtype), 1.0)

    old = of_judged(norm)
    trigger, target = of_judged(trigger), of_judged(target)
    replacement = 0.0 if nonfinite == "zero" else jnp.nan
    lowered = 1 - _ROUNDINGS * float(jnp.finfo(norm.dtype).eps) / 2 if strict else 1
    new = jnp.asarray(response(old, trigger, target)).astype(norm.dtype)
    # A zero group stays zero under any limit except NaN.
    is_changed = is_judged & (new != old) & ((old != 0) | jnp.isnan(new))
    quotient = new * lowered / of_judged(measured.divisor)
    ratio = jnp.where(is_changed, quotient, 1)
    size = lax.stop_gradient(jnp.where(is_changed, measured.size, 1))
    per_size = reciprocal_of_power(size)
    factor = jnp.abs(ratio * per_size)
    # The derivative of the factor is about as large as factor / norm.
    is_normal = _is_normal(factor) & _is_normal(factor * per_size)
    unit = size
    if isinstance(response, ExactFactor):
        exact = of_judged(response.factor(old, trigger, target))
        exact = jnp.where(exact == 1, exact, exact * lowered)
        ratio, unit = jnp.where(is_normal, exact, ratio), jnp.ones_like(size)
    # Divisions come last: XLA (JAX 0.10.2) stores the result of a division, but repeats cheaper
    # operations, such as a product with a reciprocal, for each leaf.
    dividends = (jnp.ones_like(ratio), jnp.where(is_bad, replacement, ratio))
    divisors = (jnp.where(is_normal, 1, size), jnp.where(is_normal, unit, 1))
    power, ratio = quotients(dividends, divisors)
    return Multiplier(power, ratio)


def _is_normal(factor: Array) -> Array:
    return (factor > _SMALLEST) & (factor < 1 / _SMALLEST)


_ROUNDINGS = 7
"""From a norm to an entry there are at most so many roundings, each by half an epsilon at most.

The bound leaves room for clipping twice.
"""

_SMALLEST = 2.0**-120
"""Factors from this number to its reciprocal are normal numbers of float32."""

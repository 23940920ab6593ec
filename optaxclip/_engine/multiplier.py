"""Respond: takes norms and their thresholds, and gives what the groups are multiplied by.

in   norms, triggers and targets, all of one shape
out  a `Multiplier` of that shape
"""

import functools
from typing import NamedTuple, Protocol, runtime_checkable

import chex
import jax
import jax.numpy as jnp
from jax import Array, lax

from optaxclip._backend.elementwise import divide_each
from optaxclip._base.numerics import reciprocal_pow2
from optaxclip._base.types import NonFinite
from optaxclip._engine.measure import ScaledNorms
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
def compute_multiplier(
    measured: ScaledNorms,
    trigger: Array,
    target: Array,
    *,
    response: Response,
    nonfinite: NonFinite,
    strict: bool,
) -> Multiplier:
    """What the groups are multiplied by, from their norms and thresholds.

    Args:
      measured: the norms.
      trigger: the norms above which to act.
      target: the norms to reach. An infinite target means no threshold, and the group stays.
      response: computes the new norms from these three. It gets ones for a group that is not finite
        or has no threshold.
      nonfinite: what becomes of groups whose norm is not finite.
      strict: whether rounding must not take a group above its new norm; then `measured` must hold
        upper bounds.
    """
    chex.assert_equal_shape([*measured, trigger, target])
    norm = measured.upper_bound if strict else measured.norm
    is_bad = ~jnp.isfinite(norm)
    is_active = ~is_bad & ~jnp.isinf(target)

    def where_active(x: Array) -> Array:
        # Derivatives must be finite even on the side that is not selected.
        return jnp.where(is_active, x.astype(norm.dtype), 1.0)

    old = where_active(norm)
    trigger, target = where_active(trigger), where_active(target)
    replacement = 0.0 if nonfinite == "zero" else jnp.nan
    safety_factor = 1 - _NUM_ROUNDINGS * float(jnp.finfo(norm.dtype).eps) / 2 if strict else 1
    new = jnp.asarray(response(old, trigger, target)).astype(norm.dtype)
    # A zero group stays zero under any threshold except NaN.
    is_changed = is_active & (new != old) & ((old != 0) | jnp.isnan(new))
    quotient = new * safety_factor / where_active(measured.divisor)
    ratio = jnp.where(is_changed, quotient, 1)
    size = lax.stop_gradient(jnp.where(is_changed, measured.scale, 1))
    per_size = reciprocal_pow2(size)
    factor = jnp.abs(ratio * per_size)
    # The derivative of the factor is about as large as factor / norm.
    is_normal = _is_normal(factor) & _is_normal(factor * per_size)
    unit = size
    if isinstance(response, ExactFactor):
        exact = where_active(response.factor(old, trigger, target))
        exact = jnp.where(exact == 1, exact, exact * safety_factor)
        ratio, unit = jnp.where(is_normal, exact, ratio), jnp.ones_like(size)
    # Divisions come last: XLA (JAX 0.10.2) stores the result of a division, but repeats cheaper
    # operations, such as a product with a reciprocal, for each leaf.
    dividends = (jnp.ones_like(ratio), jnp.where(is_bad, replacement, ratio))
    divisors = (jnp.where(is_normal, 1, size), jnp.where(is_normal, unit, 1))
    power, ratio = divide_each(dividends, divisors)
    return Multiplier(power, ratio)


def _is_normal(factor: Array) -> Array:
    return (factor > _MIN_FACTOR) & (factor < 1 / _MIN_FACTOR)


_NUM_ROUNDINGS = 7
"""From a norm to an entry there are at most so many roundings, each by half an epsilon at most.

The bound leaves room for clipping twice.
"""

_MIN_FACTOR = 2.0**-120
"""Factors from this number to its reciprocal are normal numbers of float32."""

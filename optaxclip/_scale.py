"""The last stage: one multiplication and one rounding for each entry."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from optaxclip._exact import product_toward_zero, refined_quotient
from optaxclip._measure import Measured
from optaxclip._numerics import (
    accumulation_dtype,
    match_weak_type,
    round_to,
    rounding_slack,
    safe_divide,
)
from optaxclip._trees import is_sparse, with_data
from optaxclip.responses import Response


class Multiplier(NamedTuple):
    """What a group is multiplied by, each field `[...]` over the axes that a norm leaves.

    Attributes:
      quotient: the factor, but for the power of two.
      inverse_unit: a power of two, so that entries at both ends of the range survive; 1 mostly.
      is_identity: where the group is left as it is, bit for bit.
      is_zero: where the group is replaced by zeros, whatever it holds.
      correction: what the quotient lacks, in small groups, whose products are rounded toward zero.
    """

    quotient: Array
    inverse_unit: Array
    is_identity: Array
    is_zero: Array
    correction: Array | None = None

    @property
    def factor(self) -> Array:
        """What the group was multiplied by."""
        return self.quotient * self.inverse_unit


def multiplier(
    measured: Measured, trigger: Array, target: Array, response: Response, replacement: float
) -> Multiplier:
    """From a norm and its limits to what the group is multiplied by.

    Args:
      measured: the group's norm.
      trigger: the norm above which to act, of the norm's shape.
      target: the norm to reach.
      response: the new norm from these three.
      replacement: the factor of a group whose norm is not finite, NaN or 0.
    """
    norm = measured.norm
    bad = ~jnp.isfinite(norm)
    new = response(norm, trigger.astype(norm.dtype), target.astype(norm.dtype))
    keep = (new == norm) & ~bad
    # A zero group stays zero under any limit, but a NaN limit still shows.
    at_zero = jnp.where(jnp.isnan(new), new, 1)
    quotient = safe_divide(new, measured.mantissa, at_zero)
    correction = None
    if measured.error is None:
        quotient = quotient * (1 - rounding_slack(measured.count, norm.dtype))
    else:
        correction = refined_quotient(quotient, new, measured.mantissa, measured.error)
    quotient = jnp.where(bad, replacement, jnp.where(keep, 1, quotient))
    inverse_unit = jnp.where(keep | bad, 1, 1 / measured.unit)
    is_zero = bad if replacement == 0 else jnp.zeros_like(bad)
    return Multiplier(quotient, inverse_unit, keep, is_zero, correction)


def scale(leaf: Any, by: Multiplier, axes: tuple[int, ...], *, strict: bool) -> Any:
    """A leaf times its group's multiplier, in the leaf's own dtype and weak type.

    Args:
      leaf: a floating or complex array, or a `BCOO`, whose data is scaled.
      by: the group's multiplier.
      axes: the leaf's axes that the multiplier lacks.
      strict: whether rounding to a narrow dtype may only lower an entry's modulus.
    """
    if is_sparse(leaf):
        data = scale(leaf.data, by, tuple(range(leaf.data.ndim)), strict=strict)
        return with_data(leaf, data)
    by = jax.tree.map(lambda field: lax.expand_dims(field, axes), by)
    if jnp.iscomplexobj(leaf):
        scaled = lax.complex(
            _product(leaf.real, by, strict=strict), _product(leaf.imag, by, strict=strict)
        )
    else:
        scaled = _product(leaf, by, strict=strict)
    scaled = jnp.where(by.is_zero, jnp.zeros_like(scaled), scaled)
    return match_weak_type(jnp.where(by.is_identity, leaf, scaled), leaf)


def _product(x: Array, by: Multiplier, *, strict: bool) -> Array:
    dtype = jnp.promote_types(accumulation_dtype(x.dtype), by.quotient.dtype)
    wide = x.astype(dtype) * by.inverse_unit.astype(dtype)
    if by.correction is None:
        wide = wide * by.quotient.astype(dtype)
    else:
        wide = product_toward_zero(wide, by.quotient, by.correction)
    return round_to(wide, x.dtype, toward_zero=strict)

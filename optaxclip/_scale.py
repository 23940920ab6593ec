"""The last stage: one multiplication and one rounding for each entry."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from optaxclip._exact import product_toward_zero, refined_quotient
from optaxclip._measure import Measured
from optaxclip._numerics import (
    accumulation_dtype,
    match_weak_type,
    promoted,
    real_parts,
    round_to,
    safe_divide,
)
from optaxclip._trees import is_sparse, with_data
from optaxclip._types import NonFinite
from optaxclip.responses import Response


class Multiplier(NamedTuple):
    """What a group is multiplied by; every field has the shape of the norms.

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
    correction: Array | None

    @property
    def factor(self) -> Array:
        """What the group was multiplied by."""
        return self.quotient * self.inverse_unit


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
      response: the new norms from these three.
      nonfinite: what becomes of groups whose norm is not finite.
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
        quotient = quotient * (1 - measured.slack)
    else:
        correction = refined_quotient(quotient, new, measured.mantissa, measured.error)
    replacement = 0.0 if nonfinite == "zero" else jnp.nan
    quotient = jnp.where(bad, replacement, jnp.where(keep, 1, quotient))
    inverse_unit = jnp.where(keep | bad, 1, 1 / measured.unit)
    is_zero = bad if nonfinite == "zero" else jnp.zeros_like(bad)
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
        axes = tuple(range(leaf.data.ndim))
        return with_data(leaf, _scale_array(leaf.data, by, axes=axes, strict=strict))
    return _scale_array(leaf, by, axes=axes, strict=strict)


# Compiled by itself so that leaves of equal shapes are traced once.
@functools.partial(jax.jit, static_argnames=("axes", "strict"))
def _scale_array(x: Array, by: Multiplier, *, axes: tuple[int, ...], strict: bool) -> Array:
    by = jax.tree.map(lambda field: lax.expand_dims(field, axes), by)
    parts = [_product(part, by, strict=strict) for part in real_parts(x)]
    scaled = lax.complex(*parts) if jnp.iscomplexobj(x) else parts[0]
    scaled = jnp.where(by.is_zero, jnp.zeros_like(scaled), scaled)
    return match_weak_type(jnp.where(by.is_identity, x, scaled), x)


def _product(x: Array, by: Multiplier, *, strict: bool) -> Array:
    wide, inverse_unit, quotient = promoted(
        [x.astype(accumulation_dtype(x.dtype)), by.inverse_unit, by.quotient]
    )
    wide = wide * inverse_unit
    if by.correction is None:
        product = wide * quotient
    else:
        product = product_toward_zero(wide, quotient, by.correction.astype(wide.dtype))
    return round_to(product, x.dtype, toward_zero=strict)

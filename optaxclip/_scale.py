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
    power_of_two_below,
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
      before: a power of two that takes entries to where no product is subnormal; 1 mostly.
      quotient: the factor divided by `before`, and by `after` if there is one.
      is_identity: where the group is left as it is, bit for bit.
      is_zero: where the group is replaced by zeros, whatever it holds.
      exact: in small groups, whose products are rounded toward zero, what the quotient lacks and
        a power of two to multiply by in the end.
    """

    before: Array
    quotient: Array
    is_identity: Array
    is_zero: Array
    exact: tuple[Array, Array] | None

    @property
    def factor(self) -> Array:
        """What the group was multiplied by."""
        after = 1 if self.exact is None else self.exact[1]
        return self.before * self.quotient * after


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
    size, unit = (lax.stop_gradient(power_of_two_below(x)) for x in (new, measured.mantissa))
    new, mantissa = new / size, measured.mantissa / unit
    before, after = _powers_around(size, unit, measured.unit)
    quotient = safe_divide(new, mantissa, at_zero)
    replacement = 0.0 if nonfinite == "zero" else jnp.nan

    def unless_kept(x: Array, otherwise: Array | float) -> Array:
        return jnp.where(bad, otherwise, jnp.where(keep, 1, x))

    before, exact = unless_kept(before, 1), None
    if measured.error is None:
        quotient = unless_kept(quotient * (1 - measured.slack) * after, replacement)
    else:
        exact = refined_quotient(quotient, new, mantissa, measured.error), unless_kept(after, 1)
        quotient = unless_kept(quotient, replacement)
    is_zero = bad if nonfinite == "zero" else jnp.zeros_like(bad)
    return Multiplier(before, quotient, keep, is_zero, exact)


def _powers_around(size: Array, unit: Array, unit_of_group: Array) -> tuple[Array, Array]:
    """Powers of two with the product `size / (unit * unit_of_group)`, which may leave the range.

    Entries are multiplied by the first, by a number near 1, and by the second: what underflows on
    the way would do so in the end.

    Args:
      size: the power of two below the new norm.
      unit: the power of two below the mantissa of the norm.
      unit_of_group: the unit of that mantissa.
    """
    info = jnp.finfo(size.dtype)
    root = jnp.sqrt(size) / (jnp.sqrt(unit) * jnp.sqrt(unit_of_group))
    is_small = unit * unit_of_group < 1
    lift = jnp.minimum((1 / unit) * (1 / unit_of_group), 1 / info.tiny)
    before = jnp.where(is_small, lift, jnp.where(root < 2.0**-30, power_of_two_below(root), 1))
    after = jnp.where(is_small, size, ((size / before) / unit_of_group) / unit)
    return before, after


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
    wide, before, quotient = promoted(
        [x.astype(accumulation_dtype(x.dtype)), by.before, by.quotient]
    )
    wide = wide * before
    if by.exact is None:
        product = wide * quotient
    else:
        correction, after = (field.astype(wide.dtype) for field in by.exact)
        product = product_toward_zero(wide, quotient, correction) * after
    return round_to(product, x.dtype, toward_zero=strict)

"""The last stage: one multiplication and one rounding for each entry."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from optaxclip._base.exact import product_toward_zero, refined_quotient
from optaxclip._base.numerics import (
    chosen,
    exponent_below,
    match_weak_type,
    power_of_two,
    promoted,
    real_parts,
    round_to,
    select,
    widened,
)
from optaxclip._base.trees import is_sparse, with_data
from optaxclip._base.types import NonFinite
from optaxclip._engine.groups import broadcast_over
from optaxclip._engine.measure import Measured
from optaxclip.responses import Response


class Multiplier(NamedTuple):
    """What a group is multiplied by; every field has the shape of the norms.

    Attributes:
      before: a power of two that takes entries to where no product is subnormal, 1 mostly; 0 where
        the group is left as it is, bit for bit.
      quotient: the factor divided by `before` and, if there is one, by the power that comes last.
      is_zero: where the group is replaced by zeros, whatever it holds, if that is the policy.
      exact: in small groups, whose products are rounded toward zero, what the quotient lacks and
        a power of two to multiply by in the end.
    """

    before: Array
    quotient: Array
    is_zero: Array | None
    exact: tuple[Array, Array] | None

    @property
    def is_identity(self) -> Array:
        """Where the group is left as it is."""
        return self.before == 0

    @property
    def factor(self) -> Array:
        """What the group was multiplied by."""
        after = 1 if self.exact is None else self.exact[1]
        return jnp.where(self.is_identity, 1, self.before * self.quotient * after)


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
    new = response(norm, trigger.astype(norm.dtype), target.astype(norm.dtype))
    new = jnp.asarray(new).astype(norm.dtype)
    # A response may be one number for many norms, and limits know shapes that norms of missing
    # leaves lack.
    new, norm, mantissa, unit_of_group = jnp.broadcast_arrays(
        new, norm, measured.mantissa, measured.unit
    )
    bad = ~jnp.isfinite(norm)
    keep = (new == norm) & ~bad
    # On exponents, as the compiler would multiply divisors first, which overflows.
    exponents = [exponent_below(x) for x in (new, mantissa, unit_of_group)]
    size, unit = (power_of_two(exponent, norm.dtype) for exponent in exponents[:2])
    around = _around(*exponents, lowest=jnp.finfo(norm.dtype).minexp // 2)
    inverse_before, after = (power_of_two(exponent, norm.dtype) for exponent in around)
    is_zero = mantissa == 0
    # A zero group stays zero under any limit, but a NaN limit still shows.
    numerator = select(is_zero, select(jnp.isnan(new), new, 1), new / size)
    denominator = select(is_zero, 1, mantissa / unit)
    replacement = 0.0 if nonfinite == "zero" else jnp.nan

    def unless_idle(x: Array) -> Array:
        return select(bad | keep, 1, x)

    # Divisions come last: XLA stores their results, where it would do cheaper steps once more for
    # each leaf, among the entries.
    before = (~keep).astype(norm.dtype) / unless_idle(inverse_before)
    exact = None
    if measured.error is None:
        numerator = numerator * (1 - measured.slack) * after
    quotient = select(bad, replacement, unless_idle(numerator)) / unless_idle(denominator)
    if measured.error is not None:
        correction = refined_quotient(quotient, numerator, denominator, measured.error)
        exact = correction, unless_idle(after)
    return Multiplier(before, quotient, bad if nonfinite == "zero" else None, exact)


def _around(size: Array, unit: Array, unit_of_group: Array, *, lowest: int) -> tuple[Array, Array]:
    """Powers of two with the quotient `size / (unit * unit_of_group)`, which may leave the range.

    Entries are divided by the first, multiplied by a number near 1, and by the second: what
    underflows on the way would do so in the end.

    Args:
      size: the exponent of the new norm.
      unit: the exponent of the mantissa of the norm.
      unit_of_group: the exponent of the unit of that mantissa.
      lowest: the exponent of a factor below which it is taken in two steps.

    Returns:
      Two exponents.
    """
    norm = unit + unit_of_group
    factor = size - norm
    down = select(factor < lowest, -(factor >> 1), 0)
    is_small = norm < 0
    return select(is_small, norm, down), select(is_small, size, factor + down)


def scale(leaf: Any, by: Multiplier, axes: tuple[int, ...], strict: bool) -> Any:
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


def _scale_array(x: Array, by: Multiplier, *, axes: tuple[int, ...], strict: bool) -> Array:
    by = jax.tree.map(lambda field: broadcast_over(field, axes), by)
    parts = [_product(part, by, strict=strict) for part in real_parts(x)]
    scaled = lax.complex(*parts) if jnp.iscomplexobj(x) else parts[0]
    if by.is_zero is not None:
        scaled = jnp.where(by.is_zero, jnp.zeros_like(scaled), scaled)
    return match_weak_type(chosen(by.is_identity, x, scaled), x)


def _product(x: Array, by: Multiplier, *, strict: bool) -> Array:
    wide, before, quotient = promoted([widened(x), by.before, by.quotient])
    ready = wide * before
    if by.exact is not None:
        correction, after = (field.astype(wide.dtype) for field in by.exact)
        product = product_toward_zero(ready, quotient, correction) * after
    elif x.dtype == jnp.bfloat16:
        # Arithmetic takes longer than memory here, and compilers make a loop for either case.
        product = jnp.where(before == 1, wide * quotient, ready * quotient)
    else:
        product = ready * quotient
    return round_to(product, x.dtype, strict)

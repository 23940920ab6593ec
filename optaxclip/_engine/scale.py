"""Scaling: computes multipliers from norms and thresholds, and multiplies leaves by them.

  norms, triggers, targets f32[groups]  ->  Multiplier f32[groups]
  leaf [...], Multiplier of the shape of the axes that were not reduced  ->  leaf [...]

Leaves are rounded once and keep their dtype and weak type.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import chex
import jax
import jax.numpy as jnp
from jax import Array, lax

from optaxclip._backend.elementwise import (
    divide_each,
    restore_where_factors_are_one,
    scale_and_round,
    select_keep_subnormals,
)
from optaxclip._base.derivatives import custom_jvp
from optaxclip._base.numerics import (
    accumulation_dtype,
    expand_dims_at,
    floor_pow2_unclamped,
    map_real_imag,
    match_weak_type,
    multiply,
    promote_dtypes,
    reciprocal_pow2,
    select,
)
from optaxclip._base.trees import is_sparse, replace_values
from optaxclip._base.types import NonFinite
from optaxclip._engine.measure import ScaledNorms
from optaxclip.responses import Response


class Multiplier(NamedTuple):
    """Factors of groups as products of two numbers, because they can leave the range of the dtype.

    If both numbers are 1, the group is returned unchanged.

    Attributes:
      power: Usually 1. If the factor or its derivative would not be a normal number, it is a power
        of two near the reciprocal of the norm.
      ratio: The rest of the factor. It is NaN or 0 for non-finite groups.
    """

    power: Array
    ratio: Array

    @property
    def factor(self) -> Array:
        """The product."""
        return self.power * self.ratio


@runtime_checkable
class ExactFactor(Protocol):
    """A response with factors that replace quotients of norms if they are normal numbers."""

    def factor(self, norm: Array, trigger: Array, target: Array) -> Array:
        """Returns the factors in the shape of the norms."""
        ...


# Jitted so that norms of the same shape share one trace.
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
    """Computes the multipliers of groups from their norms and thresholds.

    Args:
      measured: The norms.
      trigger: The norms above which groups are changed.
      target: The norms to reach. Groups with an infinite target are unchanged.
      response: Computes the new norms from these three arrays. It receives ones for non-finite
        groups and groups with an infinite target.
      nonfinite: The policy for groups with non-finite norms.
      strict: If True, rounding never increases a group above its new norm. `measured` must then
        contain upper bounds.
    """
    chex.assert_equal_shape([*measured, trigger, target])
    norm = measured.upper_bound if strict else measured.norm
    is_bad = ~jnp.isfinite(norm)
    is_active = ~is_bad & ~jnp.isinf(target)  # bool[groups]

    def where_active(x: Array) -> Array:
        # Derivatives must be finite even in branches that are not selected.
        return jnp.where(is_active, x.astype(norm.dtype), 1.0)

    old = where_active(norm)
    trigger, target = where_active(trigger), where_active(target)
    replacement = 0.0 if nonfinite == "zero" else jnp.nan
    safety_factor = 1 - _NUM_ROUNDINGS * float(jnp.finfo(norm.dtype).eps) / 2 if strict else 1
    new = jnp.asarray(response(old, trigger, target)).astype(norm.dtype)  # f32[groups]
    # Groups of zeros remain zero unless the threshold is NaN.
    is_changed = is_active & (new != old) & ((old != 0) | jnp.isnan(new))
    quotient = new * safety_factor / where_active(measured.divisor)
    ratio = jnp.where(is_changed, quotient, 1)
    size = lax.stop_gradient(jnp.where(is_changed, measured.scale, 1))
    inverse_size = reciprocal_pow2(size)
    factor = jnp.abs(ratio * inverse_size)  # f32[groups]
    # The factor and its derivative, which is about factor / norm, must be normal numbers.
    is_normal = (factor > _MIN_FACTOR) & (factor < 1 / _MIN_FACTOR)
    slope = factor * inverse_size
    is_normal &= (slope > _MIN_FACTOR) & (slope < 1 / _MIN_FACTOR)
    # The size is constant in derivatives, because it cancels in the factor.
    unit = size
    if isinstance(response, ExactFactor):
        exact = where_active(response.factor(old, trigger, target))
        exact = jnp.where(exact == 1, exact, exact * safety_factor)
        ratio, unit = jnp.where(is_normal, exact, ratio), jnp.ones_like(size)
    # XLA materializes the results of divisions, but would repeat cheaper operations, such as a
    # product with a reciprocal, for all leaves (as of JAX 0.10.2).
    dividends = (jnp.ones_like(ratio), jnp.where(is_bad, replacement, ratio))
    divisors = (jnp.where(is_normal, 1, size), jnp.where(is_normal, unit, 1))
    return Multiplier(*divide_each(dividends, divisors))


_NUM_ROUNDINGS = 7
"""An upper bound on the roundings from a norm to an element, also if it is clipped twice."""

_MIN_FACTOR = 2.0**-120
"""Factors from this number to its reciprocal are normal numbers in float32."""


def scale(
    leaf: Any,
    multiplier: Sequence[Array] | Array,
    *,
    axes: tuple[int, ...],
    strict: bool,
    zero_nonfinite: bool = False,
) -> Any:
    """Multiplies a leaf by the multiplier of its group.

    Args:
      leaf: A floating-point or complex array, or a `BCOO` of such elements.
      multiplier: The two fields of a `Multiplier`, in a sequence or stacked in an array. If both
        are 1, elements are unchanged. If there is a third array, elements whose absolute value does
        not exceed it are unchanged instead.
      axes: The axes of the leaf that the multiplier lacks.
      strict: If True, rounding to a low-precision dtype never increases absolute values.
      zero_nonfinite: If True, a ratio of 0 sets elements to 0 even if they are non-finite.
    """
    options = {"strict": strict, "zero_nonfinite": zero_nonfinite}
    if not is_sparse(leaf):
        return _scale_leaf(leaf, by=multiplier, axes=axes, **options)
    # All stored values of a `BCOO` are in one group.
    all_axes = tuple(range(leaf.data.ndim))
    return replace_values(leaf, _scale_leaf(leaf.data, by=multiplier, axes=all_axes, **options))


# Jitted so that leaves with the same shape and dtype share one trace.
@functools.partial(jax.jit, static_argnames=("axes", "strict", "zero_nonfinite"))
def _scale_leaf(
    x: Array,
    *,
    by: Sequence[Array] | Array,
    axes: tuple[int, ...],
    strict: bool,
    zero_nonfinite: bool,
) -> Array:
    columns = list(by)  # 2 or 3 x f32[...] without `axes`
    chex.assert_shape(columns, tuple([n for k, n in enumerate(x.shape) if k not in axes]))
    power, ratio, *max_unchanged = [expand_dims_at(column, axes) for column in columns]
    scale_part = functools.partial(
        scale_and_round, power=power, ratio=ratio, strict=strict, default_kernel=_multiply_wide
    )
    scaled = map_real_imag(scale_part, x)  # [...], like x
    if zero_nonfinite:
        scaled = select_keep_subnormals(ratio == 0, jnp.zeros_like(scaled), scaled)
    if max_unchanged:
        abs_x = jnp.abs(x).astype(accumulation_dtype(x.dtype))
        abs_x, bound = promote_dtypes([abs_x, *max_unchanged])
        # A select, because products with 1 may flush subnormal numbers to zero.
        result = select_keep_subnormals(abs_x <= bound, x, scaled)
    else:
        result = restore_where_factors_are_one(x, scaled, power, ratio)
    return match_weak_type(result, x)


def _multiply_wide(x: Array, power: Array, ratio: Array, *, strict: bool) -> Array:
    wide = x.astype(accumulation_dtype(x.dtype))
    wide, power, ratio = promote_dtypes([wide, power, ratio])
    # The power is first, because its product is exact.
    product = multiply(multiply(wide, power), ratio)
    if product.dtype == x.dtype:
        return product
    return (_round_toward_zero(product, x.dtype) if strict else product).astype(x.dtype)


@custom_jvp(nondiff_argnums=(1,))
def _round_toward_zero(x: Array, dtype: jnp.dtype) -> Array:
    """Rounds elements toward zero to numbers of `dtype`, without converting them.

    Rounding to the nearest number and decreasing elements that became larger would be wrong,
    because XLA removes conversions back and forth, so no element appears to be larger (on an H100,
    as of JAX 0.11.2). The derivative is the identity, as for all roundings in JAX.
    """
    info, wide = jnp.finfo(dtype), jnp.finfo(x.dtype)
    if info.nexp == wide.nexp:
        # Both dtypes have the same exponents, so only the last bits of the mantissa are set to 0.
        integer = jnp.dtype(f"uint{wide.bits}").type
        mask = integer(2**wide.bits - 2 ** (wide.nmant - info.nmant))
        rounded = lax.bitcast_convert_type(lax.bitcast_convert_type(x, integer) & mask, x.dtype)
    else:
        # The low-precision dtype has fewer exponents, so its subnormals have a fixed distance.
        smallest, largest = x.dtype.type(info.smallest_normal), x.dtype.type(info.max)
        unit = jnp.maximum(floor_pow2_unclamped(jnp.abs(x)), smallest) * float(info.eps)
        rounded = lax.clamp(-largest, jnp.trunc(x * reciprocal_pow2(unit)) * unit, largest)
    return select(lax.is_finite(x), rounded, x)


@_round_toward_zero.defjvp
def _(dtype: jnp.dtype, primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    return _round_toward_zero(primals[0], dtype), tangents[0]

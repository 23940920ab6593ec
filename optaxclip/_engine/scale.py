"""Scale: takes a leaf and its group's multiplier, and gives the leaf, rounded once.

in   a leaf `[...]`, and a `Multiplier` of the shape of the axes over which it was not reduced
out  the leaf, in its own dtype and weak type
"""

import functools
from collections.abc import Sequence
from typing import Any

import chex
import jax
import jax.numpy as jnp
from jax import Array, lax

from optaxclip._backend.elementwise import (
    map_stored_values,
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


def scale(
    leaf: Any,
    multiplier: Sequence[Array] | Array,
    *,
    axes: tuple[int, ...],
    strict: bool,
    zero_nonfinite: bool = False,
) -> Any:
    """A leaf times its group's multiplier.

    Args:
      leaf: a floating or complex array, or a `BCOO`, whose data is scaled.
      multiplier: the two fields of the group's multiplier, in a sequence or stacked in one array; if both
        are 1, entries stay as they are. If there is a third array, entries stay if their modulus is
        at most its value, and only these.
      axes: the leaf's axes that the multiplier lacks.
      strict: whether rounding to a narrow dtype may only lower an entry's modulus.
      zero_nonfinite: whether a ratio of 0 makes entries 0 even if they are not finite.
    """
    return map_stored_values(
        functools.partial(_scale_leaf, by=multiplier, strict=strict, zero_nonfinite=zero_nonfinite),
        leaf,
        axes,
    )


# A compiled function of its own, so that it is traced once for leaves that are alike.
@functools.partial(jax.jit, static_argnames=("axes", "strict", "zero_nonfinite"))
def _scale_leaf(
    x: Array,
    *,
    by: Sequence[Array] | Array,
    axes: tuple[int, ...],
    strict: bool,
    zero_nonfinite: bool,
) -> Array:
    columns = list(by)
    chex.assert_shape(columns, tuple([n for k, n in enumerate(x.shape) if k not in axes]))
    power, ratio, *above = [expand_dims_at(column, axes) for column in columns]
    of_part = functools.partial(
        scale_and_round,
        power=power,
        ratio=ratio,
        strict=strict,
        default_kernel=_multiply_in_float32,
    )
    scaled = map_real_imag(of_part, x)
    if zero_nonfinite:
        scaled = select_keep_subnormals(ratio == 0, jnp.zeros_like(scaled), scaled)
    # Entries that stay are selected: a product with 1 may flush subnormal numbers to 0.
    stays = _is_unchanged(x, power, ratio, above[0] if above else None)
    return match_weak_type(select_keep_subnormals(stays, x, scaled), x)


def _is_unchanged(x: Array, power: Array, ratio: Array, above: Array | None) -> Array:
    """Which entries are left as they are; one flag if it is the same for all."""
    if above is not None:
        modulus, above = promote_dtypes([jnp.abs(x).astype(accumulation_dtype(x.dtype)), above])
        return modulus <= above
    # Not `(power == 1) & ...`, because operators are nested calls for each leaf (JAX 0.10.2).
    one = power.dtype.type(1)
    return lax.bitwise_and(lax.eq(power, one), lax.eq(ratio, one))


def _multiply_in_float32(x: Array, power: Array, ratio: Array, *, strict: bool) -> Array:
    wide = x.astype(accumulation_dtype(x.dtype))
    wide, power, ratio = promote_dtypes([wide, power, ratio])
    product = multiply(multiply(wide, power), ratio)
    if product.dtype == x.dtype:
        return product
    return (_round_toward_zero(product, x.dtype) if strict else product).astype(x.dtype)


@custom_jvp(nondiff_argnums=(1,))
def _round_toward_zero(x: Array, dtype: jnp.dtype) -> Array:
    """Each entry rounded toward zero to a number of `dtype`, still in `x.dtype`.

    Rounding to nearest, then lowering what became larger than the entry, would fail: in such a
    comparison XLA takes an entry that was converted and converted back for the entry itself (on an
    H100 with JAX 0.11.2). The derivative is that of the identity, as for any rounding in JAX.
    """
    info, wide = jnp.finfo(dtype), jnp.finfo(x.dtype)
    if info.nexp == wide.nexp:
        # Both dtypes have the same exponents, even for subnormal numbers: the last bits are cut.
        integer = jnp.dtype(f"uint{wide.bits}").type
        kept = integer(2**wide.bits - 2 ** (wide.nmant - info.nmant))
        cut = lax.bitcast_convert_type(lax.bitcast_convert_type(x, integer) & kept, x.dtype)
    else:
        smallest, largest = x.dtype.type(info.smallest_normal), x.dtype.type(info.max)
        unit = jnp.maximum(floor_pow2_unclamped(jnp.abs(x)), smallest) * float(info.eps)
        cut = lax.clamp(-largest, jnp.trunc(x * reciprocal_pow2(unit)) * unit, largest)
    return select(lax.is_finite(x), cut, x)


@_round_toward_zero.defjvp
def _(dtype: jnp.dtype, primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    return _round_toward_zero(primals[0], dtype), tangents[0]

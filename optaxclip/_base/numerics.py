"""Number formats: what to accumulate in, how to stay finite, how to round."""

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax


def accumulation_dtype(dtype: jax.typing.DTypeLike) -> jnp.dtype:
    """The real dtype in which entries of `dtype` are summed: float64 for float64, else float32."""
    real = jnp.finfo(dtype).dtype
    return jnp.dtype(jnp.float64 if real == jnp.float64 else jnp.float32)


def is_real(x: Any) -> bool:
    """Whether `x` is a real number or an array of real numbers; bools are not."""
    if isinstance(x, (jax.Array, np.ndarray, np.generic)):
        return jnp.issubdtype(x.dtype, jnp.floating) or jnp.issubdtype(x.dtype, jnp.integer)
    return isinstance(x, (int, float)) and not isinstance(x, bool)


def promoted(arrays: Sequence[Array]) -> list[Array]:
    """Arrays of accumulation dtypes, all in the widest of them."""
    widest = max((array.dtype for array in arrays), key=lambda dtype: dtype.itemsize, default=None)
    return [array.astype(widest) for array in arrays]


def select(flag: Array, x: Array | float, y: Array | float) -> Array:
    """`jnp.where` of arrays of one shape, or of an array and a number that takes its dtype.

    `jnp.where` is a call of its own, which takes longer to trace, to lower and to compile.
    """
    like = next(z for z in (x, y) if isinstance(z, Array))

    def full(z: Array | float) -> Any:
        if isinstance(z, Array):
            return z
        return lax.full_like(like, z) if like.shape else like.dtype.type(z)

    return lax.select(flag, full(x), full(y))


def safe_sqrt(x: Array) -> Array:
    """The square root of `x >= 0`, with derivative 0 at 0."""
    positive = x > 0
    return select(positive, lax.sqrt(select(positive, x, 1)), x)


def safe_divide(x: Array, y: Array, otherwise: Array | float) -> Array:
    """`x / y`, or `otherwise` where `y` is 0; never divides by 0.

    Numerator and denominator are first divided by a power of two near `y`, without which powers of
    `1 / y` overflow in the derivatives long before the derivatives do.
    """
    zero = y == 0
    unit = lax.stop_gradient(power_of_two_below(jnp.abs(y)))
    return jnp.where(zero, otherwise, (x / unit) / jnp.where(zero, 1, y / unit))


def power_of_two_below(x: Array) -> Array:
    """The largest power of two at most `x > 0`, kept where its reciprocal is a normal number.

    Multiplying by it or by its reciprocal is exact. Zero and non-finite values give 1.
    """
    return power_of_two(exponent_below(x), x.dtype)


# Compiled by itself, as the next, so that each is traced once.
@jax.jit
def exponent_below(x: Array) -> Array:
    """The exponent of `power_of_two_below`, an integer as wide as `x`."""
    info = jnp.finfo(x.dtype)
    integer = jnp.dtype(f"int{info.bits}").type
    bits = lax.bitcast_convert_type(x, integer)
    exponent = lax.shift_right_arithmetic(bits, integer(info.nmant)) - integer(info.maxexp - 1)
    usable = (x > 0) & (x <= info.max)
    return select(usable, lax.clamp(integer(info.minexp), exponent, integer(-info.minexp)), 0)


@functools.partial(jax.jit, static_argnames="dtype")
def power_of_two(exponent: Array, dtype: jnp.dtype) -> Array:
    """2 to an integer power, held to the normal numbers."""
    info, integer = jnp.finfo(dtype), exponent.dtype.type
    exponent = lax.clamp(integer(info.minexp), exponent, integer(info.maxexp - 1))
    biased = exponent + integer(info.maxexp - 1)
    return lax.bitcast_convert_type(lax.shift_left(biased, integer(info.nmant)), dtype)


def known_size(count: Any) -> int | None:
    """A number of entries, or None where it is symbolic (in `jax.export`)."""
    return count if isinstance(count, int) else None


def rounding_slack(count: Any, dtype: jnp.dtype) -> float:
    """How much a factor is lowered so that rounding cannot push a result above its limit.

    The root, the quotient and the product round once each; the error of a sum of `count` squares
    grows with the depth of the reduction tree.

    Args:
      count: number of entries of the group, possibly symbolic.
      dtype: the accumulation dtype.

    Returns:
      A relative slack; in float32 5e-7 for 65 entries, 1e-6 for 10 million.
    """
    size = known_size(count)
    depth = 40 if size is None else math.log2(max(size, 1))
    return (6 + depth / 2) * float(jnp.finfo(dtype).eps) / 2


def real_parts(x: Array) -> list[Array]:
    """The real and imaginary parts of a complex array, or the real array itself."""
    return [x.real, x.imag] if jnp.iscomplexobj(x) else [x]


def next_toward_zero(x: Array) -> Array:
    """The neighbour of each `x != 0` in its dtype that is nearer to zero."""
    # In sign-magnitude formats that is one less in the bit pattern.
    bits = jnp.dtype(f"uint{8 * x.dtype.itemsize}")
    return lax.bitcast_convert_type(lax.bitcast_convert_type(x, bits) - jnp.ones((), bits), x.dtype)


def straight_through(value: Array, like: Array) -> Array:
    """`value`, with the derivative of `like`, which it equals but for rounding."""
    finite = jnp.where(jnp.isfinite(like), like, 0)
    return lax.stop_gradient(value) + (finite - lax.stop_gradient(finite))


def widened(x: Array) -> Array:
    """`x` in its accumulation dtype, exactly.

    Of bfloat16 by its bit pattern: a conversion would be shared with others of the same array, and
    its result stored.
    """
    return _widened_bits(x) if x.dtype == jnp.bfloat16 else x.astype(accumulation_dtype(x.dtype))


@jax.custom_jvp
def _widened_bits(x: Array) -> Array:
    bits = lax.bitcast_convert_type(x, jnp.uint16).astype(jnp.uint32)
    return lax.bitcast_convert_type(bits << jnp.uint32(16), jnp.float32)


@_widened_bits.defjvp
def _widened_bits_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    wide = _widened_bits(*primals)
    return wide, tangents[0].astype(wide.dtype)


def round_to(x: Array, dtype: jnp.dtype, toward_zero: bool) -> Array:
    """Converts to `dtype`, to nearest or, with `toward_zero`, never away from zero."""
    return x if x.dtype == dtype else _rounded(x, dtype, toward_zero)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1, 2))
def _rounded(x: Array, dtype: jnp.dtype, toward_zero: bool) -> Array:
    if dtype == jnp.bfloat16 and x.dtype == jnp.float32:
        return _rounded_bits(x, toward_zero)
    y = x.astype(dtype)
    if not toward_zero:
        return y
    over = jnp.abs(y.astype(x.dtype)) > jnp.abs(x)
    return jnp.where(over, next_toward_zero(y), y)


@_rounded.defjvp
def _rounded_jvp(
    dtype: jnp.dtype, toward_zero: bool, primals: tuple[Array], tangents: tuple[Array]
) -> tuple[Array, Array]:
    return _rounded(*primals, dtype, toward_zero), tangents[0].astype(dtype)


def _rounded_bits(x: Array, toward_zero: bool) -> Array:
    """float32 to bfloat16 on the bit pattern, which unlike a conversion fuses with what follows."""
    bits, half = lax.bitcast_convert_type(x, jnp.uint32), jnp.uint32(16)
    if not toward_zero:
        # To nearest, of two the even one.
        bits = bits + jnp.uint32(0x7FFF) + ((bits >> half) & jnp.uint32(1))
    # The payload of a NaN may be in the bits that are lost.
    bits = jnp.where(jnp.isnan(x), jnp.uint32(0x7FC00000), bits)
    return lax.bitcast_convert_type((bits >> half).astype(jnp.uint16), jnp.bfloat16)


def chosen(flag: Array, x: Array, y: Array) -> Array:
    """`x` where `flag`, else `y`; of bfloat16 by the bit patterns, as in `widened`."""
    return (_chosen_bits if x.dtype == jnp.bfloat16 else _select)(flag, x, y)


@jax.custom_jvp
def _chosen_bits(flag: Array, x: Array, y: Array) -> Array:
    bits = [lax.bitcast_convert_type(z, jnp.uint16) for z in (x, y)]
    return lax.bitcast_convert_type(_select(flag, *bits), jnp.bfloat16)


@_chosen_bits.defjvp
def _chosen_bits_jvp(primals: tuple[Array, ...], tangents: tuple[Any, ...]) -> tuple[Array, Array]:
    return _chosen_bits(*primals), _select(primals[0], tangents[1], tangents[2])


def _select(flag: Array, x: Array, y: Array) -> Array:
    return jnp.where(flag, x, y) if flag.ndim else select(flag, x, y)


def match_weak_type(x: Array, like: Array) -> Array:
    """`x`, weakly typed if `like` (of the same shape and dtype) is."""
    if not jax.typeof(like).weak_type:
        return x
    # `full_like` is the public operation that keeps a weak type while taking a traced value.
    fill = lax.full_like
    for _ in range(x.ndim):
        fill = jax.vmap(fill)
    return fill(like, x)

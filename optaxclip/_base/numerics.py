"""Number formats: what to accumulate in, how to stay finite, how to round."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax


def accumulation_dtype(dtype: jax.typing.DTypeLike) -> jnp.dtype:
    """The real dtype in which entries of `dtype` are summed: float64 for float64, else float32."""
    real = jnp.finfo(dtype).dtype
    return jnp.dtype(jnp.float64 if real == jnp.float64 else jnp.float32)


def norm_dtype(dtypes: Iterable[Any]) -> jnp.dtype:
    """That of a norm over entries of these dtypes: float64 if one is summed in it, else float32."""
    is_wide = any(accumulation_dtype(dtype) == jnp.float64 for dtype in dtypes)
    return jnp.dtype(jnp.float64 if is_wide else jnp.float32)


def is_real(x: Any) -> bool:
    """Whether `x` is a real number or an array of real numbers; bools are not."""
    if isinstance(x, (jax.Array, np.ndarray, np.generic)):
        return jnp.issubdtype(x.dtype, jnp.floating) or jnp.issubdtype(x.dtype, jnp.integer)
    return isinstance(x, (int, float)) and not isinstance(x, bool)


def promoted(arrays: Sequence[Array]) -> list[Array]:
    """Arrays of accumulation dtypes, all in the widest of them."""
    widest = max((array.dtype for array in arrays), key=lambda dtype: dtype.itemsize, default=None)
    return [array if array.dtype == widest else array.astype(widest) for array in arrays]


def narrowed(x: Array, dtype: jnp.dtype) -> Array:
    """`x` in a dtype that may be narrower; what is finite stays so."""
    if x.dtype == dtype:
        return x
    most = float(jnp.finfo(dtype).max)
    return jnp.where(jnp.isfinite(x), jnp.clip(x, -most, most), x).astype(dtype)


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
    return select((x > 0) & (x <= jnp.finfo(x.dtype).max), invertible(leading_bit(x)), 1)


def leading_bit(x: Array) -> Array:
    """The largest power of two at most `x`; 0 for 0 and subnormal numbers, else infinity."""
    info = jnp.finfo(x.dtype)
    integer = jnp.dtype(f"int{info.bits}").type
    exponent_bits = integer((2**info.nexp - 1) << info.nmant)
    bits = lax.bitcast_convert_type(x, integer) & exponent_bits
    return lax.bitcast_convert_type(bits, x.dtype)


def invertible(power: Array) -> Array:
    """Powers of two brought to the nearest of which the reciprocal is a normal number too."""
    tiny = jnp.finfo(power.dtype).tiny
    return lax.clamp(tiny, power, 1 / tiny)


def known_size(count: Any) -> int | None:
    """A number of entries, or None where it is symbolic (in `jax.export`)."""
    return count if isinstance(count, int) else None


def slack_of_norm(count: Any, degree: float, eps: float) -> float:
    """By what share of itself a norm may be wrong.

    The error of a sum of `count` powers grows with the depth of the reduction tree, and shrinks by
    the root.

    Args:
      count: number of entries of the group, possibly symbolic.
      degree: the power that was summed.
      eps: of the dtype of the sum.

    Returns:
      For squares in float32 2e-7 for one entry, 9e-7 for 10 million.
    """
    size = known_size(count)
    depth = 40 if size is None else math.log2(max(size, 1))
    # Other powers than 1 and 2 are computed by logarithms, to fewer digits.
    digits = 1 if degree in (1, 2) else 4
    return (min(degree, 2) + digits * (2 + depth) / degree) * eps / 2


def next_above(x: Array) -> Array:
    """The neighbour of each finite `x >= 0` in its dtype that is larger."""
    integer = jnp.dtype(f"int{jnp.finfo(x.dtype).bits}")
    return lax.bitcast_convert_type(lax.bitcast_convert_type(x, integer) + integer.type(1), x.dtype)


def broadcast_over(x: Array, axes: Sequence[int]) -> Array:
    """`x` with axes of size 1 where a leaf has those that it lacks."""
    return lax.expand_dims(x, axes) if x.ndim else x


def real_parts(x: Array) -> list[Array]:
    """The real and imaginary parts of a complex array, or the real array itself."""
    return [x.real, x.imag] if jnp.iscomplexobj(x) else [x]


def match_weak_type(x: Array, like: Array) -> Array:
    """`x`, weakly typed if `like` (of the same shape and dtype) is."""
    if not jax.typeof(like).weak_type:
        return x
    # `full_like` is the public operation that keeps a weak type while taking a traced value.
    fill = lax.full_like
    for _ in range(x.ndim):
        fill = jax.vmap(fill)
    return fill(like, x)

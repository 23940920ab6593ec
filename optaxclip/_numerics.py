"""Number formats: what to accumulate in, how to stay finite, how to round."""

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


def safe_sqrt(x: Array) -> Array:
    """The square root of `x >= 0`, with derivative 0 at 0."""
    positive = x > 0
    return jnp.where(positive, jnp.sqrt(jnp.where(positive, x, 1)), x)


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
    info = jnp.finfo(x.dtype)
    bits = jnp.uint32 if info.bits == 32 else jnp.uint64
    exponent = ((1 << info.nexp) - 1) << info.nmant
    floor = lax.bitcast_convert_type(
        lax.bitcast_convert_type(x, bits) & jnp.array(exponent, bits), x.dtype
    )
    usable = jnp.isfinite(x) & (x > 0)
    return jnp.where(usable, jnp.clip(floor, info.tiny, 1 / info.tiny), 1)


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


def round_to(x: Array, dtype: jnp.dtype, *, toward_zero: bool) -> Array:
    """Converts to `dtype`, to nearest or, with `toward_zero`, never away from zero."""
    y = x.astype(dtype)
    if not toward_zero or y.dtype == x.dtype:
        return y
    over = jnp.abs(y.astype(x.dtype)) > jnp.abs(x)
    return straight_through(jnp.where(over, next_toward_zero(y), y), y)


def match_weak_type(x: Array, like: Array) -> Array:
    """`x`, weakly typed if `like` (of the same shape and dtype) is."""
    if not jax.typeof(like).weak_type:
        return x
    # `full_like` is the public operation that keeps a weak type while taking a traced value.
    fill = lax.full_like
    for _ in range(x.ndim):
        fill = jax.vmap(fill)
    return fill(like, x)

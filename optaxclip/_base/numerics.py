"""Numerics: dtypes of sums, powers of two, safe divisions and roots."""

import math
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from optaxclip._base.derivatives import custom_jvp

_itemsize = operator.attrgetter("itemsize")


def accumulation_dtype(dtype: jax.typing.DTypeLike) -> jnp.dtype:
    """Returns the real dtype in which elements of `dtype` are summed: float32 or float64."""
    real = jnp.finfo(dtype).dtype
    return jnp.dtype(jnp.float64 if real == jnp.float64 else jnp.float32)


def norm_dtype(dtypes: Iterable[Any]) -> jnp.dtype:
    """Returns the dtype of a norm over these dtypes: float64 if one of them is 64-bit."""
    return max(map(accumulation_dtype, dtypes), default=jnp.dtype(jnp.float32), key=_itemsize)


def is_real(x: Any) -> bool:
    """Returns `True` for real numbers and arrays of real numbers, except bools."""
    if isinstance(x, (jax.Array, np.ndarray, np.generic)):
        # `jnp.issubdtype`, because NumPy does not treat bfloat16 as a floating-point type.
        return jnp.issubdtype(x.dtype, jnp.floating) or jnp.issubdtype(x.dtype, jnp.integer)
    return isinstance(x, (int, float)) and not isinstance(x, bool)


def static_size_or_none(count: Any) -> int | None:
    """Returns `count`, or None if it is symbolic (in `jax.export`)."""
    return count if isinstance(count, int) else None


def promote_dtypes(arrays: Sequence[Array]) -> list[Array]:
    """Converts arrays to the widest of their dtypes."""
    widest = max((array.dtype for array in arrays), key=_itemsize, default=None)
    return [array if array.dtype == widest else array.astype(widest) for array in arrays]


def cast_elements(x: Array, dtype: jax.typing.DTypeLike) -> Array:
    """Converts real elements, or the parts of complex elements, to `dtype`."""
    wide = jnp.complex128 if dtype == jnp.float64 else jnp.complex64
    # `astype` takes longer to trace, and this function runs once per leaf.
    return lax.convert_element_type(x, wide if jnp.iscomplexobj(x) else dtype)


def saturating_cast(x: Array, dtype: jnp.dtype) -> Array:
    """Converts `x` to `dtype`, and clamps elements beyond its range instead of overflowing."""
    info = jnp.finfo(dtype)
    if jnp.finfo(x.dtype).max <= info.max:
        return x.astype(dtype)
    clamped = jnp.clip(x, float(info.min), float(info.max))
    # Infinite elements are only clamped if `dtype` has no infinity.
    has_infinity = np.isinf(np.asarray(np.inf).astype(dtype))
    return (jnp.where(jnp.isinf(x), x, clamped) if has_infinity else clamped).astype(dtype)


def clamp_to_finite(x: Array) -> Array:
    """Replaces infinities by the largest finite numbers, because infinity * 0 is NaN."""
    largest = x.dtype.type(jnp.finfo(x.dtype).max)
    return lax.clamp(-largest, x, largest)


def select(flag: Array, x: Array | float, y: Array | float) -> Array:
    """Selects between arrays of the same shape, or between an array and a number."""
    # `jnp.where` is a nested call, which takes longer to trace and to compile (as of JAX 0.10.2).
    like: Any = x if isinstance(x, Array) else y
    if not isinstance(x, Array):
        x = lax.full_like(like, x) if like.shape else like.dtype.type(x)
    elif not isinstance(y, Array):
        y = lax.full_like(like, y) if like.shape else like.dtype.type(y)
    return lax.select(flag, x, y)


def multiply(x: Array, y: Array | float) -> Array:
    """Computes `x * y`, in a single operation if `y` is a scalar."""
    if jnp.ndim(y):
        return x * y
    # The operator `*` is a nested call, which takes ten times as long to trace (as of JAX 0.10.2).
    return lax.mul(x, y if isinstance(y, Array) else x.dtype.type(y))


def expand_dims_at(x: Array, axes: Sequence[int]) -> Array:
    """Inserts axes of size 1 to broadcast `x` to a leaf. Scalars are returned unchanged."""
    return lax.expand_dims(x, axes) if x.ndim else x


def split_complex(x: Array) -> list[Array]:
    """Returns the real and imaginary parts of a complex array, or a list of the real array."""
    return [x.real, x.imag] if jnp.iscomplexobj(x) else [x]


def map_real_imag(fn: Callable[[Array], Array], x: Array) -> Array:
    """Applies `fn` to a real array, or to both parts of a complex array."""
    return lax.complex(*map(fn, split_complex(x))) if jnp.iscomplexobj(x) else fn(x)


def match_weak_type(x: Array, like: Array) -> Array:
    """Makes `x` weakly typed if `like` is. Both must have the same shape and dtype."""
    if not jax.typeof(like).weak_type:
        return x
    # No other public function creates weakly typed arrays from traced values (as of JAX 0.10.2).
    fill = lax.full_like
    for _ in range(x.ndim):
        fill = jax.vmap(fill)
    return fill(like, x)


@custom_jvp()
def safe_sqrt(x: Array) -> Array:
    """Computes the square root of `x >= 0`, with a derivative of 0 at 0."""
    return select(*sqrt_where_positive(x), x)


@safe_sqrt.defjvp
def _(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    (x,), (dx,) = primals, tangents
    is_positive, root = sqrt_where_positive(x)
    # XLA on CPUs materializes the result of a division, but would repeat a product such as
    # `dx * (0.5 / root)` for all leaves (as of JAX 0.10.2). A derivative of the global norm of 200
    # leaves then compiles in 3 seconds instead of 8 seconds.
    return safe_sqrt(x), select(is_positive, dx / (2 * root), 0)


def sqrt_where_positive(x: Array) -> tuple[Array, Array]:
    """Returns `x > 0` and the square root of `x`, or 1 where `x` is not positive."""
    # The derivative of the root would be infinite at 0.
    is_positive = lax.gt(x, jnp.zeros_like(x))
    return is_positive, lax.sqrt(select(is_positive, x, 1))


def combine_norms(norms: Array) -> Array:
    """Computes the L2 norm of all groups from their norms, without overflow or underflow."""
    root, unit = combine_norms_factored(norms)
    return unit * root


def combine_norms_factored(norms: Array) -> tuple[Array, Array]:
    """Returns `combine_norms` as a factor and a power of two, whose product may overflow."""
    unit = floor_pow2(jnp.max(norms, initial=0))  # []
    return safe_sqrt(jnp.sum(jnp.square(divide_by_pow2(norms, unit)))), unit


def norm_relative_error(count: Any, degree: float, eps: float) -> float:
    """Bounds the relative error of a norm of `count` elements, such as 9e-7 for 10**7 floats."""
    # The error of a sum grows with the depth of the reduction tree, and the root divides it.
    size = static_size_or_none(count)
    # Symbolic counts in `jax.export` are at most 2**40.
    depth = 40 if size is None else math.log2(max(size, 1))
    # Powers except 1 and 2 are computed by logarithms, which are less accurate.
    digits = 1 if degree in (1, 2) else 4
    return (min(degree, 2) + digits * (2 + depth) / degree) * eps / 2


def divide_no_nan(x: Array, y: Array, otherwise: Array | float) -> Array:
    """Computes `x / y`, or `otherwise` where `y` is 0, with finite derivatives."""
    # Without the unit, powers of `1 / y` could overflow in derivatives that are in range. The unit
    # cancels in the quotient, so it needs no derivative.
    zero, unit = y == 0, lax.stop_gradient(floor_pow2(jnp.abs(y)))
    divisor = jnp.where(zero, 1, divide_by_pow2(y, unit))
    return jnp.where(zero, otherwise, divide_by_pow2(x, unit) / divisor)


def lerp(old: Array, new: Array, weight: Array) -> Array:
    """Interpolates linearly from `old` to `new`. A weight of 1 returns exactly `new`."""
    # The sum would lose a `new` that is tiny compared with `old`.
    return jnp.where(weight == 1, new, old + weight * (new - old))


def scale_by_exp(x: Array, log_factor: Array) -> Array:
    """Computes `x * exp(log_factor)` for `x >= 0`, clamped to the normal numbers of the dtype."""
    # Zero, infinity and NaN are unchanged. Other numbers never become 0 or infinity, because no
    # factor could change them again.
    info = jnp.finfo(jnp.result_type(x))
    product = jnp.clip(x * jnp.exp(log_factor), float(info.tiny), float(info.max))
    return jnp.where((x > 0) & (x <= float(info.max)), product, x)


def floor_pow2(x: Array) -> Array:
    """Returns the largest power of two that is at most `x > 0` and has a normal reciprocal.

    Products with the power or its reciprocal are exact. Returns 1 if `x` is 0 or non-finite.
    """
    return select((x > 0) & (x <= jnp.finfo(x.dtype).max), clamp_pow2(floor_pow2_unclamped(x)), 1)


def floor_pow2_unclamped(x: Array) -> Array:
    """Returns the largest power of two up to `x >= 0`: 0 for subnormals, infinity for NaN."""
    info = jnp.finfo(x.dtype)
    integer = jnp.dtype(f"int{info.bits}").type
    exponent_bits = integer((2**info.nexp - 1) << info.nmant)  # all bits of the exponent
    bits = lax.bitcast_convert_type(x, integer) & exponent_bits
    return lax.bitcast_convert_type(bits, x.dtype)


def clamp_pow2(power: Array) -> Array:
    """Clamps powers of two to those with a normal reciprocal."""
    # The reciprocal of the largest power of two is subnormal, and may be flushed to zero.
    tiny = jnp.finfo(power.dtype).tiny
    return lax.clamp(tiny, power, 1 / tiny)


def reciprocal_pow2(power: Array) -> Array:
    """Computes reciprocals of results of `clamp_pow2` or `floor_pow2`, faster than a division."""
    info = jnp.finfo(power.dtype)
    integer = jnp.dtype(f"int{info.bits}").type
    # The exponent of the reciprocal is the negative exponent, and both mantissas are 0.
    bits_of_one = integer((info.maxexp - 1) << info.nmant)
    bits = bits_of_one + bits_of_one - lax.bitcast_convert_type(power, integer)
    return lax.bitcast_convert_type(bits, power.dtype)


def divide_by_pow2(x: Array, power: Array) -> Array:
    """Divides `x` by a power of two from `floor_pow2`."""
    # A multiplication, because XLA replaces `a / b / c` by `a / (b * c)`, and `a / (b / c)` by
    # `a * c / b` (as of JAX 0.10.2). These products may overflow.
    return x * reciprocal_pow2(power).astype(x.dtype)


def nextafter_up(x: Array) -> Array:
    """Returns the next larger number of the dtype, for finite `x >= 0`."""
    # Non-negative floats are ordered like their bit patterns.
    integer = jnp.dtype(f"int{jnp.finfo(x.dtype).bits}")
    return lax.bitcast_convert_type(lax.bitcast_convert_type(x, integer) + integer.type(1), x.dtype)

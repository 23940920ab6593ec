"""Number formats: the dtypes of sums, and functions that keep results finite and round them."""

import math
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from optaxclip._base.derivatives import custom_jvp


def accumulation_dtype(dtype: jax.typing.DTypeLike) -> jnp.dtype:
    """The real dtype in which entries of `dtype` are summed: float64 for float64, else float32."""
    real = jnp.finfo(dtype).dtype
    return jnp.dtype(jnp.float64 if real == jnp.float64 else jnp.float32)


def norm_dtype(dtypes: Iterable[Any]) -> jnp.dtype:
    """The dtype of a norm over entries of these dtypes: float64 if one of them is 64-bit."""
    is_wide = jnp.dtype(jnp.float64) in map(accumulation_dtype, dtypes)
    return jnp.dtype(jnp.float64 if is_wide else jnp.float32)


def is_real(x: Any) -> bool:
    """Whether `x` is a real number or an array of real numbers; bools are not."""
    if isinstance(x, (jax.Array, np.ndarray, np.generic)):
        return jnp.issubdtype(x.dtype, jnp.floating) or jnp.issubdtype(x.dtype, jnp.integer)
    return isinstance(x, (int, float)) and not isinstance(x, bool)


def promote_dtypes(arrays: Sequence[Array]) -> list[Array]:
    """The arrays, converted to the widest of their dtypes."""
    dtypes = [array.dtype for array in arrays]
    widest = max(dtypes, key=operator.attrgetter("itemsize"), default=None)
    return [array if array.dtype == widest else array.astype(widest) for array in arrays]


def saturating_cast(x: Array, dtype: jnp.dtype) -> Array:
    """`x` converted to `dtype`; finite entries beyond its range become its largest numbers.

    If `dtype` has no infinity, infinite entries become these numbers too.
    """
    info = jnp.finfo(dtype)
    if jnp.finfo(x.dtype).max <= info.max:
        return x.astype(dtype)
    held = jnp.clip(x, float(info.min), float(info.max))
    has_infinity = np.isinf(np.asarray(np.inf).astype(dtype))
    return (jnp.where(jnp.isinf(x), x, held) if has_infinity else held).astype(dtype)


def clamp_to_finite(x: Array) -> Array:
    """`x` with the largest numbers in place of infinities, because infinity * 0 is NaN."""
    largest = x.dtype.type(jnp.finfo(x.dtype).max)
    return lax.clamp(-largest, x, largest)


def select(flag: Array, x: Array | float, y: Array | float) -> Array:
    """`jnp.where` for arrays of one shape, or for an array and a number, which gets its dtype.

    `jnp.where` would be a nested call (JAX 0.10.2), which takes longer to trace and to compile.
    """
    like: Any = x if isinstance(x, Array) else y
    if not isinstance(x, Array):
        x = lax.full_like(like, x) if like.shape else like.dtype.type(x)
    elif not isinstance(y, Array):
        y = lax.full_like(like, y) if like.shape else like.dtype.type(y)
    return lax.select(flag, x, y)


def multiply(x: Array, y: Array | float) -> Array:
    """`x * y`, in one operation if `y` is a scalar.

    The operator `*` would be a nested call (JAX 0.10.2), which takes ten times as long to trace.
    """
    if jnp.ndim(y):
        return x * y
    return lax.mul(x, y if isinstance(y, Array) else x.dtype.type(y))


@custom_jvp()
def safe_sqrt(x: Array) -> Array:
    """The square root of `x >= 0`, whose derivative is 0 at 0."""
    return select(*sqrt_where_positive(x), x)


@safe_sqrt.defjvp
def _(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    (x,), (dx,) = primals, tangents
    is_positive, root = sqrt_where_positive(x)
    # Not `dx * (0.5 / root)`: XLA on CPU (JAX 0.10.2) stores the result of a division, but repeats
    # a product for each leaf. With a division, which is the last step in reverse mode, a derivative
    # of the global norm of 200 leaves compiles in 3 seconds instead of 8.
    return safe_sqrt(x), select(is_positive, dx / (2 * root), 0)


def sqrt_where_positive(x: Array) -> tuple[Array, Array]:
    """Whether each `x` is above 0, and its square root; 1 in place of the root if it is not.

    It is 1, because the derivative of the root would be infinite at 0.
    """
    is_positive = lax.gt(x, jnp.zeros_like(x))
    return is_positive, lax.sqrt(select(is_positive, x, 1))


def combine_norms(norms: Array) -> Array:
    """The L2 norm of all groups, from their norms; no square overflows or underflows."""
    root, unit = combine_norms_factored(norms)
    return unit * root


def combine_norms_factored(norms: Array) -> tuple[Array, Array]:
    """`combine_norms` as two factors, because it may overflow; the second is a power of two."""
    unit = floor_pow2(jnp.max(norms, initial=0))
    return safe_sqrt(jnp.sum(jnp.square(divide_by_pow2(norms, unit)))), unit


def divide_no_nan(x: Array, y: Array, otherwise: Array | float) -> Array:
    """`x / y`, or `otherwise` if `y` is 0, without any division by 0.

    First `x` and `y` are divided by a power of two near `y`, because the derivatives contain powers
    of `1 / y`, which may overflow although the derivatives do not.
    """
    zero = y == 0
    unit = lax.stop_gradient(floor_pow2(jnp.abs(y)))
    return jnp.where(
        zero, otherwise, divide_by_pow2(x, unit) / jnp.where(zero, 1, divide_by_pow2(y, unit))
    )


def lerp(old: Array, new: Array, weight: Array) -> Array:
    """`old`, moved toward `new` by this share of their difference.

    With a share of 1 it is `new` itself, because rounding of the sum would lose a `new` that is
    tiny beside `old`.
    """
    return jnp.where(weight == 1, new, old + weight * (new - old))


def scale_by_exp(x: Array, log_factor: Array) -> Array:
    """`x * exp(log_factor)` for `x >= 0`, kept within the normal numbers of the dtype.

    Zero and infinity stay as they are. No other number becomes 0 or infinity, because no factor
    leads back from these.
    """
    info = jnp.finfo(jnp.result_type(x))
    product = jnp.clip(x * jnp.exp(log_factor), float(info.tiny), float(info.max))
    return jnp.where((x > 0) & (x <= float(info.max)), product, x)


def floor_pow2(x: Array) -> Array:
    """The largest power of two that is at most `x > 0` and whose reciprocal is a normal number.

    A product with this power or its reciprocal is exact. For 0 and non-finite values it is 1.
    """
    return select((x > 0) & (x <= jnp.finfo(x.dtype).max), clamp_pow2(floor_pow2_unclamped(x)), 1)


def floor_pow2_unclamped(x: Array) -> Array:
    """The largest power of two that is at most `x >= 0`.

    It is 0 for subnormal numbers, and infinity for infinity and NaN.
    """
    info = jnp.finfo(x.dtype)
    integer = jnp.dtype(f"int{info.bits}").type
    exponent_bits = integer((2**info.nexp - 1) << info.nmant)
    bits = lax.bitcast_convert_type(x, integer) & exponent_bits
    return lax.bitcast_convert_type(bits, x.dtype)


def clamp_pow2(power: Array) -> Array:
    """Powers of two, each replaced by the nearest one whose reciprocal is a normal number."""
    tiny = jnp.finfo(power.dtype).tiny
    return lax.clamp(tiny, power, 1 / tiny)


def reciprocal_pow2(power: Array) -> Array:
    """The reciprocals of powers of two that `invertible` gave, from their bits.

    This is faster than a division.
    """
    info = jnp.finfo(power.dtype)
    integer = jnp.dtype(f"int{info.bits}").type
    of_one = integer((info.maxexp - 1) << info.nmant)
    bits = of_one + of_one - lax.bitcast_convert_type(power, integer)
    return lax.bitcast_convert_type(bits, power.dtype)


def divide_by_pow2(x: Array, power: Array) -> Array:
    """`x` divided by a power of two that `floor_pow2` gave.

    It is no division, because XLA (JAX 0.10.2) rewrites quotients of quotients: from `a / b / c` it
    makes `a / (b * c)`, and from `a / (b / c)` it makes `a * c / b`. Each product may overflow.
    """
    return x * reciprocal_pow2(power).astype(x.dtype)


def static_size_or_none(count: Any) -> int | None:
    """`count`, or None if it is symbolic (in `jax.export`)."""
    return count if isinstance(count, int) else None


def norm_relative_error(count: Any, degree: float, eps: float) -> float:
    """A bound on the relative error of a norm: of squares in float32, 9e-7 for 10 million entries.

    The error of a sum of `count` powers, computed with this epsilon, grows with the depth of the
    reduction tree; the root that follows divides it by `degree`. In `jax.export` the count may be
    symbolic.
    """
    size = static_size_or_none(count)
    depth = 40 if size is None else math.log2(max(size, 1))
    # Powers other than 1 and 2 are computed by logarithms, which lose digits.
    digits = 1 if degree in (1, 2) else 4
    return (min(degree, 2) + digits * (2 + depth) / degree) * eps / 2


def nextafter_up(x: Array) -> Array:
    """The next larger number of the dtype, for finite `x >= 0`."""
    integer = jnp.dtype(f"int{jnp.finfo(x.dtype).bits}")
    return lax.bitcast_convert_type(lax.bitcast_convert_type(x, integer) + integer.type(1), x.dtype)


def expand_dims_at(x: Array, axes: Sequence[int]) -> Array:
    """`x`, with axes of size 1 inserted at `axes` so that it broadcasts to a leaf; scalars stay."""
    return lax.expand_dims(x, axes) if x.ndim else x


def split_complex(x: Array) -> list[Array]:
    """The real and imaginary parts of a complex array, or the real array itself."""
    return [x.real, x.imag] if jnp.iscomplexobj(x) else [x]


def map_real_imag(fn: Callable[[Array], Array], x: Array) -> Array:
    """`fn(x)`; for a complex array, `fn` of its real part and `fn` of its imaginary part."""
    return lax.complex(*map(fn, split_complex(x))) if jnp.iscomplexobj(x) else fn(x)


def match_weak_type(x: Array, like: Array) -> Array:
    """`x`, weakly typed if `like` is; both have the same shape and dtype."""
    if not jax.typeof(like).weak_type:
        return x
    # No other public function makes a weakly typed array from traced values (JAX 0.10.2).
    fill = lax.full_like
    for _ in range(x.ndim):
        fill = jax.vmap(fill)
    return fill(like, x)


def cast_elements(x: Array, dtype: jax.typing.DTypeLike) -> Array:
    """Real entries in `dtype`; complex entries with parts in `dtype`."""
    wide = jnp.complex128 if dtype == jnp.float64 else jnp.complex64
    # Not `astype`, which takes longer to trace for each leaf.
    return lax.convert_element_type(x, wide if jnp.iscomplexobj(x) else dtype)

"""Sums powers and products of a leaf's elements using the fastest method on each platform.

In float32, a sum of squares is accurate to within rounding errors for norms from 2**-31 to 2**64,
regardless of the number of elements. For smaller norms, elements are multiplied by 2**88 before
they are squared, and for larger norms by 2**-88.
"""

import functools
import itertools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

import optaxclip._backend.kernels as kernels
import optaxclip._backend.meshes as meshes
from optaxclip._backend.elementwise import scale_by_real
from optaxclip._base.numerics import cast_elements, clamp_to_finite, select, split_complex
from optaxclip.norms import Norm, l2

ScaledSums = tuple[Array, ...]
"""Sums of powers, one per scale, for a leaf, a group, or an array of groups."""

MAX_NUM_ELEMENTS = 2.0**40
"""Upper bound on the number of elements in a sum."""


def dispatch_reduction(
    *, in_float64: Callable[..., Any], at_scales: Callable[[list[Array]], Any], whole: bool
) -> Callable[[list[Array]], Any]:
    """Selects between a sum in float64 and sums at several scales, depending on the platform.

    Both `in_float64` and `at_scales` take a list of leaves. On platforms where a sum in float64 is
    faster, `in_float64` is called with 64-bit types enabled. It receives the `kernels.Float64Sums`
    of the platform as `platform`. `whole` must be the result of `is_full_local_reduction` for the
    leaves.
    """
    on_cpu, on_gpu = (
        jax.enable_x64(True)(functools.partial(in_float64, platform=sums))
        for sums in (kernels.CPU_SUMS, kernels.GPU_SUMS)
    )
    is_slow = whole and not kernels.has_fast_float64()
    gpus = {} if is_slow else {"cuda": on_gpu, "rocm": on_gpu}
    return functools.partial(lax.platform_dependent, cpu=on_cpu, **gpus, default=at_scales)


def scale_step(dtype: jax.typing.DTypeLike) -> float:
    """Returns the ratio of two adjacent scales: 2**88 in float32, 2**704 in float64."""
    return 2.0 ** int(0.6875 * jnp.finfo(dtype).maxexp)


def underflow_bound(dtype: jax.typing.DTypeLike) -> float:
    """Returns the value below which underflow may affect a sum of positive numbers."""
    info = jnp.finfo(dtype)
    return MAX_NUM_ELEMENTS * float(info.tiny) / float(info.eps)


def overflow_bound(dtype: jax.typing.DTypeLike) -> float:
    """Returns the product of norms above which the large scale is used."""
    # Products above this bound exceed `underflow_bound` at the large scale, and neither factor
    # underflows. Multiply by the step twice: for float64, its square would overflow a Python float.
    in_range = underflow_bound(dtype) * scale_step(dtype) * scale_step(dtype)
    return max(in_range, float(jnp.finfo(dtype).max) / MAX_NUM_ELEMENTS)


def prescale_factors(norm: Norm, dtype: jax.typing.DTypeLike) -> tuple[float, ...]:
    """Returns the powers of two that elements are multiplied by before the norm is applied."""
    # The second factor keeps sums from overflowing, and the third keeps squares from underflowing.
    up = scale_step(dtype)
    by_degree: dict[float, tuple[float, ...]] = {0: (1.0,), 1: (1.0, 1 / up), 2: (1.0, 1 / up, up)}
    return by_degree[norm.degree]


def is_full_local_reduction(
    leaves: Sequence[Array], axes: Sequence[tuple[int, ...]], *, in_one_piece: bool
) -> bool:
    """Returns whether all axes are reduced and the compiler does not shard the leaves."""
    reduces_all = all(len(over) == x.ndim for x, over in zip(leaves, axes, strict=True))
    return reduces_all and (in_one_piece or bool(meshes.manual_axes()))


# Jitted so that leaves with the same shape and dtype share one trace.
@functools.partial(jax.jit, static_argnames=("axes", "norm", "dtype", "in_one_piece"))
def compute_scaled_sums(
    leaf: Array, *, axes: tuple[int, ...], norm: Norm, dtype: jnp.dtype, in_one_piece: bool
) -> ScaledSums:
    """Computes the sums of powers of a leaf, one per scale."""
    whole = is_full_local_reduction([leaf], [axes], in_one_piece=in_one_piece)
    x = cast_elements(leaf, dtype)
    factors = _hide_from_xla(prescale_factors(norm, dtype), dtype)
    powers = tuple([norm.map(scale_by_real(x, factor)) for factor in factors])
    return _reduce(powers, axes, is_fused=whole and dtype == jnp.float32)


def _hide_from_xla(constants: tuple[float, ...], dtype: jnp.dtype) -> tuple[float | Array, ...]:
    """Hides constants from XLA's algebraic simplifier."""
    # Otherwise, XLA rewrites `(x * scale)**2` to `x**2 * scale**2` if all elements of `x` are equal
    # (as of JAX 0.10.2), and `scale**2` overflows.
    first, *others = constants
    return (first, *lax.optimization_barrier([np.asarray(x, dtype) for x in others]))


def _reduce(summands: ScaledSums, axes: tuple[int, ...], *, is_fused: bool) -> ScaledSums:
    """Sums arrays in one variadic reduction, or separately."""
    # GPUs run a variadic reduction over all axes as one kernel. TPUs compute small separate sums in
    # one pass, and the compiler can shard separate sums across devices.
    if not is_fused:
        return tuple([lax.reduce_sum(x, axes) for x in summands])
    zeros = (summands[0].dtype.type(0),) * len(summands)
    return tuple(lax.reduce(summands, zeros, _add, axes))


def _add(left: ScaledSums, right: ScaledSums) -> ScaledSums:
    return tuple(map(operator.add, left, right))


# Jitted so that leaves with the same shape and dtype share one trace.
@functools.partial(jax.jit, static_argnames=("axes", "in_one_piece"))
def sum_products(x: Array, y: Array, *, axes: tuple[int, ...], in_one_piece: bool) -> ScaledSums:
    """Returns the sums of `x * y` and of `y**2` for each scale in turn.

    Both arrays must have the same shape and the dtype of the norms. Complex elements count as pairs
    of real elements. Set `in_one_piece` if both arrays are known not to be sharded.

    All sums share one reduction. Otherwise, XLA on GPUs would fuse the reduction over the
    parameters into the AdamW update and copy the parameters first (as of JAX 0.10.2). However,
    variadic reductions are slow on CPUs, where separate sums in float64 are used.
    """
    dtype = jnp.finfo(x.dtype).dtype
    whole = is_full_local_reduction([x], [axes], in_one_piece=in_one_piece)

    def sum_in_own_dtype(x: Array, y: Array) -> ScaledSums:
        factors = _hide_from_xla(prescale_factors(l2, dtype), dtype)
        scaled = [(scale_by_real(x, factor), scale_by_real(y, factor)) for factor in factors]
        summands = [(_multiply(x, y, _multiply_bounded), l2.map(y)) for x, y in scaled]
        flat = tuple(itertools.chain.from_iterable(summands))
        return _reduce(flat, axes, is_fused=whole and dtype == jnp.float32)

    def sum_in_float64(x: Array, y: Array, *, separate_cast: bool = False) -> ScaledSums:
        u, v = lax.optimization_barrier((x, y)) if separate_cast else (x, y)
        with jax.enable_x64(True):
            y, u, v = (cast_elements(array, jnp.float64) for array in (y, u, v))
            # One scale is enough in float64. The sums at all scales are computed from it.
            totals = _reduce((_multiply(u, v, lax.mul), l2.map(y)), axes, is_fused=False)
            squares = [factor**2 for factor in prescale_factors(l2, dtype)]
            return tuple([(x * square).astype(dtype) for square in squares for x in totals])

    if dtype != jnp.float32:
        return sum_in_own_dtype(x, y)
    on_gpu = sum_in_own_dtype if whole else sum_in_float64
    # On CPUs, XLA materializes a cast that several sums share (as of JAX 0.10.2).
    on_cpu = functools.partial(sum_in_float64, separate_cast=True)
    return lax.platform_dependent(
        x, y, cpu=on_cpu, cuda=on_gpu, rocm=on_gpu, default=sum_in_own_dtype
    )


def _multiply(x: Array, y: Array, multiply_real: Callable[[Array, Array], Array]) -> Array:
    """Multiplies elements. The products of real parts and of imaginary parts are added."""
    # If only one of the leaves is complex, only the real parts are multiplied.
    return functools.reduce(lax.add, map(multiply_real, split_complex(x), split_complex(y)))


def _multiply_bounded(x: Array, y: Array) -> Array:
    """Multiplies elements, and replaces products that are too large for this scale by 0."""
    # Infinite products with different signs would sum to NaN. If a product is too large, the sum at
    # the scale for large numbers is used.
    product = lax.mul(clamp_to_finite(x), clamp_to_finite(y))
    is_in_range = lax.le(lax.abs(product), x.dtype.type(2 * overflow_bound(x.dtype)))
    return select(is_in_range, product, 0)


# Jitted so that leaves with the same shape and dtype share one trace.
@functools.partial(jax.jit, static_argnames=("by", "axes", "dtype"))
def max_abs_bits(leaf: Array, *, by: float, axes: tuple[int, ...], dtype: jnp.dtype) -> Array:
    """Multiplies the largest absolute value by `by`, and returns its bits as an integer.

    The bit patterns of non-negative floats sort in the same order as the floats, and NaN is larger
    than infinity. Therefore, a maximum over devices preserves NaN, unlike `lax.pmax` of floats on
    CPUs (as of JAX 0.10.2).
    """
    x, integer = cast_elements(leaf, dtype), jnp.dtype(f"int{jnp.finfo(dtype).bits}")
    # Clear the sign bit, which may be set for NaN.
    mask = integer.type(jnp.iinfo(integer).max)

    def reduce_integers(x: Array) -> Array:
        bits = lax.bitcast_convert_type(jnp.abs(scale_by_real(x, by)), integer) & mask
        return lax.reduce(bits, integer.type(0), lax.max, axes)

    def reduce_floats(x: Array) -> Array:
        largest = scale_by_real(kernels.max_abs_on_cpu(x, axes=axes), by)
        return lax.bitcast_convert_type(largest, integer) & mask

    if x.dtype != jnp.float32:
        return reduce_integers(x)
    return lax.platform_dependent(x, cpu=reduce_floats, default=reduce_integers)

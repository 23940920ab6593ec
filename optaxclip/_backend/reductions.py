"""Sums powers of a leaf's entries, or products, in the way that is best on each platform.

In float32 a sum of squares is exact up to rounding for norms from 2**-31 to 2**64, whatever the
number of entries. For smaller norms the entries are multiplied by 2**88 before they are squared,
for larger norms by 2**-88.
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

import optaxclip._backend.cpu as cpu
import optaxclip._backend.gpu as gpu
import optaxclip._backend.meshes as meshes
from optaxclip._backend.elementwise import scale_by_real
from optaxclip._base.numerics import cast_elements, clamp_to_finite, select, split_complex
from optaxclip.norms import Norm, l2

ScaledSums = tuple[Array, ...]
"""For each scale, the sum of powers of a leaf, of a group, or of an array of groups."""


def dispatch_reduction(
    *, in_float64: Callable[..., Any], at_scales: Callable[[list[Array]], Any], whole: bool
) -> Callable[[list[Array]], Any]:
    """Calls one of two functions of leaves: where a sum in float64 is better, the first.

    It is called with 64-bit types enabled, and with the module that adds on a platform as `adder`.
    The second sums at several scales; `whole` says whether it can do that by `variadic_sums`.
    """
    on_cpu, on_gpu = (
        jax.enable_x64(True)(functools.partial(in_float64, platform=adder)) for adder in (cpu, gpu)
    )
    gpus = () if whole and not gpu.has_fast_float64() else ("cuda", "rocm")
    gpu_branches = dict.fromkeys(gpus, on_gpu)
    return functools.partial(lax.platform_dependent, cpu=on_cpu, default=at_scales, **gpu_branches)


def scale_step(dtype: jax.typing.DTypeLike) -> float:
    """The ratio of two neighbouring scales: 2**88 in float32, 2**704 in float64."""
    return 2.0 ** int(0.6875 * jnp.finfo(dtype).maxexp)


MAX_NUM_ELEMENTS = 2.0**40
"""An upper bound on the number of entries in one sum."""


def underflow_bound(dtype: jax.typing.DTypeLike) -> float:
    """The bound below which summands that underflowed may matter to a sum of positive numbers."""
    info = jnp.finfo(dtype)
    return MAX_NUM_ELEMENTS * float(info.tiny) / float(info.eps)


def overflow_bound(dtype: jax.typing.DTypeLike) -> float:
    """The bound of products of norms above which the sum at the scale for large numbers is used.

    Such products are above `lowest` at that scale, and neither factor underflows there.
    """
    # Not the square of the distance: for float64 it is too large for a Python float.
    in_range = underflow_bound(dtype) * scale_step(dtype) * scale_step(dtype)
    return max(in_range, float(jnp.finfo(dtype).max) / MAX_NUM_ELEMENTS)


def prescale_factors(norm: Norm, dtype: jax.typing.DTypeLike) -> tuple[float, ...]:
    """The powers of two by which entries are multiplied before the norm maps them.

    The first scale is 1; the second keeps sums from overflow; the third keeps squares from
    underflow. Counts of entries (degree 0) need only the scale 1.
    """
    up = scale_step(dtype)
    by_degree: dict[float, tuple[float, ...]] = {0: (1.0,), 1: (1.0, 1 / up), 2: (1.0, 1 / up, up)}
    return by_degree[norm.degree]


# Compiled functions of their own, so that they are traced once for leaves that are alike.
@functools.partial(jax.jit, static_argnames=("axes", "norm", "dtype"))
def variadic_sums(
    leaf: Array, *, axes: tuple[int, ...], norm: Norm, dtype: jnp.dtype
) -> ScaledSums:
    """The sums at all scales in one variadic reduction, which a GPU runs as one kernel."""
    return _variadic_reduce(_summands(leaf, norm, dtype), axes)


@functools.partial(jax.jit, static_argnames=("axes", "norm", "dtype"))
def separate_sums(
    leaf: Array, *, axes: tuple[int, ...], norm: Norm, dtype: jnp.dtype
) -> ScaledSums:
    """The sums at all scales, as one plain sum for each scale.

    A TPU computes several plain sums in one pass if their results are small, and the compiler can
    split plain sums over devices.
    """
    return _separate_reduces(_summands(leaf, norm, dtype), axes)


def _summands(leaf: Array, norm: Norm, dtype: jnp.dtype) -> ScaledSums:
    """The summands at each scale."""
    x = cast_elements(leaf, dtype)
    return tuple(
        [
            norm.map(scale_by_real(x, by))
            for by in _opaque_constants(prescale_factors(norm, dtype), dtype)
        ]
    )


def _opaque_constants(numbers: tuple[float, ...], dtype: jnp.dtype) -> tuple[float | Array, ...]:
    """The numbers, which XLA does not know while it simplifies.

    Else it would compute `(x * scale)**2` as `x**2 * scale**2` if all entries of `x` are one number
    (JAX 0.10.2), and the second square overflows.
    """
    first, *others = numbers
    return (first, *lax.optimization_barrier([np.asarray(x, dtype) for x in others]))


def _variadic_reduce(summands: ScaledSums, axes: tuple[int, ...]) -> ScaledSums:
    zero = summands[0].dtype.type(0)
    return tuple(lax.reduce(summands, (zero,) * len(summands), _add_pairs, axes))


def _separate_reduces(summands: ScaledSums, axes: tuple[int, ...]) -> ScaledSums:
    return tuple([lax.reduce_sum(x, axes) for x in summands])


def _add_pairs(sums: ScaledSums, more: ScaledSums) -> ScaledSums:
    return tuple(map(operator.add, sums, more))


def is_full_local_reduction(
    leaves: Sequence[Array], axes: Sequence[tuple[int, ...]], *, in_one_piece: bool
) -> bool:
    """Whether all axes of each leaf are summed over, and no leaf is split by the compiler."""
    over_all = all(len(over) == x.ndim for x, over in zip(leaves, axes, strict=True))
    return over_all and (in_one_piece or bool(meshes.manual_axes()))


def compute_scaled_sums(
    leaf: Array, *, axes: tuple[int, ...], norm: Norm, dtype: jnp.dtype, in_one_piece: bool
) -> ScaledSums:
    """The sums of a leaf at all scales: at once if it is whole and float32, else one by one."""
    whole = is_full_local_reduction([leaf], [axes], in_one_piece=in_one_piece)
    way = variadic_sums if whole and dtype == jnp.float32 else separate_sums
    return way(leaf, axes=axes, norm=norm, dtype=dtype)


# A compiled function of its own, so that it is traced once for leaves that are alike.
@functools.partial(jax.jit, static_argnames=("axes", "in_one_piece"))
def sum_products(x: Array, y: Array, *, axes: tuple[int, ...], in_one_piece: bool) -> ScaledSums:
    """The sums of the products `x * y`, and of the squares of `y`.

    The result has both sums at the first scale, then at the next. One reduction gives all of them:
    if there were two reductions, XLA on GPUs (JAX 0.10.2) would merge the one over parameters with
    AdamW's step, and copy the parameters first. On a CPU, where such a reduction is slow, each of
    the sums is one sum in float64.

    Args:
      x: entries in the dtype of the norms; a complex entry counts as a pair of real entries.
      y: as many entries.
      axes: the axes to sum over.
      in_one_piece: whether it is certain that neither array is split over devices.
    """
    dtype = jnp.finfo(x.dtype).dtype
    over_all = is_full_local_reduction([x], [axes], in_one_piece=in_one_piece)

    def sum_in_own_dtype(x: Array, y: Array) -> ScaledSums:
        pairs = [
            (scale_by_real(x, by), scale_by_real(y, by))
            for by in _opaque_constants(prescale_factors(l2, dtype), dtype)
        ]
        summands = [(_product_of_entries(x, y, _zero_overflows), l2.map(y)) for x, y in pairs]
        way = _variadic_reduce if over_all and dtype == jnp.float32 else _separate_reduces
        return way(tuple(itertools.chain(*summands)), axes)

    def sum_in_float64(x: Array, y: Array, *, separate_cast: bool = False) -> ScaledSums:
        u, v = lax.optimization_barrier((x, y)) if separate_cast else (x, y)
        with jax.enable_x64(True):
            y, u, v = (cast_elements(part, jnp.float64) for part in (y, u, v))
            totals = _separate_reduces((_product_of_entries(u, v, lax.mul), l2.map(y)), axes)
            at_each = [[total * by**2 for total in totals] for by in prescale_factors(l2, dtype)]
            return tuple(total.astype(dtype) for total in itertools.chain(*at_each))

    if dtype != jnp.float32:
        return sum_in_own_dtype(x, y)
    on_gpu = sum_in_own_dtype if over_all else sum_in_float64
    # Without `apart`, several sums would share a conversion, which XLA on CPU (JAX 0.10.2) stores.
    on_cpu = functools.partial(sum_in_float64, separate_cast=True)
    return lax.platform_dependent(
        x, y, cpu=on_cpu, cuda=on_gpu, rocm=on_gpu, default=sum_in_own_dtype
    )


def _product_of_entries(x: Array, y: Array, by_parts: Callable[[Array, Array], Array]) -> Array:
    """The products of entries; for complex entries, the products of both parts, added."""
    # If one leaf is real and the other complex, only the real parts have a product.
    return functools.reduce(lax.add, map(by_parts, split_complex(x), split_complex(y)))


def _zero_overflows(x: Array, y: Array) -> Array:
    """The products of entries, with 0 for products that are too large for this scale.

    Infinite products of both signs would add up to NaN. If there are such products, the sum at the
    scale for large numbers is used, at which there are none.
    """
    found = lax.mul(clamp_to_finite(x), clamp_to_finite(y))
    return select(lax.le(lax.abs(found), x.dtype.type(2 * overflow_bound(x.dtype))), found, 0)


# A compiled function of its own, so that it is traced once for leaves that are alike.
@functools.partial(jax.jit, static_argnames=("by", "axes", "dtype"))
def max_abs_bits(leaf: Array, *, by: float, axes: tuple[int, ...], dtype: jnp.dtype) -> Array:
    """The largest modulus, times a constant, as an integer.

    The bits of floats of at least 0 are in the order of the floats, with NaN above infinity. So a
    maximum over devices keeps a NaN, which `lax.pmax` of floats loses on a CPU (JAX 0.10.2).
    """
    x, integer = cast_elements(leaf, dtype), jnp.dtype(f"int{jnp.finfo(dtype).bits}")
    # The mask clears the sign bit, which a NaN may have.
    mask = integer.type(jnp.iinfo(integer).max)

    def of_integers(x: Array) -> Array:
        bits = lax.bitcast_convert_type(jnp.abs(scale_by_real(x, by)), integer) & mask
        return lax.reduce(bits, integer.type(0), lax.max, axes)

    def of_floats(x: Array) -> Array:
        return lax.bitcast_convert_type(cpu.largest_modulus(x, axes=axes), integer) & mask

    if x.dtype != jnp.float32:
        return of_integers(x)
    return lax.platform_dependent(x, cpu=of_floats, default=of_integers)

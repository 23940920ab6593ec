"""Weighted sums of the gradients of a parameter over examples.

The sums are products of data and cotangents that also contract the examples, so per-example
gradients are never computed. The factors of the examples multiply the smaller of data and
cotangents.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

import optaxclip._backend.meshes as meshes
import optaxclip.per_example._ghost_primitives as primitives
import optaxclip.per_example._ghost_sites as sites
from optaxclip._backend.elementwise import product_with_bfloat16
from optaxclip._base.numerics import floor_pow2, reciprocal_pow2, static_size_or_none
from optaxclip._engine.scale import Multiplier
from optaxclip.per_example._batched_clip import expand_like, sum_dtype
from optaxclip.per_example._ghost_norms import (
    NormTerm,
    einsum,
    exact_operands,
    map_chunks,
    sum_blocks,
)
from optaxclip.per_example._ghost_sites import Axes, BackpropResult, ParamUse

# The maximum product of data, cotangents, and factors for extreme examples of a convolution.
_LARGEST = 2.0**70


def compute_weighted_sum(
    backward: BackpropResult,
    leaf: Any,
    parts: Sequence[NormTerm],
    by: Multiplier,
    *,
    are_ordinary: bool,  # True if data, cotangents, and their products with factors are in range.
) -> Array:
    """Sums the gradients of a parameter times their multipliers `[examples]`."""
    dtype, total = sum_dtype(leaf.dtype), None
    for use, _ in (use for part in parts for use in part.uses):
        used = _sum_use(use, *use.operands(backward), by, dtype, are_ordinary)
        # [*sliced loops, *operand] -> [*leaf]
        used = _scatter_into_leaf(use, used, shape=leaf.shape)
        total = used if total is None else total + used
    return jnp.zeros(leaf.shape, dtype) if total is None else total


def _sum_use(
    use: ParamUse, x: Array, d: Array, by: Multiplier, dtype: Any, are_ordinary: bool
) -> Array:
    """Sums the gradients of one use, `[*sliced loops, *operand]`."""
    example, kind = len(use.loops), use.site.kind
    if kind == primitives.GATHER:
        return _sum_rows(use, x, _scale_examples(d, by, example, dtype))
    is_product = kind == primitives.DOT_GENERAL
    if is_product:
        x, d = sites.slice_used(use, x, d)
    # The smaller array is scaled because the scaled array is written in a wider dtype.
    is_data_scaled = x.size < d.size
    smaller, larger = (x, d) if is_data_scaled else (d, x)  # [*loops, examples, ...]
    if not are_ordinary:
        smaller, larger, by = _rescale_operands(use, smaller, larger, is_data_scaled, by, dtype)
    smaller = _scale_examples(smaller, by, example, dtype)
    x, d = (smaller, larger) if is_data_scaled else (larger, smaller)
    if is_product:
        return _sum_products(use, x, d, dtype, summed=True)
    return _sum_kernels(use, x.astype(dtype), d.astype(dtype))


def _rescale_operands(
    use: ParamUse, smaller: Array, larger: Array, is_data_scaled: bool, by: Multiplier, dtype: Any
) -> tuple[Array, Array, Multiplier]:
    """Rescales data and cotangents so that their products with the factors stay in range."""
    example = len(use.loops)
    # The axes of data and cotangents that have separate powers.
    pairs = [(example, example)]
    if use.site.kind == primitives.DOT_GENERAL:
        axes = Axes.create(use)
        pairs += zip(axes.data_groups, axes.groups, strict=True)
        pairs += zip(axes.data_positions, axes.positions, strict=True)
    pairs = sorted(pair if is_data_scaled else pair[::-1] for pair in pairs)
    smaller_kept, larger_kept = zip(*pairs, strict=True)
    smaller_axes = [axis for axis in range(smaller.ndim) if axis not in smaller_kept]
    larger_axes = [axis for axis in range(larger.ndim) if axis not in larger_kept]
    # The larger array is divided by powers of two near its largest elements, and the smaller array
    # is multiplied by them.
    power = floor_pow2(jnp.max(jnp.abs(larger), larger_axes).astype(dtype))  # [*larger_kept]
    ratio = expand_like(by.ratio, larger, example)
    scaled = larger.astype(dtype) * lax.expand_dims(reciprocal_pow2(power), larger_axes)
    scaled = jnp.where(ratio == 0, ratio.astype(dtype), scaled)  # They may contain NaN.
    # The cast is exact because the elements were multiplied by a power of two.
    larger = scaled.astype(larger.dtype) if larger.dtype == jnp.bfloat16 else scaled
    # [*larger_kept] -> [*smaller_kept]
    power = jnp.transpose(power, [sorted(larger_kept).index(axis) for axis in larger_kept])
    power = lax.expand_dims(power, smaller_axes)
    smaller = smaller.astype(dtype) * power
    if use.site.kind == primitives.CONVOLUTION:
        # The largest elements may only be multiplied by zeros, but the products with smaller
        # elements must also stay in range.
        most = _LARGEST / (jnp.max(jnp.abs(smaller), smaller_axes) * by.power)  # [examples]
        by = by._replace(ratio=jnp.where(by.ratio > most, most, by.ratio))
    return smaller, larger, by


def gradients_of_examples(leaf: Any, parts: Sequence[NormTerm], backward: BackpropResult) -> Array:
    """Computes per-example gradients, `[examples, *leaf]`, of products and convolutions."""
    dtype, totals = sum_dtype(leaf.dtype), []
    for use, _ in (use for part in parts for use in part.uses):
        x, d = use.operands(backward)
        if use.site.kind == primitives.DOT_GENERAL:
            used = _sum_products(use, *sites.slice_used(use, x, d), dtype, summed=False)
        else:
            used = _compute_kernels(use, x, d, dtype)
        # [examples, *sliced loops, *operand] -> [examples, *leaf]
        scatter = functools.partial(_scatter_into_leaf, use, shape=leaf.shape)
        totals.append(jax.vmap(scatter)(used))
    return functools.reduce(jnp.add, totals)


def _scatter_into_leaf(use: ParamUse, gradient: Array, *, shape: tuple[int, ...]) -> Array:
    """Moves the gradient of the used elements to their positions in the parameter."""
    if not use.reference.moves:
        return gradient.reshape(shape)
    return _apply_transpose(use.reference.apply, shape, gradient)


def _scale_examples(x: Array, by: Multiplier, example: int, dtype: Any) -> Array:
    ratio, power = (expand_like(v.astype(dtype), x, example) for v in (by.ratio, by.power))
    # For constant zeros, XLA on GPUs would materialize an array (as of JAX 0.10.2).
    return jnp.where(ratio == 0, ratio, x.astype(dtype) * power * ratio)


def _sum_products(use: ParamUse, x: Array, d: Array, dtype: Any, *, summed: bool) -> Array:
    """Multiplies data and cotangents, `[*sliced loops, *operand]`, per example unless summed."""
    axes, example = Axes.create(use), len(use.loops)
    over, kept = ((example,), ()) if summed else ((), (example,))
    positions = ((*over, *axes.data_positions), (*over, *axes.positions))
    groups = ((*kept, *axes.data_groups), (*kept, *axes.groups))

    def multiply(x: Array, d: Array) -> Array:
        x, d, options = exact_operands(x, d, dtype)
        return lax.dot_general(x, d, (positions, groups), **options)

    sum_product = multiply
    if {x.dtype, d.dtype} == {jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)}:
        in_parts = functools.partial(_product_in_parts, numbers=(positions, groups), dtype=dtype)
        sum_product = functools.partial(product_with_bfloat16, whole=multiply, in_parts=in_parts)
    split, block_axes = sites.block_split(use), (example, example)
    if split.pieces > 1:
        block_axes = axes.data_positions[split.axis], axes.positions[split.axis]
    # [*kept, *sliced loops, *batch, *data elements, *cotangent elements]
    total = sum_blocks(sum_product, (x, block_axes[0]), (d, block_axes[1]), split.pieces)
    order = [len(kept) + axis for axis in sites.order_of_sum(use)]
    return jnp.transpose(total, [*range(len(kept)), *order])


def _product_in_parts(x: Array, d: Array, *, numbers: Any, dtype: Any) -> Array:
    """Multiplies a bfloat16 factor by a float32 factor in two bfloat16 parts."""
    contracted, batch = numbers
    is_wide = [v.dtype == jnp.float32 for v in (x, d)]
    num_terms = math.prod(x.shape[axis] for axis in contracted[0])
    num_free = [
        math.prod(size for axis, size in enumerate(v.shape) if axis not in (*sums, *kept))
        for v, sums, kept in zip((x, d), contracted, batch, strict=True)
    ]
    # Using the parts as additional terms of the sum writes the bfloat16 factor twice. Using them as
    # additional columns writes the result twice.
    are_terms = static_size_or_none(num_terms) is None or num_terms <= 4 * min(num_free)
    factors, axes = [], []
    for v, flag, *own in zip((x, d), is_wide, contracted, batch, strict=True):
        is_stacked = flag or are_terms
        sums, kept = (tuple(axis + is_stacked for axis in group) for group in own)
        # [...] -> [2, ...]
        stacked = split_float32_to_bfloat16(v) if flag else jnp.stack([v, v]) if is_stacked else v
        factors.append(stacked)
        axes.append(((0, *sums) if are_terms else sums, kept))
    (sums_x, batch_x), (sums_d, batch_d) = axes
    numbers = ((sums_x, sums_d), (batch_x, batch_d))
    product = lax.dot_general(factors[0], factors[1], numbers, preferred_element_type=dtype)
    # The axis of the parts is the first free axis of the wide factor.
    axis = len(batch_x) + (0 if is_wide[0] else x.ndim - len(sums_x) - len(batch_x))
    return product if are_terms else jnp.sum(product, axis)


def split_float32_to_bfloat16(d: Array) -> Array:
    """Splits float32 numbers into sums of two bfloat16 numbers, `[2, ...]`."""
    high = lax.reduce_precision(d, 8, 7)  # The error of the sum is at most `OTHER_ERRORS`.
    return jnp.stack([high, lax.reduce_precision(d - high, 8, 7)]).astype(jnp.bfloat16)


def _compute_kernels(use: ParamUse, x: Array, d: Array, dtype: Any) -> Array:
    """Computes gradients `[examples, *sliced loops, *kernel]` from products with patches."""
    # An XLA convolution per example would move twice the bytes on a GPU, the same number on a TPU,
    # and more on a CPU.
    example = len(use.loops)

    def multiply_chunk(operands: Any) -> Array:
        x, d = sites.to_matmul_form(use, *(jnp.moveaxis(v, 0, example) for v in operands))
        return einsum("bgtk,bgtn->bgkn", x, d, dtype)  # [B, G, K, N]

    groups, positions, inputs, _ = sites.sizes_of(use)
    operands = [jnp.moveaxis(v, example, 0) for v in (x, d)]  # [examples, *loops, ...]
    products = map_chunks(multiply_chunk, operands, groups * positions * inputs * x.dtype.itemsize)
    # [examples, *sliced loops, feature groups, K, N]
    products = products.reshape(products.shape[0], *use.sliced_lengths, -1, *products.shape[-2:])
    return primitives.reshape_to_kernel(use.site.eqn, products)


def _sum_kernels(use: ParamUse, x: Array, d: Array) -> Array:
    """Sums gradients `[*sliced loops, *kernel]` with the transpose of the convolution."""
    eqn = use.site.eqn

    def convolve_examples(kernel: Array) -> Array:
        fn = jax.vmap(functools.partial(primitives.convolve, eqn, dtype=x.dtype), (0, None))
        for is_sliced in reversed(use.loops):
            fn = jax.vmap(fn, (0, 0 if is_sliced else None))
        return fn(x, kernel)

    return _apply_transpose(convolve_examples, (*use.sliced_lengths, *eqn.invars[1].aval.shape), d)


def _apply_transpose(fn: Callable[[Array], Array], shape: Sequence[int], cotangent: Array) -> Array:
    """Applies the transpose of a linear function of arrays of this shape."""
    # `jax.linear_transpose` would lose the mesh in types (as of JAX 0.10.2).
    (zeros,) = meshes.pvary_like([cotangent], [jnp.zeros(shape, cotangent.dtype)])
    return jax.vjp(fn, zeros)[1](cotangent)[0]


def _sum_rows(use: ParamUse, x: Array, d: Array) -> Array:
    """Sums rows to `[*sliced loops, rows, ...]` with a single scatter-add."""
    ids, d = sites.to_gather_form(use, x, d)  # i32[B, G, T], [B, G, T, N]
    count, *row_shape = use.site.eqn.invars[0].aval.shape
    num_rows = math.prod(use.sliced_lengths) * count
    # The tables of all groups are concatenated. Dropped rows have an index out of range.
    first = count * jnp.arange(ids.shape[1], dtype=ids.dtype)[None, :, None]  # i32[1, G, 1]
    indices = jnp.where(ids < count, ids + first, num_rows).reshape(-1)  # i32[B * G * T]
    table = jnp.zeros((num_rows, d.shape[-1]), d.dtype)  # [rows, N]
    table = table.at[indices].add(d.reshape(indices.size, -1), mode="drop")
    return table.reshape(*use.sliced_lengths, count, *row_shape)

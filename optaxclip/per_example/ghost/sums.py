"""Sums of a parameter's gradients over examples, each multiplied by its example's factor.

They are products of data and cotangents, summed over the examples too, so no example's gradient is
computed. The factor multiplies the smaller of data and cotangents.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

import optaxclip._backend.meshes as meshes
import optaxclip.per_example.ghost.primitives as primitives
import optaxclip.per_example.ghost.sites as sites
from optaxclip._backend.elementwise import product_with_bfloat16
from optaxclip._base.numerics import floor_pow2, reciprocal_pow2, static_size_or_none
from optaxclip._engine.scale import Multiplier
from optaxclip.per_example._batched_clip import sum_dtype
from optaxclip.per_example.ghost.norms import (
    NormTerm,
    einsum,
    exact_operands,
    map_chunks,
    sum_blocks,
)
from optaxclip.per_example.ghost.sites import Axes, BackpropResult, ParamUse

_LARGEST = 2.0**70
"""Of data times cotangents times factors, if a convolution takes extreme examples."""


def compute_weighted_sum(
    leaf: Any,
    parts: Sequence[NormTerm],
    backward: BackpropResult,
    by: Multiplier,
    *,
    are_ordinary: bool,
) -> Array:
    """The sum of a parameter's gradients times their multipliers, `[examples]`.

    If a ratio is 0, the example adds nothing, even if it is not finite. Of ordinary examples all
    data, cotangents, and their products with their factors are known to be in range.
    """
    dtype, total = sum_dtype(leaf.dtype), None
    for use, _ in (use for part in parts for use in part.uses):
        found = _sum(use, *use.operands(backward), by, dtype, are_ordinary)
        found = _scatter_into_leaf(use, found, leaf.shape)
        total = found if total is None else total + found
    return jnp.zeros(leaf.shape, dtype) if total is None else total


def _sum(
    use: ParamUse, x: Array, d: Array, by: Multiplier, dtype: Any, are_ordinary: bool
) -> Array:
    example, kind = len(use.loops), use.site.kind
    if kind == primitives.GATHER:
        return _sum_of_rows(use, x, _scale_cotangents(d, by, example, dtype))
    is_product = kind == primitives.DOT_GENERAL
    if is_product:
        x, d = sites.slice_used(use, x, d)
    # The array that is multiplied is written again in a wider dtype, so the smaller one is taken.
    is_of_data = x.size < d.size
    smaller, larger = (x, d) if is_of_data else (d, x)
    if not are_ordinary:
        smaller, larger, by = _rescale_operands(use, smaller, larger, is_of_data, by, dtype)
    smaller = _scale_cotangents(smaller, by, example, dtype)
    x, d = (smaller, larger) if is_of_data else (larger, smaller)
    if is_product:
        return _sum_products(use, x, d, dtype, summed=True)
    return _sum_kernels(use, x.astype(dtype), d.astype(dtype))


def _rescale_operands(
    use: ParamUse, smaller: Array, larger: Array, is_of_data: bool, by: Multiplier, dtype: Any
) -> tuple[Array, Array, Multiplier]:
    """Data and cotangents whose products with the factors stay in range.

    At each position of a product, or for each example of a convolution, the larger array is divided
    by a power of two near its largest entry, and the smaller array is multiplied by it. The larger
    one has zeros for examples that add nothing, because these may hold NaN.
    """
    example = len(use.loops)
    pairs = [(example, example)]
    if use.site.kind == primitives.DOT_GENERAL:
        axes = Axes.create(use)
        pairs += zip(axes.data_groups, axes.groups, strict=True)
        pairs += zip(axes.data_positions, axes.positions, strict=True)
    to, of = zip(*sorted(pair if is_of_data else pair[::-1] for pair in pairs), strict=True)
    others = [
        [axis for axis in range(x.ndim) if axis not in kept]
        for x, kept in ((smaller, to), (larger, of))
    ]
    power = floor_pow2(jnp.max(jnp.abs(larger), others[1]).astype(dtype))
    ratio = _expand_like(by.ratio, larger, example)
    found = larger.astype(dtype) * lax.expand_dims(reciprocal_pow2(power), others[1])
    found = jnp.where(ratio == 0, ratio.astype(dtype), found)
    # A product with a power of two is exact.
    larger = found.astype(larger.dtype) if larger.dtype == jnp.bfloat16 else found
    power = jnp.transpose(power, [sorted(of).index(axis) for axis in of])
    power = lax.expand_dims(power, others[0])
    smaller = smaller.astype(dtype) * power
    if use.site.kind == primitives.CONVOLUTION:
        # The largest numbers may meet only zeros: what they would make of others is held in range.
        most = _LARGEST / (jnp.max(jnp.abs(smaller), others[0]) * by.power)
        by = by._replace(ratio=jnp.where(by.ratio > most, most, by.ratio))
    return smaller, larger, by


def gradients_of_examples(leaf: Any, parts: Sequence[NormTerm], backward: BackpropResult) -> Array:
    """The gradient of each example, `[examples, *parameter]`, from products and convolutions."""
    dtype, totals = sum_dtype(leaf.dtype), []
    for use, _ in (use for part in parts for use in part.uses):
        x, d = use.operands(backward)
        if use.site.kind == primitives.DOT_GENERAL:
            found = _sum_products(use, *sites.slice_used(use, x, d), dtype, summed=False)
        else:
            found = _kernels(use, x, d, dtype)
        totals.append(jax.vmap(lambda x, use=use: _scatter_into_leaf(use, x, leaf.shape))(found))
    return functools.reduce(jnp.add, totals)


def _scatter_into_leaf(use: ParamUse, found: Array, shape: tuple[int, ...]) -> Array:
    """A gradient of the used entries, put where these entries lie in the parameter."""
    if not use.reference.moves:
        return found.reshape(shape)
    return _apply_transpose(use.reference.apply, shape, found)


def _scale_cotangents(d: Array, by: Multiplier, example: int, dtype: Any) -> Array:
    ratio, power = (_expand_like(x.astype(dtype), d, example) for x in (by.ratio, by.power))
    # Not a constant 0, for which XLA on a GPU (JAX 0.10.2) stores an array of zeros.
    return jnp.where(ratio == 0, ratio, d.astype(dtype) * power * ratio)


def _expand_like(x: Array, like: Array, example: int) -> Array:
    """A number for each example, with axes of size 1, so that they broadcast to `like`."""
    return lax.expand_dims(x, [axis for axis in range(like.ndim) if axis != example])


def _sum_products(use: ParamUse, x: Array, d: Array, dtype: Any, *, summed: bool) -> Array:
    """The sum `[*sliced loops, *operand]`, if the operand holds only the parameter.

    Unless the examples are `summed`, their axis comes first.
    """
    axes, example = Axes.create(use), len(use.loops)
    over, kept = ((example,), ()) if summed else ((), (example,))
    positions = ((*over, *axes.data_positions), (*over, *axes.positions))
    groups = ((*kept, *axes.data_groups), (*kept, *axes.groups))

    def product(x: Array, d: Array) -> Array:
        x, d, options = exact_operands(x, d, dtype)
        return lax.dot_general(x, d, (positions, groups), **options)

    in_parts = functools.partial(_product_in_parts, numbers=(positions, groups), dtype=dtype)

    def sum_product(x: Array, d: Array) -> Array:
        if {x.dtype, d.dtype} != {jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)}:
            return product(x, d)
        return product_with_bfloat16(x, d, whole=product, in_parts=in_parts)

    cut, at = sites.block_split(use), (example, example)
    if cut.pieces > 1:
        at = axes.data_positions[cut.axis], axes.positions[cut.axis]
    found = sum_blocks(sum_product, (x, at[0]), (d, at[1]), cut.pieces)
    order = [len(kept) + axis for axis in sites.order_of_sum(use)]
    return jnp.transpose(found, [*range(len(kept)), *order])


def _product_in_parts(x: Array, d: Array, *, numbers: Any, dtype: Any) -> Array:
    """`lax.dot_general` of a factor in bfloat16, and a float32 factor in two parts of bfloat16."""
    over, groups = numbers
    is_wide = [v.dtype == jnp.float32 for v in (x, d)]
    terms = math.prod(x.shape[axis] for axis in over[0])
    free = [
        math.prod(size for axis, size in enumerate(v.shape) if axis not in (*sums, *kept))
        for v, sums, kept in zip((x, d), over, groups, strict=True)
    ]
    # Either the two parts are more terms of the sum, which writes the other factor twice; or they
    # are columns beside each other, which writes the result twice.
    are_terms = static_size_or_none(terms) is None or terms <= 4 * min(free)
    both, axes = [], []
    for v, flag, *own in zip((x, d), is_wide, over, groups, strict=True):
        stacked = flag or are_terms
        sums, kept = (tuple(axis + stacked for axis in some) for some in own)
        both.append(split_float32_to_bfloat16(v) if flag else jnp.stack([v, v]) if stacked else v)
        axes.append(((0, *sums) if are_terms else sums, kept))
    (over_x, groups_x), (over_d, groups_d) = axes
    numbers = ((over_x, over_d), (groups_x, groups_d))
    found = lax.dot_general(both[0], both[1], numbers, preferred_element_type=dtype)
    before = len(groups_x) + (0 if is_wide[0] else x.ndim - len(over_x) - len(groups_x))
    return found if are_terms else jnp.sum(found, before)


def split_float32_to_bfloat16(d: Array) -> Array:
    """Two bfloat16 numbers for each float32 number, `[2, ...]`.

    The relative error of their sum is at most `bounds.REST`.
    """
    high = lax.reduce_precision(d, 8, 7)
    return jnp.stack([high, lax.reduce_precision(d - high, 8, 7)]).astype(jnp.bfloat16)


def _kernels(use: ParamUse, x: Array, d: Array, dtype: Any) -> Array:
    """Gradients `[examples, *sliced loops, *kernel]`, from products with the patches of the input.

    A convolution by XLA for each example would move twice the bytes on a GPU, as many on a TPU, and
    more on a CPU.
    """
    example = len(use.loops)

    def sum_chunk(both: Any) -> Array:
        x, d = sites.to_matmul_form(use, *(jnp.moveaxis(v, 0, example) for v in both))
        return einsum("bgtk,bgtn->bgkn", x, d, dtype)

    groups, positions, inputs, _ = sites.sizes_of(use)
    operands = [jnp.moveaxis(v, example, 0) for v in (x, d)]
    found = map_chunks(sum_chunk, operands, groups * positions * inputs * x.dtype.itemsize)
    found = found.reshape(found.shape[0], *_loop_lengths(use), -1, *found.shape[-2:])
    return primitives.reshape_to_kernel(use.site.eqn, found)


def _sum_kernels(use: ParamUse, x: Array, d: Array) -> Array:
    eqn = use.site.eqn

    def sum_kernel(kernel: Array) -> Array:
        def fn(x: Array, kernel: Array) -> Array:
            return primitives.convolve(eqn, x, kernel, x.dtype)

        fn = jax.vmap(fn, (0, None))
        for is_sliced in reversed(use.loops):
            fn = jax.vmap(fn, (0, 0 if is_sliced else None))
        return fn(x, kernel)

    return _apply_transpose(sum_kernel, (*_loop_lengths(use), *eqn.invars[1].aval.shape), d)


def _loop_lengths(use: ParamUse) -> tuple[int, ...]:
    """The lengths of the loops that slice the parameter."""
    lengths = zip(use.loops, use.site.lengths, strict=True)
    return tuple(length for is_sliced, length in lengths if is_sliced)


def _apply_transpose(fn: Callable[[Array], Array], shape: Sequence[int], cotangent: Array) -> Array:
    """The transpose of a linear function of an array of this shape."""
    # Not `jax.linear_transpose`, which loses the mesh in types (JAX 0.10.2).
    (zeros,) = meshes.pvary_like([cotangent], [jnp.zeros(shape, cotangent.dtype)])
    return jax.vjp(fn, zeros)[1](cotangent)[0]


def _sum_of_rows(use: ParamUse, x: Array, d: Array) -> Array:
    """The sum `[*sliced loops, rows, ...]`, from one addition of all rows."""
    ids, d = sites.to_gather_form(use, x, d)
    count, *entries = use.site.eqn.invars[0].aval.shape
    around = _loop_lengths(use)
    rows = math.prod(around) * count
    first = count * jnp.arange(ids.shape[1], dtype=ids.dtype)[None, :, None]
    at = jnp.where(ids < count, ids + first, rows).reshape(-1)
    table = jnp.zeros((rows, d.shape[-1]), d.dtype)
    return table.at[at].add(d.reshape(at.size, -1), mode="drop").reshape(*around, count, *entries)

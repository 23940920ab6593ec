"""Computes on elements of dense and `BCOO` leaves with the fastest method of each platform."""

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

import optaxclip._backend.kernels as kernels
import optaxclip._backend.meshes as meshes
from optaxclip._base.derivatives import custom_jvp
from optaxclip._base.numerics import cast_elements, map_real_imag, multiply
from optaxclip._base.trees import is_sparse, replace_values


def as_arrays(leaves: list[Any]) -> list[Any]:
    """Converts numbers to arrays. A `BCOO` is returned unchanged."""
    return [leaf if is_sparse(leaf) else jnp.asarray(leaf) for leaf in leaves]


def dense_values(
    leaf: Any, axes: tuple[int, ...], dtype: jax.typing.DTypeLike
) -> tuple[Array, tuple[int, ...]]:
    """Returns a leaf as an array, and the axes over which its elements share a norm.

    For a `BCOO`, the array contains the stored values in `dtype`, with duplicates summed and
    padding set to 0. Its elements share a norm over all axes.
    """
    if not is_sparse(leaf):
        return leaf, axes
    data = jnp.where(valid_mask(leaf), cast_elements(leaf.data, dtype), 0)  # [*batch, nse, *dense]
    x = replace_values(leaf, data).sum_duplicates(nse=leaf.nse).data
    return x, tuple(range(x.ndim))


def pair_values(
    leaf: Any, other: Any, axes: tuple[int, ...], dtype: jax.typing.DTypeLike
) -> tuple[Array, Array, tuple[int, ...]]:
    """Returns the elements that both leaves store, and the axes that share a norm."""
    if is_sparse(other):
        other = other.todense()
    if is_sparse(leaf):
        from jax.experimental.sparse import bcoo_extract

        # Products are linear in the leaf, so duplicates need not be summed first.
        other = bcoo_extract(leaf, other, assume_unique=True).data  # [*batch, nse, *dense]
        leaf = jnp.where(valid_mask(leaf), leaf.data, 0)
        axes = tuple(range(leaf.ndim))
    return cast_elements(leaf, dtype), cast_elements(other, dtype), axes


def coalesce_values(leaf: Any, dtype: jax.typing.DTypeLike) -> tuple[Array, Array]:
    """Replaces the stored values of a `BCOO` by the elements to which they contribute.

    Padding is set to 0. Also returns a mask that is True for the first stored value of an element
    and False for its duplicates. Both arrays have the shape of the stored values.
    """
    is_valid = valid_mask(leaf)
    data = jnp.where(is_valid, cast_elements(leaf.data, dtype), 0)  # [*batch, nse, *dense]
    sum_fn = _sum_duplicates
    for _ in range(leaf.n_batch):
        sum_fn = jax.vmap(sum_fn)
    sums, is_first = sum_fn(data, leaf.indices)
    return sums, lax.expand_dims(is_first, range(is_first.ndim, data.ndim)) & is_valid


def _sum_duplicates(data: Array, indices: Array) -> tuple[Array, Array]:
    size = len(indices)
    _, first, segments = jnp.unique(
        indices, axis=0, size=size, return_index=True, return_inverse=True
    )
    is_first = first[segments] == jnp.arange(size)  # bool[nse]
    return jax.ops.segment_sum(data, segments, size)[segments], is_first


def valid_mask(leaf: Any) -> Array:
    """Returns a mask that is False for padding, and broadcasts to a `BCOO`'s stored values."""
    bounds = np.asarray(leaf.shape[leaf.n_batch : leaf.n_batch + leaf.n_sparse])
    bounds = jnp.broadcast_to(bounds.astype(leaf.indices.dtype), leaf.indices.shape)
    is_valid = jnp.all(leaf.indices < bounds, axis=-1)  # bool[*batch, nse]
    return lax.expand_dims(is_valid, range(is_valid.ndim, leaf.data.ndim))


def scale_by_real(x: Array, by: Array | float) -> Array:
    """Multiplies elements by a real number."""
    if isinstance(by, float) and by == 1:
        return x
    # Parts of complex elements are scaled separately, because 0 * infinity is NaN.
    return map_real_imag(functools.partial(multiply, y=by), x)


def scale_and_round(
    x: Array, power: Array, ratio: Array, *, strict: bool, default_kernel: Callable[..., Array]
) -> Array:
    """Computes `x * power * ratio` for real elements, rounded once to the dtype of `x`.

    `power` must be a power of two. If `strict` is True, elements are rounded toward zero.
    Derivatives and platforms other than CPUs use `default_kernel`, a function of the same four
    arguments.
    """
    default_kernel = functools.partial(default_kernel, strict=strict)
    if x.dtype != jnp.bfloat16 or ratio.dtype != jnp.float32:
        return default_kernel(x, power, ratio)
    cpu_kernel = custom_jvp()(functools.partial(kernels.scale_bfloat16_on_cpu, strict=strict))
    # Operations on bits have no derivative, so the derivative of the default kernel is used.
    cpu_kernel.defjvp(functools.partial(jax.jvp, default_kernel))
    return lax.platform_dependent(x, power, ratio, cpu=cpu_kernel, default=default_kernel)


def select_keep_subnormals(flag: Array, x: Array, y: Array) -> Array:
    """Selects `x` where `flag` is True, and `y` otherwise, and keeps subnormal numbers."""
    # `jnp.where` broadcasts the flags of several groups, but it is a nested call per leaf, which
    # takes longer to compile (as of JAX 0.10.2).
    select = lax.select if flag.shape in ((), x.shape) else jnp.where
    if x.dtype != jnp.bfloat16:
        return select(flag, x, y)
    return lax.platform_dependent(flag, x, y, cpu=kernels.select_bfloat16_on_cpu, default=select)


def restore_where_factors_are_one(x: Array, scaled: Array, power: Array, ratio: Array) -> Array:
    """Selects `x` where both factors are 1, and `x * power * ratio` otherwise."""

    # Products with 1 may flush subnormal numbers to zero, but not on GPUs. There, the flags of 25
    # leaves would only take XLA 0.3 s longer to compile (for an H100, as of JAX 0.10.2).
    def restore(x: Array, scaled: Array, power: Array, ratio: Array) -> Array:
        # `lax`, because operators would add nested calls for all leaves (as of JAX 0.10.2).
        one = power.dtype.type(1)
        is_unchanged = lax.bitwise_and(lax.eq(power, one), lax.eq(ratio, one))  # bool[] or [...]
        return select_keep_subnormals(is_unchanged, x, scaled)

    def keep_scaled(x: Array, scaled: Array, power: Array, ratio: Array) -> Array:
        del x, power, ratio
        return scaled

    return lax.platform_dependent(
        x, scaled, power, ratio, cuda=keep_scaled, rocm=keep_scaled, default=restore
    )


def force_row_major(leaves: list[Array]) -> list[Array]:
    """Makes CPUs store per-example gradients in the order of the examples."""
    return lax.platform_dependent(
        leaves, cpu=kernels.force_row_major_on_cpu, default=lambda leaves: leaves
    )


def sum_weighted(
    leaves: list[Array],
    factors: Any,
    *,
    by_products: Callable[..., list[Array]],
    fused: Callable[..., list[Array]],
) -> list[Array]:
    """Computes weighted sums over examples with one of two equivalent functions."""
    # XLA fuses the product and the sum on accelerators. On CPUs, a matrix product only takes a
    # quarter of the time, and two thirds of the memory in bfloat16.
    return lax.platform_dependent(leaves, factors, cpu=by_products, default=fused)


def product_with_bfloat16(
    x: Array, y: Array, *, whole: Callable[..., Array], in_parts: Callable[..., Array]
) -> Array:
    """Multiplies matrices in bfloat16 and float32 with one of two equivalent functions."""
    # On accelerators, two products in bfloat16 are much faster than one product in float32.
    return lax.platform_dependent(x, y, cpu=whole, default=in_parts)


def dispatch_chunk_size(
    operands: Any, *, small: Callable[..., Any], large: Callable[..., Any]
) -> Any:
    """Calls `small(operands)`, which uses small chunks, on CPUs, and `large` on accelerators."""
    return lax.platform_dependent(operands, cpu=small, default=large)


def divide_each(dividends: Sequence[Array], divisors: Sequence[Array]) -> tuple[Array, ...]:
    """Divides arrays with equal shapes by one divisor each."""
    # If the caller stacked the quotients, XLA on CPUs would repeat that in the loops of all leaves
    # (as of JAX 0.10.2), with 10% more instructions for 200 leaves.
    return lax.platform_dependent(
        dividends,
        divisors,
        cpu=lambda xs, ys: tuple(meshes.stack(xs) / meshes.stack(ys)),
        default=lambda xs, ys: tuple(map(operator.truediv, xs, ys)),
    )

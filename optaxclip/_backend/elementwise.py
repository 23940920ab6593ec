"""Measures and changes the entries of a leaf in the way that is best on a platform.

The tricks for one backend are in a file of its own, with what they save.
"""

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

import optaxclip._backend.cpu as cpu
from optaxclip._base.numerics import cast_elements, custom_jvp, map_real_imag, multiply
from optaxclip._base.trees import is_sparse, replace_values


def as_arrays(leaves: list[Any]) -> list[Any]:
    """Leaves as arrays, even if they are numbers; a `BCOO` stays as it is."""
    return [leaf if is_sparse(leaf) else jnp.asarray(leaf) for leaf in leaves]


def dense_values(
    leaf: Any, axes: tuple[int, ...], dtype: jax.typing.DTypeLike
) -> tuple[Array, tuple[int, ...]]:
    """A leaf as one array, and the axes over which its entries share a norm.

    For a `BCOO` these are the stored values in `dtype`, with duplicates added up and 0 for padding,
    and all of their axes.
    """
    if not is_sparse(leaf):
        return leaf, axes
    data = jnp.where(valid_mask(leaf), cast_elements(leaf.data, dtype), 0)
    x = replace_values(leaf, data).sum_duplicates(nse=leaf.nse).data
    return x, tuple(range(x.ndim))


def pair_values(
    leaf: Any, other: Any, axes: tuple[int, ...], dtype: jax.typing.DTypeLike
) -> tuple[Array, Array, tuple[int, ...]]:
    """Pairs of entries of two leaves of one shape, and the axes over which they share a norm.

    Entries that a `BCOO` does not store are left out of both.
    """
    if is_sparse(other):
        other = other.todense()
    if is_sparse(leaf):
        from jax.experimental.sparse import bcoo_extract

        # Products are linear in the leaf, so duplicates need not be added first.
        other = bcoo_extract(leaf, other, assume_unique=True).data
        leaf = jnp.where(valid_mask(leaf), leaf.data, 0)
        axes = tuple(range(leaf.ndim))
    return cast_elements(leaf, dtype), cast_elements(other, dtype), axes


def coalesce_values(leaf: Any, dtype: jax.typing.DTypeLike) -> Array:
    """For each stored value of a `BCOO`, the entry that it is a summand of; 0 for padding."""
    return stored_as_entries(leaf, dtype)[0]


def stored_as_entries(leaf: Any, dtype: jax.typing.DTypeLike) -> tuple[Array, Array]:
    """`coalesce_values`, and which stored values are the first of their entry, without padding."""
    is_inside = valid_mask(leaf)
    data = jnp.where(is_inside, cast_elements(leaf.data, dtype), 0)
    sums = _sum_duplicates
    for _ in range(leaf.n_batch):
        sums = jax.vmap(sums)
    found, is_first = sums(data, leaf.indices)
    return found, lax.expand_dims(is_first, range(is_first.ndim, data.ndim)) & is_inside


def _sum_duplicates(data: Array, indices: Array) -> tuple[Array, Array]:
    size = len(indices)
    _, first, segments = jnp.unique(
        indices, axis=0, size=size, return_index=True, return_inverse=True
    )
    is_first = first[segments] == jnp.arange(size)
    return jax.ops.segment_sum(data, segments, size)[segments], is_first


def valid_mask(leaf: Any) -> Array:
    """Which stored values of a `BCOO` are not padding; the flags broadcast to its data."""
    bounds = np.asarray(leaf.shape[leaf.n_batch : leaf.n_batch + leaf.n_sparse])
    bounds = jnp.broadcast_to(bounds.astype(leaf.indices.dtype), leaf.indices.shape)
    inside = jnp.all(leaf.indices < bounds, axis=-1)
    return lax.expand_dims(inside, range(inside.ndim, leaf.data.ndim))


def any_over_axes(leaf: Any, flags: Array, axes: tuple[int, ...]) -> Array:
    """Whether any entry has its flag set, over some axes of a leaf; padding does not count."""
    return jnp.any(flags & valid_mask(leaf)) if is_sparse(leaf) else jnp.any(flags, axes)


def map_stored_values(fn: Callable[..., Array], leaf: Any, axes: tuple[int, ...]) -> Any:
    """`fn(leaf, axes=axes)`; for a `BCOO`, `fn` of its stored values with all of their axes."""
    if not is_sparse(leaf):
        return fn(leaf, axes=axes)
    return replace_values(leaf, fn(leaf.data, axes=tuple(range(leaf.data.ndim))))


def scale_by_real(x: Array, by: Array | float) -> Array:
    """Entries times a real number; complex ones part by part, because 0 * infinity is NaN."""
    if isinstance(by, float) and by == 1:
        return x
    return map_real_imag(functools.partial(multiply, y=by), x)


def scale_and_round(
    x: Array, power: Array, ratio: Array, *, strict: bool, default_kernel: Callable[..., Array]
) -> Array:
    """`x * power * ratio` of real entries, rounded once to the dtype of `x`; a power is one of two.

    With `strict` it is rounded toward zero instead of to the nearest number. `plain` is the
    function for platforms that need no trick.
    """
    default_kernel = functools.partial(default_kernel, strict=strict)
    if x.dtype != jnp.bfloat16 or ratio.dtype != jnp.float32:
        return default_kernel(x, power, ratio)

    @custom_jvp()
    def bfloat16_kernel(x: Array, power: Array, ratio: Array) -> Array:
        return cpu.scale_bfloat16_bits(x, power, ratio, strict=strict)

    bfloat16_kernel.defjvp(functools.partial(jax.jvp, default_kernel))
    return lax.platform_dependent(x, power, ratio, cpu=bfloat16_kernel, default=default_kernel)


def select_keep_subnormals(flag: Array, x: Array, y: Array) -> Array:
    """`x` where `flag`, which broadcasts to `x`, is True, else `y`; subnormal numbers stay."""
    # `lax.select` does not broadcast the flags of several groups. `jnp.where` does, but is a nested
    # call for each leaf (JAX 0.10.2), which takes longer to compile.
    select = lax.select if flag.shape in ((), x.shape) else jnp.where
    if x.dtype != jnp.bfloat16:
        return select(flag, x, y)
    return lax.platform_dependent(flag, x, y, cpu=cpu.select_bits, default=select)


def force_row_major(leaves: list[Array]) -> list[Array]:
    """Gradients of examples; a CPU stores them one example after another."""
    return lax.platform_dependent(leaves, cpu=cpu.force_row_major, default=lambda leaves: leaves)


def sum_weighted(
    leaves: list[Array],
    factors: Any,
    *,
    by_products: Callable[..., list[Array]],
    fused: Callable[..., list[Array]],
) -> list[Array]:
    """The sums over examples of gradients times factors, by one of two functions of these.

    On accelerators XLA fuses product and sum. On a CPU, a matrix product takes a quarter of the
    time of product and sum and, in bfloat16, two thirds of the memory.
    """
    return lax.platform_dependent(leaves, factors, cpu=by_products, default=fused)


def product_with_bfloat16(
    x: Array, y: Array, *, whole: Callable[..., Array], in_parts: Callable[..., Array]
) -> Array:
    """The product of a factor in bfloat16 and one in float32, by one of two functions of them.

    Two products in bfloat16 take accelerators far less time than one in float32.
    """
    return lax.platform_dependent(x, y, cpu=whole, default=in_parts)


def dispatch_chunk_size(
    operands: Any, *, small: Callable[..., Any], large: Callable[..., Any]
) -> Any:
    """`small(operands)`, which takes small chunks, on a CPU, and `large(operands)` elsewhere."""
    return lax.platform_dependent(operands, cpu=small, default=large)


def divide_each(dividends: Sequence[Array], divisors: Sequence[Array]) -> tuple[Array, ...]:
    """Each dividend divided by its divisor; all have one shape."""
    return lax.platform_dependent(
        dividends, divisors, cpu=cpu.divide_stacked, default=_divide_separately
    )


def _divide_separately(dividends: Sequence[Array], divisors: Sequence[Array]) -> tuple[Array, ...]:
    return tuple(map(operator.truediv, dividends, divisors))

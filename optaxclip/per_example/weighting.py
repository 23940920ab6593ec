"""Sums of gradients over examples, each multiplied by its example's factor."""

import functools

import jax
import jax.numpy as jnp
from jax import Array, lax

import optaxclip._border.devices as devices
from optaxclip._base.numerics import accumulation_dtype, split_complex
from optaxclip._border.entries import sum_weighted
from optaxclip._engine.respond import Multiplier
from optaxclip._engine.scale import scale


def sum_dtype(dtype: jax.typing.DTypeLike) -> jnp.dtype:
    """The dtype in which leaves are summed: complex leaves' own dtype, else float32 or float64."""
    is_complex = jnp.issubdtype(dtype, jnp.complexfloating)
    return jnp.dtype(dtype) if is_complex else accumulation_dtype(dtype)


def compute_weighted_sums(
    leaves: list[Array], by_leaf: list[Multiplier], axes: tuple[tuple[int, ...], ...]
) -> list[Array]:
    """The sums over the examples of each leaf `[examples, ...]` times its multiplier.

    Leaves are in the dtypes in which they are summed. `axes` are those of one example that share a
    multiplier. If a ratio is 0, the example adds nothing, even if it is not finite.
    """
    if not leaves or leaves[0].shape[0] == 0:
        return [jnp.zeros(leaf.shape[1:], leaf.dtype) for leaf in leaves]
    if not devices.manual_axes() and not devices.is_unsharded(leaves):
        return _sum_fused(leaves, by_leaf, axes=axes)
    by_products, fused = (functools.partial(way, axes=axes) for way in (_sum_by_matmul, _sum_fused))
    return sum_weighted(leaves, by_leaf, by_products=by_products, fused=fused)


def _sum_fused(
    leaves: list[Array], multipliers: list[Multiplier], *, axes: tuple[tuple[int, ...], ...]
) -> list[Array]:
    return [
        jnp.sum(_scale_leaf(leaf, by, tuple(axis + 1 for axis in reduced)), axis=0)
        for leaf, by, reduced in zip(leaves, multipliers, axes, strict=True)
    ]


def _scale_leaf(leaf: Array, by: Multiplier, axes: tuple[int, ...]) -> Array:
    return scale(leaf, by, axes=axes, strict=False, zero_nonfinite=True)


def _sum_by_matmul(
    leaves: list[Array], multipliers: list[Multiplier], *, axes: tuple[tuple[int, ...], ...]
) -> list[Array]:
    if leaves[0].shape[0] == 1:
        return _sum_fused(leaves, multipliers, axes=axes)
    factors = [by.factor for by in multipliers]
    is_plain = [jnp.all(x >= jnp.finfo(x.dtype).tiny) & jnp.all(jnp.isfinite(x)) for x in factors]
    return lax.cond(
        functools.reduce(jnp.logical_and, is_plain),
        functools.partial(_products, axes=axes),
        functools.partial(_sum_by_loop, axes=axes),
        leaves,
        multipliers,
    )


def _products(
    leaves: list[Array], multipliers: list[Multiplier], *, axes: tuple[tuple[int, ...], ...]
) -> list[Array]:
    """The sums as matrix products; they are right if all factors are finite normal numbers."""
    return [
        _matmul_sum(leaf, by.factor, reduced)
        for leaf, by, reduced in zip(leaves, multipliers, axes, strict=True)
    ]


def _matmul_sum(leaf: Array, factor: Array, reduced: tuple[int, ...]) -> Array:
    kept = [axis + 1 for axis in range(leaf.ndim - 1) if axis not in reduced]
    parts = [
        jnp.einsum(
            factor.astype(part.dtype),
            [0, *kept],
            part,
            list(range(leaf.ndim)),
            list(range(1, leaf.ndim)),
            precision=lax.Precision.HIGHEST,
        )
        for part in split_complex(leaf)
    ]
    return lax.complex(*parts) if jnp.iscomplexobj(leaf) else parts[0]


def _sum_by_loop(
    leaves: list[Array], multipliers: list[Multiplier], *, axes: tuple[tuple[int, ...], ...]
) -> list[Array]:
    """The sums, one example after another, without a second copy of the batch."""

    def scale_example(i: Array | int) -> list[Array]:
        example, by_leaf = jax.tree.map(
            lambda x: lax.dynamic_index_in_dim(x, i, keepdims=False), (leaves, multipliers)
        )
        pairs = zip(example, by_leaf, axes, strict=True)
        return [_scale_leaf(leaf, by, reduced) for leaf, by, reduced in pairs]

    def add(i: Array, totals: list[Array]) -> list[Array]:
        return jax.tree.map(jnp.add, totals, scale_example(i))

    return lax.fori_loop(1, leaves[0].shape[0], add, scale_example(0))

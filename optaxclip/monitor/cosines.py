"""The cosine of each group of leaves with the same leaves of another tree, and that tree's norms.

Products are summed as squares are: at several scales, over a group's leaves and over devices, in
one read of both trees. The code for sums of powers takes a pair of real entries as one complex
entry.
"""

import dataclasses
import functools
import itertools
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import Array, lax

import optaxclip._border.devices as devices
import optaxclip._border.leaf_sums as leaf_sums
from optaxclip._base.numerics import bounded, norm_dtype, real_parts, safe_sqrt, select
from optaxclip._base.trees import is_sparse
from optaxclip._border.entries import not_padding
from optaxclip._engine.groups import Groups
from optaxclip._engine.measure import Measured, in_range, lowest
from optaxclip.norms import Norm

Pair: TypeAlias = tuple[Array, Array]
"""Real entries of a leaf, and those of the other tree, of the same shape."""


def cosines(
    leaves: list[Any],
    others: list[Any],
    groups: Groups,
    norms: Array,
    of_others: Array | None = None,
) -> tuple[Array, Array]:
    """The cosines of the groups' entries with the others, and the L2 norms of the others.

    A cosine is from -1 to 1; 0 where a norm is 0, NaN where one is not finite. Of complex entries
    the real part of the inner product counts.

    Args:
      leaves: floating or complex arrays (or `BCOO`), in the order of the grouping.
      others: as many, of the same shapes.
      groups: the groups of the leaves.
      norms: the L2 norms of the groups.
      of_others: the L2 norms of the other tree; required where a leaf is a `BCOO`, because the
        other leaf is read only where the `BCOO` has entries.
    """
    if not leaves:
        return norms, norms
    pairs, groups = _pairs(leaves, others, groups)

    def local(pairs: list[Any]) -> leaf_sums.AtScales:
        rows = zip(pairs, groups.grouping.axes, strict=True)
        is_whole = groups.placement.in_one_piece or bool(devices.manual_axes())
        return groups.totals([_sums(x, axes=axes, is_whole=is_whole) for x, axes in rows])

    sums = groups.placement.on_each_device(local)(pairs)
    if of_others is None:
        of_others = _norm(sums[1::2])
    return _cosine(sums[::2], norms, of_others), of_others


def _pairs(leaves: list[Any], others: list[Any], groups: Groups) -> tuple[list[Pair], Groups]:
    """The real entries of both trees in pairs, and the groups of the pairs."""
    dtype = norm_dtype(leaf.dtype for leaf in (*leaves, *others))
    pairs, axes, sources = list[Pair](), list[tuple[int, ...]](), list[int]()
    for i, (leaf, other) in enumerate(zip(leaves, others, strict=True)):
        x, y, over = leaf, other, groups.grouping.axes[i]
        if is_sparse(y):
            y = y.todense()
        if is_sparse(x):
            from jax.experimental.sparse import bcoo_extract

            # Products are linear in the leaf, so that duplicates need not be added first.
            y = bcoo_extract(x, y, assume_unique=True).data
            x = jnp.where(not_padding(x), x.data, 0)
            over = tuple(range(x.ndim))
        nothing = jnp.zeros(x.shape, dtype)
        parts = itertools.zip_longest(real_parts(x), real_parts(y), fillvalue=nothing)
        for first, second in parts:
            pairs.append((first.astype(dtype), second.astype(dtype)))
            axes.append(over)
            sources.append(i)
    return pairs, _of_sources(groups, sources, tuple(axes))


def _of_sources(groups: Groups, sources: list[int], axes: tuple[tuple[int, ...], ...]) -> Groups:
    """Groups of leaves made of others; each is grouped and placed as the one it was made of."""
    old, placement = groups.grouping, groups.placement
    of_groups = [
        dataclasses.replace(
            group, members=tuple(n for n, i in enumerate(sources) if i in group.members)
        )
        for group in old.groups
    ]
    moved = {
        field: tuple(getattr(placement, field)[i] for i in sources)
        for field in ("reduced", "kept", "specs")
        if getattr(placement, field)
    }
    return dataclasses.replace(
        groups,
        grouping=dataclasses.replace(old, axes=axes, groups=tuple(of_groups)),
        placement=dataclasses.replace(placement, **moved),
    )


def _both(x: Array) -> Any:
    """The two summands of a pair: the product, and the square of the other's entry.

    A product too large for this scale becomes 0, because infinite products of both signs would add
    up to NaN; then the sum at another scale is used. At the scale for large numbers none is.
    """
    product = lax.mul(*(bounded(part) for part in (x.real, x.imag)))
    info = jnp.finfo(product.dtype)
    largest = max(
        _highest(product.dtype), (float(info.max) / leaf_sums.distance(product.dtype)) ** 2
    )
    is_usable = lax.le(lax.abs(product), product.dtype.type(2 * largest))
    return select(is_usable, product, 0), lax.square(x.imag)


def _highest(dtype: Any) -> float:
    """A larger product of norms stays above `lowest` at the scale for large numbers.

    So each scale is used only where products of entries are neither too large nor too small for it.
    """
    # One factor after the other: in float64 the square of the distance is no number of Python's.
    return lowest(dtype) * leaf_sums.distance(dtype) * leaf_sums.distance(dtype)


def _total(total: Array, count: Array) -> Array:
    del count
    return total


_BOTH = Norm("both", _both, _total, degree=2)
"""What is summed of pairs, as squares are."""


# Compiled by itself so that it is traced once for leaves that are alike.
@functools.partial(jax.jit, static_argnames=("axes", "is_whole"))
def _sums(pair: Pair, *, axes: tuple[int, ...], is_whole: bool) -> leaf_sums.AtScales:
    """The sums of products and of the others' squares, in turn, at all scales.

    One reduction gives both: if there were two, XLA on GPUs (JAX 0.10.2) would merge the one over
    the parameters with AdamW's step, and copy the parameters first. On a CPU both are real sums in
    float64, because XLA would store complex numbers.
    """
    dtype, over_all = pair[0].dtype, is_whole and len(axes) == pair[0].ndim
    scales = leaf_sums.scales(_BOTH, dtype)

    def in_own_dtype(pair: Pair, way: Any = leaf_sums.one_by_one) -> leaf_sums.AtScales:
        return way(lax.complex(*pair), axes=axes, norm=_BOTH, dtype=dtype)

    def in_float64(pair: Pair, *, apart: bool = False) -> leaf_sums.AtScales:
        squared = pair[1]
        if apart:
            pair = lax.optimization_barrier(pair)
        with jax.enable_x64(True):
            x, y = (part.astype(jnp.float64) for part in pair)
            totals = [
                lax.reduce_sum(found, axes)
                for found in (x * y, lax.square(squared.astype(jnp.float64)))
            ]
            at_scales = [(total * by**2).astype(dtype) for by in scales for total in totals]
        return tuple(at_scales)

    if dtype != jnp.float32:
        return in_own_dtype(pair)
    usual = functools.partial(in_own_dtype, way=leaf_sums.at_once) if over_all else in_own_dtype
    on_gpu = usual if over_all else in_float64
    # XLA on CPU (JAX 0.10.2) would store a conversion that several sums share: a barrier keeps
    # them apart.
    on_cpu = functools.partial(in_float64, apart=True)
    ways = {"cpu": on_cpu, "cuda": on_gpu, "rocm": on_gpu}
    return lax.platform_dependent(pair, **ways, default=usual)


def _norm(sums: leaf_sums.AtScales) -> Array:
    total, unit = in_range(sums)
    return Measured.of(safe_sqrt(total), unit).norm


def _cosine(sums: leaf_sums.AtScales, norm: Array, other: Array) -> Array:
    """The cosine, from the sum at the scale at which no sum of these products leaves the range."""
    plain, down, up = sums
    far = leaf_sums.distance(plain.dtype)
    bound = safe_sqrt(norm.astype(plain.dtype)) * safe_sqrt(other.astype(plain.dtype))
    is_finite = jnp.isfinite(bound)
    is_high = bound > _highest(plain.dtype) ** 0.5
    is_low = bound < lowest(plain.dtype) ** 0.5
    total = select(is_high, down, select(is_low, up, plain))
    bound = bound * select(is_high, 1 / far, select(is_low, far, jnp.ones_like(plain)))
    is_usable = is_finite & (bound > 0)
    bound = select(is_usable, bound, 1)
    found = jnp.clip(total / bound / bound, -1, 1)
    return select(is_usable, found, select(is_finite, jnp.zeros_like(found), jnp.nan))

"""Cosines: leaves and others like them come in; for each group their cosine, and the others' norm.

A pair of real entries is held as one complex number. So products are summed as squares are: at
several scales, in one read of both, over a group's leaves and over devices.
"""

import dataclasses
import functools
import itertools
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental.sparse import bcoo_extract

import optaxclip._base.devices as devices
import optaxclip._engine.gpu as gpu
import optaxclip._engine.powers as powers
from optaxclip._base.numerics import norm_dtype, real_parts, safe_sqrt, select
from optaxclip._base.trees import is_sparse
from optaxclip._engine.entries import stored
from optaxclip._engine.groups import Groups, Rows
from optaxclip._engine.measure import Measured
from optaxclip.norms import Norm


def cosines(
    leaves: list[Any],
    others: list[Any],
    groups: Groups,
    norms: Rows,
    of_others: Rows | None = None,
) -> tuple[Rows, Rows]:
    """The cosines of the groups' entries with the others, and the L2 norms of the others.

    A cosine is from -1 to 1; 0 where a norm is 0, NaN where one is not finite. Of complex entries
    the real part of the inner product counts.

    Args:
      leaves: floating or complex arrays (or `BCOO`), in the order of the grouping.
      others: as many, of the same shapes.
      groups: the groups of the leaves.
      norms: the L2 norms of the groups.
      of_others: those of the others, which have to be given where a leaf is a `BCOO`: of others,
        only what lies where it has entries is read.
    """
    if not leaves:
        return norms, norms
    pairs, groups = _pairs(leaves, others, groups)

    def local(pairs: list[Any]) -> list[powers.AtScales]:
        rows = zip(pairs, groups.grouping.axes, strict=True)
        is_whole = groups.placement.in_one_piece or bool(devices.manual_axes())
        return powers.of_groups([_sums(x, axes, is_whole) for x, axes in rows], groups)

    sums = groups.placement.on_each_device(local, pairs)
    if of_others is None:
        of_others = [_norm(row[1::2]) for row in sums]
    rows = zip(sums, norms, of_others, strict=True)
    return [_cosine(row[::2], *of) for row, *of in rows], of_others


def _pairs(leaves: list[Any], others: list[Any], groups: Groups) -> tuple[list[Array], Groups]:
    """Real entries and others as complex numbers, and the groups of these."""
    dtype = norm_dtype(leaf.dtype for leaf in (*leaves, *others))
    pairs, axes, sources = list[Array](), list[tuple[int, ...]](), list[int]()
    for i, (leaf, other) in enumerate(zip(leaves, others, strict=True)):
        x, y, over = leaf, other, groups.grouping.axes[i]
        if is_sparse(y):
            y = y.todense()
        if is_sparse(x):
            # Products are linear in the leaf, so that duplicates need not be added first.
            y = bcoo_extract(x, y, assume_unique=True).data
            x = jnp.where(stored(x), x.data, 0)
            over = tuple(range(x.ndim))
        nothing = jnp.zeros(x.shape, dtype)
        parts = itertools.zip_longest(real_parts(x), real_parts(y), fillvalue=nothing)
        for pair in parts:
            pairs.append(lax.complex(*(part.astype(dtype) for part in pair)))
            axes.append(over)
            sources.append(i)
    return pairs, _of_sources(groups, sources, tuple(axes))


def _of_sources(groups: Groups, sources: list[int], axes: tuple[tuple[int, ...], ...]) -> Groups:
    """The groups of leaves of which each has the place of the leaf that it was made of."""
    old, place = groups.grouping, groups.placement
    of_groups = [
        dataclasses.replace(
            group, members=tuple(n for n, i in enumerate(sources) if i in group.members)
        )
        for group in old.groups
    ]
    moved = {
        field: tuple(getattr(place, field)[i] for i in sources)
        for field in ("reduced", "kept", "specs")
        if getattr(place, field)
    }
    return dataclasses.replace(
        groups,
        grouping=dataclasses.replace(old, axes=axes, groups=tuple(of_groups)),
        placement=dataclasses.replace(place, **moved),
    )


def _product(x: Array) -> Array:
    return x.real * x.imag


def _other_squared(x: Array) -> Array:
    return lax.square(x.imag)


def _both(x: Array) -> Any:
    """Several summands of one entry."""
    return _product(x), _other_squared(x)


def _total(total: Array, count: Array) -> Array:
    del count
    return total


# What is summed of pairs, as squares are.
_OTHER, _PRODUCT, _BOTH = (
    Norm(name, of, _total, degree=2)
    for name, of in (("other", _other_squared), ("product", _product), ("both", _both))
)


def _sums(pair: Array, axes: tuple[int, ...], is_whole: bool) -> powers.AtScales:
    """Of products and of the others' squares, in turn, at all scales.

    In one reduction: of two, of which one shares the parameters with AdamW, XLA on GPUs makes one
    kernel with the optimizer's step, in front of which it copies the parameters.
    """
    dtype = jnp.finfo(pair.dtype).dtype
    options: dict[str, Any] = {"axes": axes, "dtype": dtype}
    if dtype != jnp.float32:
        return powers.one_by_one(pair, norm=_BOTH, **options)
    over_all = is_whole and len(axes) == pair.ndim
    usual = functools.partial(
        powers.at_once if over_all else powers.one_by_one, norm=_BOTH, **options
    )

    def in_float64(pair: Array) -> powers.AtScales:
        scales = powers.scales(_BOTH, dtype)
        columns = [
            gpu.sum_of_columns(pair, norm=norm, scales=scales, **options)
            for norm in (_PRODUCT, _OTHER)
        ]
        return tuple(itertools.chain.from_iterable(zip(*columns, strict=True)))

    on_gpu = usual if over_all else in_float64
    ways = {"cpu": in_float64, "cuda": on_gpu, "rocm": on_gpu}
    return lax.platform_dependent(pair, **ways, default=usual)


def _norm(sums: powers.AtScales) -> Array:
    total, unit = powers.in_range(sums)
    return Measured.of(safe_sqrt(total), unit).norm


def _cosine(sums: powers.AtScales, norm: Array, other: Array) -> Array:
    """From the sum at the scale at which no sum of these products can leave the range."""
    plain, down, up = sums
    info, far = jnp.finfo(plain.dtype), powers.distance(plain.dtype)
    bound = safe_sqrt(norm.astype(plain.dtype)) * safe_sqrt(other.astype(plain.dtype))
    is_finite = jnp.isfinite(bound)
    is_high = bound > float(info.max) ** 0.5 / 2
    is_low = bound < (powers.VERY_MANY * float(info.tiny) / float(info.eps)) ** 0.5
    total = select(is_high, down, select(is_low, up, plain))
    bound = bound * select(is_high, 1 / far, select(is_low, far, jnp.ones_like(plain)))
    is_usable = is_finite & (bound > 0)
    bound = select(is_usable, bound, 1)
    found = jnp.clip(total / bound / bound, -1, 1)
    return select(is_usable, found, select(is_finite, jnp.zeros_like(found), jnp.nan))

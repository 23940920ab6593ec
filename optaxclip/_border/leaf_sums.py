"""Sums of powers of the entries of one leaf, in the way that is best on each platform.

In float32 a sum of squares is exact up to rounding for norms from 2**-31 to 2**64, whatever the
number of entries. For smaller norms the entries are multiplied by 2**88 before they are squared,
for larger ones by 2**-88.
"""

import functools
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

import optaxclip._border.devices as devices
import optaxclip._border.gpu as gpu
from optaxclip._base.numerics import fixed_size
from optaxclip._base.trees import data_of
from optaxclip._border.entries import entries, times
from optaxclip.norms import Norm

AtScales = tuple[Array, ...]
"""For each scale the sum of powers of a leaf, of a group, or of an array of groups."""


def either(
    in_float64: Callable[[list[Any]], Any], at_scales: Callable[[list[Any]], Any]
) -> Callable[[list[Any]], Any]:
    """One of two functions of leaves: that which sums in float64 where this costs nothing more.

    That is on a CPU. The other sums at several scales.
    """
    return functools.partial(lax.platform_dependent, cpu=in_float64, default=at_scales)


def distance(dtype: jax.typing.DTypeLike) -> float:
    """The power of two between two scales: 2**88 in float32, 2**704 in float64."""
    return 2.0 ** int(0.6875 * jnp.finfo(dtype).maxexp)


def scales(norm: Norm, dtype: jax.typing.DTypeLike) -> tuple[float, ...]:
    """The powers of two by which entries are multiplied before the norm maps them.

    The first is 1; the second keeps sums from overflow; a third keeps squares from underflow.
    Counts of entries (degree 0) need only the scale 1.
    """
    up = distance(dtype)
    by_degree: dict[float, tuple[float, ...]] = {0: (1.0,), 1: (1.0, 1 / up), 2: (1.0, 1 / up, up)}
    return by_degree[norm.degree]


# Compiled by themselves so that they are traced once for leaves that are alike.
@functools.partial(jax.jit, static_argnames=("axes", "norm", "dtype"))
def at_once(leaf: Any, *, axes: tuple[int, ...], norm: Norm, dtype: jnp.dtype) -> AtScales:
    """The sums at all scales in one variadic reduction, which a GPU runs as one kernel."""
    powers, axes = _summands(leaf, axes, norm, dtype)
    return tuple(lax.reduce(powers, (dtype.type(0),) * len(powers), _added, axes))


@functools.partial(jax.jit, static_argnames=("axes", "norm", "dtype"))
def one_by_one(leaf: Any, *, axes: tuple[int, ...], norm: Norm, dtype: jnp.dtype) -> AtScales:
    """The sums at all scales, as one plain sum per scale.

    A TPU computes several in one pass where their results are small, and the compiler can split
    them over devices.
    """
    powers, axes = _summands(leaf, axes, norm, dtype)
    return tuple(lax.reduce_sum(x, axes) for x in powers)


def _summands(
    leaf: Any, axes: tuple[int, ...], norm: Norm, dtype: jnp.dtype
) -> tuple[AtScales, tuple[int, ...]]:
    """The summands at each scale, and the axes to sum over."""
    x = entries(leaf, dtype)
    if fixed_size(x.size) == 1:
        # A zero is appended: for a single number XLA (JAX 0.10.2) computes
        # `x * x * (scale * scale)`, whose second product overflows.
        x = devices.stack([x, jnp.zeros_like(x)])
        axes = (0, *(axis + 1 for axis in axes))
    # A norm's `map` may return several summands per entry (`monitor/cosines.py`).
    powers = [norm.map(times(x, by)) for by in scales(norm, dtype)]
    return tuple(jax.tree.leaves(powers)), axes


def _added(sums: AtScales, more: AtScales) -> AtScales:
    return tuple(map(operator.add, sums, more))


def at_scales(
    leaf: Any, *, axes: tuple[int, ...], norm: Norm, dtype: jnp.dtype, in_one_piece: bool
) -> AtScales:
    """The sums of a leaf at all scales, on any platform.

    If norms are computed in float32, a leaf that is summed over all of its axes takes one variadic
    reduction, as long as it is whole, or a shard inside of `shard_map`. Any other leaf takes one
    plain sum for each scale, or on a GPU one sum in float64. If norms are computed in float64,
    every leaf takes one plain sum for each scale.
    """
    options = {"axes": axes, "norm": norm, "dtype": dtype}
    if dtype != jnp.float32:
        return one_by_one(leaf, **options)
    over_all = len(axes) == np.ndim(data_of(leaf))
    if over_all and (in_one_piece or devices.manual_axes()):
        return at_once(leaf, **options)
    return _by_platform(leaf, axes, norm, in_one_piece)


# Compiled by itself so that all branches are traced once for leaves that are alike.
@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _by_platform(leaf: Any, axes: tuple[int, ...], norm: Norm, in_one_piece: bool) -> AtScales:
    """The float32 sums by `gpu.sum_of_columns` on a GPU, by `one_by_one` elsewhere."""
    dtype = jnp.dtype(jnp.float32)
    pieces = {"scales": scales(norm, dtype), "in_one_piece": in_one_piece}
    on_gpu = functools.partial(gpu.sum_of_columns, axes=axes, norm=norm, **pieces)
    elsewhere = functools.partial(one_by_one, axes=axes, norm=norm, dtype=dtype)
    return lax.platform_dependent(leaf, cuda=on_gpu, rocm=on_gpu, default=elsewhere)


# Compiled by itself so that it is traced once for leaves that are alike.
@functools.partial(jax.jit, static_argnames=("by", "axes", "dtype"))
def largest_bits(leaf: Any, *, by: float, axes: tuple[int, ...], dtype: jnp.dtype) -> Array:
    """The largest modulus, times a constant, as an integer.

    The bits of floats of at least 0 are in the order of the floats, with NaN above infinity. So the
    maximum over devices keeps a NaN, which `lax.pmax` of floats loses on a CPU (JAX 0.10.2).
    """
    x = times(entries(leaf, dtype), by)
    integer = jnp.dtype(f"int{jnp.finfo(dtype).bits}")
    # The mask clears the sign bit, which a NaN may have.
    bits = lax.bitcast_convert_type(jnp.abs(x), integer) & integer.type(jnp.iinfo(integer).max)
    return lax.reduce(bits, integer.type(0), lax.max, axes)

"""Code for XLA on CPU alone; each function says what it saves.

On accelerators memory thresholds a pass, so sums at three scales take no longer than one sum. On a CPU,
XLA calls a library for plain sums, and compiles all other reductions itself; these take 5 to 10
times as long. The library takes one and a half times to twice as long for a sum in float64 as for
one in float32. A sum in float64 is exact for all norms of float32, so there is no second pass. (All
with JAX 0.10.2.)
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

import optaxclip._backend.meshes as meshes
from optaxclip._base.numerics import cast_elements, custom_jvp
from optaxclip.norms import Norm, l2


def sums_in_float64(
    leaves: Sequence[Array], *, axes: Sequence[tuple[int, ...]], norm: Norm, **_: Any
) -> list[Array]:
    """For each leaf the sum of powers of its entries, with 64-bit types enabled."""
    return list(map(functools.partial(_sum_in_float64, norm=norm), leaves, axes))


# A compiled function of its own, so that it is traced once for leaves that are alike.
@functools.partial(jax.jit, static_argnums=(1,), static_argnames=("norm",))
def _sum_in_float64(leaf: Array, axes: tuple[int, ...], *, norm: Norm) -> Array:
    # Each norm converts other numbers to float64: XLA on CPU (JAX 0.10.2) stores the results of a
    # conversion that two sums share, and all of a step's statistics then take six times as long.
    x = cast_elements(
        leaf, jnp.float64 if norm.degree == 2 or jnp.iscomplexobj(leaf) else jnp.float32
    )
    powers = norm.map(x)
    if norm.degree == 0:
        # XLA on CPU (JAX 0.10.2) stores what a comparison gives; so it takes one byte, not four.
        powers = (powers != 0).astype(jnp.int8)
    return lax.reduce_sum(powers.astype(jnp.float64), axes)


# A compiled function of its own, so that it is traced once for leaves that are alike.
@functools.partial(jax.jit, static_argnames="axes")
def largest_modulus(x: Array, *, axes: tuple[int, ...]) -> Array:
    """The largest modulus of float32 entries, NaN if an entry is NaN.

    XLA on CPU (JAX 0.10.2) calls a library for the extremes of floats, which takes a quarter of the
    time of integers' extremes, but ignores NaN. A sum of squares, which the L2 norm uses too, has
    NaN. Moduli are not computed, because XLA would store them if two reductions share them.
    """
    extremes = (
        lax.reduce(x, jnp.float32(0), lax.max, axes),
        lax.reduce(x, jnp.float32(0), lax.min, axes),
    )
    largest = lax.max(extremes[0], lax.neg(extremes[1]))
    with jax.enable_x64(True):
        has_nan = jnp.isnan(lax.reduce_sum(l2.map(cast_elements(x, jnp.float64)), axes))
    return jnp.where(has_nan, jnp.nan, largest)


def sum_leading_axis(x: Array) -> Array:
    """The sum along the first axis, as the last entry of a cumulative sum.

    XLA on CPU (JAX 0.10.2) repeats a plain sum, with all of its summands, at each use: with
    `jnp.sum` a clip of 200 leaves by their global norm takes twice as long to compile.
    """
    return lax.cumsum(x)[-1]


def divide_stacked(dividends: Sequence[Array], divisors: Sequence[Array]) -> tuple[Array, ...]:
    """Each dividend divided by its divisor, all of one shape, in one division of stacked arrays.

    The callers would have to stack the results of several divisions. XLA on CPU (JAX 0.10.2)
    repeats that stacking inside of each leaf's loop: a clip of 200 leaves by their own norms then
    has a tenth more instructions.
    """
    return tuple(meshes.stack(dividends) / meshes.stack(divisors))


def force_row_major(leaves: list[Array]) -> list[Array]:
    """The leaves, stored one entry of their first axis after another.

    Without this, XLA on CPU (JAX 0.10.2) stores gradients of weights, which are outer products,
    with another order of axes, and copies them in each branch that reads them.
    """
    rows = [leaf.reshape(leaf.shape[0], math.prod(leaf.shape[1:])) for leaf in leaves]
    rows = lax.optimization_barrier(rows)
    return [row.reshape(leaf.shape) for row, leaf in zip(rows, leaves, strict=True)]


def scale_bfloat16_bits(x: Array, power: Array, ratio: Array, *, strict: bool) -> Array:
    """`x * power * ratio` on the bit patterns of bfloat16.

    XLA on CPU (JAX 0.10.2) stores the result of a conversion such as `x.astype(jnp.float32)`, but
    fuses operations on bits with what comes before and after them. With conversions, a clip in a
    step of AdamW takes twice as long, and longer than Optax's.
    """
    wide = lax.bitcast_convert_type(x, jnp.uint16).astype(jnp.uint32) << jnp.uint32(16)
    product = lax.bitcast_convert_type(wide, jnp.float32) * power * ratio
    bits, half = lax.bitcast_convert_type(product, jnp.uint32), jnp.uint32(16)
    if not strict:
        # Rounds to nearest, and ties to even.
        bits = bits + jnp.uint32(0x7FFF) + ((bits >> half) & jnp.uint32(1))
    # A NaN whose payload is in the bits that are cut off would become infinity.
    bits = jnp.where(jnp.isnan(product), jnp.uint32(0x7FC00000), bits)
    return lax.bitcast_convert_type((bits >> half).astype(jnp.uint16), jnp.bfloat16)


@custom_jvp()
def select_bits(flag: Array, x: Array, y: Array) -> Array:
    """`x` where `flag`, which broadcasts to `x`, is True, else `y`; both are bfloat16.

    XLA on CPU (JAX 0.10.2) converts bfloat16 for a `lax.select`, which loses subnormal numbers.
    """
    bits, others = (lax.bitcast_convert_type(z, jnp.uint16) for z in (x, y))
    chosen = lax.select(jnp.broadcast_to(flag, x.shape), bits, others)
    return lax.bitcast_convert_type(chosen, x.dtype)


@select_bits.defjvp
def _(primals: tuple[Array, ...], tangents: tuple[Any, ...]) -> tuple[Array, Array]:
    (flag, x, y), (_, dx, dy) = primals, tangents
    return select_bits(flag, x, y), jnp.where(flag, dx, dy)

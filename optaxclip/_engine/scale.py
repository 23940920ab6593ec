"""Scale: a leaf and its group's multiplier come in, the leaf goes out, each entry rounded once.

in   a leaf `[...]`, and a `Multiplier` of the shape of the axes over which it was not reduced
out  the leaf, in its own dtype and weak type
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

import optaxclip._engine.cpu as cpu
from optaxclip._base.numerics import (
    accumulation_dtype,
    broadcast_over,
    match_weak_type,
    promoted,
    real_parts,
)
from optaxclip._base.trees import is_sparse, with_data
from optaxclip._engine.respond import Multiplier


def scale(leaf: Any, by: Multiplier, *, axes: tuple[int, ...], strict: bool) -> Any:
    """A leaf times its group's multiplier.

    Args:
      leaf: a floating or complex array, or a `BCOO`, whose data is scaled.
      by: the group's multiplier.
      axes: the leaf's axes that the multiplier lacks.
      strict: whether rounding to a narrow dtype may only lower an entry's modulus.
    """
    if is_sparse(leaf):
        axes = tuple(range(leaf.data.ndim))
        return with_data(leaf, _scaled(leaf.data, by, axes=axes, strict=strict))
    return _scaled(leaf, by, axes=axes, strict=strict)


# Compiled by itself so that it is traced once for leaves alike.
@functools.partial(jax.jit, static_argnames=("axes", "strict"))
def _scaled(x: Array, by: Multiplier, *, axes: tuple[int, ...], strict: bool) -> Array:
    by = jax.tree.map(lambda field: broadcast_over(field, axes), by)
    if x.dtype == jnp.bfloat16 and by.before.dtype == jnp.float32:
        on_cpu, default = (functools.partial(way, strict) for way in (_on_bits, _on_parts))
        scaled = lax.platform_dependent(x, by, cpu=on_cpu, default=default)
    else:
        scaled = _on_parts(strict, x, by)
    return match_weak_type(scaled, x)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _on_bits(strict: bool, x: Array, by: Multiplier) -> Array:
    product = cpu.scaled_bfloat16(x, by.before, by.quotient, strict=strict)
    if by.is_zero is not None:
        product = cpu.select_bfloat16(by.is_zero, jnp.zeros_like(x), product)
    return cpu.select_bfloat16(by.is_identity, x, product)


@_on_bits.defjvp
def _(strict: bool, primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[Array, Array]:
    return jax.jvp(functools.partial(_on_parts, strict), primals, tangents)


def _on_parts(strict: bool, x: Array, by: Multiplier) -> Array:
    parts = [_product(part, by, strict=strict) for part in real_parts(x)]
    scaled = lax.complex(*parts) if jnp.iscomplexobj(x) else parts[0]
    if by.is_zero is not None:
        scaled = jnp.where(by.is_zero, jnp.zeros_like(scaled), scaled)
    return jnp.where(by.is_identity, x, scaled)


def _product(x: Array, by: Multiplier, *, strict: bool) -> Array:
    wide = x.astype(accumulation_dtype(x.dtype))
    wide, before, quotient = promoted([wide, by.before, by.quotient])
    product = wide * before * quotient
    return product if product.dtype == x.dtype else _rounded(product, x.dtype, strict)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1, 2))
def _rounded(x: Array, dtype: jnp.dtype, toward_zero: bool) -> Array:
    """Converts to `dtype`, to nearest or, with `toward_zero`, never away from zero."""
    y = x.astype(dtype)
    if not toward_zero:
        return y
    over = jnp.abs(y.astype(x.dtype)) > jnp.abs(x)
    return jnp.where(over, _next_toward_zero(y), y)


@_rounded.defjvp
def _rounded_jvp(
    dtype: jnp.dtype, toward_zero: bool, primals: tuple[Array], tangents: tuple[Array]
) -> tuple[Array, Array]:
    return _rounded(*primals, dtype, toward_zero), tangents[0].astype(dtype)


def _next_toward_zero(x: Array) -> Array:
    """The neighbour of each `x != 0` in its dtype that is nearer to zero."""
    # In sign-magnitude formats that is one less in the bit pattern.
    bits = jnp.dtype(f"uint{8 * x.dtype.itemsize}")
    return lax.bitcast_convert_type(lax.bitcast_convert_type(x, bits) - jnp.ones((), bits), x.dtype)

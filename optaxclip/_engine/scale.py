"""Scale: takes a leaf and its group's multiplier, and gives the leaf, rounded once.

in   a leaf `[...]`, and a `Multiplier` of the shape of the axes over which it was not reduced
out  the leaf, in its own dtype and weak type
"""

import functools
from collections.abc import Sequence
from typing import Any

import chex
import jax
import jax.numpy as jnp
from jax import Array, lax

from optaxclip._base.derivatives import custom_jvp
from optaxclip._base.numerics import (
    accumulation_dtype,
    broadcast_over,
    by_parts,
    leading_bit,
    match_weak_type,
    multiply,
    promoted,
    reciprocal_of_power,
    select,
)
from optaxclip._border.entries import on_data, product, select_exactly


def scale(
    leaf: Any,
    by: Sequence[Array] | Array,
    *,
    axes: tuple[int, ...],
    strict: bool,
    zeroes: bool = False,
) -> Any:
    """A leaf times its group's multiplier.

    Args:
      leaf: a floating or complex array, or a `BCOO`, whose data is scaled.
      by: the two fields of the group's multiplier, in a sequence or stacked in one array; if both
        are 1, entries stay as they are. If there is a third array, entries stay if their modulus is
        at most its value, and only these.
      axes: the leaf's axes that the multiplier lacks.
      strict: whether rounding to a narrow dtype may only lower an entry's modulus.
      zeroes: whether a ratio of 0 makes entries 0 even if they are not finite.
    """
    return on_data(functools.partial(_scaled, by=by, strict=strict, zeroes=zeroes), leaf, axes)


# A compiled function of its own, so that it is traced once for leaves that are alike.
@functools.partial(jax.jit, static_argnames=("axes", "strict", "zeroes"))
def _scaled(
    x: Array, *, by: Sequence[Array] | Array, axes: tuple[int, ...], strict: bool, zeroes: bool
) -> Array:
    columns = list(by)
    chex.assert_shape(columns, tuple([n for k, n in enumerate(x.shape) if k not in axes]))
    power, ratio, *above = [broadcast_over(column, axes) for column in columns]
    of_part = functools.partial(
        product, power=power, ratio=ratio, strict=strict, plain=_wide_product
    )
    scaled = by_parts(of_part, x)
    if zeroes:
        scaled = select_exactly(ratio == 0, jnp.zeros_like(scaled), scaled)
    # Entries that stay are selected: a product with 1 may flush subnormal numbers to 0.
    stays = _stays(x, power, ratio, above[0] if above else None)
    return match_weak_type(select_exactly(stays, x, scaled), x)


def _stays(x: Array, power: Array, ratio: Array, above: Array | None) -> Array:
    """Which entries are left as they are; one flag if it is the same for all."""
    if above is not None:
        modulus, above = promoted([jnp.abs(x).astype(accumulation_dtype(x.dtype)), above])
        return modulus <= above
    # Not `(power == 1) & ...`, because operators are nested calls for each leaf (JAX 0.10.2).
    one = power.dtype.type(1)
    return lax.bitwise_and(lax.eq(power, one), lax.eq(ratio, one))


def _wide_product(x: Array, power: Array, ratio: Array, *, strict: bool) -> Array:
    wide = x.astype(accumulation_dtype(x.dtype))
    wide, power, ratio = promoted([wide, power, ratio])
    product = multiply(multiply(wide, power), ratio)
    if product.dtype == x.dtype:
        return product
    return (_cut(product, x.dtype) if strict else product).astype(x.dtype)


@custom_jvp(nondiff_argnums=(1,))
def _cut(x: Array, dtype: jnp.dtype) -> Array:
    """Each entry rounded toward zero to a number of `dtype`, still in `x.dtype`.

    Rounding to nearest, then lowering what became larger than the entry, would fail: in such a
    comparison XLA takes an entry that was converted and converted back for the entry itself (on an
    H100 with JAX 0.11.2). The derivative is that of the identity, as for any rounding in JAX.
    """
    info, wide = jnp.finfo(dtype), jnp.finfo(x.dtype)
    if info.nexp == wide.nexp:
        # Both dtypes have the same exponents, even for subnormal numbers: the last bits are cut.
        integer = jnp.dtype(f"uint{wide.bits}").type
        kept = integer(2**wide.bits - 2 ** (wide.nmant - info.nmant))
        cut = lax.bitcast_convert_type(lax.bitcast_convert_type(x, integer) & kept, x.dtype)
    else:
        smallest, largest = x.dtype.type(info.smallest_normal), x.dtype.type(info.max)
        unit = jnp.maximum(leading_bit(jnp.abs(x)), smallest) * float(info.eps)
        cut = lax.clamp(-largest, jnp.trunc(x * reciprocal_of_power(unit)) * unit, largest)
    return select(lax.is_finite(x), cut, x)


@_cut.defjvp
def _(dtype: jnp.dtype, primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    return _cut(primals[0], dtype), tangents[0]

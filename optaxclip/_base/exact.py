"""Norms and products of small groups to more digits than float32 has.

In a group of a few entries the rounding of a single product can be the whole error, so no slack
that keeps results below the limit is small enough to keep them near it. Here such groups get a norm
to about 7 more bits and products rounded toward zero: the result obeys its limit by construction.
For larger groups rounding averages out, and a slack (see `rounding_slack`) is cheaper.

Everything here is a correction, constant for differentiation, to what the caller computed.
"""

import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import Array, lax

from optaxclip._base.numerics import (
    next_toward_zero,
    power_of_two_below,
    real_parts,
    safe_divide,
    straight_through,
)

MOST_ENTRIES = 64
"""Groups up to this size are measured exactly; sums of so many 18-bit squares fit into 24 bits."""


MOST_GROUPS = 16
"""In trees with more small groups than this none is refined: it would take long to compile."""


@functools.partial(jax.jit, static_argnames="weight")
def refined_root(
    root: Array, unit: Array, arrays: Sequence[Array], weight: int
) -> tuple[Array, Array]:
    """A root of a mean or sum of squares to more digits than its dtype holds.

    Args:
      root: `sqrt(sum(squares of all entries) / weight) / unit` as computed, `[]`.
      unit: a power of two, `[]`.
      arrays: the entries, real or complex, at most `MOST_ENTRIES`.
      weight: 1 for an L2 norm, the number of entries for a root mean square.

    Returns:
      `root` rounded once, and the relative error that it still has.
    """
    constant, parts = lax.stop_gradient((root, [p for x in arrays for p in real_parts(x)]))
    dtype = root.dtype
    largest = jnp.max(jnp.stack([jnp.max(jnp.abs(p), initial=0).astype(dtype) for p in parts]))
    scale = power_of_two_below(largest)
    # The leading bits can be squared and summed without error; what they leave out is small.
    digits = 2.0**8 if dtype == jnp.float32 else 2.0**22
    scaled = [part.astype(dtype) / scale for part in parts]
    high = [jnp.round(part * digits) / digits for part in scaled]
    low = [part - h for part, h in zip(scaled, high, strict=True)]
    leading = _sum_of([h * h for h in high])
    rest = _sum_of([(2 * h + x) * x for h, x in zip(high, low, strict=True)])
    value = constant * (unit / scale)
    square, square_error = two_product(value, value)
    total, total_error = two_product(square, jnp.full_like(value, weight))
    missing = ((leading - total) - total_error) - weight * square_error + rest
    error = safe_divide(missing, 2 * total, 0)
    rounded = lax.optimization_barrier(constant + constant * error)
    left = error - safe_divide(rounded - constant, constant, 0)
    return straight_through(jnp.where(jnp.isfinite(root), rounded, root), root), left


def _sum_of(arrays: list[Array]) -> Array:
    return functools.reduce(jnp.add, [jnp.sum(array) for array in arrays])


def refined_quotient(quotient: Array, new: Array, root: Array, error: Array) -> Array:
    """What `quotient = new / root` lacks to be just below the true quotient.

    Args:
      quotient: as computed.
      new: the new norm.
      root: the norm.
      error: the relative error of `root`, from `refined_root`.
    """
    quotient, new, root = lax.stop_gradient((quotient, new, root))
    product, product_error = two_product(quotient, root)
    short = safe_divide((new - product) - product_error, root, 0)
    margin = 2.0**-6 * jnp.finfo(root.dtype).eps
    return short - quotient * error - quotient * margin


def product_toward_zero(x: Array, quotient: Array, correction: Array) -> Array:
    """`x * (quotient + correction)`, rounded toward zero."""
    nearest = x * quotient
    product, error = two_product(*lax.stop_gradient(jnp.broadcast_arrays(x, quotient)))
    error = error + x * correction
    total = lax.optimization_barrier(product + error)
    error = error - (total - product)
    over = (error != 0) & ((error < 0) == (total > 0))
    return straight_through(jnp.where(over, next_toward_zero(total), total), nearest)


def two_product(a: Array, b: Array) -> tuple[Array, Array]:
    """`a * b` as its rounded value and the error of it (Dekker, 1971)."""
    # Behind the barrier the product is rounded; fused into the difference it would not be.
    product = lax.optimization_barrier(a * b)
    (a1, a2), (b1, b2) = _halves(a), _halves(b)
    return product, ((a1 * b1 - product) + a1 * b2 + a2 * b1) + a2 * b2


def _halves(x: Array) -> tuple[Array, Array]:
    """`x` as the sum of two numbers of half as many bits."""
    info = jnp.finfo(x.dtype)
    bits = jnp.dtype(f"uint{info.bits}")
    dropped = math.ceil((info.nmant + 1) / 2)
    mask = jnp.array(~((1 << dropped) - 1) & ((1 << info.bits) - 1), bits)
    upper = lax.bitcast_convert_type(lax.bitcast_convert_type(x, bits) & mask, x.dtype)
    return upper, x - upper

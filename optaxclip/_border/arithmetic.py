"""Quotients, products and choices, each in the way that is best on the platform.

The tricks for one backend are in its own file, with what they gain.
"""

import functools
import operator
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import Array, lax

import optaxclip._border.cpu as cpu
from optaxclip._base.derivatives import custom_jvp


def quotients(dividends: Sequence[Array], divisors: Sequence[Array]) -> tuple[Array, ...]:
    """Each dividend by its divisor, all of one shape."""
    ways = {"cpu": cpu.by_one_division, "default": _one_by_one}
    return lax.platform_dependent(dividends, divisors, **ways)


def _one_by_one(dividends: Sequence[Array], divisors: Sequence[Array]) -> tuple[Array, ...]:
    return tuple(map(operator.truediv, dividends, divisors))


def product(
    x: Array, power: Array, ratio: Array, *, strict: bool, plain: Callable[..., Array]
) -> Array:
    """`x * power * ratio`, rounded once to the dtype of `x`.

    Args:
      x: real entries.
      power: a power of two, which broadcasts to them.
      ratio: the other factor, of the same shape.
      strict: whether to round toward zero, not to the nearest number.
      plain: the function of these that computes the product where no trick is needed.
    """
    plain = functools.partial(plain, strict=strict)
    if x.dtype != jnp.bfloat16 or ratio.dtype != jnp.float32:
        return plain(x, power, ratio)

    @custom_jvp()
    def on_bits(x: Array, power: Array, ratio: Array) -> Array:
        return cpu.product_of_bfloat16(x, power, ratio, strict=strict)

    on_bits.defjvp(functools.partial(jax.jvp, plain))
    return lax.platform_dependent(x, power, ratio, cpu=on_bits, default=plain)


def select_exactly(flag: Array, x: Array, y: Array) -> Array:
    """`x` where `flag`, which broadcasts to it, is True, else `y`; subnormal numbers stay."""
    # `lax.select` does not broadcast flags of several groups; `jnp.where` does, but it is a nested
    # call for each leaf, which takes longer to compile.
    select = lax.select if flag.shape in ((), x.shape) else jnp.where
    if x.dtype != jnp.bfloat16:
        return select(flag, x, y)
    return lax.platform_dependent(flag, x, y, cpu=cpu.select_bits, default=select)

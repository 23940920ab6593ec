"""Responses: the norm that a group shall have, given the norm it has and its limits.

A `Response` maps `(norm, trigger, target)`, arrays of one shape, to the new norm; the engine
multiplies the group by `new / norm`, and leaves it alone, bit for bit, where the two are equal.

  response    | new norm
  ------------|---------------------------------------------------------------
  `clip`      | `min(norm, target)` where the norm exceeds the trigger
  `normalize` | `target`, whatever the norm was
  `smooth`    | `norm / sqrt(1 + (norm / target)**2)`, always below the target
"""

from collections.abc import Callable
from typing import TypeAlias

import jax.numpy as jnp
from jax import Array

from optaxclip._numerics import safe_divide

Response: TypeAlias = Callable[[Array, Array, Array], Array]


def clip(norm: Array, trigger: Array, target: Array) -> Array:
    """Brings a norm above the trigger to the target (Pascanu et al., 2013, arXiv 1211.5063)."""
    return jnp.where(norm <= trigger, norm, jnp.minimum(norm, target))


def normalize(norm: Array, trigger: Array, target: Array) -> Array:
    """Brings every norm but zero to the target."""
    del trigger
    return jnp.broadcast_to(target, norm.shape)


def smooth(norm: Array, trigger: Array, target: Array) -> Array:
    """Approaches the target from below, without a corner.

    Small norms stay as they are to second order, and the derivative is continuous everywhere. Cf.
    Zhang, He, Sra and Jadbabaie, 2019, arXiv 1905.11881.
    """
    del trigger
    # The formula is symmetric: dividing the smaller by the larger, no square overflows.
    is_below = norm <= target
    small, large = jnp.where(is_below, norm, target), jnp.where(is_below, target, norm)
    ratio = safe_divide(small, jnp.where(jnp.isinf(large), 1, large), 0)
    return jnp.where(jnp.isinf(large), small, small / jnp.sqrt(1 + jnp.square(ratio)))


_NAMED: dict[str, Response] = {"clip": clip, "normalize": normalize, "smooth": smooth}


def as_response(response: str | Response) -> Response:
    """The response of that name, or `response` itself.

    Raises:
      ValueError: for an unknown name.
    """
    if callable(response):
        return response
    if response not in _NAMED:
        raise ValueError(
            f"response must be one of {sorted(_NAMED)} or a function (norm, trigger, target) -> "
            f"new norm, got {response!r}"
        )
    return _NAMED[response]

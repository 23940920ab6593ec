"""Responses: the norm that a group shall have, given the norm it has and its limits.

A `Response` maps `(norm, trigger, target)`, arrays of one shape, to the new norm; the engine
multiplies the group by `new / norm`, and leaves it alone, bit for bit, where the two are equal.

  response    | new norm
  ------------|---------------------------------------------------------------
  `clip`      | `min(norm, target)` where the norm exceeds the trigger
  `normalize` | `target`, whatever the norm was
  `smooth`    | `norm / sqrt(1 + (norm / target)**2)`, always below the target
  `auto_s()`  | `target * norm / (norm + gamma)`, always below the target
"""

import dataclasses
import math
from collections.abc import Callable
from typing import TypeAlias

import jax.numpy as jnp
from jax import Array

from optaxclip._base.numerics import safe_divide

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


def auto_s(gamma: float = 0.01) -> Response:
    """Normalizes, but for norms that are small beside `gamma`.

    What is multiplied by `target / (norm + gamma)` stays below the target, and zeros stay zeros.

    Source: Bu, Wang, Zha and Karypis, 2022, Automatic clipping, arXiv 2206.07136, for the gradients
    of single examples; there `gamma` is 0.01, and with 0 (AUTO-V) this is `normalize`.

    Args:
      gamma: the norm that is brought to half the target.

    Returns:
      A response: a function of the norms, triggers and targets, arrays of one shape, to the new
      norms, of the same shape and dtype.

    Raises:
      ValueError: if `gamma` is negative, NaN or infinite.

    Example:
      >>> import jax.numpy as jnp, optaxclip
      >>> response = optaxclip.responses.auto_s(1.0)
      >>> info = optaxclip.clip_tree(
      ...     [jnp.array([3.0, 0.0])], 1.0, scope=optaxclip.scopes.tree(), response=response)[1]
      >>> print(info.factor)
      0.25
    """
    if not (isinstance(gamma, (int, float)) and 0 <= gamma < math.inf):
        raise ValueError(f"gamma must be a finite number of at least 0, got {gamma!r}")
    return _AutoS(float(gamma))


@dataclasses.dataclass(frozen=True)
class _AutoS:
    """The response of `auto_s`; equal ones are compiled once."""

    gamma: float

    def __call__(self, norm: Array, trigger: Array, target: Array) -> Array:
        del trigger
        gamma = jnp.asarray(self.gamma).astype(norm.dtype)
        # The quotient first: no product leaves the range.
        return jnp.broadcast_to(target, norm.shape) * safe_divide(norm, norm + gamma, 1)


_NAMED: dict[str, Response] = {
    "clip": clip,
    "normalize": normalize,
    "smooth": smooth,
    "auto_s": auto_s(),
}


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

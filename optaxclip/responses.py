"""Responses: functions that compute new norms from norms and thresholds.

A `Response` is a function `(norm, trigger, target) -> new norm` of arrays with the same shape and
dtype. Groups are multiplied by `new / norm`, and are unchanged if both norms are equal.

  response    | new norm
  ------------|---------------------------------------------------------------
  `clip`      | `min(norm, target)` if the norm exceeds the trigger
  `normalize` | `target`
  `smooth`    | `norm / sqrt(1 + (norm / target)**2)`, always below the target
  `auto_s()`  | `target * norm / (norm + gamma)`, always below the target
  `band()`    | like `clip`, but at least a fraction of the target
  `clip_with_eps()` | `norm * target / (norm + eps)` if this is less than the norm

A response can also define a method `factor(norm, trigger, target)`, which returns the multipliers
of the groups. It is used unless the factor or its derivative is zero, subnormal, or non-finite.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from optaxclip._base.derivatives import custom_jvp
from optaxclip._base.numerics import divide_no_nan
from optaxclip._base.validation import check_called, validate_call

Response: TypeAlias = Callable[[Array, Array, Array], Array]


def clip(norm: Array, trigger: Array, target: Array) -> Array:
    """Clips norms above the trigger to the target (Pascanu et al., 2013, arXiv 1211.5063)."""
    return jnp.where(norm <= trigger, norm, jnp.minimum(norm, target))


def normalize(norm: Array, trigger: Array, target: Array) -> Array:
    """Scales all norms except 0 to the target, unless the target is infinite."""
    del trigger
    return jnp.where(jnp.isinf(target), norm, target)


def smooth(norm: Array, trigger: Array, target: Array) -> Array:
    """Scales norms smoothly to values below the target.

    Large norms become almost as large as the target, and small norms hardly change. The derivative
    is continuous. See also Zhang, He, Sra, and Jadbabaie, 2019, arXiv 1905.11881.
    """
    del trigger
    # The formula is symmetric in norm and target. Dividing the smaller number by the larger one
    # prevents overflow of the square.
    is_below = norm <= target
    small, large = jnp.where(is_below, norm, target), jnp.where(is_below, target, norm)
    ratio = divide_no_nan(small, jnp.where(jnp.isinf(large), 1, large), 0)
    return jnp.where(jnp.isinf(large), small, small / jnp.sqrt(1 + jnp.square(ratio)))


@validate_call()
def auto_s(gamma: float = 0.01) -> Response:
    """Multiplies groups by `target / (norm + gamma)`.

    Norms that are much larger than `gamma` become almost as large as the target. Zeros are
    unchanged. If `gamma` is 0 (AUTO-V), this response is equal to `normalize`.

    Source: Bu, Wang, Zha, and Karypis, 2022, Automatic clipping, arXiv 2206.07136. The paper clips
    per-example gradients and sets `gamma` to 0.01.

    Args:
      gamma: The norm that is scaled to half the target. Defaults to 0.01.

    Returns:
      A response, which is a function `(norm, trigger, target) -> new norm`.

    Raises:
      ValueError: If `gamma` is negative, NaN or infinite.

    Example:
      >>> import jax.numpy as jnp, optaxclip
      >>> response = optaxclip.responses.auto_s(1.0)
      >>> print(response(jnp.array(3.0), jnp.array(1.0), jnp.array(1.0)))
      0.75
    """
    return _AutoS(_check_range(gamma, 0, _MAX_FLOAT32, "gamma"))


@dataclasses.dataclass(frozen=True)
class _AutoS:
    """The response of `auto_s`, a dataclass so that equal responses share compiled programs."""

    gamma: float

    def __call__(self, norm: Array, trigger: Array, target: Array) -> Array:
        del trigger
        gamma = jnp.asarray(self.gamma).astype(norm.dtype)
        # The quotient is at most 1, so its product with the target cannot overflow.
        new = target * divide_no_nan(norm, norm + gamma, 1)
        return jnp.where(jnp.isinf(target), norm, new)


@validate_call()
def band(low: float = 1 / 3, *, min_factor: float = 0.0, max_factor: float = math.inf) -> Response:
    """Reduces norms to the target, and increases small norms to `low` times the target.

    Norms above the trigger are reduced. Groups of zeros are unchanged, and if the target is
    infinite, all groups are unchanged. The bounds on the factor take precedence over the bounds on
    the norm.

    You can use this response for three published methods. AGGC (Li, Wu, and Chang, 2026, arXiv
    2601.11864) keeps the norms of groups of layers between 0.5 and 1.5 times their moving averages.
    Here, the averages include norms before they are increased. LAMBC (Fong et al., 2020, arXiv
    2011.13584) is LAMB with a bounded trust ratio. Speedruns (KellerJordan/modded-nanogpt) set a
    minimum ratio of updates to parameters. Use the latter two after the optimizer::

      clip_by(scopes.group(labels), thresholds.ema(0.98, 1.5), response=responses.band(0.5 / 1.5))
      clip_by(scopes.leaf(), thresholds.relative_to_params(1.0, eps=0.0),
              response=responses.band(1.0, min_factor=0.1, max_factor=10.0))
      clip_by(scopes.leaf(), thresholds.relative_to_params(1e-2), response=responses.band(0.1))

    Args:
      low: The minimum norm as a fraction of the target. Use 0 for `clip` and 1 for `normalize`.
        Defaults to 1/3.
      min_factor: The minimum factor. Defaults to 0.
      max_factor: The maximum factor, which must not be below `min_factor`. Defaults to infinity.

    Returns:
      A response, which is a function `(norm, trigger, target) -> new norm`.

    Raises:
      ValueError: If `low` is not between 0 and 1, if a factor is negative or NaN, or if
        `min_factor` exceeds `max_factor`.

    Example:
      >>> import jax.numpy as jnp, optaxclip
      >>> from optaxclip import responses, scopes
      >>> tx = optaxclip.clip_by(scopes.tree(), 1.0, response=responses.band(0.5))
      >>> for size in (4.0, 0.7, 0.1, 0.0):
      ...     print(tx.update(jnp.array([size]), None)[0])
      [1.]
      [0.7]
      [0.5]
      [0.]
    """
    smallest = _check_range(min_factor, 0, _MAX_FLOAT32, "min_factor")
    return _Band(
        _check_range(low, 0, 1, "low"),
        smallest,
        _check_range(max_factor, smallest, math.inf, "max_factor"),
    )


@dataclasses.dataclass(frozen=True)
class _Band:
    """The response of `band`, a dataclass so that equal responses share compiled programs."""

    low: float
    min_factor: float
    max_factor: float

    def __call__(self, norm: Array, trigger: Array, target: Array) -> Array:
        low, smallest, largest = (
            jnp.asarray(x).astype(norm.dtype) for x in (self.low, self.min_factor, self.max_factor)
        )
        edge = low * jnp.where(jnp.isinf(target), 0, target)
        new = jnp.maximum(clip(norm, trigger, target), edge)
        if self.max_factor < math.inf:  # The product of infinity and 0 would be NaN.
            new = jnp.minimum(new, largest * norm)
        new = jnp.maximum(new, smallest * norm)
        return jnp.where(norm == 0, norm, new)  # No factor can increase a norm of 0.


@validate_call()
def clip_with_eps(eps: float = 1e-6) -> Response:
    """Multiplies groups by `target / (norm + eps)` if this factor is below 1, as in PyTorch.

    Use this response to reproduce a run with PyTorch's `clip_grad_norm_`. Unlike `clip`, it also
    reduces groups with a norm at the threshold or slightly below it. In float32 and with the
    default `eps`, which is also the one in PyTorch, the factors of both libraries are bitwise
    equal. However, factors may differ in the last digit if `factor` or `factor / norm` is below
    1e-36, because this response does not flush them to zero.

    Args:
      eps: The number added to the norm. Defaults to 1e-6.

    Returns:
      A response, which is a function `(norm, trigger, target) -> new norm`.

    Raises:
      ValueError: If `eps` is negative, NaN or infinite.

    Example:
      >>> import jax.numpy as jnp, optaxclip
      >>> response = optaxclip.responses.clip_with_eps(1e-2)
      >>> tx = optaxclip.clip_by(optaxclip.scopes.tree(), 5.0, response=response)
      >>> print(tx.update(jnp.array([3.0, 4.0]), None)[0])
      [2.994012 3.992016]
    """
    return _ClipWithEps(_check_range(eps, 0, _MAX_FLOAT32, "eps"))


@dataclasses.dataclass(frozen=True)
class _ClipWithEps:
    """The response of `clip_with_eps`, a dataclass like `_AutoS`."""

    eps: float

    def __call__(self, norm: Array, trigger: Array, target: Array) -> Array:
        return jnp.minimum(_AutoS(self.eps)(norm, trigger, target), norm)

    def factor(self, norm: Array, trigger: Array, target: Array) -> Array:
        del trigger
        divisor = norm + jnp.asarray(self.eps).astype(norm.dtype)
        # The quotient may overflow for norms far below the threshold, where the factor is 1.
        is_far_below = divisor < target / 2
        target, divisor = (jnp.where(is_far_below, 1, x) for x in (target, divisor))
        return jnp.minimum(_quotient(target, divisor), 1)


@custom_jvp()
def _quotient(x: Array, y: Array) -> Array:
    """Computes `x * (1 / y)`, as PyTorch does for a number divided by a tensor."""
    return divide_no_nan(jnp.ones_like(y), y, 1) * x


@_quotient.defjvp
def _(primals: tuple[Array, Array], tangents: tuple[Array, Array]) -> tuple[Array, Array]:
    # Differentiate `x / y`, because the derivative of `1 / y` may overflow.
    _, change = jax.jvp(lambda x, y: divide_no_nan(x, y, x), primals, tangents)
    return _quotient(*primals), change


_MAX_FLOAT32 = float(jnp.finfo(jnp.float32).max)


def _check_range(value: Any, low: float, high: float, argument: str) -> float:
    """Checks that `value` is a Python number from `low` to `high`, and converts it to a float."""
    # Compiled programs depend on the value, so it must be static.
    if isinstance(value, jax.Array):
        raise ValueError(
            f"{argument} must be a Python number, got {value!r}; use "
            f"static_args=({argument!r},) in optax.inject_hyperparams"
        )
    if not isinstance(value, (int, float, np.integer, np.floating)) or not low <= value <= high:
        finite = f"finite and at least {low:g}"
        condition = finite if high == _MAX_FLOAT32 else f"between {low:g} and {high:g}"
        raise ValueError(f"{argument} must be {condition}, got {value!r}")
    return float(value)


_BY_NAME: dict[str, Response] = {
    "clip": clip,
    "normalize": normalize,
    "smooth": smooth,
    "auto_s": auto_s(),
    "band": band(),
}


def as_response(response: str | Response) -> Response:
    """Returns the response with this name, or `response` itself if it is a function."""
    if callable(response):
        # Functions such as `band` are not responses, but return a response.
        if response not in _BY_NAME.values():
            check_called(response, "optaxclip.responses", "response", "responses")
        return response
    if not isinstance(response, str) or response not in _BY_NAME:
        raise ValueError(
            f"response must be one of {sorted(_BY_NAME)} or a function that maps (norm, trigger, "
            f"target) to the new norm, got {response!r}"
        )
    return _BY_NAME[response]

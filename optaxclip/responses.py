"""Responses: functions from norms and thresholds to new norms.

A `Response` is a function from `(norm, trigger, target)`, arrays of the same shape, to new norms.
Groups are multiplied by `new / norm`. If both are equal, the group is unchanged.

  response    | new norm
  ------------|---------------------------------------------------------------
  `clip`      | `min(norm, target)` if the norm exceeds the trigger
  `normalize` | `target`
  `smooth`    | `norm / sqrt(1 + (norm / target)**2)`, always below the target
  `auto_s()`  | `target * norm / (norm + gamma)`, always below the target
  `band()`    | like `clip`, but at least a fraction of the target
  `clip_with_eps()` | `norm * target / (norm + eps)` if that is less than the norm

A response can also have a method `factor(norm, trigger, target)`. Groups are then multiplied by the
result of this method instead of `new / norm`, unless the factor or its derivative is not a normal
number.
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

    Large norms become almost as large as the target. Small norms only change in second order, and
    the derivative is continuous. Cf. Zhang, He, Sra and Jadbabaie, 2019, arXiv 1905.11881.
    """
    del trigger
    # The formula is symmetric in norm and target. The smaller one is divided by the larger one,
    # because the square of this quotient cannot overflow.
    is_below = norm <= target
    small, large = jnp.where(is_below, norm, target), jnp.where(is_below, target, norm)
    ratio = divide_no_nan(small, jnp.where(jnp.isinf(large), 1, large), 0)
    return jnp.where(jnp.isinf(large), small, small / jnp.sqrt(1 + jnp.square(ratio)))


@validate_call()
def auto_s(gamma: float = 0.01) -> Response:
    """Scales norms almost to the target, unless they are small compared with `gamma`.

    Groups are multiplied by `target / (norm + gamma)`. The new norms are below the target, and
    zeros are unchanged. `gamma=0` (AUTO-V) is `normalize`.

    Source: Bu, Wang, Zha and Karypis, 2022, Automatic clipping, arXiv 2206.07136. The paper uses it
    for per-example gradients with a `gamma` of 0.01.

    Args:
      gamma: A norm of this size is scaled to half the target. Defaults to 0.01.

    Returns:
      A response, which is a function from norms, triggers and targets, arrays of the same shape, to
      the new norms with this shape and dtype.

    Raises:
      ValueError: If `gamma` is negative, NaN or infinite.

    Example:
      >>> import jax.numpy as jnp, optaxclip
      >>> response = optaxclip.responses.auto_s(1.0)
      >>> info = optaxclip.clip_tree(
      ...     [jnp.array([3.0, 0.0])], 1.0, scope=optaxclip.scopes.tree(), response=response)[1]
      >>> print(info.factor)
      0.25
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
    """Clips norms from both sides, to `low` times the target and to the target.

    Norms above the trigger are reduced to the target, and norms below `low * target` are increased
    to `low * target`. Groups of zeros are unchanged, as are all norms if the target is infinite. No
    group is multiplied by more than `max_factor` or by less than `min_factor`, even if the new norm
    is then outside the band.

    Three published methods are bands. AGGC (Li, Wu and Chang, 2026, arXiv 2601.11864) keeps the
    norms of groups of layers within 0.5 to 1.5 times their moving averages. Here, the average
    records norms before they are increased. LAMBC (Fong et al., 2020, arXiv 2011.13584) is LAMB
    with a bounded trust ratio. Speedruns (KellerJordan/modded-nanogpt) bound the ratio of updates
    to parameters from below::

      clip_by(scopes.group(labels), thresholds.ema(0.98, 1.5), response=responses.band(0.5 / 1.5))
      clip_by(scopes.leaf(), thresholds.relative_to_params(1.0, eps=0.0),    # after the optimizer
              response=responses.band(1.0, min_factor=0.1, max_factor=10.0))
      clip_by(scopes.leaf(), thresholds.relative_to_params(1e-2),            # after the optimizer
              response=responses.band(0.1))

    Args:
      low: The lower edge as a fraction of the target. Use 0 for `clip` and 1 for `normalize`.
        Defaults to 1/3.
      min_factor: The smallest factor. Defaults to 0.
      max_factor: The largest factor, at least `min_factor`. Defaults to infinity.

    Returns:
      A response, which is a function from norms, triggers and targets, arrays of the same shape, to
      the new norms with this shape and dtype.

    Raises:
      ValueError: If `low` is not from 0 to 1, a factor is negative or NaN, or `min_factor` exceeds
        `max_factor`.

    Example:
      >>> import jax.numpy as jnp, optaxclip
      >>> from optaxclip import responses, scopes, thresholds
      >>> tx = optaxclip.clip_by(scopes.tree(), 1.0, response=responses.band(0.5))
      >>> for size in (4.0, 0.7, 0.1, 0.0):
      ...     print(tx.update(jnp.array([size]), None)[0])
      [1.]
      [0.7]
      [0.5]
      [0.]

      A trust ratio (here 5 / 0.1) of at most 10:

      >>> trust = responses.band(1.0, max_factor=10.0)
      >>> tx = optaxclip.clip_by(
      ...     scopes.leaf(), thresholds.relative_to_params(1.0, eps=0.0), response=trust)
      >>> print(tx.update(jnp.array([0.06, 0.08]), None, jnp.array([3.0, 4.0]))[0])
      [0.6 0.8]

      An update of at least 1e-3 and at most 1e-2 of its parameters:

      >>> rule = thresholds.relative_to_params(1e-2)
      >>> tx = optaxclip.clip_by(scopes.leaf(), rule, response=responses.band(0.1))
      >>> print(tx.update(jnp.array([6e-5, 8e-5]), None, jnp.array([3.0, 4.0]))[0])
      [0.003 0.004]
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
        # No factor can scale a norm of 0 to the edge.
        return jnp.where(norm == 0, norm, new)


@validate_call()
def clip_with_eps(eps: float = 1e-6) -> Response:
    """Multiplies groups by `target / (norm + eps)` if it is below 1, as in PyTorch.

    Groups at their threshold, or slightly below it, are reduced too. Use this response for runs
    that must match PyTorch's `clip_grad_norm_`. With PyTorch's `eps` of 1e-6, the factor is equal
    to PyTorch's in all bits of float32. The exception is a factor below 1e-36, alone or divided by
    the norm, which may differ in the last digit, because neither the factor nor its derivative is
    flushed to zero here.

    Args:
      eps: The number that is added to the norm. Defaults to 1e-6.

    Returns:
      A response, which is a function from norms, triggers and targets, arrays of the same shape, to
      the new norms with this shape and dtype.

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
        """Returns the factors of the groups."""
        del trigger
        divisor = norm + jnp.asarray(self.eps).astype(norm.dtype)
        # Far below the threshold, the quotient may overflow, and the factor is 1.
        is_far_below = divisor < target / 2
        target, divisor = (jnp.where(is_far_below, 1, x) for x in (target, divisor))
        return jnp.minimum(_quotient(target, divisor), 1)


@custom_jvp()
def _quotient(x: Array, y: Array) -> Array:
    """Computes `x * (1 / y)`, as PyTorch does for a number divided by a tensor.

    The derivatives are those of `x / y`, because derivatives of `1 / y` may overflow.
    """
    return divide_no_nan(jnp.ones_like(y), y, 1) * x


@_quotient.defjvp
def _(primals: tuple[Array, Array], tangents: tuple[Array, Array]) -> tuple[Array, Array]:
    x, y = primals
    _, change = jax.jvp(lambda x, y: divide_no_nan(x, y, x), primals, tangents)
    return _quotient(x, y), change


_MAX_FLOAT32 = float(jnp.finfo(jnp.float32).max)


def _check_range(value: Any, low: float, high: float, argument: str) -> float:
    """Checks that `value` is a Python number from `low` to `high`, and converts it to a float."""
    if isinstance(value, jax.Array):
        raise ValueError(
            f"{argument} must be a Python number, because a program is compiled for each value, "
            f"got {value!r}; with optax.inject_hyperparams pass static_args=({argument!r},)"
        )
    if not isinstance(value, (int, float, np.integer, np.floating)) or not low <= value <= high:
        kind = "a finite number" if high == _MAX_FLOAT32 else f"a number of at most {high:g}"
        raise ValueError(f"{argument} must be {kind} and at least {low:g}, got {value!r}")
    return float(value)


_BY_NAME: dict[str, Response] = {
    "clip": clip,
    "normalize": normalize,
    "smooth": smooth,
    "auto_s": auto_s(),
    "band": band(),
}


def as_response(response: str | Response) -> Response:
    """Returns the response with this name, or `response` itself.

    Raises:
      ValueError: If the name is unknown.
      TypeError: If `response` is a function that makes responses, such as `band`.
    """
    if callable(response):
        # `clip` and others are responses, and `band` and others return responses.
        if response not in _BY_NAME.values():
            check_called(response, "optaxclip.responses", "response", "responses")
        return response
    if not isinstance(response, str) or response not in _BY_NAME:
        raise ValueError(
            f"response must be one of {sorted(_BY_NAME)} or a function (norm, trigger, target) -> "
            f"new norm, got {response!r}"
        )
    return _BY_NAME[response]

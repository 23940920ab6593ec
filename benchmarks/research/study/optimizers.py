"""The optimizers of the study, each in two halves, so that a method can stand between them."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

DECAY, MOMENTUM = 1e-4, 0.9
WARMUP, FALL = 0.1, 0.2
"""Shares of the steps in which the learning rate rises to its value, and falls to 0 at the end."""


class Optimizer(NamedTuple):
    """An optimizer of one run.

    Attributes:
      direction: from the gradient to the step before the rate, such as `optax.scale_by_adam`.
      finish: weight decay and the learning rate.
      share: the learning rate of a step over the largest, from 0 to 1.
    """

    direction: optax.GradientTransformation
    finish: optax.GradientTransformation
    share: optax.Schedule


NOT_MUONS = ("embedding", "positions", "head", "gain", "bias")
"""Parts of the names of leaves that Adam trains beside Muon."""


def _matrices(params: Any) -> Any:
    """Which axes of a leaf are Muon's rows and columns; None for what Adam trains.

    The rows are all axes but the last; the first axis of what is in `layers` counts layers.
    """

    def numbers(path: Any, leaf: Array) -> optax.contrib.MuonDimensionNumbers | None:
        names = [str(getattr(key, "key", "")) for key in path]
        rows = tuple(range("layers" in names, jnp.ndim(leaf) - 1))
        if not rows or any(part in name for part in NOT_MUONS for name in names):
            return None
        return optax.contrib.MuonDimensionNumbers(rows, -1)

    return jax.tree.map_with_path(numbers, params)


def _muon() -> optax.GradientTransformation:
    """Steps of the size that Adam's have, so that both kinds of leaves take one rate."""
    sizes = {"consistent_rms": 0.2, "muon_weight_dimension_numbers": _matrices}
    return optax.chain(optax.contrib.muon(1.0, **sizes), optax.scale(-1.0))


def _adafactor() -> optax.GradientTransformation:
    """With Optax's own constants, but small matrices are factored too."""
    return optax.chain(optax.adafactor(1.0, min_dim_size_to_factor=8), optax.scale(-1.0))


DIRECTIONS: dict[str, Callable[[], optax.GradientTransformation]] = {
    "adamw": optax.scale_by_adam,
    "sgd": lambda: optax.trace(MOMENTUM),
    "muon": _muon,
    "lion": optax.scale_by_lion,
    "adafactor": _adafactor,
}
"""By name; all but SGD with Optax's own constants."""


def optimizer(name: str, rate: Array, steps: int) -> Optimizer:
    """The optimizer with a learning rate that rises, stays, and falls to 0.

    Args:
      name: as in `DIRECTIONS`.
      rate: float32[], or float32[steps] if it also differs by step.
      steps: of the run.
    """
    rate = jnp.broadcast_to(rate, (steps,))
    share = optax.join_schedules(
        [
            optax.linear_schedule(0.0, 1.0, max(1, round(WARMUP * steps))),
            optax.linear_schedule(1.0, 0.0, max(1, round(FALL * steps))),
        ],
        [steps - round(FALL * steps)],
    )
    finish = optax.chain(
        optax.add_decayed_weights(DECAY),
        optax.scale_by_learning_rate(lambda count: rate[count] * share(count)),
    )
    return Optimizer(DIRECTIONS[name](), finish, share)

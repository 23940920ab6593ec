"""Defines optimizers in two parts, so that methods can add a stage between them."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

DECAY, MOMENTUM = 1e-4, 0.9
WARMUP, FALL = 0.1, 0.2
"""Fractions of the steps in which the learning rate increases from 0, and decreases to 0."""


class Optimizer(NamedTuple):
    """An optimizer of a run.

    Attributes:
      direction: The transformation before the learning rate, such as `optax.scale_by_adam`.
      finish: Weight decay and the learning rate.
      share: The learning rate of a step divided by the largest learning rate.
    """

    direction: optax.GradientTransformation
    finish: optax.GradientTransformation
    share: optax.Schedule


ADAM_LEAVES = ("embedding", "positions", "head", "gain", "bias")
"""Parts of the names of leaves that Adam trains."""


def _get_matrix_axes(params: Any) -> Any:
    """Returns Muon's row and column axes for all leaves, or None for leaves that Adam trains.

    The rows are all axes but the last. The first axis of leaves in `layers` is a batch axis.
    """

    def get_dimension_numbers(path: Any, leaf: Array) -> optax.contrib.MuonDimensionNumbers | None:
        names = [str(getattr(key, "key", "")) for key in path]
        rows = tuple(range("layers" in names, jnp.ndim(leaf) - 1))
        if not rows or any(part in name for part in ADAM_LEAVES for name in names):
            return None
        return optax.contrib.MuonDimensionNumbers(rows, -1)

    return jax.tree.map_with_path(get_dimension_numbers, params)


def _build_muon() -> optax.GradientTransformation:
    """Returns Muon with steps as large as Adam's, so that all leaves share a learning rate."""
    sizes = {"consistent_rms": 0.2, "muon_weight_dimension_numbers": _get_matrix_axes}
    return optax.chain(optax.contrib.muon(1.0, **sizes), optax.scale(-1.0))


def _build_adafactor() -> optax.GradientTransformation:
    """Returns Adafactor with Optax's defaults, but factors small matrices too."""
    return optax.chain(optax.adafactor(1.0, min_dim_size_to_factor=8), optax.scale(-1.0))


DIRECTIONS: dict[str, Callable[[], optax.GradientTransformation]] = {
    "adamw": optax.scale_by_adam,
    "sgd": lambda: optax.trace(MOMENTUM),
    "muon": _build_muon,
    "lion": optax.scale_by_lion,
    "adafactor": _build_adafactor,
}
"""The directions by name, with Optax's defaults except for SGD."""


def build_optimizer(name: str, rate: Array, steps: int) -> Optimizer:
    """Builds an optimizer with a warm-up to `rate`, float32[] or float32[steps], and a decay."""
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

"""AdamH: `hyperball` behind Adam's direction, for the matrices of layers; and by hand."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

import optaxclip

Step = optax.GradientTransformation
RATE = 1e-2


def adam_h(**told: Any) -> Step:
    """With ours; all else is AdamW's."""
    return _of_matrices(optaxclip.hyperball(RATE, **told))


def by_hand() -> Step:
    """With the formula as it stands: no care for the range, nor for rounding."""
    return _of_matrices(optax.GradientTransformation(_norms, _formula))


def _of_matrices(last: Step) -> Step:
    matrices = optax.chain(optax.scale_by_adam(), last)
    return optax.partition({"matrices": matrices, "others": optax.adamw(1e-3)}, _labels)


def _labels(params: Any) -> Any:
    def label(path: Any, leaf: Any) -> str:
        return "matrices" if path[0].key == "layers" and leaf.ndim == 2 else "others"

    return jax.tree.map_with_path(label, params)


def _norms(params: Any) -> Any:
    return jax.tree.map(_norm, params)


def _formula(updates: Any, radii: Any, params: Any) -> Any:
    def step(u: jax.Array, radius: jax.Array, w: jax.Array) -> jax.Array:
        moved = w - RATE * radius * u / _norm(u)
        return radius * moved / _norm(moved) - w

    return jax.tree.map(step, updates, radii, params), radii


def _norm(x: jax.Array) -> jax.Array:
    return jnp.sqrt(jnp.sum(x * x))

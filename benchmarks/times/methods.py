"""Other methods with a constant limit: what they add to a step, and to compile."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array

import optaxclip
from benchmarks.times.clips import beside_optax
from benchmarks.times.effort import Effort, Tell
from benchmarks.times.report import Row
from benchmarks.times.steps import OPTIMIZERS, OURS, THEIRS, Clips, added, by_global_norm
from benchmarks.times.timing import phases
from benchmarks.times.trees import filled, transformer
from optaxclip._base.types import PyTree

PLAIN = "plain norms"
EPS = 1e-3


def other_clips(effort: Effort, tell: Tell) -> list[Row]:
    """In an AdamW step, beside clips by plain norms, which may overflow and keep no record."""
    grads, rows = filled(transformer(effort.layers, effort.width), jnp.float32), []
    for case, clips in _methods().items():
        tell(case)
        rows += added(case, clips, OPTIMIZERS["AdamW"], grads, effort)
    return rows


def compiling(effort: Effort, tell: Tell) -> list[Row]:
    """From empty caches, the clip alone of a transformer."""
    grads, rows = filled(transformer(effort.layers, effort.narrow), jnp.float32), []
    for case, clips in {"clip_by_global_norm": by_global_norm(), **_methods()}.items():
        tell(case)
        steps = {way: partial(_clip, tx) for way, tx in clips.items()}
        for phase, times in phases(steps, (grads, grads), effort.repetitions).items():
            rows += [Row(f"{case}, {phase}", way, beside_optax(times, way)) for way in times]
    return rows


def _methods() -> dict[str, Clips]:
    return {
        "adaptive_grad_clip": {
            OURS: optaxclip.adaptive_grad_clip(0.01),
            THEIRS: optax.adaptive_grad_clip(0.01),
            PLAIN: _leaf_by_leaf(partial(_unit_by_unit, 0.01)),
        },
        "clip_by_block_rms": {
            OURS: optaxclip.clip_by_block_rms(1e-3),
            THEIRS: optax.clip_by_block_rms(1e-3),
            PLAIN: _leaf_by_leaf(partial(_by_rms, 1e-3)),
        },
        "clip_by_norm": {OURS: optaxclip.clip_by_norm(0.1)},
    }


def _clip(tx: optax.GradientTransformation, grads: PyTree, params: PyTree) -> tuple[PyTree, Any]:
    return tx.update(grads, tx.init(params), params)


def _leaf_by_leaf(clip: Callable[[Array, Array], Array]) -> optax.GradientTransformation:
    return optax.stateless(lambda grads, params: jax.tree.map(clip, grads, params))


def _unit_by_unit(clipping: float, grad: Array, param: Array) -> Array:
    axis = 0 if grad.ndim > 1 else None
    norm, of_param = (jnp.linalg.norm(x, axis=axis, keepdims=True) for x in (grad, param))
    limit = clipping * jnp.maximum(of_param, EPS)
    return grad * (limit / jnp.maximum(norm, limit))


def _by_rms(limit: float, grad: Array, param: Array) -> Array:
    del param
    return grad * (limit / jnp.maximum(jnp.sqrt(jnp.mean(jnp.square(grad))), limit))

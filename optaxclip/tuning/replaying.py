"""Rules that learn, tried on recorded norms."""

import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from optaxclip.transforms.adaptive import adagc, autoclip, clip_by_window_norm, zclip
from optaxclip.tuning.spread import Floats, Regime

WINDOW = 100
"""The window of AutoClip."""
MAX_REPLAYED = 10_000
"""Rules are tried on at most this many of the last norms."""
UNCHOSEN = "adagc()"
"""Nearly a clip with nothing to choose (docs/evidence.md)."""

Rule = Regime | Literal["unchosen"]


def replayed(
    norms: Floats, rule: Rule, warmup: int = 0, percent: float = 50.0
) -> tuple[float, float]:
    """The share of the last norms that the rule clips, and its threshold after the last norm.

    Args:
      norms: float64[steps], finite and positive.
      rule: the rule for a regime, or the one with nothing to choose.
      warmup: how many norms at the start do not count; the rule learns from them too.
      percent: AutoClip's percentile.
    """
    largest = np.finfo(np.float32).max
    gradients = jnp.asarray(np.minimum(norms[-MAX_REPLAYED:], largest), jnp.float32)
    clipped, thresholds = _replayed(gradients, jnp.float32(percent), rule=rule)
    counted = np.asarray(clipped)[max(warmup - (len(norms) - len(clipped)), 0) :]
    return float(np.mean(counted)), float(thresholds[-1])


@functools.partial(jax.jit, static_argnames="rule")
def _replayed(
    gradients: jax.Array, percent: jax.Array, *, rule: Rule
) -> tuple[jax.Array, jax.Array]:
    """Whether each step is clipped, and its threshold, for gradients [steps] of one entry each."""
    clip = {
        "stationary": lambda: autoclip(percent, WINDOW),
        "drifting": zclip,
        "stepped": clip_by_window_norm,
        "unchosen": adagc,
    }[rule]()

    def step(state: Any, gradient: jax.Array) -> tuple[Any, tuple[jax.Array, jax.Array]]:
        state = clip.update(gradient, state)[1]
        info = state.info
        return state, (info.fraction > 0, jnp.reshape(info.threshold, ()))

    return jax.lax.scan(step, clip.init(gradients[0]), gradients)[1]


def beside(threshold: float, other: float) -> str:
    """How far a threshold is from the other, in words."""
    ratio = other / threshold
    if 0.95 < ratio < 1.05:
        return "as the threshold here"
    return f"{max(ratio, 1 / ratio):.3g} times {'below' if ratio > 1 else 'above'} {other:g}"

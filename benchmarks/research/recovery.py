"""Measures how soon threshold rules adapt to a permanent increase of the norms.

Norms are lognormal with a log-std of 0.1, at level 1 for 1000 steps and then at level L for 4000
steps. The result is the number of steps until the mean multiplier over the next 50 steps is at
least 0.95. For rules that clip more by design (AutoClip at its 10th percentile, the quantile at the
median), it is 0.95 of their mean before the increase. "never" means not within 4000 steps.
Published settings are `patience=None, floor=0.0`, shown with the figures of methods.md, 5.1.

  python benchmarks/research/recovery.py
"""

import functools
import inspect
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from optaxclip import ThresholdRule, thresholds

BEFORE, AFTER, SPAN, ENOUGH = 1000, 4000, 50, 0.95
LEVELS = (2.0, 5.0, 50.0)
NEVER = math.inf


class Subject(NamedTuple):
    """A rule, the results of the original (methods.md, 5.1), and whether it skips steps."""

    make: Callable[..., ThresholdRule]
    original: tuple[float, ...] | None = None
    skips: bool = False

    def build_published(self) -> ThresholdRule:
        """Builds the rule with the published settings."""
        options = {"patience": None, "floor": 0.0}
        accepted = inspect.signature(self.make).parameters
        return self.make(**{name: options[name] for name in options if name in accepted})


def _bind_percentile(*numbers: float, **options: Any) -> Callable[..., ThresholdRule]:
    return functools.partial(thresholds.percentile, *numbers, **options)


def _bind_autoclip(percent: float) -> Callable[..., ThresholdRule]:
    return _bind_percentile(percent, 1000, inclusive=True, warmup_steps=0)


_ema = functools.partial(functools.partial, thresholds.ema)
_zscore = functools.partial(functools.partial, thresholds.zscore)
_LOCKED = (NEVER, NEVER, NEVER)
_ACCEPTED: dict[str, Any] = {"debias": True, "record": "accepted"}

SUBJECTS = {
    "AutoClip p10": Subject(_bind_autoclip(10.0)),
    "AutoClip p95": Subject(_bind_autoclip(95.0), (81, 58, 72)),
    "TRELLIS p95": Subject(thresholds.percentile, (87, 75, 73)),
    "ZClip": Subject(thresholds.zscore, _LOCKED),
    "ZClip mean": Subject(_zscore(option="mean"), _LOCKED),
    "ZClip spikes skipped": Subject(_zscore(record="accepted"), _LOCKED),
    "ZClip percentile": Subject(_zscore(option="percentile"), (6, 28, 66)),
    "AdaGC .98 1.05": Subject(
        functools.partial(thresholds.adagc, 1.05, beta=0.98), (649, 1596, 3872)
    ),
    "AdaGC .99 1.04": Subject(thresholds.adagc, (1703, NEVER, NEVER)),
    "OLMo ratio 2": Subject(_ema(skip_steps=1), (0, 8, 56)),
    "PDE-Transformer": Subject(
        _ema(0.99, 2.0, target_decay=0.9, target_ratio=1.1, debias=True), (1, 130, 362)
    ),
    "ScaledAdam": Subject(thresholds.median, (0, 95, 97)),
    "Levanter": Subject(thresholds.window, (0, 2, 4)),
    "OLMo-core": Subject(
        functools.partial(thresholds.window, 6.0, ddof=1, min_std=0.0, warmup_steps=63),
        (1, 3, 3),
        skips=True,
    ),
    "axlearn mean": Subject(_ema(0.99, 20.0, **_ACCEPTED), (0, 0, NEVER), skips=True),
    "axlearn stddev": Subject(
        _zscore(0.99, 6.0, 500, option="percentile", **_ACCEPTED), (77, NEVER, NEVER), skips=True
    ),
    "Lingvo": Subject(thresholds.log_tracker, (20, 41, 72), skips=True),
    "quantile": Subject(thresholds.quantile),
}
"""The rules by their names in methods.md. Windows contain 1000, 100 (ScaledAdam) or 128 norms."""


def draw_norms(levels: Any = LEVELS, seed: int = 0) -> jax.Array:
    """Draws norms [levels, steps]."""
    noise = np.exp(0.1 * np.random.default_rng(seed).normal(size=BEFORE + AFTER + SPAN))
    is_after = np.arange(noise.size) >= BEFORE
    return jnp.asarray([np.where(is_after, level, 1) * noise for level in levels], jnp.float32)


@functools.partial(jax.jit, static_argnames="skips")
@functools.partial(jax.vmap, in_axes=(None, 0, None))
def compute_multipliers(rule: ThresholdRule, norms: jax.Array, skips: bool = False) -> jax.Array:
    """Computes the multipliers of all steps."""

    def step(state: Any, norm: jax.Array) -> tuple[Any, jax.Array]:
        threshold_values, state = rule.update(norm, state, None)
        target = jnp.zeros_like(norm) if skips else jnp.minimum(threshold_values.target, norm)
        return state, jnp.where(norm > threshold_values.trigger, target, norm) / norm

    return jax.lax.scan(step, rule.init(norms[0]), norms)[1]


def count_recovery_steps(
    rule: ThresholdRule, levels: Any = LEVELS, *, skips: bool = False
) -> list[float]:
    """Returns the number of steps until the multiplier has recovered for every level."""
    found = []
    for values in np.asarray(compute_multipliers(rule, draw_norms(levels), skips), np.float64):
        before = values[BEFORE // 2 : BEFORE].mean()
        target_multiplier = ENOUGH if before >= ENOUGH else ENOUGH * before
        means = np.convolve(values[BEFORE:], np.ones(SPAN) / SPAN, "valid")
        found.append(
            float(np.argmax(means >= target_multiplier))
            if np.any(means >= target_multiplier)
            else NEVER
        )
    return found


def _format_steps(figures: Any) -> str:
    if figures is None:
        return " | ".join("" for _ in LEVELS)
    return " | ".join("never" if figure == NEVER else f"{figure:.0f}" for figure in figures)


def main() -> None:
    """Prints the table."""
    kinds = ("defaults", "published", "original")
    print("| rule |", " | ".join(f"{kind}, L={level:g}" for kind in kinds for level in LEVELS), "|")
    print("|---" * (1 + len(kinds) * len(LEVELS)) + "|")
    for name, subject in SUBJECTS.items():
        columns = [
            _format_steps(count_recovery_steps(subject.make(), skips=subject.skips)),
            _format_steps(count_recovery_steps(subject.build_published(), skips=subject.skips)),
            _format_steps(subject.original),
        ]
        print(f"| {name} |", " | ".join(columns), "|", flush=True)


if __name__ == "__main__":
    main()

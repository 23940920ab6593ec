"""Guards with nothing to choose: the rules that are judged, beside constants, in one program.

Compiling takes most of the time of a small study, so the rule of a run is data, as its seed is.
"""

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array

import optaxclip
from benchmarks.research.study.methods import Method, Setting, chain, watched
from optaxclip import Limits, Threshold, scopes, thresholds
from optaxclip.ops import global_norm
from optaxclip.thresholds.moving import weight

DECAY, MOST = 0.99, 4.0


class _Settings(NamedTuple):
    share: Any


@dataclasses.dataclass(frozen=True)
class _Average:
    """The mean of the norms at first, then their moving average.

    A norm counts as at most `MOST` times the average, so that a spike hardly lifts it.
    """

    def init(self, settings: Any, like: Array) -> Array:
        del settings
        return jnp.zeros(like.shape, jnp.float32)

    def observe(self, settings: Any, state: Array, norm: Array, count: Array) -> Array:
        del settings
        counted = jnp.where(count == 0, norm, jnp.minimum(norm, MOST * state))
        return state + weight(DECAY, count, debias=True) * (counted - state)

    def limits(self, settings: _Settings, state: Array, norm: Array, count: Array) -> Limits:
        del norm
        limit = jnp.where(count == 0, jnp.inf, settings.share * state)
        return Limits(limit, limit)


def share_of_average(share: float) -> Threshold:
    """That share of the average, which does not depend on what is clipped."""
    return thresholds.adaptive(_Average(), _Settings(share), record="raw", patience=None)


RULES: dict[str, Threshold] = {
    "AdaGC": thresholds.adagc(),
    "AdaGC, own start": thresholds.ema(0.99, 1.04),
    "half the average": share_of_average(0.5),
    "a quarter of it": share_of_average(0.25),
}
"""By name; each clips by leaf, and has no constant that depends on the task or the optimizer."""
NO_CLIP = np.inf


def number(rule: str) -> float:
    """What a program takes in place of a limit, to clip by a rule: a number below 0."""
    return -1.0 - list(RULES).index(rule)


def chosen(limit: Array) -> Threshold:
    """A constant limit of the global norm, or, if it is below 0, the rule of this `number`."""
    rules = tuple(RULES.values())

    def update(norms: Any, state: Any, param_norms: Any) -> Any:
        found = [
            rule.update(norms, each, param_norms) for rule, each in zip(rules, state, strict=True)
        ]
        shrunk = norms * jnp.minimum(1.0, limit / jnp.maximum(global_norm(norms), 1e-30))
        constant = jnp.where(jnp.isinf(limit), jnp.inf, shrunk)
        limits = jnp.stack([constant, *(each.trigger for each, _ in found)])
        now = limits[jnp.maximum(-limit, 0.0).astype(jnp.int32)]
        return Limits(now, now), tuple(each for _, each in found)

    return Threshold(lambda norms: tuple(rule.init(norms) for rule in rules), update)


def _guarded(of: Setting) -> Any:
    clip = watched(optaxclip.clip_by(scopes.leaf(), chosen(of.limit)))
    return optaxclip.skip_nonfinite(chain(of, clip), max_consecutive=20)


GUARDED = Method(_guarded)
"""Constants are inside of `skip_nonfinite` too, as it costs them nothing."""

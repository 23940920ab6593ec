"""Guards with nothing to choose: what they are made of, each part tried by itself.

AdaGC and a small multiple of the running median lose the fewest runs of all methods. `PARTS` takes
both apart, and puts the parts together in other ways; `CANDIDATES` are judged.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array

import optaxclip
from benchmarks.research.study.methods import Method, Setting, before, chain, watched
from optaxclip import Limits, Threshold, scopes, thresholds

FINAL: dict[str, Any] = {"lambda_rel": 1.04, "beta": 0.99, "patience": None}
"""AdaGC's constants in its last version."""
WINDOW = 100
"""Norms of which percentiles are taken."""


def _adagc() -> Threshold:
    return thresholds.adagc(**FINAL)


def _average(ratio: float = FINAL["lambda_rel"], **options: Any) -> Threshold:
    """AdaGC's rule without its warm-up."""
    return thresholds.ema(FINAL["beta"], ratio, patience=None, **options)


def never_rises(percentile: float) -> Threshold:
    """A percentile of the norms after their clip, so that no limit is above all earlier ones."""
    return thresholds.percentile(
        percentile, WINDOW, record="clipped", warmup_steps=0, patience=None
    )


def rises_slowly(power: Callable[[Array], Any], percentile: float) -> Threshold:
    """A percentile of the last norms; in `t` steps a limit rises no faster than `t**power`."""
    rule = thresholds.percentile(percentile, WINDOW, inclusive=True, warmup_steps=0, patience=None)

    def init(norms: Any) -> Any:
        return rule.init(norms), jax.tree.map(lambda x: jnp.full_like(x, jnp.inf), norms), 0

    def update(norms: Any, state: Any, param_norms: Any) -> Any:
        inner, before, count = state
        limits, inner = rule.update(norms, inner, param_norms)
        count = count + 1
        most = jax.tree.map(lambda x: x * (1 + power(count) / count), before)
        new = jax.tree.map(jnp.minimum, limits.trigger, most)
        return Limits(new, new), (inner, new, count)

    return Threshold(init, update)


def _raised(norm: Array, trigger: Array, target: Array) -> Array:
    """Brings a norm above the trigger to the target, be that lower or higher."""
    return jnp.where((norm <= trigger) | jnp.isinf(target), norm, target)


def _times(rule: Threshold, trigger: Callable[[Any], Any], target: Callable[[Any], Any]) -> Any:
    """The rule, its limits multiplied by functions of the step."""

    def init(norms: Any) -> Any:
        return rule.init(norms), jnp.zeros((), jnp.int32)

    def update(norms: Any, state: Any, param_norms: Any) -> Any:
        inner, count = state
        limits, inner = rule.update(norms, inner, param_norms)
        each = (limits.trigger, trigger(count)), (limits.target, target(count))
        scaled = (jax.tree.map(lambda x, by=by: x * by, limit) for limit, by in each)
        return Limits(*scaled), (inner, count + 1)

    return Threshold(init, update)


def _by(scope: Any, rule: Callable[[], Threshold], **options: Any) -> Method:
    return Method(before(lambda: optaxclip.clip_by(scope, rule(), **options)))


def _median(scale: float) -> Threshold:
    return thresholds.median(scale, every_step=True)


def _with_the_rate(of: Setting) -> Any:
    """An eighth of the median at the full rate, the median where the rate is 0."""

    def scale(count: Array) -> Array:
        return 8.0 ** -of.share(count)

    rule = _times(_median(1.0), scale, scale)
    return chain(of, watched(optaxclip.clip_by(scopes.tree(), rule)))


def _restored(rule: Callable[[], Threshold]) -> Method:
    """Norms above an eighth of the limit become the limit."""
    return _by(
        scopes.tree(),
        lambda: _times(rule(), lambda _: 1 / 8, lambda _: 1.0),
        response=_raised,
    )


def _capped() -> optax.GradientTransformation:
    median = optaxclip.clip_by(scopes.tree(), _median(1.0))
    return optax.chain(median, optaxclip.adagc(**FINAL))


LEAF, TREE = scopes.leaf(), scopes.tree()


def _never_rises(percentile: float) -> Callable[[], Threshold]:
    return functools.partial(never_rises, percentile)


def _slowly(power: float, percentile: float) -> Callable[[], Threshold]:
    return functools.partial(rises_slowly, lambda _: power, percentile)


def _for_100_steps() -> Threshold:
    return rises_slowly(lambda count: jnp.where(count <= 100, 1e6, 0.0), 50.0)


PARTS: dict[str, Method] = {
    "AdaGC, one norm": _by(TREE, _adagc),
    "AdaGC, no warm-up": _by(LEAF, _average),
    "AdaGC, one norm, no warm-up": _by(TREE, _average),
    "AdaGC, no warm-up, raw norms": _by(LEAF, functools.partial(_average, record="raw")),
    "AdaGC, one norm, no warm-up, raw": _by(TREE, functools.partial(_average, record="raw")),
    "AdaGC, no warm-up, twice": _by(LEAF, functools.partial(_average, 2.0)),
    "AdaGC below the median": Method(before(_capped)),
    "median 1": _by(TREE, functools.partial(_median, 1.0)),
    "median 1/2": _by(TREE, functools.partial(_median, 1 / 2)),
    "median 1/8": _by(TREE, functools.partial(_median, 1 / 8)),
    "median 1/32": _by(TREE, functools.partial(_median, 1 / 32)),
    "median 1/8, by leaf": _by(LEAF, functools.partial(_median, 1 / 8)),
    "median 1/8, rising to 1": Method(_with_the_rate),
    "median 1, restored": _restored(functools.partial(_median, 1.0)),
    "never rises, 25": _by(TREE, _never_rises(25.0)),
    "never rises, 50": _by(TREE, _never_rises(50.0)),
    "never rises, 75": _by(TREE, _never_rises(75.0)),
    "never rises, 90": _by(TREE, _never_rises(90.0)),
    "never rises, 50, by leaf": _by(LEAF, _never_rises(50.0)),
    "never rises, 50, restored": _restored(_never_rises(50.0)),
    "rises as t, 50": _by(TREE, _slowly(1.0, 50.0)),
    "rises as t, 75": _by(TREE, _slowly(1.0, 75.0)),
    "rises as t, 50, by leaf": _by(LEAF, _slowly(1.0, 50.0)),
    "rises as t, 65, by leaf": _by(LEAF, _slowly(1.0, 65.0)),
    "rises as t, 75, by leaf": _by(LEAF, _slowly(1.0, 75.0)),
    "rises as t ** 0.5, 50, by leaf": _by(LEAF, _slowly(0.5, 50.0)),
    "rises as t ** 0.5, 75, by leaf": _by(LEAF, _slowly(0.5, 75.0)),
    "rises as t ** 2, 50, by leaf": _by(LEAF, _slowly(2.0, 50.0)),
    "rises for 100 steps, 50, by leaf": _by(LEAF, _for_100_steps),
}


def _guarded(rule: Callable[[], Threshold]) -> Method:
    def make(of: Setting) -> Any:
        clip = watched(optaxclip.clip_by(scopes.leaf(), rule()))
        return optaxclip.skip_nonfinite(chain(of, clip), max_consecutive=20)

    return Method(make)


CANDIDATES: dict[str, Method] = {
    "AdaGC (final), guarded": _guarded(_adagc),
    "never rises": _guarded(_never_rises(50.0)),
    "rises slowly, 65": _guarded(_slowly(1.0, 65.0)),
    "rises slowly, 75": _guarded(_slowly(1.0, 75.0)),
}
"""What may become a guard, as `benchmarks/research/guard.md` says."""

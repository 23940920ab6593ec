"""Defines the compared methods with their defaults and, if different, the settings of their papers.

Methods add a stage before or after the direction of an optimizer, or wrap it. Constant thresholds
are determined by the study, and are inputs of the programs.
"""

import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

import optaxclip
from optaxclip import per_example, scopes, thresholds

Step = optax.GradientTransformation


class Setting(NamedTuple):
    """The inputs of a method.

    Attributes:
      direction: The first part of the optimizer, as in `Optimizer`.
      finish: The second part of the optimizer.
      share: The learning rate of a step divided by the largest learning rate.
      threshold: The threshold of a constant method, float32[].
      noise: The noise of the task, or 0 for non-private training.
      key: The key of the noise.
      examples: The number of examples in a batch.
    """

    direction: Step
    finish: Step
    share: optax.Schedule
    threshold: Array
    noise: float
    key: Array
    examples: int


Make = Callable[[Setting], Step]


class Method(NamedTuple):
    """A method that safeguards an optimizer.

    Attributes:
      make: Builds the complete optimizer.
      threshold: "best" for a sweep, "suggest" for `tuning.suggest`, or None without a constant.
      only: The compatible optimizers, or all if empty.
      microbatches: Whether to accumulate microbatches, which are clipped separately if there is a
        threshold, and rejected if non-finite.
      is_scaled: Whether to multiply the loss by the loss scale in the state.
    """

    make: Make
    threshold: Literal["best", "suggest"] | None = None
    only: tuple[str, ...] = ()
    microbatches: bool = False
    is_scaled: bool = False


class Watched(NamedTuple):
    """The state of a stage, and the number of steps with changed updates, int32[]."""

    inner: Any
    changed: Array


def watched(stage: Step) -> Step:
    """Wraps a stage and counts the steps that it changes, where NaN equals NaN."""
    stage = optax.with_extra_args_support(stage)

    def update(updates: Any, state: Watched, params: Any = None, **extra: Any) -> Any:
        new, inner = stage.update(updates, state.inner, params, **extra)
        is_new = jax.tree.map(
            lambda a, b: jnp.any((a != b) & ~(jnp.isnan(a) & jnp.isnan(b))), updates, new
        )
        changed = functools.reduce(jnp.logical_or, jax.tree.leaves(is_new))
        return new, Watched(inner, state.changed + changed)

    zero = functools.partial(jnp.zeros, (), jnp.int32)
    return optax.GradientTransformationExtraArgs(lambda p: Watched(stage.init(p), zero()), update)


COUNTERS: dict[type, Callable[[Any], Array]] = {
    Watched: lambda state: state.changed,
    optaxclip.SkipState: lambda state: state.num_skipped,
    optaxclip.StableAdamState: lambda state: state.clip.info.num_clipped.max(),
    # Per-example clipping only counts examples of the last step.
    per_example.PerExampleState: lambda state: jnp.full((), -1, jnp.int32),
}
"""Functions that return the number of changed steps from a state, or -1 if unknown."""


def steps_changed(state: Any) -> Array:
    """Returns the number of steps that the method changed, int32[], or -1 if unknown.

    Stages in a skip take precedence over the skip.
    """
    for kinds in ((Watched,), COUNTERS):

        def is_counted(x: Any, kinds: Any = kinds) -> bool:
            return type(x) in kinds

        for x in jax.tree.leaves(state, is_leaf=is_counted):
            if is_counted(x):
                return COUNTERS[type(x)](x)
    return jnp.zeros((), jnp.int32)


def _front(stage: Callable[[Array], Step]) -> Make:
    """Adds a stage with a threshold before the optimizer."""
    return lambda of: chain(of, watched(stage(of.threshold)))


def chain(of: Setting, stage: Step) -> Step:
    """Chains a stage and the optimizer."""
    return optax.chain(stage, of.direction, of.finish)


def before(stage: Callable[[], Step]) -> Make:
    return _front(lambda threshold: stage())


def _behind(stage: Callable[[], Step]) -> Make:
    """Adds a stage between the direction and the learning rate."""
    return lambda of: optax.chain(of.direction, watched(stage()), of.finish)


def _around(wrap: Callable[[Step], Step]) -> Make:
    return lambda of: wrap(_plain(of))


def _plain(of: Setting) -> Step:
    return optax.chain(of.direction, of.finish)


def _skip(inner: Step) -> Step:
    rule = thresholds.window(6.0, 128)
    return optaxclip.skip_above(inner, rule, loss_threshold=rule)


def _stable_adam(of: Setting) -> Step:
    return optax.chain(optaxclip.scale_by_stable_adam(b2=0.999), of.finish)


def _but_the_head(params: Any) -> Any:
    return jax.tree.map_with_path(lambda path, _: "head" not in jax.tree_util.keystr(path), params)


def _stable_spam() -> Step:
    return optax.chain(optaxclip.clip_by_moving_max(), optaxclip.normalize_by_norm_history())


def _autoclip(percentile: float, only: tuple[str, ...] = ()) -> Method:
    clip = functools.partial(optaxclip.autoclip, percentile)
    return Method(before(clip), only=only)


METHODS: dict[str, Method] = {
    "none": Method(_plain),
    "constant (best)": Method(
        _front(optaxclip.clip_by_global_norm),
        "best",
    ),
    "constant (suggest)": Method(
        _front(optaxclip.clip_by_global_norm),
        "suggest",
    ),
    "constant, zero": Method(
        _front(functools.partial(optaxclip.clip_by_global_norm, nonfinite="zero")),
        "suggest",
    ),
    "block RMS": Method(
        _behind(lambda: optaxclip.clip_by_block_rms(1.0)),
    ),
    "AGC": Method(before(lambda: optaxclip.adaptive_grad_clip(0.01))),
    "AGC (paper)": Method(
        before(lambda: optax.masked(optaxclip.adaptive_grad_clip(0.16), _but_the_head)),
    ),
    "AutoClip": Method(before(optaxclip.autoclip)),
    "AutoClip 1": _autoclip(1.0, only=("adamw",)),
    "AutoClip 25": _autoclip(25.0, only=("adamw",)),
    "AutoClip 50": _autoclip(50.0, only=("adamw",)),
    "AutoClip 90": _autoclip(90.0),
    "ZClip": Method(before(optaxclip.zclip)),
    "ZClip (paper)": Method(
        before(lambda: optaxclip.zclip(max_norm=1.0, patience=None, floor=0.0)),
    ),
    "quantile": Method(before(optaxclip.clip_by_quantile)),
    "median": Method(before(optaxclip.clip_by_median_norm)),
    "window": Method(before(optaxclip.clip_by_window_norm)),
    "log tracker": Method(
        before(lambda: optaxclip.clip_by(scopes.tree(), thresholds.log_tracker())),
    ),
    "AdaGC": Method(
        before(lambda: optaxclip.adagc(lambda_rel=1.05, beta=0.98, patience=None)),
    ),
    "AdaGC (final)": Method(before(lambda: optaxclip.adagc(patience=None))),
    "EMA": Method(before(optaxclip.clip_by_ema_norm)),
    "moving max": Method(before(optaxclip.clip_by_moving_max)),
    "second moment": Method(before(optaxclip.clip_by_second_moment)),
    "Stable-SPAM": Method(before(_stable_spam)),
    "stable Adam": Method(_stable_adam, only=("adamw",)),
    "normalize": Method(before(optaxclip.normalize_by_global_norm)),
    "normalize by history": Method(before(optaxclip.normalize_by_norm_history)),
    "spectral": Method(before(lambda: optaxclip.clip_by_spectral_norm(1.0))),
    "skip non-finite": Method(_around(optaxclip.skip_nonfinite)),
    "skip above": Method(_around(_skip)),
    "microbatches": Method(_plain, microbatches=True),
    "microbatches, clipped": Method(
        _plain,
        "suggest",
        microbatches=True,
    ),
}


def _aggregate(of: Setting, threshold: Any, **options: Any) -> Step:
    return optaxclip.per_example_clip_and_aggregate(threshold, of.noise, of.key, **options)


def _of_examples(
    threshold: Callable[[Setting], Any] = lambda of: of.threshold, **options: Any
) -> Make:
    """Clips examples, sums them and adds noise before the optimizer."""
    return lambda of: optax.chain(_aggregate(of, threshold(of), **options), _plain(of))


def _behind_noise(stage: Callable[[], Step]) -> Make:
    return lambda of: optax.chain(_aggregate(of, of.threshold), watched(stage()), _plain(of))


def _quantile(of: Setting) -> Any:
    return per_example.quantile_threshold(count_noise=of.examples / 20)


def _mean(of: Setting) -> Step:
    mean = optax.stateless(lambda updates, _: jax.tree.map(lambda x: jnp.mean(x, 0), updates))
    return optax.chain(mean, _plain(of))


PRIVATE: dict[str, Method] = {
    "none": Method(_mean),
    "constant (best)": Method(_of_examples(), "best"),
    "quantile": Method(_of_examples(_quantile)),
    "normalize": Method(_of_examples(response="smooth"), "best"),
    "constant, leaf by leaf": Method(_of_examples(scope=scopes.leaf()), "best"),
    "constant, ZClip": Method(_behind_noise(optaxclip.zclip), "best"),
    "constant, AutoClip": Method(_behind_noise(optaxclip.autoclip), "best"),
}
"""The methods of the private task. All but the first clip examples and add noise."""


WITH_MUON = (
    *("none", "constant (best)", "constant (suggest)", "constant, zero", "block RMS", "AGC"),
    *("AutoClip", "ZClip", "quantile", "AdaGC", "normalize", "spectral"),
    *("skip non-finite", "skip above", "microbatches"),
)
"""One or two methods per kind, because Muon is slow and nearly insensitive to gradient scale."""

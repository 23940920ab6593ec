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

    `direction`, `finish` and `share` are as in `Optimizer`. `noise` is 0 for non-private training,
    and `examples` is the number of examples in a batch.
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


def count_changes(stage: Step) -> Step:
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


def get_num_changed(state: Any) -> Array:
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


def _prepend_clip(stage: Callable[[Array], Step]) -> Make:
    """Adds a stage with a threshold before the optimizer."""
    return lambda setting: chain(setting, count_changes(stage(setting.threshold)))


def chain(setting: Setting, stage: Step) -> Step:
    """Chains a stage and the optimizer."""
    return optax.chain(stage, setting.direction, setting.finish)


def prepend(stage: Callable[[], Step]) -> Make:
    return _prepend_clip(lambda threshold: stage())


def _append(stage: Callable[[], Step]) -> Make:
    """Adds a stage between the direction and the learning rate."""
    return lambda setting: optax.chain(setting.direction, count_changes(stage()), setting.finish)


def _wrap_optimizer(wrap: Callable[[Step], Step]) -> Make:
    return lambda setting: wrap(_chain(setting))


def _chain(setting: Setting) -> Step:
    return optax.chain(setting.direction, setting.finish)


def _skip(inner: Step) -> Step:
    rule = thresholds.window(6.0, 128)
    return optaxclip.skip_above(inner, rule, loss_threshold=rule)


def _chain_stable_adam(setting: Setting) -> Step:
    return optax.chain(optaxclip.scale_by_stable_adam(b2=0.999), setting.finish)


def _exclude_head(params: Any) -> Any:
    return jax.tree.map_with_path(lambda path, _: "head" not in jax.tree_util.keystr(path), params)


def _chain_stable_spam() -> Step:
    return optax.chain(optaxclip.clip_by_moving_max(), optaxclip.normalize_by_norm_history())


def _build_autoclip(percentile: float, only: tuple[str, ...] = ()) -> Method:
    clip = functools.partial(optaxclip.autoclip, percentile)
    return Method(prepend(clip), only=only)


METHODS: dict[str, Method] = {
    "none": Method(_chain),
    "constant (best)": Method(_prepend_clip(optaxclip.clip_by_global_norm), "best"),
    "constant (suggest)": Method(_prepend_clip(optaxclip.clip_by_global_norm), "suggest"),
    "constant, zero": Method(
        _prepend_clip(functools.partial(optaxclip.clip_by_global_norm, nonfinite="zero")), "suggest"
    ),
    "block RMS": Method(_append(lambda: optaxclip.clip_by_block_rms(1.0))),
    "AGC": Method(prepend(lambda: optaxclip.adaptive_grad_clip(0.01))),
    "AGC (paper)": Method(
        prepend(lambda: optax.masked(optaxclip.adaptive_grad_clip(0.16), _exclude_head))
    ),
    "AutoClip": Method(prepend(optaxclip.autoclip)),
    "AutoClip 1": _build_autoclip(1.0, only=("adamw",)),
    "AutoClip 25": _build_autoclip(25.0, only=("adamw",)),
    "AutoClip 50": _build_autoclip(50.0, only=("adamw",)),
    "AutoClip 90": _build_autoclip(90.0),
    "ZClip": Method(prepend(optaxclip.zclip)),
    "ZClip (paper)": Method(
        prepend(lambda: optaxclip.zclip(max_norm=1.0, patience=None, floor=0.0))
    ),
    "quantile": Method(prepend(optaxclip.clip_by_quantile)),
    "median": Method(prepend(optaxclip.clip_by_median_norm)),
    "window": Method(prepend(optaxclip.clip_by_window_norm)),
    "log tracker": Method(
        prepend(lambda: optaxclip.clip_by(scopes.tree(), thresholds.log_tracker()))
    ),
    "AdaGC": Method(prepend(lambda: optaxclip.adagc(lambda_rel=1.05, beta=0.98, patience=None))),
    "AdaGC (final)": Method(prepend(lambda: optaxclip.adagc(patience=None))),
    "EMA": Method(prepend(optaxclip.clip_by_ema_norm)),
    "moving max": Method(prepend(optaxclip.clip_by_moving_max)),
    "second moment": Method(prepend(optaxclip.clip_by_second_moment)),
    "Stable-SPAM": Method(prepend(_chain_stable_spam)),
    "stable Adam": Method(_chain_stable_adam, only=("adamw",)),
    "normalize": Method(prepend(optaxclip.normalize_by_global_norm)),
    "normalize by history": Method(prepend(optaxclip.normalize_by_norm_history)),
    "spectral": Method(prepend(lambda: optaxclip.clip_by_spectral_norm(1.0))),
    "skip non-finite": Method(_wrap_optimizer(optaxclip.skip_nonfinite)),
    "skip above": Method(_wrap_optimizer(_skip)),
    "microbatches": Method(_chain, microbatches=True),
    "microbatches, clipped": Method(_chain, "suggest", microbatches=True),
}


def _aggregate(setting: Setting, threshold: Any, **options: Any) -> Step:
    return optaxclip.per_example_clip_and_aggregate(
        threshold, setting.noise, setting.key, **options
    )


def _clip_examples(
    threshold: Callable[[Setting], Any] = lambda setting: setting.threshold, **options: Any
) -> Make:
    """Clips examples, sums them and adds noise before the optimizer."""
    return lambda setting: optax.chain(
        _aggregate(setting, threshold(setting), **options), _chain(setting)
    )


def _clip_after_noise(stage: Callable[[], Step]) -> Make:
    return lambda setting: optax.chain(
        _aggregate(setting, setting.threshold), count_changes(stage()), _chain(setting)
    )


def _build_quantile(setting: Setting) -> Any:
    return per_example.quantile_threshold(count_noise=setting.examples / 20)


def _average_examples(setting: Setting) -> Step:
    mean = optax.stateless(lambda updates, _: jax.tree.map(lambda x: jnp.mean(x, 0), updates))
    return optax.chain(mean, _chain(setting))


PRIVATE: dict[str, Method] = {
    "none": Method(_average_examples),
    "constant (best)": Method(_clip_examples(), "best"),
    "quantile": Method(_clip_examples(_build_quantile)),
    "normalize": Method(_clip_examples(response="smooth"), "best"),
    "constant, leaf by leaf": Method(_clip_examples(scope=scopes.leaf()), "best"),
    "constant, ZClip": Method(_clip_after_noise(optaxclip.zclip), "best"),
    "constant, AutoClip": Method(_clip_after_noise(optaxclip.autoclip), "best"),
}
"""The methods of the private task. All but the first clip examples and add noise."""


WITH_MUON = (
    *("none", "constant (best)", "constant (suggest)", "constant, zero", "block RMS", "AGC"),
    *("AutoClip", "ZClip", "quantile", "AdaGC", "normalize", "spectral"),
    *("skip non-finite", "skip above", "microbatches"),
)
"""One or two methods per kind, because Muon is slow and nearly insensitive to gradient scale."""

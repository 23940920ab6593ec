"""The methods that the study compares, each at its defaults and, where it differs, its paper's.

A method is what it makes of an optimizer: a stage in front of the direction, one behind it, or a
wrapper. If its threshold is a constant, the study finds it, and the program gets it as an input.
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
    """What a method gets.

    Attributes:
      direction: the optimizer's first half, as in `Optimizer`.
      finish: its second half.
      share: the learning rate of a step over the largest.
      threshold: float32[], of a method with a constant.
      noise: the task's; 0 where training is not private.
      key: for the noise.
      examples: how many are in a batch.
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
    """A way to guard an optimizer.

    Attributes:
      make: gives the whole optimizer.
      threshold: how the threshold is found: the best of a sweep, by `tuning.suggest`, or not at
        all.
      only: the optimizers that it goes with; any if empty.
      microbatches: whether the gradient is accumulated over microbatches, each clipped separately
        if there is one, and left out if it is not finite.
      is_scaled: whether the loss is multiplied by the number in the state of `scale_loss`.
    """

    make: Make
    threshold: Literal["best", "suggest"] | None = None
    only: tuple[str, ...] = ()
    microbatches: bool = False
    is_scaled: bool = False


class Watched(NamedTuple):
    """The state of a stage, and at how many steps it changed what it was given, int32[]."""

    inner: Any
    changed: Array


def watched(stage: Step) -> Step:
    """The stage, which counts the steps that it changed. NaN counts as equal to NaN."""
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
    # Clips of examples count examples, of the last step alone.
    per_example.PerExampleState: lambda state: jnp.full((), -1, jnp.int32),
}
"""Where the state of each stage has at how many steps it did something; -1 where it does not."""


def steps_changed(state: Any) -> Array:
    """At how many steps the method did something: int32[], -1 if that is not known.

    What is in a skip is asked first.
    """
    for kinds in ((Watched,), COUNTERS):

        def is_counted(x: Any, kinds: Any = kinds) -> bool:
            return type(x) in kinds

        for x in jax.tree.leaves(state, is_leaf=is_counted):
            if is_counted(x):
                return COUNTERS[type(x)](x)
    return jnp.zeros((), jnp.int32)


def _front(stage: Callable[[Array], Step]) -> Make:
    """A stage before the optimizer."""
    return lambda of: chain(of, watched(stage(of.threshold)))


def chain(of: Setting, stage: Step) -> Step:
    """A stage, and the optimizer behind it."""
    return optax.chain(stage, of.direction, of.finish)


def before(stage: Callable[[], Step]) -> Make:
    return _front(lambda threshold: stage())


def _behind(stage: Callable[[], Step]) -> Make:
    """A stage between the direction and the learning rate."""
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
    """Examples are clipped, added up and get noise; the rest is as always."""
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
"""What the private task compares: every one but the first bounds each example and adds noise."""


WITH_MUON = (
    *("none", "constant (best)", "constant (suggest)", "constant, zero", "block RMS", "AGC"),
    *("AutoClip", "ZClip", "quantile", "AdaGC", "normalize", "spectral"),
    *("skip non-finite", "skip above", "microbatches"),
)
"""One or two of each kind, as Muon hardly minds the size of gradients and takes the longest."""

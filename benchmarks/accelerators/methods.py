"""Builds AdamW steps with the methods of optaxclip and their closest equivalents in Optax."""

import functools
from collections.abc import Callable

import optax

import optaxclip
from benchmarks.every_method import OF_GRADIENTS, OF_PARAMETERS
from optaxclip import monitor

OURS, THEIRS, NONE = "optaxclip", "Optax", "no clip"
Step = optax.GradientTransformation
# Builds a step from options for the mesh.
Build = Callable[..., Step]


def build_adamw() -> Step:
    """Returns the optimizer of all steps."""
    return optax.adamw(1e-3)


def _chain_adamw(clip: Callable[..., Step], *arguments: object) -> Build:
    return lambda **options: optax.chain(clip(*arguments, **options), build_adamw())


def _chain_optax(clip: Callable[..., Step], *arguments: object) -> Build:
    return lambda: optax.chain(clip(*arguments), build_adamw())


def _chain_record(clip: Step, **options: object) -> Step:
    return optax.chain(monitor.record(**options), clip, build_adamw())


def _chain_statistics(*stats: str) -> Build:
    def build(**options: object) -> Step:
        record = monitor.record(stats=stats, **options)
        return optax.chain(record, optaxclip.clip_by_global_norm(1.0, **options), build_adamw())

    return build


def _wrap_skip(skip: Callable[..., Step], *threshold: float) -> Build:
    clipped = _chain_adamw(optaxclip.clip_by_global_norm, 1.0)
    return lambda **options: skip(clipped(**options), *threshold, **options)


def _chain_decay(direction: Step) -> Step:
    """Builds AdamW with another update direction."""
    decay = optax.add_decayed_weights(1e-4)
    return optax.chain(direction, decay, optax.scale_by_learning_rate(1e-3))


def _build_finite() -> Step:
    return optax.apply_if_finite(GLOBAL(), 5)


GLOBAL = _chain_optax(optax.clip_by_global_norm, 1.0)
METHODS: dict[str, tuple[Build, Build]] = {
    "global_norm": (_chain_adamw(optaxclip.clip_by_global_norm, 1.0), GLOBAL),
    "zclip": (_chain_adamw(optaxclip.zclip), GLOBAL),
    "autoclip": (_chain_adamw(optaxclip.autoclip), GLOBAL),
    "block_rms": (
        _chain_adamw(optaxclip.clip_by_block_rms, 1e-3),
        _chain_optax(optax.clip_by_block_rms, 1e-3),
    ),
    "adagc": (_chain_adamw(optaxclip.adagc), GLOBAL),
    "norm_history": (_chain_adamw(optaxclip.normalize_by_norm_history), GLOBAL),
    "moving_max": (_chain_adamw(optaxclip.clip_by_moving_max), GLOBAL),
    "second_moment": (
        lambda **_: optax.chain(optaxclip.clip_by_second_moment(), build_adamw()),
        GLOBAL,
    ),
    "stable_adam": (
        lambda **options: _chain_decay(optaxclip.scale_by_stable_adam(**options)),
        lambda: _chain_decay(optax.chain(optax.scale_by_adam(), optax.clip_by_block_rms(1.0))),
    ),
    "agc": (
        _chain_adamw(optaxclip.adaptive_grad_clip, 0.01),
        _chain_optax(optax.adaptive_grad_clip, 0.01),
    ),
    "agc_of_layers": (
        _chain_adamw(functools.partial(optaxclip.adaptive_grad_clip, axis=1), 0.01),
        _chain_optax(optax.adaptive_grad_clip, 0.01),
    ),
    "record": (
        lambda **options: _chain_record(optaxclip.clip_by_global_norm(1.0, **options), **options),
        GLOBAL,
    ),
    "histogram": (_chain_adamw(monitor.histogram), GLOBAL),
    "events": (
        lambda **options: monitor.events(
            optax.chain(optaxclip.clip_by_global_norm(1.0, **options), build_adamw()), **options
        ),
        GLOBAL,
    ),
    "events_of_leaves": (
        lambda **options: monitor.events(
            optax.chain(optaxclip.clip_by_block_rms(1e-3, **options), build_adamw()), **options
        ),
        GLOBAL,
    ),
    "events_of_skip": (
        lambda **options: monitor.events(
            _wrap_skip(optaxclip.skip_nonfinite)(**options), **options
        ),
        _build_finite,
    ),
    "statistics": (_chain_statistics(*OF_GRADIENTS), GLOBAL),
    "statistics_params": (_chain_statistics(*OF_GRADIENTS, *OF_PARAMETERS), GLOBAL),
    "scale_loss": (_wrap_skip(optaxclip.scale_loss), _build_finite),
    "skip_above": (_wrap_skip(optaxclip.skip_above, 1e3), _build_finite),
    "skip_nonfinite": (_wrap_skip(optaxclip.skip_nonfinite), _build_finite),
    "skip_record_zclip": (
        lambda **options: optaxclip.skip_nonfinite(
            _chain_record(optaxclip.zclip(**options), **options), **options
        ),
        _build_finite,
    ),
}

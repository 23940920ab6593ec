"""The methods: ours in an AdamW step, and what Optax has in its place."""

import functools
from collections.abc import Callable

import optax

import optaxclip
from benchmarks.every_method import OF_GRADIENTS, OF_PARAMETERS
from optaxclip import monitor

OURS, THEIRS, NONE = "optaxclip", "Optax", "no clip"
Step = optax.GradientTransformation
# A clip's, with what it is to know of the mesh, around or before the optimizer.
Build = Callable[..., Step]


def adamw() -> Step:
    """The optimizer of all steps."""
    return optax.adamw(1e-3)


def _before(clip: Callable[..., Step], *arguments: object) -> Build:
    return lambda **of_mesh: optax.chain(clip(*arguments, **of_mesh), adamw())


def _optax(clip: Callable[..., Step], *arguments: object) -> Build:
    return lambda: optax.chain(clip(*arguments), adamw())


def _recorded(clip: Step, **told: object) -> Step:
    return optax.chain(monitor.record(**told), clip, adamw())


def _statistics(*stats: str) -> Build:
    def build(**told: object) -> Step:
        record = monitor.record(stats=stats, **told)
        return optax.chain(record, optaxclip.clip_by_global_norm(1.0, **told), adamw())

    return build


def _skipping(skip: Callable[..., Step], *threshold: float) -> Build:
    clipped = _before(optaxclip.clip_by_global_norm, 1.0)
    return lambda **told: skip(clipped(**told), *threshold, **told)


def _stable_adamw(direction: Step) -> Step:
    """AdamW with another direction."""
    decay = optax.add_decayed_weights(1e-4)
    return optax.chain(direction, decay, optax.scale_by_learning_rate(1e-3))


def _finite() -> Step:
    return optax.apply_if_finite(GLOBAL(), 5)


GLOBAL, FINITE = _optax(optax.clip_by_global_norm, 1.0), _finite
METHODS: dict[str, tuple[Build, Build]] = {
    "global_norm": (_before(optaxclip.clip_by_global_norm, 1.0), GLOBAL),
    "zclip": (_before(optaxclip.zclip), GLOBAL),
    "autoclip": (_before(optaxclip.autoclip), GLOBAL),
    "block_rms": (
        _before(optaxclip.clip_by_block_rms, 1e-3),
        _optax(optax.clip_by_block_rms, 1e-3),
    ),
    "adagc": (_before(optaxclip.adagc), GLOBAL),
    "norm_history": (_before(optaxclip.normalize_by_norm_history), GLOBAL),
    "moving_max": (_before(optaxclip.clip_by_moving_max), GLOBAL),
    "second_moment": (lambda **_: optax.chain(optaxclip.clip_by_second_moment(), adamw()), GLOBAL),
    "stable_adam": (
        lambda **told: _stable_adamw(optaxclip.scale_by_stable_adam(**told)),
        lambda: _stable_adamw(
            optax.chain(optax.scale_by_adam(), optax.clip_by_block_rms(1.0)),
        ),
    ),
    "agc": (
        _before(optaxclip.adaptive_grad_clip, 0.01),
        _optax(optax.adaptive_grad_clip, 0.01),
    ),
    "agc_of_layers": (
        _before(functools.partial(optaxclip.adaptive_grad_clip, axis=1), 0.01),
        _optax(optax.adaptive_grad_clip, 0.01),
    ),
    "record": (
        lambda **told: _recorded(optaxclip.clip_by_global_norm(1.0, **told), **told),
        GLOBAL,
    ),
    "histogram": (_before(monitor.histogram), GLOBAL),
    "events": (
        lambda **told: monitor.events(
            optax.chain(optaxclip.clip_by_global_norm(1.0, **told), adamw()), **told
        ),
        GLOBAL,
    ),
    "events_of_leaves": (
        lambda **told: monitor.events(
            optax.chain(optaxclip.clip_by_block_rms(1e-3, **told), adamw()), **told
        ),
        GLOBAL,
    ),
    "events_of_skip": (
        lambda **told: monitor.events(_skipping(optaxclip.skip_nonfinite)(**told), **told),
        FINITE,
    ),
    "statistics": (_statistics(*OF_GRADIENTS), GLOBAL),
    "statistics_params": (_statistics(*OF_GRADIENTS, *OF_PARAMETERS), GLOBAL),
    "scale_loss": (_skipping(optaxclip.scale_loss), FINITE),
    "skip_above": (_skipping(optaxclip.skip_above, 1e3), FINITE),
    "skip_nonfinite": (_skipping(optaxclip.skip_nonfinite), FINITE),
    "skip_record_zclip": (
        lambda **told: optaxclip.skip_nonfinite(_recorded(optaxclip.zclip(**told), **told), **told),
        FINITE,
    ),
}

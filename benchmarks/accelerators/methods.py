"""The methods: ours in an AdamW step, and what Optax has in its place."""

from collections.abc import Callable

import optax

import optaxclip
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


def _finite(*clips: Step) -> Step:
    return optax.apply_if_finite(optax.chain(*clips, adamw()), 5)


GLOBAL = _optax(optax.clip_by_global_norm, 1.0)
METHODS: dict[str, tuple[Build, Build]] = {
    "global_norm": (_before(optaxclip.clip_by_global_norm, 1.0), GLOBAL),
    "zclip": (_before(optaxclip.zclip), GLOBAL),
    "autoclip": (_before(optaxclip.autoclip), GLOBAL),
    "block_rms": (
        _before(optaxclip.clip_by_block_rms, 1e-3),
        _optax(optax.clip_by_block_rms, 1e-3),
    ),
    "adagc": (_before(optaxclip.adagc), GLOBAL),
    "agc": (
        _before(optaxclip.adaptive_grad_clip, 0.01),
        _optax(optax.adaptive_grad_clip, 0.01),
    ),
    "record": (
        lambda **m: optax.chain(
            monitor.record(**m), optaxclip.clip_by_global_norm(1.0, **m), adamw()
        ),
        GLOBAL,
    ),
    "skip_above": (
        lambda **m: optaxclip.skip_above(
            optax.chain(optaxclip.clip_by_global_norm(1.0, **m), adamw()), 1e3, **m
        ),
        lambda: _finite(optax.clip_by_global_norm(1.0)),
    ),
    "skip_nonfinite": (
        lambda **m: optaxclip.skip_nonfinite(
            optax.chain(optaxclip.clip_by_global_norm(1.0, **m), adamw()), **m
        ),
        lambda: _finite(optax.clip_by_global_norm(1.0)),
    ),
    "skip_record_zclip": (
        lambda **m: optaxclip.skip_nonfinite(
            optax.chain(monitor.record(**m), optaxclip.zclip(**m), adamw()), **m
        ),
        lambda: _finite(optax.clip_by_global_norm(1.0)),
    ),
}

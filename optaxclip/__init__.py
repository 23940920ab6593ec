"""optaxclip: gradient clipping for JAX.

The Optax transformations in this module have the names used by Optax and the papers. Most of them
call `clip_by` with objects from `scopes`, `norms`, `thresholds`, and `responses`. `ops` contains
TensorFlow's clipping functions for pytrees, `per_example` clips per-example gradients, and
`accumulate` accumulates gradients over microbatches.
"""

import typing as _typing

from optaxclip import (
    accumulate,
    monitor,
    norms,
    ops,
    per_example,
    plots,
    responses,
    scopes,
    thresholds,
    tuning,
)
from optaxclip._base.types import ClipInfo, ClipState, ThresholdRule, Thresholds
from optaxclip._engine.clip import clip_by, clip_tree
from optaxclip._engine.options import (
    ClipOptions,
    NormOptions,
    RescaleOptions,
    ShardingOptions,
    TransformOptions,
)
from optaxclip.per_example._aggregate import per_example_clip_and_aggregate
from optaxclip.per_example._clip_sum import (
    per_example_global_norm_clip,
    per_example_layer_norm_clip,
)
from optaxclip.transforms.adaptive import (
    adagc,
    autoclip,
    clip_by_ema_norm,
    clip_by_median_norm,
    clip_by_quantile,
    clip_by_window_norm,
    zclip,
)
from optaxclip.transforms.attention import Heads, clip_attention_logits
from optaxclip.transforms.elementwise import ClipByValueState, clip, clip_by_value
from optaxclip.transforms.loss_scale import LossScaleState, scale_loss
from optaxclip.transforms.norm_clips import (
    adaptive_grad_clip,
    clip_by_block_rms,
    clip_by_global_norm,
    clip_by_group_norm,
    clip_by_norm,
    normalize_by_global_norm,
    normalize_by_norm_history,
)
from optaxclip.transforms.second_moment import (
    SecondMomentState,
    clip_by_moving_max,
    clip_by_second_moment,
)
from optaxclip.transforms.skip import SkipState, skip_above, skip_nonfinite
from optaxclip.transforms.spectral import clip_by_spectral_norm
from optaxclip.transforms.stable_adam import StableAdamState, scale_by_stable_adam

__version__ = "0.1.0"

__all__ = [
    "ClipByValueState",
    "ClipInfo",
    "ClipOptions",
    "ClipState",
    "Heads",
    "LossScaleState",
    "NormOptions",
    "RescaleOptions",
    "SecondMomentState",
    "ShardingOptions",
    "SkipState",
    "StableAdamState",
    "ThresholdRule",
    "Thresholds",
    "TransformOptions",
    "__version__",
    "accumulate",
    "adagc",
    "adaptive_grad_clip",
    "autoclip",
    "clip",
    "clip_attention_logits",
    "clip_by",
    "clip_by_block_rms",
    "clip_by_ema_norm",
    "clip_by_global_norm",
    "clip_by_group_norm",
    "clip_by_median_norm",
    "clip_by_moving_max",
    "clip_by_norm",
    "clip_by_quantile",
    "clip_by_second_moment",
    "clip_by_spectral_norm",
    "clip_by_value",
    "clip_by_window_norm",
    "clip_tree",
    "monitor",
    "normalize_by_global_norm",
    "normalize_by_norm_history",
    "norms",
    "ops",
    "per_example",
    "per_example_clip_and_aggregate",
    "per_example_global_norm_clip",
    "per_example_layer_norm_clip",
    "plots",
    "responses",
    "scale_by_stable_adam",
    "scale_loss",
    "scopes",
    "skip_above",
    "skip_nonfinite",
    "thresholds",
    "tuning",
    "zclip",
]

_OTHER_LIBRARIES = {
    # PyTorch
    "clip_grad_norm_": "clip_by_global_norm(max_norm)",
    "clip_grad_value_": "clip(max_delta)",
    "clip_grads_with_norm_": "ops.clip_by_global_norm(grads, max_norm, use_norm=norm)",
    "get_total_norm": "ops.global_norm(grads)",
    "GradScaler": "scale_loss(optimizer)",
    # TensorFlow
    "clip_by_average_norm": "ops.clip_by_average_norm(grads, clip_norm)",
    "global_norm": "ops.global_norm(grads)",
    # Optax
    "apply_if_finite": "skip_nonfinite(optimizer, max_consecutive)",
    "differentially_private_aggregate": (
        "per_example_clip_and_aggregate(threshold, noise_multiplier, key)"
    ),
    "normalize_by_update_norm": "normalize_by_global_norm(norm)",
    "skip_large_updates": "skip_above(optimizer, threshold)",
    "skip_not_finite": "skip_nonfinite(optimizer)",
    "zero_nans": "clip_by_global_norm(max_norm, nonfinite='mask')",
}
"""The replacements for functions of other libraries."""

# Type checkers assume that a module with a `__getattr__` has all names.
if not _typing.TYPE_CHECKING:

    def __getattr__(name: str) -> _typing.NoReturn:
        """Raises an error that names the replacement for a function of another library."""
        message = f"module 'optaxclip' has no attribute {name!r}"
        if name not in _OTHER_LIBRARIES:
            raise AttributeError(message)
        # Without `obj`, Python does not suggest similar names.
        raise AttributeError(
            f"{message}; use optaxclip.{_OTHER_LIBRARIES[name]}", name=name, obj=None
        )


def __dir__() -> list[str]:
    """Returns the public names."""
    return __all__

"""optaxclip: gradient clipping for JAX.

At top level, Optax transformations by the names of Optax and of the papers, and the engine that all
of them are expressions over. In `ops`, TensorFlow's clipping functions over any pytree. In
`per_example`, the lift of the engine over the examples of a batch. In `accumulate`, gradients of
microbatches. In `scopes`, `norms`, `thresholds` and `responses`, the engine's parts.
"""

from optaxclip import accumulate as accumulate
from optaxclip import monitor as monitor
from optaxclip import norms as norms
from optaxclip import ops as ops
from optaxclip import per_example as per_example
from optaxclip import plots as plots
from optaxclip import responses as responses
from optaxclip import scopes as scopes
from optaxclip import thresholds as thresholds
from optaxclip import tuning as tuning
from optaxclip._base.types import ClipInfo as ClipInfo
from optaxclip._base.types import ClipState as ClipState
from optaxclip._base.types import Limits as Limits
from optaxclip._base.types import Threshold as Threshold
from optaxclip._engine.clip import clip_by as clip_by
from optaxclip._engine.clip import clip_tree as clip_tree
from optaxclip.config import from_config as from_config
from optaxclip.methods.adaptive import adagc as adagc
from optaxclip.methods.adaptive import clip_by_ema_norm as clip_by_ema_norm
from optaxclip.methods.adaptive import clip_by_quantile as clip_by_quantile
from optaxclip.methods.adaptive import zclip as zclip
from optaxclip.methods.attention import clip_attention_logits as clip_attention_logits
from optaxclip.methods.by_value import ClipByValueState as ClipByValueState
from optaxclip.methods.by_value import clip as clip
from optaxclip.methods.by_value import clip_by_value as clip_by_value
from optaxclip.methods.fixed import adaptive_grad_clip as adaptive_grad_clip
from optaxclip.methods.fixed import clip_by_global_norm as clip_by_global_norm
from optaxclip.methods.fixed import clip_by_group_norm as clip_by_group_norm
from optaxclip.methods.fixed import clip_by_norm as clip_by_norm
from optaxclip.methods.heads import Heads as Heads
from optaxclip.methods.normalizing import normalize_by_global_norm as normalize_by_global_norm
from optaxclip.methods.normalizing import normalize_by_norm_history as normalize_by_norm_history
from optaxclip.methods.skipping import SkipState as SkipState
from optaxclip.methods.skips import skip_above as skip_above
from optaxclip.methods.skips import skip_nonfinite as skip_nonfinite
from optaxclip.methods.spectral import clip_by_spectral_norm as clip_by_spectral_norm
from optaxclip.methods.spikes import SecondMomentState as SecondMomentState
from optaxclip.methods.spikes import clip_by_moving_max as clip_by_moving_max
from optaxclip.methods.spikes import clip_by_second_moment as clip_by_second_moment
from optaxclip.methods.stable_adam import StableAdamState as StableAdamState
from optaxclip.methods.stable_adam import scale_by_stable_adam as scale_by_stable_adam
from optaxclip.methods.updates import clip_by_block_rms as clip_by_block_rms
from optaxclip.methods.windowed import autoclip as autoclip
from optaxclip.methods.windowed import clip_by_median_norm as clip_by_median_norm
from optaxclip.methods.windowed import clip_by_window_norm as clip_by_window_norm
from optaxclip.per_example import (
    per_example_clip_and_aggregate as per_example_clip_and_aggregate,
)
from optaxclip.per_example import per_example_global_norm_clip as per_example_global_norm_clip
from optaxclip.per_example import per_example_layer_norm_clip as per_example_layer_norm_clip

__version__ = "0.1.0"


def __dir__() -> list[str]:
    """The names that this file imports; the rooms that they come from are not for users."""
    import ast
    import inspect
    import sys

    body = ast.parse(inspect.getsource(sys.modules[__name__])).body
    imports = (node for node in body if isinstance(node, ast.ImportFrom))
    return ["__version__", *sorted(alias.name for node in imports for alias in node.names)]

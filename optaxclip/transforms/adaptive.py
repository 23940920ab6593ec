"""Adaptive clipping methods from the literature.

These functions call `clip_by` with the rules and scopes of the papers. You can use other scopes.
For example, `clip_by(scopes.leaf(), thresholds.zscore())` applies ZClip to individual leaves.

By default, the rules recover from a permanent increase of the norms, and `zclip` does not limit its
threshold. To use the published rules, pass `patience=None, floor=0.0`, and `max_norm=1.0` for
`zclip`.

Arguments are keyword-only, because a number such as 1.0 in `zclip(1.0)` would look like a
threshold. `optaxclip.thresholds._adaptive` explains `floor` and `patience`.
"""

from typing import Unpack

import optaxclip.scopes as scopes
import optaxclip.thresholds as thresholds
from optaxclip._backend.global_view import Transformation
from optaxclip._base.types import ArrayLike, ClipState
from optaxclip._base.validation import validate_call
from optaxclip._engine.clip import clip_by
from optaxclip._engine.options import ClipOptions, NormOptions, document_options
from optaxclip.thresholds._adaptive import DEFAULT_FLOOR, DEFAULT_PATIENCE
from optaxclip.thresholds._averages import Option


@validate_call(transformation=True)
@document_options(ClipOptions)
def zclip(
    *,
    alpha: ArrayLike = 0.97,
    z_thresh: ArrayLike = 2.5,
    warmup_steps: int = 25,
    max_norm: ArrayLike | None = None,
    option: Option = "adaptive",
    floor: float = DEFAULT_FLOOR,
    patience: int | None = DEFAULT_PATIENCE,
    **options: Unpack[ClipOptions],
) -> Transformation[ClipState]:
    """Clips spikes of the global norm based on their z-scores (ZClip).

    The published rule records clipped norms, so it never recovers from a permanent increase of the
    norms. The option `patience` prevents this. The published code also limits thresholds to 1, so
    it is equivalent to `clip_by_global_norm(1.0)` if most norms exceed 1. By default, thresholds
    are not limited here, and no step is clipped during warmup.

    Source: Kumar, Owen, Roy Chowdhury, and Güra, 2025, ZClip, arXiv 2504.02507.

    Args:
      alpha: The decay of the mean and the variance.
      z_thresh: The z-score above which a norm counts as a spike.
      warmup_steps: The number of norms to record before clipping begins.
      max_norm: An upper bound on thresholds, which also applies during warmup. By default, there is
        no bound.
      option: The target for spikes, as in `optaxclip.thresholds.zscore`.
      floor: A lower bound on thresholds. Norms below it are not recorded.
      patience: The number of consecutive clipped norms after which unclipped norms are recorded.
        None disables this.
      **options: Options that can be used with any transformation. See `optaxclip.ClipOptions`.

    Example:
      >>> import jax.numpy as jnp, optaxclip
      >>> tx = optaxclip.zclip(warmup_steps=3)
      >>> state = tx.init(jnp.zeros(1))
      >>> for norm in (1.0, 1.2, 0.8, 1.0, 5.0):
      ...     updates, state = tx.update(jnp.array([norm]), state)
      >>> print(state.info.factor)
      0.2080833
    """
    rule = thresholds.zscore(
        alpha,
        z_thresh,
        warmup_steps,
        option=option,
        floor=floor,
        patience=patience,
        max_norm=max_norm,
    )
    return clip_by(scopes.tree(), rule, **options)


@validate_call(transformation=True)
@document_options(NormOptions)
def adagc(
    *,
    lambda_rel: ArrayLike = 1.04,
    lambda_abs: ArrayLike = 1.0,
    beta: ArrayLike = 0.99,
    warmup_steps: int = 100,
    floor: float = DEFAULT_FLOOR,
    patience: int | None = DEFAULT_PATIENCE,
    **options: Unpack[NormOptions],
) -> Transformation[ClipState]:
    """Clips leaves to slightly more than the moving averages of their clipped norms (AdaGC).

    During warmup, the whole tree is clipped by its global norm. The defaults are from the latest
    version of the paper. The first version used `lambda_rel=1.05, beta=0.98`.

    By design, almost all steps are clipped. Because the averages contain clipped norms, thresholds
    stay near the smaller norms and increase slowly. Without `patience`, as published, a threshold
    takes 1734 steps to double, which slows down training if the initial gradients are small, for
    example because the last layers are initialized with zeros.

    Source: Wang et al., 2025, AdaGC, arXiv 2502.11034.

    Args:
      lambda_rel: The ratio of the threshold to the average.
      lambda_abs: The maximum global norm during warmup.
      beta: The decay of the average.
      warmup_steps: The number of norms in the warmup.
      floor: A lower bound on thresholds. Norms below it are not recorded. If 0, a leaf with zero
        gradients during warmup never changes, as in the published rule.
      patience: The number of consecutive clipped norms after which unclipped norms are recorded.
        None disables this.
      **options: Options that can be used with any transformation. See `optaxclip.NormOptions`.

    Example:
      >>> import jax.numpy as jnp, optaxclip
      >>> tx = optaxclip.adagc(warmup_steps=3)
      >>> grads = {"a": jnp.array([3.0]), "b": jnp.array([4.0])}
      >>> updates, state = tx.update(grads, tx.init(grads))
      >>> print(updates["a"], updates["b"])
      [0.6] [0.8]
    """
    rule = thresholds.adagc(
        lambda_rel, lambda_abs, beta, warmup_steps, floor=floor, patience=patience
    )
    return clip_by(scopes.leaf(), rule, **options)


@validate_call(transformation=True)
@document_options(ClipOptions)
def clip_by_quantile(
    *,
    target: ArrayLike = 0.5,
    learning_rate: ArrayLike = 0.2,
    init_threshold: ArrayLike = 0.1,
    geometric: bool = True,
    floor: float = DEFAULT_FLOOR,
    **options: Unpack[ClipOptions],
) -> Transformation[ClipState]:
    """Clips the global norm to an estimated quantile of the norms.

    Source: Andrew, Thakkar, McMahan, and Ramaswamy, 2019, arXiv 1905.03871, without noise.

    Args:
      target: The fraction of steps without clipping, from 0 to 1.
      learning_rate: The learning rate of the threshold.
      init_threshold: The initial threshold.
      geometric: If True, updates of the threshold are multiplicative. If False, they are additive.
      floor: A lower bound on thresholds. Norms below it are not recorded.
      **options: Options that can be used with any transformation. See `optaxclip.ClipOptions`.

    Example:
      >>> import jax.numpy as jnp, optaxclip
      >>> tx = optaxclip.clip_by_quantile(init_threshold=1.0)
      >>> state = tx.init(jnp.zeros(1))
      >>> for norm in (1.0, 1.2):
      ...     updates, state = tx.update(jnp.array([norm]), state)
      >>> print(state.info.threshold)
      0.904837
    """
    rule = thresholds.quantile(
        target, learning_rate, init_threshold, geometric=geometric, floor=floor
    )
    return clip_by(scopes.tree(), rule, **options)


@validate_call(transformation=True)
@document_options(NormOptions)
def clip_by_ema_norm(
    *,
    ratio: ArrayLike = 2.0,
    decay: ArrayLike = 0.95,
    floor: float = DEFAULT_FLOOR,
    patience: int | None = DEFAULT_PATIENCE,
    max_norm: ArrayLike | None = None,
    **options: Unpack[NormOptions],
) -> Transformation[ClipState]:
    """Clips leaves to a multiple of the moving averages of their clipped norms.

    Source: allenai/OLMo (`max_grad_norm_ratio`), where the decay is the larger decay of Adam.

    Args:
      ratio: The ratio of the threshold to the average.
      decay: The decay of the average, which is initialized with the norm of the second step.
      floor: A lower bound on thresholds. Norms below it are not recorded.
      patience: The number of consecutive clipped norms after which unclipped norms are recorded.
        None disables this.
      max_norm: The maximum threshold. By default, there is no maximum.
      **options: Options that can be used with any transformation. See `optaxclip.NormOptions`.

    Example:
      >>> import jax.numpy as jnp, optaxclip
      >>> tx = optaxclip.clip_by_ema_norm(ratio=1.5)
      >>> state = tx.init(jnp.zeros(1))
      >>> for norm in (1.0, 1.2, 0.8, 1.0, 5.0):
      ...     updates, state = tx.update(jnp.array([norm]), state)
      >>> print(state.info.threshold, state.info.factor)
      [1.7565] [0.3513]
    """
    rule = thresholds.ema(
        decay, ratio, skip_steps=1, floor=floor, patience=patience, max_norm=max_norm
    )
    return clip_by(scopes.leaf(), rule, **options)


@validate_call(transformation=True)
@document_options(ClipOptions)
def autoclip(
    percentile: ArrayLike = 10.0,
    window: int = 1000,
    *,
    floor: float = DEFAULT_FLOOR,
    max_norm: ArrayLike | None = None,
    **options: Unpack[ClipOptions],
) -> Transformation[ClipState]:
    """Clips the global norm to a percentile of recent norms (AutoClip).

    The recent norms include the current norm. About `100 - percentile` percent of all steps are
    clipped. Use a percentile above 90 to clip only spikes.

    Source: Seetharaman, Wichern, Pardo, and Le Roux, 2020, AutoClip, arXiv 2007.14469, with an
    unlimited window.

    Args:
      percentile: The percentile, from 0 to 100.
      window: The number of norms to keep. It must be static in `optax.inject_hyperparams`.
      floor: A lower bound on thresholds. Norms below it are not recorded.
      max_norm: The maximum threshold. By default, there is no maximum.
      **options: Options that can be used with any transformation. See `optaxclip.ClipOptions`.

    Example:
      >>> import jax.numpy as jnp, optaxclip
      >>> tx = optaxclip.autoclip(percentile=50.0)
      >>> state = tx.init(jnp.zeros(1))
      >>> for norm in (1.0, 1.2, 0.8, 1.0, 5.0):
      ...     updates, state = tx.update(jnp.array([norm]), state)
      >>> print(state.info.threshold, state.info.factor)
      1.0 0.2
    """
    rule = thresholds.percentile(
        percentile, window, inclusive=True, warmup_steps=0, floor=floor, max_norm=max_norm
    )
    return clip_by(scopes.tree(), rule, **options)


@validate_call(transformation=True)
@document_options(ClipOptions)
def clip_by_median_norm(
    *,
    scale: ArrayLike = 2.0,
    window: int = 100,
    floor: float = DEFAULT_FLOOR,
    max_norm: ArrayLike | None = None,
    **options: Unpack[ClipOptions],
) -> Transformation[ClipState]:
    """Clips the global norm to a multiple of the median of recent norms.

    The threshold is updated every `window` steps. It is also set to `2 * scale` times the median at
    steps 10, 20, and 40. Unlike ScaledAdam, this function does not multiply gradients by the size
    of the parameters before it computes the norm.

    Source: ScaledAdam (Povey et al., k2-fsa/icefall) and Zipformer, arXiv 2310.11230.

    Args:
      scale: The ratio of the threshold to the median.
      window: The number of norms to keep, and the number of steps between updates of the threshold.
        It must be static in `optax.inject_hyperparams`.
      floor: A lower bound on thresholds. Norms below it are not recorded.
      max_norm: The maximum threshold. By default, there is no maximum.
      **options: Options that can be used with any transformation. See `optaxclip.ClipOptions`.

    Example:
      >>> import jax.numpy as jnp, optaxclip
      >>> tx = optaxclip.clip_by_median_norm(scale=2.0, window=4)
      >>> state = tx.init(jnp.zeros(1))
      >>> for norm in (9.0, 1.0, 1.2, 0.8, 1.0, 5.0):
      ...     updates, state = tx.update(jnp.array([norm]), state)
      >>> print(state.info.threshold, state.info.factor)
      2.0 0.4
    """
    rule = thresholds.median(scale, window, floor=floor, max_norm=max_norm)
    return clip_by(scopes.tree(), rule, **options)


@validate_call(transformation=True)
@document_options(ClipOptions)
def clip_by_window_norm(
    *,
    num_std: ArrayLike = 3.0,
    window: int = 128,
    floor: float = DEFAULT_FLOOR,
    max_norm: ArrayLike | None = None,
    **options: Unpack[ClipOptions],
) -> Transformation[ClipState]:
    """Clips the global norm to the mean of recent norms plus a number of standard deviations.

    Clipping starts when the window is half full. Levanter clips the updates of Adam like this. To
    do the same, use this transformation after Adam in `optax.chain`.

    Source: marin-community/levanter (`clip_update_by_historical_norm`).

    Args:
      num_std: The number of standard deviations above the mean.
      window: The number of norms to keep. It must be static in `optax.inject_hyperparams`.
      floor: A lower bound on thresholds. Norms below it are not recorded.
      max_norm: The maximum threshold. By default, there is no maximum.
      **options: Options that can be used with any transformation. See `optaxclip.ClipOptions`.

    Example:
      >>> import jax.numpy as jnp, optaxclip
      >>> tx = optaxclip.clip_by_window_norm(num_std=3.0, window=4)
      >>> state = tx.init(jnp.zeros(1))
      >>> for norm in (1.0, 1.2, 0.8, 1.0, 5.0):
      ...     updates, state = tx.update(jnp.array([norm]), state)
      >>> print(state.info.threshold, state.info.factor)
      1.424264 0.284853
    """
    rule = thresholds.window(num_std, window, floor=floor, max_norm=max_norm)
    return clip_by(scopes.tree(), rule, **options)

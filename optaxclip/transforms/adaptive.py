"""Adaptive clipping methods from the literature.

These functions call `clip_by` with the rules and scopes of the papers. All rules work with all
scopes. For example, `clip_by(scopes.leaf(), thresholds.zscore())` uses ZClip for single leaves.

Two defaults differ from the published code. The rules recover from a lasting increase of the norms,
and `zclip` has no upper bound on its threshold. Use `patience=None, floor=0.0` to get the published
rules, and also `max_norm=1.0` for `zclip`.

All arguments are keyword-only, because a single number, as in `zclip(1.0)`, would look like a
threshold. The options `floor` and `patience` are explained in `optaxclip.thresholds._adaptive`.
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
    """Clips spikes of the global norm, which are detected by their z-score (ZClip).

    The published rule never recovers from a lasting increase of the norms, because it learns from
    clipped norms. Use `patience` to recover. The published code also limits all thresholds to 1 and
    therefore acts as `clip_by_global_norm(1.0)` if the usual norms are above 1. Here, only
    `max_norm` limits the thresholds. Without it, no step is clipped during the warmup.

    Source: Kumar, Owen, Roy Chowdhury and Güra, 2025, ZClip, arXiv 2504.02507.

    Args:
      alpha: The decay of the mean and the variance.
      z_thresh: The z-score above which a norm is a spike.
      warmup_steps: The number of recorded norms after which there is a threshold.
      max_norm: The upper bound on thresholds, including the warmup. It is 1.0 in the published
        code. By default, there is no bound.
      option: The target of a spike, as in `optaxclip.thresholds.zscore`.
      floor: The lower bound on thresholds. Smaller norms are not recorded.
      patience: The number of consecutive norms above their threshold after which raw norms are
        recorded. Defaults to 20. Use `None` to disable this.
      **options: The options shared by all transformations. See `optaxclip.ClipOptions`.

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
    """Clips leaves to a small multiple of the moving averages of their clipped norms (AdaGC).

    During the warmup, the whole tree is clipped by its global norm with the threshold
    `lambda_abs`, which does not depend on the task. The defaults are the constants of the latest
    version of the paper. The first version used `lambda_rel=1.05, beta=0.98`.

    By design, almost all steps are clipped. The rule learns from clipped norms, so its thresholds
    stay close to the smaller norms and do not increase quickly after a fault. If the norms increase
    permanently, the thresholds follow after more than `patience` consecutive norms above them. As
    published, without patience, a threshold needs 1734 steps to double. A run with small initial
    gradients, for example because its last layers are initialized with zeros, then learns much
    less.

    Source: Wang et al., 2025, AdaGC, arXiv 2502.11034.

    Args:
      lambda_rel: The ratio of the threshold to the average.
      lambda_abs: The maximum global norm during the warmup.
      beta: The decay of the average.
      warmup_steps: The number of norms in the warmup.
      floor: The lower bound on thresholds. Smaller norms are not recorded. If 0, a leaf with zero
        gradients during the warmup stays at zero, as in the published rule.
      patience: The number of consecutive norms above their threshold after which raw norms are
        recorded. Defaults to 20. Use `None` to disable this.
      **options: The options shared by all transformations. See `optaxclip.NormOptions`.

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
    """Clips the global norm and adapts the threshold to a quantile of the norms.

    Source: Andrew, Thakkar, McMahan and Ramaswamy, 2019, arXiv 1905.03871, without noise.

    Args:
      target: The fraction of steps without clipping, from 0 to 1.
      learning_rate: The learning rate of the threshold.
      init_threshold: The threshold at the first step.
      geometric: If True, the threshold is multiplied at all steps. If False, a number is added.
      floor: The lower bound on thresholds. Smaller norms are not recorded.
      **options: The options shared by all transformations. See `optaxclip.ClipOptions`.

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

    Source: allenai/OLMo (`max_grad_norm_ratio`). Its decay is the larger decay of Adam.

    Args:
      ratio: The ratio of the threshold to the average.
      decay: The decay of the average, which starts from the norm of the second step.
      floor: The lower bound on thresholds. Smaller norms are not recorded.
      patience: The number of consecutive norms above their threshold after which raw norms are
        recorded. Defaults to 20. Use `None` to disable this.
      max_norm: The upper bound on thresholds. By default, there is no bound.
      **options: The options shared by all transformations. See `optaxclip.NormOptions`.

    Example:
      >>> import jax.numpy as jnp, optaxclip
      >>> tx = optaxclip.clip_by_ema_norm(ratio=1.5)
      >>> state = tx.init(jnp.zeros(1))
      >>> for norm in (1.0, 1.2, 0.8, 1.0, 5.0):
      ...     updates, state = tx.update(jnp.array([norm]), state)
      >>> print(state.info.threshold, state.info.factor)
      [1.7565] [0.3513]
    """
    # As in OLMo, the average starts from the norm of the second step.
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
    """Clips the global norm to a percentile of the last norms (AutoClip).

    The window includes the current norm. Until it is full, the percentile of all previous norms is
    used. The rule clips about `100 - percentile` % of all steps. Use a percentile above 90 to clip
    only spikes.

    Source: Seetharaman, Wichern, Pardo and Le Roux, 2020, AutoClip, arXiv 2007.14469, with an
    unbounded history.

    Args:
      percentile: The percentile, from 0 to 100.
      window: The number of norms to keep. `optax.inject_hyperparams` requires
        `static_args=("window",)`.
      floor: The lower bound on thresholds. Smaller norms are not recorded.
      max_norm: The upper bound on the threshold. By default, there is no bound.
      **options: The options shared by all transformations. See `optaxclip.ClipOptions`.

    Example:
      >>> import jax.numpy as jnp, optaxclip
      >>> tx = optaxclip.autoclip(percentile=50.0)
      >>> state = tx.init(jnp.zeros(1))
      >>> for norm in (1.0, 1.2, 0.8, 1.0, 5.0):
      ...     updates, state = tx.update(jnp.array([norm]), state)
      >>> print(state.info.threshold, state.info.factor)
      1.0 0.2
    """
    # AutoClip has no warmup, and its window includes the current norm.
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
    """Clips the global norm to a multiple of the median of the last norms.

    As in ScaledAdam, the threshold is set every `window` steps, and to twice the multiple at steps
    10, 20 and 40. However, this function does not multiply the gradient by the size of the
    parameters first, as ScaledAdam does.

    Source: ScaledAdam, Povey et al., k2-fsa/icefall, and Zipformer, arXiv 2310.11230.

    Args:
      scale: The ratio of the threshold to the median.
      window: The number of norms to keep, and the number of steps between updates of the threshold.
        `optax.inject_hyperparams` requires `static_args=("window",)`.
      floor: The lower bound on thresholds. Smaller norms are not recorded.
      max_norm: The upper bound on the threshold. By default, there is no bound.
      **options: The options shared by all transformations. See `optaxclip.ClipOptions`.

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
    """Clips the global norm to the mean of the last norms plus a number of standard deviations.

    There is no threshold until the window is half full.

    Source: marin-community/levanter (`clip_update_by_historical_norm`), which clips the updates
    after Adam. You can use it after Adam in `optax.chain`.

    Args:
      num_std: The number of standard deviations above the mean.
      window: The number of norms to keep. `optax.inject_hyperparams` requires
        `static_args=("window",)`.
      floor: The lower bound on thresholds. Smaller norms are not recorded.
      max_norm: The upper bound on the threshold. By default, there is no bound.
      **options: The options shared by all transformations. See `optaxclip.ClipOptions`.

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

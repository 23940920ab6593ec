"""The named adaptive methods: the papers' rules on the scopes that the papers use.

Each is one call of `clip_by` with a rule and a scope. Any rule works on any scope:
`clip_by(scopes.leaf(), thresholds.zscore())` is ZClip for each leaf.

Two defaults differ from the published code: after a lasting rise of the norms the rules recover,
and `zclip` has no cap.
`patience=None, floor=0.0`, and for `zclip` also `max_norm=1.0`, give the published rules.

All arguments must be passed by name, because a number alone, as in `zclip(1.0)`, would look like a
threshold. `floor` and `patience` are explained in `optaxclip.thresholds.adaptive`.
"""

from typing import Unpack

import optaxclip.scopes as scopes
import optaxclip.thresholds as thresholds
from optaxclip._backend.global_view import Transformation
from optaxclip._base.types import ArrayLike, ClipState
from optaxclip._base.validation import validate_call
from optaxclip._engine.clip import clip_by
from optaxclip._engine.options import ClipOptions, NormOptions, document_options
from optaxclip.thresholds.adaptive import DEFAULT_FLOOR, DEFAULT_PATIENCE
from optaxclip.thresholds.averages import Option


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
    """Clips spikes of the global norm, which it recognizes by their z-score.

    Source: Kumar, Owen, Roy Chowdhury and Güra, 2025, ZClip, arXiv 2504.02507. The published rule
    never recovers from a lasting rise of the norms, because it learns from clipped norms; with
    `patience` it recovers. The published code also caps every threshold at 1, so it acts as
    `clip_by_global_norm(1.0)` if ordinary norms exceed 1. Here only `max_norm` sets a cap; without
    it, nothing is clipped in the warm-up.

    Args:
      alpha: the decay of mean and variance.
      z_thresh: a norm more than `z_thresh` standard deviations above the mean is a spike.
      warmup_steps: how many norms are recorded before there is a threshold.
      max_norm: a cap on every threshold, in the warm-up too; None: no cap. It is 1.0 in published code.
      option: which norm a spike is given, as in `optaxclip.thresholds.zscore`.
      floor: smaller norms are not recorded, and no threshold is smaller.
      patience: after this many norms in a row above their threshold the raw norm is recorded.
      **options: those that all transformations share, `optaxclip.ClipOptions`.

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
    """Clips each leaf a little above the moving average of its clipped norms.

    Source: Wang et al., 2025, AdaGC, arXiv 2502.11034. The constants are those of the paper's last
    version; the first had `lambda_rel=1.05, beta=0.98`. In the warm-up the whole tree is clipped by
    its global norm, to a threshold that does not depend on the task.

    It clips at nearly every step, and that is meant: it learns from norms after their clip, so its
    thresholds stay near the smaller norms, and nothing that goes wrong lifts them soon. If norms rise
    for good, the thresholds follow once more than `patience` norms in a row were above them. As
    published, without patience, a threshold needs 1734 steps to double, and a run whose gradients begin
    small, because its last layers begin at zero, loses much of what it learns.

    Args:
      lambda_rel: the threshold, divided by the average.
      lambda_abs: the global norm to clip to in the warm-up.
      beta: the decay of the average.
      warmup_steps: how many norms the warm-up lasts.
      floor: smaller norms are not recorded, and no threshold is smaller. With 0, a leaf whose gradient
        is zero in the warm-up never moves again, as in the published rule.
      patience: after this many norms in a row above their threshold the raw norm is recorded.
      **options: those that all transformations share, `optaxclip.NormOptions`.

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
    """Clips the global norm to a threshold that moves until the wanted share of norms is below it.

    Source: Andrew, Thakkar, McMahan and Ramaswamy, 2019, arXiv 1905.03871, without noise.

    Args:
      target: the share of steps that are not clipped, from 0 to 1.
      learning_rate: how fast the threshold moves.
      init_threshold: the threshold at the first step.
      geometric: whether each step multiplies the threshold; otherwise each step adds to it.
      floor: smaller norms are not recorded, and no threshold is smaller.
      **options: those that all transformations share, `optaxclip.ClipOptions`.

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
    """Clips each leaf to a multiple of the moving average of its clipped norms.

    Source: allenai/OLMo (`max_grad_norm_ratio`); its decay is the larger of Adam's two.

    Args:
      ratio: the threshold, divided by the average.
      decay: the decay of the average, which starts with the norm of the second step.
      floor: smaller norms are not recorded, and no threshold is smaller.
      patience: after this many norms in a row above their threshold the raw norm is recorded.
      max_norm: a cap on every threshold.
      **options: those that all transformations share, `optaxclip.NormOptions`.

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
    """Clips the global norm to a percentile of the last norms, among them this step's.

    Until the window is full, it is the percentile of all norms so far. The rule clips about
    `100 - percentile` % of all steps, so a percentile above 90 catches only spikes.

    Source: Seetharaman, Wichern, Pardo and Le Roux, 2020, AutoClip, arXiv 2007.14469, where the
    history is unbounded.

    Args:
      percentile: from 0 to 100.
      window: how many norms to keep; `optax.inject_hyperparams` needs `static_args=("window",)`.
      floor: smaller norms are not recorded, and no threshold is smaller.
      max_norm: a cap on the threshold.
      **options: those that all transformations share, `optaxclip.ClipOptions`.

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
    """Clips the global norm to a multiple of the median of the last norms.

    Source: ScaledAdam (Povey et al., k2-fsa/icefall; Zipformer, arXiv 2310.11230), which sets the
    threshold every `window` steps, and at steps 10, 20 and 40 to twice the multiple. ScaledAdam first
    multiplies the gradient by the parameters' size; this function does not.

    Args:
      scale: the multiple of the median.
      window: how many norms to keep, and how often to set the threshold; `optax.inject_hyperparams`
        needs `static_args=("window",)`.
      floor: smaller norms are not recorded, and no threshold is smaller.
      max_norm: a cap on the threshold.
      **options: those that all transformations share, `optaxclip.ClipOptions`.

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
    """Clips the global norm to the mean of the last norms plus some standard deviations.

    Source: marin-community/levanter (`clip_update_by_historical_norm`), which clips the
    updates after Adam; in `optax.chain` this clip can stand there too. There is no threshold until the
    window is half full.

    Args:
      num_std: how many standard deviations above the mean.
      window: how many norms to keep; `optax.inject_hyperparams` needs `static_args=("window",)`.
      floor: smaller norms are not recorded, and no threshold is smaller.
      max_norm: a cap on the threshold.
      **options: those that all transformations share, `optaxclip.ClipOptions`.

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

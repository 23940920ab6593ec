"""The named adaptive methods: the papers' rules on the scopes that the papers use.

Each is one expression over the engine; any rule works on any scope
(`clip_by(scopes.leaf(), thresholds.zscore())` is ZClip per layer).

Differences from the published code: the defaults do not lock after a lasting change of scale
(AdaGC's growth is limited by design), and `zclip` has no cap. With `patience=None, floor=0.0`, and
`max_norm=1.0` for `zclip`, they are as published.

All arguments are keywords, as a number alone, `zclip(1.0)`, would be read as a limit. `floor` and
`patience` are explained in `optaxclip.thresholds.base`.
"""

from typing import Unpack

import jax

import optaxclip.scopes as scopes
import optaxclip.thresholds as thresholds
from optaxclip._base.transformation import Transformation
from optaxclip._base.types import ClipState
from optaxclip._engine.clip import clip_by
from optaxclip._engine.options import ClipOptions, NormOptions, takes
from optaxclip.thresholds.base import FLOOR, PATIENCE
from optaxclip.thresholds.moving import Option


@takes(ClipOptions)
def zclip(
    *,
    alpha: jax.typing.ArrayLike = 0.97,
    z_thresh: jax.typing.ArrayLike = 2.5,
    warmup_steps: int = 25,
    max_norm: jax.typing.ArrayLike | None = None,
    option: Option = "adaptive",
    floor: float = FLOOR,
    patience: int | None = PATIENCE,
    **options: Unpack[ClipOptions],
) -> Transformation[ClipState]:
    """Clips spikes of the global norm, told by their z-score.

    Source: Kumar, Owen, Roy Chowdhury and Güra, 2025, ZClip, arXiv 2504.02507. As published the
    rule never recovers from a lasting rise of the norms, because it learns from the clipped ones;
    `patience` cures that. The published code also caps every limit at 1, which makes it
    `clip_by_global_norm(1.0)` wherever ordinary norms exceed 1; here there is a cap only where
    `max_norm` gives one, and without it nothing is clipped in the warm-up.

    Args:
      alpha: the decay of mean and variance.
      z_thresh: how many standard deviations above the mean is a spike.
      warmup_steps: steps that only set the first mean and variance.
      max_norm: a cap on every limit, in the warm-up too; none if None, 1.0 in the published code.
      option: what a spike is brought to, as in `optaxclip.thresholds.zscore`.
      floor: the least norm that counts, and the least limit.
      patience: norms above their limit in a row before the raw norm is learned from.
      **options: those that all transformations share, `optaxclip.ClipOptions`.

    Returns:
      A transformation with a `ClipState`, whose update gives a tree of the shapes, dtypes and weak
      types of the gradients.

    Raises:
      ValueError: for an option out of its range, or an unknown policy.
      TypeError: for an option that is no number.

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


@takes(NormOptions)
def adagc(
    *,
    lambda_rel: jax.typing.ArrayLike = 1.05,
    lambda_abs: jax.typing.ArrayLike = 1.0,
    beta: jax.typing.ArrayLike = 0.98,
    warmup_steps: int = 100,
    floor: float = FLOOR,
    patience: int | None = None,
    **options: Unpack[NormOptions],
) -> Transformation[ClipState]:
    """Clips each leaf a little above the moving average of its clipped norms.

    Source: Wang et al., 2025, AdaGC, arXiv 2502.11034. In the warm-up the whole tree is clipped by
    its global norm. A limit at most doubles in 694 steps, by design: after a lasting rise of the
    norms recovery takes thousands of steps, unless `patience` is given.

    Args:
      lambda_rel: how many times the average is the limit; 1.04 in the revised paper.
      lambda_abs: the global norm to clip to in the warm-up.
      beta: the decay of the average; 0.99 in the revised paper.
      warmup_steps: steps of the warm-up.
      floor: the least norm that counts, and the least limit; with 0 a leaf whose gradient is zero
        in the warm-up never moves again, as published.
      patience: norms above their limit in a row before the raw norm is learned from.
      **options: those that all transformations share, `optaxclip.NormOptions`.

    Returns:
      A transformation with a `ClipState`, whose update gives a tree of the shapes, dtypes and weak
      types of the gradients.

    Raises:
      ValueError: for an option out of its range, or an unknown policy.
      TypeError: for an option that is no number.

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


@takes(ClipOptions)
def clip_by_quantile(
    *,
    target: jax.typing.ArrayLike = 0.5,
    learning_rate: jax.typing.ArrayLike = 0.2,
    init_limit: jax.typing.ArrayLike = 0.1,
    geometric: bool = True,
    floor: float = FLOOR,
    **options: Unpack[ClipOptions],
) -> Transformation[ClipState]:
    """Clips the global norm to a limit that moves until the wanted share of norms passes.

    Source: Andrew, Thakkar, McMahan and Ramaswamy, 2019, arXiv 1905.03871, without noise.

    Args:
      target: the share of steps not to clip, from 0 to 1.
      learning_rate: how fast the limit moves.
      init_limit: the limit at the first step.
      geometric: whether steps multiply the limit; they add to it otherwise.
      floor: the least norm that counts, and the least limit.
      **options: those that all transformations share, `optaxclip.ClipOptions`.

    Returns:
      A transformation with a `ClipState`, whose update gives a tree of the shapes, dtypes and weak
      types of the gradients.

    Raises:
      ValueError: for an option out of its range, or an unknown policy.
      TypeError: for an option that is no number.

    Example:
      >>> import jax.numpy as jnp, optaxclip
      >>> tx = optaxclip.clip_by_quantile(init_limit=1.0)
      >>> state = tx.init(jnp.zeros(1))
      >>> for norm in (1.0, 1.2):
      ...     updates, state = tx.update(jnp.array([norm]), state)
      >>> print(state.info.limit)
      0.904837
    """
    rule = thresholds.quantile(target, learning_rate, init_limit, geometric=geometric, floor=floor)
    return clip_by(scopes.tree(), rule, **options)


@takes(NormOptions)
def clip_by_ema_norm(
    *,
    ratio: jax.typing.ArrayLike = 2.0,
    decay: jax.typing.ArrayLike = 0.95,
    floor: float = FLOOR,
    patience: int | None = PATIENCE,
    max_norm: jax.typing.ArrayLike | None = None,
    **options: Unpack[NormOptions],
) -> Transformation[ClipState]:
    """Clips each leaf to a multiple of the moving average of its clipped norms.

    Source: allenai/OLMo (`max_grad_norm_ratio`), where the decay is the larger of Adam's two.

    Args:
      ratio: how many times the average is the limit.
      decay: of the average, which starts with the norm of the second step.
      floor: the least norm that counts, and the least limit.
      patience: norms above their limit in a row before the raw norm is learned from.
      max_norm: a cap on every limit.
      **options: those that all transformations share, `optaxclip.NormOptions`.

    Returns:
      A transformation with a `ClipState`, whose update gives a tree of the shapes, dtypes and weak
      types of the gradients.

    Raises:
      ValueError: for an option out of its range, or an unknown policy.
      TypeError: for an option that is no number.

    Example:
      >>> import jax.numpy as jnp, optaxclip
      >>> tx = optaxclip.clip_by_ema_norm(ratio=1.5)
      >>> state = tx.init(jnp.zeros(1))
      >>> for norm in (1.0, 1.2, 0.8, 1.0, 5.0):
      ...     updates, state = tx.update(jnp.array([norm]), state)
      >>> print(state.info.limit, state.info.factor)
      [1.7565] [0.3513]
    """
    rule = thresholds.ema(
        decay, ratio, skip_steps=1, floor=floor, patience=patience, max_norm=max_norm
    )
    return clip_by(scopes.leaf(), rule, **options)

"""The named methods whose threshold depends on a window of past norms.

`floor` is explained in `optaxclip.thresholds.base`.
"""

from typing import Unpack

import optaxclip.scopes as scopes
import optaxclip.thresholds as thresholds
from optaxclip._base.types import ArrayLike, ClipState
from optaxclip._border.crossing import Transformation
from optaxclip._engine.clip import clip_by
from optaxclip._engine.options import ClipOptions, clip_factory
from optaxclip.thresholds.base import DEFAULT_FLOOR


@clip_factory(
    ClipOptions,
    equivalent="clip_by(scopes.tree(), thresholds.percentile(10.0, inclusive=True, warmup_steps=0))",
)
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


@clip_factory(ClipOptions, equivalent="clip_by(scopes.tree(), thresholds.median())")
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


@clip_factory(ClipOptions, equivalent="clip_by(scopes.tree(), thresholds.window())")
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

"""Skipping whole steps, which must wrap the optimizer.

A stage of a chain cannot skip a step: after zero updates Adam's moments still decay, and weight
decay still acts. A wrapper leaves parameters and inner state exactly as they were. It selects the
old values and never multiplies by zero, as `0 * NaN` is NaN. The wrapped optimizer runs at every
step, and its results of a skipped step are dropped; so its clips and records share one read of the
gradients with the skip.
"""

import math
from typing import Unpack

import optax

from optaxclip._base.transformation import Transformation
from optaxclip._base.types import Threshold
from optaxclip._engine.options import Options, PlaceOptions, takes
from optaxclip.methods.skipping import SkipState, skipping
from optaxclip.norms import Norm
from optaxclip.thresholds.fixed import LimitLike, ScalarOrSchedule
from optaxclip.thresholds.losses import as_loss_limit


@takes(PlaceOptions)
def skip_nonfinite(
    inner: optax.GradientTransformation,
    max_consecutive: int | None = None,
    **options: Unpack[PlaceOptions],
) -> Transformation[SkipState]:
    """Skips the steps whose gradients hold a NaN or an infinite entry.

    `optaxclip.monitor.bad_leaves` then names the leaves, and `optaxclip.monitor.verdict` tells the
    host whether to go on.

    Args:
      inner: the optimizer.
      max_consecutive: after so many skipped steps in a row the next step is taken as it is, as by
        `optax.apply_if_finite`, so that a lost run is seen to be lost; with None none is.
      **options: those that all transformations share, `optaxclip.PlaceOptions`.

    Returns:
      A transformation with a `SkipState`. A skipped step gives zero updates.

    Raises:
      ValueError: if `max_consecutive` is less than 1.
      TypeError: if `inner` is not a transformation, or `max_consecutive` no int.

    Example:
      >>> import jax.numpy as jnp, optax, optaxclip
      >>> tx = optaxclip.skip_nonfinite(optax.sgd(0.1, momentum=0.9))
      >>> params = jnp.array([1.0, 2.0])
      >>> updates, state = tx.update(jnp.array([jnp.nan, 1.0]), tx.init(params), params)
      >>> print(updates, state.num_skipped)
      [0. 0.] 1
    """
    checked = Options.checked(**options)
    return skipping(inner, math.inf, max_consecutive, options=checked, gives_up=True)


@takes(PlaceOptions)
def skip_above(
    inner: optax.GradientTransformation,
    limit: LimitLike,
    max_consecutive: int | None = 20,
    *,
    loss_limit: ScalarOrSchedule | Threshold | None = None,
    norm: str | Norm = "l2",
    known_norm: str | None = None,
    **options: Unpack[PlaceOptions],
) -> Transformation[SkipState]:
    """Skips the steps whose global gradient norm, or loss, exceeds a limit or is not finite.

    With a constant this is paxml's and Megatron-LM's rule, and with
    `thresholds.ema(0.99, 20.0, record="accepted", debias=True)` axlearn's. Those that judge the
    loss too, each by its own past, take one rule twice, `skip_above(inner, rule, loss_limit=rule)`:

      of                | rule
      ------------------|-----------------------------------------------------------------
      OLMo-core         | `thresholds.window(6.0, 128, ddof=1, min_std=0.0, warmup_steps=63)`
      Levanter          | `thresholds.window(6.0, 128)`
      MaxText           | OLMo-core's, on what its clip has left of the gradients:
                        | `optax.chain(clip_by_global_norm(1.0), skip_above(...))`

    Source: allenai/OLMo-core, marin-community/levanter, AI-Hypercomputer/maxtext, apple/axlearn.

    The published rules may skip any number of steps in a row; pass `max_consecutive=None` for that.
    `optaxclip.monitor.bad_leaves` names the leaves that were the cause, and
    `optaxclip.monitor.verdict` tells the host whether to go on.

    Args:
      inner: the optimizer.
      limit: a number, a schedule, or a rule from `optaxclip.thresholds`, whose trigger counts;
        `math.inf` to judge the loss alone.
      max_consecutive: after so many skipped steps in a row the next finite step is taken, so that
        no limit can stop a run for good; with None none is. Steps that are not finite are always
        skipped.
      loss_limit: the same for the loss, which may be negative: a number of any sign, a schedule, or
        `thresholds.window`, `zscore`, `percentile`, `median` or `ema`, without their `floor`. (A
        multiple of an average below 0 is as far above it as it would be above its modulus.)
      norm: which norm of the tree is compared with `limit`.
      known_norm: the name of an extra argument of the update, such as "grad_norm", that holds the
        norm of what comes in; it is then not measured, and no leaf can be blamed.
      **options: those that all transformations share, `optaxclip.PlaceOptions`.

    Returns:
      A transformation with a `SkipState`. A skipped step gives zero updates. Its update with
      `loss_limit` needs the loss: `value=`, as Optax calls it, or `loss=`, which counts where both
      are given. It is a scalar, the same on all devices; `optax.MultiSteps` hands on that of the
      last microbatch only. A loss that is not finite is a reason to skip, and never recorded. All
      extra arguments, a known norm too, reach the optimizer.

    Raises:
      ValueError: for a limit that is negative, NaN or not a scalar (a loss's may be negative), and
        for a rule of the loss that makes no sense of numbers below 0; when used, for a missing
        loss, or one that is not a scalar.
      TypeError: if `inner` is not a transformation, or a limit or a loss is not a number.

    Example:
      >>> import jax.numpy as jnp, optax, optaxclip
      >>> tx = optaxclip.skip_above(optax.sgd(1.0), 10.0)
      >>> params = jnp.array([1.0, 2.0])
      >>> updates, state = tx.update(jnp.array([30.0, 40.0]), tx.init(params), params)
      >>> print(updates, state.info.norm, state.num_skipped)
      [0. 0.] 50.0 1

      The loss alone:

      >>> tx = optaxclip.skip_above(optax.sgd(1.0), jnp.inf, loss_limit=-1.0)
      >>> state = tx.init(params)
      >>> for loss in (-3.0, 0.5, jnp.nan):
      ...     updates, state = tx.update(jnp.ones(2), state, params, value=loss)
      ...     print(updates, state.num_skipped)
      [-1. -1.] 0
      [0. 0.] 1
      [0. 0.] 2
    """
    return skipping(
        inner,
        limit,
        max_consecutive,
        loss_limit=None if loss_limit is None else as_loss_limit(loss_limit),
        options=Options.checked(norm=norm, known_norm=known_norm, **options),
    )

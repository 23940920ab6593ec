"""Wrappers that skip whole steps of an optimizer.

A stage of a chain cannot skip a step: after zero updates Adam's moments still decay, and weight
decay still acts. A wrapper leaves parameters and inner state exactly as they were: it selects the
old values, and does not multiply by zero, as `0 * NaN` is NaN. The wrapped optimizer runs at every
step, and the results of a skipped step are dropped; so its clips and records share one read of the
gradients with the skip.
"""

import math
from typing import Unpack, get_args

import optax

from optaxclip._base.arguments import check_choice
from optaxclip._base.types import ThresholdRule
from optaxclip._border.crossing import Transformation
from optaxclip._engine.options import Options, ShardingOptions, clip_factory
from optaxclip.methods.skipping import CheckedTree, SkipState, skip_wrapper
from optaxclip.norms import Norm
from optaxclip.thresholds.fixed import ScalarOrSchedule, ThresholdLike
from optaxclip.thresholds.losses import check_loss_threshold


@clip_factory(ShardingOptions)
def skip_nonfinite(
    inner: optax.GradientTransformation,
    max_consecutive: int | None = None,
    **options: Unpack[ShardingOptions],
) -> Transformation[SkipState]:
    """Skips the steps whose gradients hold a NaN or an infinite entry.

    `optaxclip.monitor.bad_leaves` then names the leaves, and `optaxclip.monitor.step_status` tells the
    host whether to go on.

    Put it around `optax.MultiSteps`,
    `skip_nonfinite(optax.MultiSteps(chain, k).gradient_transformation())`, not inside of it: Optax
    0.2.8 keeps a NaN of one microbatch in its sum for ever, so that a skip inside would skip every
    later step.

    Args:
      inner: the optimizer.
      max_consecutive: after this many skipped steps in a row, steps are taken even if they are not
        finite, until one is finite, as in `optax.apply_if_finite`; this shows that the run is lost.
        With None, a step that is not finite is never taken.
      **options: those that all transformations share, `optaxclip.ShardingOptions`.

    Returns:
      A transformation with a `SkipState`. A skipped step gives zero updates.

    Raises:
      ValueError: if `max_consecutive` is less than 1.
      TypeError: if `inner` is not a transformation, or `max_consecutive` is not an int.

    Example:
      >>> import jax.numpy as jnp, optax, optaxclip
      >>> tx = optaxclip.skip_nonfinite(optax.sgd(0.1, momentum=0.9))
      >>> params = jnp.array([1.0, 2.0])
      >>> updates, state = tx.update(jnp.array([jnp.nan, 1.0]), tx.init(params), params)
      >>> print(updates, state.num_skipped)
      [0. 0.] 1
    """
    checked = Options.create(**options)
    return skip_wrapper(
        inner, math.inf, max_consecutive, options=checked, accept_nonfinite_at_limit=True
    )


@clip_factory(ShardingOptions)
def skip_above(
    inner: optax.GradientTransformation,
    threshold: ThresholdLike,
    max_consecutive: int | None = 20,
    *,
    loss_threshold: ScalarOrSchedule | ThresholdRule | None = None,
    check: CheckedTree = "gradients",
    norm: str | Norm = "l2",
    known_norm: str | None = None,
    **options: Unpack[ShardingOptions],
) -> Transformation[SkipState]:
    """Skips the steps whose global gradient norm, or loss, exceeds a threshold or is not finite.

    With a constant this is the rule of paxml and Megatron-LM; with
    `thresholds.ema(0.99, 20.0, record="accepted", debias=True)` it is axlearn's. The following
    projects judge the loss by its own past too; pass their rule twice,
    `skip_above(inner, rule, loss_threshold=rule)`:

      project           | rule
      ------------------|-----------------------------------------------------------------
      OLMo-core         | `thresholds.window(6.0, 128, ddof=1, min_std=0.0, warmup_steps=63)`
      Levanter          | `thresholds.window(6.0, 128)`
      MaxText           | OLMo-core's rule, behind a clip of the gradients:
                        | `optax.chain(clip_by_global_norm(1.0), skip_above(...))`

    Source: allenai/OLMo-core, marin-community/levanter, AI-Hypercomputer/maxtext, apple/axlearn.

    The published rules may skip any number of steps in a row; pass `max_consecutive=None` for that.
    `optaxclip.monitor.bad_leaves` names the leaves that caused a skip, and
    `optaxclip.monitor.step_status` tells the host whether to go on.

    Args:
      inner: the optimizer.
      threshold: a number, a schedule, or a rule from `optaxclip.thresholds`, whose trigger counts;
        `math.inf` to judge the loss alone.
      max_consecutive: after this many skipped steps in a row, the next finite step is taken, so
        that a threshold cannot stop a run for good. With None the threshold always holds. Steps that are
        not finite are always skipped.
      loss_threshold: the threshold of the loss, which may be negative: a number, a schedule, or
        `thresholds.window`, `zscore`, `percentile`, `median` or `ema`, whose `floor` is not used.
        (For a negative average `m` the multiple `k` is `m + (k - 1) * abs(m)`.)
      check: "gradients" judges what comes in; "updates" judges the step that `inner` would take, whose
        length an Adam or a Muon sets itself. Steps with non-finite gradients are skipped in both
        cases. With "updates", `inner` must not accumulate gradients: write
        `optax.MultiSteps(skip_above(adam, threshold, check="updates"), k)`.
      norm: which norm of the tree is compared with `threshold`.
      known_norm: the name of an extra argument of the update, such as "grad_norm", that holds the
        norm of the incoming tree. That norm is then not measured, and no leaf can be blamed.
      **options: those that all transformations share, `optaxclip.ShardingOptions`.

    Returns:
      A transformation with a `SkipState`. A skipped step gives zero updates. With `loss_threshold`, its
      update needs the loss: `value=`, as Optax calls it, or `loss=`, which is used if both are
      given. The loss must be a scalar, the same on all devices; `optax.MultiSteps` passes on only
      the loss of the last microbatch. A step whose loss is not finite is skipped, and that loss is
      never recorded. All extra arguments are passed on to the optimizer. Inside of
      `optax.MultiSteps` the skip judges means, and needs one of the guards against NaN that
      `docs/recipes/wrappers.md` shows.

    Raises:
      ValueError: for a threshold that is negative, NaN or not a scalar (a `loss_threshold` may be
        negative), for a `loss_threshold` that is a rule for norms alone, and for `get_known_norm` with
        `check="updates"`; when used, for a loss that is missing or not a scalar, and for
        `optax.MultiSteps` or `optax.apply_every` inside a skip with `check="updates"`.
      TypeError: if `inner` is not a transformation, or a threshold or a loss is not a number.

    Example:
      >>> import jax.numpy as jnp, optax, optaxclip
      >>> tx = optaxclip.skip_above(optax.sgd(1.0), 10.0)
      >>> params = jnp.array([1.0, 2.0])
      >>> updates, state = tx.update(jnp.array([30.0, 40.0]), tx.init(params), params)
      >>> print(updates, state.info.norm, state.num_skipped)
      [0. 0.] 50.0 1

      The loss alone:

      >>> tx = optaxclip.skip_above(optax.sgd(1.0), jnp.inf, loss_threshold=-1.0)
      >>> state = tx.init(params)
      >>> for loss in (-3.0, 0.5, jnp.nan):
      ...     updates, state = tx.update(jnp.ones(2), state, params, value=loss)
      ...     print(updates, state.num_skipped)
      [-1. -1.] 0
      [0. 0.] 1
      [0. 0.] 2
    """
    check = check_choice(check, get_args(CheckedTree), "check")
    if check == "updates" and known_norm is not None:
        raise ValueError(
            f"known_norm={known_norm!r} is of gradients: leave it out, or check='updates'"
        )
    return skip_wrapper(
        inner,
        threshold,
        max_consecutive,
        check=check,
        loss_threshold=None if loss_threshold is None else check_loss_threshold(loss_threshold),
        options=Options.create(norm=norm, known_norm=known_norm, **options),
    )

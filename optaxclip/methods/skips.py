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

from optaxclip._base.arguments import checked_choice
from optaxclip._base.types import Threshold
from optaxclip._border.crossing import Transformation
from optaxclip._engine.options import Options, PlaceOptions, takes
from optaxclip.methods.skipping import Of, SkipState, skipping
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

    Put it around `optax.MultiSteps`,
    `skip_nonfinite(optax.MultiSteps(chain, k).gradient_transformation())`, not inside of it: Optax
    0.2.8 keeps a NaN of one microbatch in its sum for ever, so that a skip inside would skip every
    later step.

    Args:
      inner: the optimizer.
      max_consecutive: after this many skipped steps in a row, steps are taken even if they are not
        finite, until one is finite, as in `optax.apply_if_finite`; this shows that the run is lost.
        With None, a step that is not finite is never taken.
      **options: those that all transformations share, `optaxclip.PlaceOptions`.

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
    checked = Options.checked(**options)
    return skipping(inner, math.inf, max_consecutive, options=checked, gives_up=True)


@takes(PlaceOptions)
def skip_above(
    inner: optax.GradientTransformation,
    limit: LimitLike,
    max_consecutive: int | None = 20,
    *,
    loss_limit: ScalarOrSchedule | Threshold | None = None,
    of: Of = "gradients",
    norm: str | Norm = "l2",
    known_norm: str | None = None,
    **options: Unpack[PlaceOptions],
) -> Transformation[SkipState]:
    """Skips the steps whose global gradient norm, or loss, exceeds a limit or is not finite.

    With a constant this is the rule of paxml and Megatron-LM; with
    `thresholds.ema(0.99, 20.0, record="accepted", debias=True)` it is axlearn's. The following
    projects judge the loss by its own past too; pass their rule twice,
    `skip_above(inner, rule, loss_limit=rule)`:

      project           | rule
      ------------------|-----------------------------------------------------------------
      OLMo-core         | `thresholds.window(6.0, 128, ddof=1, min_std=0.0, warmup_steps=63)`
      Levanter          | `thresholds.window(6.0, 128)`
      MaxText           | OLMo-core's rule, behind a clip of the gradients:
                        | `optax.chain(clip_by_global_norm(1.0), skip_above(...))`

    Source: allenai/OLMo-core, marin-community/levanter, AI-Hypercomputer/maxtext, apple/axlearn.

    The published rules may skip any number of steps in a row; pass `max_consecutive=None` for that.
    `optaxclip.monitor.bad_leaves` names the leaves that caused a skip, and
    `optaxclip.monitor.verdict` tells the host whether to go on.

    Args:
      inner: the optimizer.
      limit: a number, a schedule, or a rule from `optaxclip.thresholds`, whose trigger counts;
        `math.inf` to judge the loss alone.
      max_consecutive: after this many skipped steps in a row, the next finite step is taken, so
        that a limit cannot stop a run for good. With None the limit always holds. Steps that are
        not finite are always skipped.
      loss_limit: the limit of the loss, which may be negative: a number, a schedule, or
        `thresholds.window`, `zscore`, `percentile`, `median` or `ema`, whose `floor` is not used.
        (For a negative average `m` the multiple `k` is `m + (k - 1) * abs(m)`.)
      of: "gradients" judges what comes in; "updates" judges the step that `inner` would take, whose
        length an Adam or a Muon sets itself. Steps with non-finite gradients are skipped in both
        cases. With "updates", `inner` must not accumulate gradients: write
        `optax.MultiSteps(skip_above(adam, limit, of="updates"), k)`.
      norm: which norm of the tree is compared with `limit`.
      known_norm: the name of an extra argument of the update, such as "grad_norm", that holds the
        norm of the incoming tree. That norm is then not measured, and no leaf can be blamed.
      **options: those that all transformations share, `optaxclip.PlaceOptions`.

    Returns:
      A transformation with a `SkipState`. A skipped step gives zero updates. With `loss_limit`, its
      update needs the loss: `value=`, as Optax calls it, or `loss=`, which is used if both are
      given. The loss must be a scalar, the same on all devices; `optax.MultiSteps` passes on only
      the loss of the last microbatch. A step whose loss is not finite is skipped, and that loss is
      never recorded. All extra arguments are passed on to the optimizer. Inside of
      `optax.MultiSteps` the skip judges means, and needs one of the guards against NaN that
      `docs/recipes/wrappers.md` shows.

    Raises:
      ValueError: for a limit that is negative, NaN or not a scalar (a `loss_limit` may be
        negative), for a `loss_limit` that is a rule for norms alone, and for `known_norm` with
        `of="updates"`; when used, for a loss that is missing or not a scalar, and for
        `optax.MultiSteps` or `optax.apply_every` inside a skip with `of="updates"`.
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
    of = checked_choice(of, get_args(Of), "of")
    if of == "updates" and known_norm is not None:
        raise ValueError(
            f"known_norm={known_norm!r} is of gradients: leave it out, or of='updates'"
        )
    return skipping(
        inner,
        limit,
        max_consecutive,
        of=of,
        loss_limit=None if loss_limit is None else as_loss_limit(loss_limit),
        options=Options.checked(norm=norm, known_norm=known_norm, **options),
    )

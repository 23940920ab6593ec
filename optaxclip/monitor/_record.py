"""Recording of norms and other statistics of the last steps on the device."""

from collections.abc import Sequence
from typing import Any, NamedTuple, Unpack

import jax.numpy as jnp
import numpy as np
from jax import Array

import optaxclip._backend.meshes as meshes
import optaxclip.scopes as scopes
from optaxclip._backend.global_view import Transformation, global_view, transformation
from optaxclip._backend.leaf_shardings import apply_scope
from optaxclip._base.numerics import saturating_cast
from optaxclip._base.state import (
    REINIT_HINT,
    StaticNames,
    check_state,
    register_state,
    safe_increment,
)
from optaxclip._base.trees import flatten
from optaxclip._base.types import PyTree
from optaxclip._base.validation import check_bool, check_int, did_you_mean, validate_call
from optaxclip._engine.options import Options, ShardingOptions, document_options
from optaxclip._engine.plan import make_plan
from optaxclip.monitor._find_states import check_ring_buffer
from optaxclip.monitor._statistics import STATISTICS, compute_statistics
from optaxclip.norms import Norm
from optaxclip.scopes.leaves import Scope, resolve_scope
from optaxclip.thresholds._constant import loss_from_extra_args


@register_state
class RecordState(NamedTuple):
    """State of `record`.

    Attributes:
      steps: int32[], the number of steps so far, including steps that a surrounding skip skipped.
      num_skipped: int32[], the number of steps that a surrounding skip skipped.
      name: The name of the transformation, as a tuple with one element.
      names: The names of the groups in order.
      last: The statistics of the last step by name, float32[] or, with a scope, float32[groups].
        The value is -inf for a group without leaves at that step, because NaN means that it was
        non-finite or that the step was skipped.
      ring: float32[window] or float32[window, groups]. With several statistics,
        float32[window, statistics, ...] in the order of their names. Step n is in row `n % window`.
    """

    NEEDS_OPTIMIZER = True

    steps: Array
    num_skipped: Array
    name: StaticNames
    names: StaticNames
    last: dict[str, Array]
    ring: Array

    def after_skip(self, skip: Array) -> "RecordState":
        """Returns the state with a row of NaN if a surrounding skip skipped the step."""
        steps, num_skipped, last, ring = _after_skip(
            self.steps, self.num_skipped, self.last, self.ring, skip
        )
        return self._replace(steps=steps, num_skipped=num_skipped, last=last, ring=ring)


@validate_call(
    transformation=True, replacements={"per_leaf": "scope=scopes.leaf()", "ratio": "stats='ratio'"}
)
@document_options(ShardingOptions)
def record(
    window: int = 1000,
    *,
    scope: Scope | None = None,
    stats: str | Sequence[str] = ("norm",),
    loss: bool = False,
    norm: str | Norm = "l2",
    **options: Unpack[ShardingOptions],
) -> Transformation[RecordState]:
    """Records statistics of the last steps on the device.

    As the first stage of a chain, it records the raw gradients, even if they are non-finite. Inside
    a skip, the statistics of skipped steps are NaN. Steps keep their numbers, and `num_skipped`
    counts the skipped steps. Put the record before the skip to see the norms of skipped steps.
    Nothing is sent to the host until you call `history`. `metrics` and `scalars` return the last
    step. It works under `jit`, in `scan` and under `vmap`.

    As the last stage of a chain, it records the updates that are applied to the params. Then
    "ratio" is the norm of the update divided by the norm of the params, usually about 1e-3. Its
    spikes precede spikes of the loss.

      statistic     | value for a group                                 | if non-finite
      --------------|---------------------------------------------------|----------------------
      norm          | the norm                                          | inf or NaN
      max           | the largest modulus of an element                 | inf or NaN
      mean_abs      | the mean modulus                                  | inf or NaN
      zero_fraction | the fraction of elements that are 0               | that fraction
      share         | the fraction of the squared L2 norm of all groups | NaN for all groups
      param_norm    | the norm of its params                            | not affected
      ratio         | norm / param_norm; inf where only param_norm is 0 | inf or NaN
      cosine_param  | the cosine with its params; 0 if a norm is 0      | NaN

    On a GPU, statistics that only use the gradients share one pass over them with a neighboring
    clipping stage. The other statistics also read the params. Statistics of narrow dtypes are as
    exact as those of float32. If all leaves of a group are None at a step, its statistics are NaN.
    Integer leaves are ignored.

    Args:
      window: The number of steps to keep.
      scope: The grouping of elements from `optaxclip.scopes`, for example leaves, layers of stacked
        leaves, experts, or labeled groups. If None, the whole tree is one group. The scopes `axes`
        and `unit` divide a leaf into very many groups, so the largest number of a leaf is kept.
      stats: The name or names of the statistics to keep, see the table.
      loss: If True, records the loss instead of statistics. The loss must then be passed to the
        update as `value=` or `loss=`.
      norm: The norm for "norm", "param_norm" and "ratio", as in `optaxclip.clip_by`.
      **options: Options that all transformations share, see `optaxclip.ShardingOptions`. `history`
        uses the `name` to choose among several records.

    Returns:
      A transformation with a `RecordState`. Its update returns the updates unchanged.

    Raises:
      ValueError: If `window` is less than 1, if the norm or a statistic is unknown, if `stats` is
        empty or contains a name twice, or if `loss` is used with `scope` or `stats`. The update
        also raises it if a statistic needs `params` and they are missing, or if the loss is missing
        or has axes.
      TypeError: If `window` is not an int, if `loss` is not a bool, if a statistic is not a string,
        if `scope` is not a scope, or if the loss is not a number.

    Example:
      >>> import jax.numpy as jnp, optax, optaxclip
      >>> from optaxclip import monitor, scopes
      >>> tx = optax.chain(record(window=2), optaxclip.clip_by_global_norm(1.0))
      >>> state = tx.init(jnp.zeros(2))
      >>> for size in (1.0, 2.0, 3.0):
      ...     updates, state = tx.update(jnp.array([0.0, size]), state)
      >>> print(monitor.history(state))
      [2. 3.]
      >>> tx = record(scope=scopes.leaf(), stats=("share", "zero_fraction"))
      >>> grads = {"head": jnp.array([3.0, 0.0]), "body": jnp.array([1.0, -1.0, 0.0])}
      >>> _, state = tx.update(grads, tx.init(grads))
      >>> print(monitor.history_names(state), monitor.history(state, stat="share").round(2))
      ('body', 'head') [[0.18 0.82]]
    """
    window = check_int(window, 1, "window")
    checked = Options.create(norm=norm, **options)
    kept = _check_stats(stats)
    chosen_scope = scopes.tree() if scope is None else resolve_scope(scope)
    if check_bool(loss, "loss") and (scope is not None or kept != ("norm",)):
        raise ValueError("loss cannot be kept with scope or stats: chain a second record for those")
    name = checked.name

    def init(params: PyTree) -> RecordState:
        columns, names, keys = (), StaticNames(("loss",)), ("loss",)
        if not loss:
            grouping, keys = (
                apply_scope(chosen_scope, flatten(params, "params"), checked.sharding_hints),
                kept,
            )
            names = grouping.names
            columns = () if grouping.layout == "scalar" else (len(names),)
        last = {key: jnp.zeros(columns, jnp.float32) for key in keys}
        rows = (window, len(keys)) if len(keys) > 1 else (window,)
        ring = jnp.zeros((*rows, *columns), jnp.float32)
        zero = jnp.zeros((), jnp.int32)
        return RecordState(zero, jnp.zeros((), jnp.int32), StaticNames((name,)), names, last, ring)

    def update(
        updates: PyTree, state: Any, params: PyTree | None = None, **extra_args: Any
    ) -> tuple[PyTree, RecordState]:
        check_state(state, RecordState, name, updates=updates)
        keys = ("loss",) if loss else kept
        if sorted(state.last) != list(keys):
            raise ValueError(
                f"{name}: the state was made by another record: it holds the statistics "
                f"{sorted(state.last)}, and this record keeps {list(keys)}; {REINIT_HINT}"
            )
        absent = None
        if loss:
            found, names = (
                {"loss": loss_from_extra_args(extra_args, name, checked.axis_names)},
                state.names,
            )
        else:
            flat, size = flatten(updates, "updates"), next(iter(state.last.values())).size
            plan = make_plan(flat, chosen_scope, checked, state.names, size)
            found = compute_statistics(flat, params, plan, kept, checked)
            names = plan.grouping.names
            if plan.grouping.layout != "scalar" and not all(plan.grouping.has_leaves):
                absent = ~np.array(plan.grouping.has_leaves)
        rows = (window, len(found)) if len(found) > 1 else (window,)
        shape = (*rows, *jnp.shape(next(iter(found.values()))))
        check_ring_buffer(state.ring, shape, name, "another record")
        steps, last, ring = _append_row(state.steps, state.last, state.ring, found, absent)
        return updates, state._replace(steps=steps, names=names, last=last, ring=ring)

    return transformation(init, update)


def _check_stats(stats: str | Sequence[str]) -> tuple[str, ...]:
    """Checks the names of statistics and returns them sorted."""
    given = (stats,) if isinstance(stats, str) else stats
    if not isinstance(given, Sequence) or not all(isinstance(stat, str) for stat in given):
        raise TypeError(f"stats must be a name or several, of {list(STATISTICS)}; got {stats!r}")
    for stat in given:
        if stat not in STATISTICS:
            hint = did_you_mean(stat, STATISTICS)
            raise ValueError(f"stats must be among {list(STATISTICS)}, got {stat!r}{hint}")
    if not given or len(set(given)) < len(given):
        raise ValueError(
            f"stats must name at least one of {list(STATISTICS)}, each at most once; got {stats!r}"
        )
    return tuple(sorted(given))


@global_view(out_like=("steps", "num_skipped", "last", "ring"))
def _after_skip(
    steps: Array, num_skipped: Array, last: dict[str, Array], ring: Array, skip: Array
) -> tuple[Array, Array, dict[str, Array], Array]:
    """Updates the counters, last statistics and ring if `skip` is True."""
    at = steps % len(ring)
    ring = ring.at[at].set(jnp.where(skip, jnp.nan, ring[at]))
    last = {key: jnp.where(skip, jnp.nan, x).astype(x.dtype) for key, x in last.items()}
    steps = safe_increment(steps, skip, period=len(ring))
    return steps, safe_increment(num_skipped, skip), last, ring


@global_view(out_like=("steps", "old", "ring"))
def _append_row(
    steps: Array, old: dict[str, Array], ring: Array, found: dict[str, Array], is_absent: Any
) -> tuple[Array, dict[str, Array], Array]:
    """Appends a row and marks the groups without leaves, `is_absent`, with -inf."""
    last = {key: saturating_cast(found[key], ring.dtype) for key in sorted(found)}
    row = meshes.stack(list(last.values())) if len(last) > 1 else next(iter(last.values()))
    ring = ring.at[steps % len(ring)].set(row)
    if is_absent is not None:
        last = {key: jnp.where(is_absent, -jnp.inf, x) for key, x in last.items()}
    return safe_increment(steps, period=len(ring)), meshes.reuse_buffers(old, last), ring

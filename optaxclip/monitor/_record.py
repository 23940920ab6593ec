"""Norms and other statistics of the last steps, kept on the device."""

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
from optaxclip.thresholds._loss import loss_from_extra_args


@register_state
class RecordState(NamedTuple):
    """State of `record`.

    Attributes:
      steps: int32[], steps so far, with those that a skip around the record left out.
      num_skipped: int32[], how many steps such a skip left out.
      name: the transformation's name, as a tuple of one.
      names: the groups' names in order.
      last: for each statistic, of the last step, float32[] or, with a scope, float32[groups]. It is
        -inf for a group without leaves at that step, because NaN means that it was not finite, or
        that the step was skipped.
      ring: float32[window], or float32[window, groups]; if there are several statistics,
        float32[window, statistics, ...], in the order of their names. Step n is in row
        `n % window`.
    """

    NEEDS_OPTIMIZER = True

    steps: Array
    num_skipped: Array
    name: StaticNames
    names: StaticNames
    last: dict[str, Array]
    ring: Array

    def after_skip(self, skip: Array) -> "RecordState":
        """This state, with a row of NaN for the step if a skip around the record left it out."""
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
    """Keeps statistics of the last steps on the device; updates pass through untouched.

    As the first stage of a chain it records the raw gradients, even if they are not finite. Inside
    a skip, the statistics of skipped steps are NaN: steps keep their numbers, and `num_skipped`
    counts those that were left out. Put the record in front of the skip to see their norms. Nothing
    is sent to the host until `history` asks for it; `metrics` and `scalars` have the last step. It
    works under `jit`, in `scan` and under `vmap`.

    As the last stage of a chain it records the step that the weights take. Then "ratio" is how far
    the step moves them, as a share of their own norm: usually about 1e-3. Its spikes come before
    spikes of the loss.

      statistic     | what it is of each group                          | not finite
      --------------|---------------------------------------------------|----------------------
      norm          | the norm                                          | inf or NaN
      max           | the largest modulus of an entry                   | inf or NaN
      mean_abs      | the mean modulus                                  | inf or NaN
      zero_fraction | the share of entries that are 0                   | that share
      share         | its part of the squared L2 norm of all groups     | NaN, of all groups
      param_norm    | the norm of its parameters                        | not affected
      ratio         | norm / param_norm; inf where only param_norm is 0 | inf or NaN
      cosine_param  | the cosine with its parameters; 0 if a norm is 0  | NaN

    On a GPU, statistics of the gradients alone share the read of a clip beside them; the others
    read the parameters too. They are as exact for narrow dtypes as for float32. At a step at which
    all leaves of a group are None, its statistics are NaN; integer leaves do not count.

    Args:
      window: how many steps to keep.
      scope: which entries belong together, from `optaxclip.scopes`: leaves, layers of leaves that
        stack them, experts, labelled groups; the whole tree if None. With the scopes `axes` and
        `unit`, which divide a leaf into very many groups, the largest number of each leaf is kept.
      stats: which statistics to keep, of those in the table: one name, or several.
      loss: whether to keep the loss in place of statistics; the update takes it as `value=` or
        `loss=`.
      norm: the norm of "norm", "param_norm" and "ratio", as in `optaxclip.clip_by`.
      **options: those that all transformations share, `optaxclip.ShardingOptions`; `history`
        chooses among several records by their `name`.

    Returns:
      A transformation with a `RecordState`. Its update returns the updates as they are.

    Raises:
      ValueError: if `window` is less than 1; for an unknown norm or statistic, for no statistic, or
        for one that comes twice; for `loss` with `scope` or `stats`; when used, without `params` if
        a statistic needs them, or for a loss that is missing or has axes.
      TypeError: if `window` is not an int; if `loss` is neither True nor False; if a statistic is
        not a string, the scope is not a scope, or the loss is not a number.

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
    """The names of statistics, sorted."""
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
    """Steps, their number that was skipped, last statistics and ring after one skipped step."""
    at = steps % len(ring)
    ring = ring.at[at].set(jnp.where(skip, jnp.nan, ring[at]))
    last = {key: jnp.where(skip, jnp.nan, x).astype(x.dtype) for key, x in last.items()}
    steps = safe_increment(steps, skip, period=len(ring))
    return steps, safe_increment(num_skipped, skip), last, ring


@global_view(out_like=("steps", "old", "ring"))
def _append_row(
    steps: Array, old: dict[str, Array], ring: Array, found: dict[str, Array], is_absent: Any
) -> tuple[Array, dict[str, Array], Array]:
    """Steps, last statistics and ring after one more row; `absent` groups have no leaves."""
    last = {key: saturating_cast(found[key], ring.dtype) for key in sorted(found)}
    row = meshes.stack(list(last.values())) if len(last) > 1 else next(iter(last.values()))
    ring = ring.at[steps % len(ring)].set(row)
    if is_absent is not None:
        last = {key: jnp.where(is_absent, -jnp.inf, x) for key, x in last.items()}
    return safe_increment(steps, period=len(ring)), meshes.reuse_buffers(old, last), ring

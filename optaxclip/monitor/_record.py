"""Records norms and other statistics of recent steps, and stores them on the device."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Unpack

import jax.numpy as jnp
import numpy as np
from jax import Array

import optaxclip._backend.meshes as meshes
import optaxclip.norms as norms
import optaxclip.scopes as scopes
from optaxclip._backend.elementwise import as_arrays
from optaxclip._backend.global_view import Transformation, global_view, transformation
from optaxclip._backend.leaf_shardings import apply_scope
from optaxclip._base.numerics import divide_no_nan, promote_dtypes, saturating_cast
from optaxclip._base.state import (
    REINIT_HINT,
    StaticNames,
    check_state,
    register_state,
    safe_increment,
)
from optaxclip._base.trees import FlatTree, flatten, is_sparse
from optaxclip._base.types import PyTree
from optaxclip._base.validation import check_bool, check_int, did_you_mean, validate_call
from optaxclip._engine.measure import measure, with_entries
from optaxclip._engine.options import Options, ShardingOptions, document_options
from optaxclip._engine.plan import Plan, get_param_leaves, make_plan, resolve_scope
from optaxclip._engine.products import InnerProducts, products
from optaxclip.monitor._find_states import check_ring_buffer
from optaxclip.norms import Norm
from optaxclip.scopes import Scope
from optaxclip.thresholds._constant import loss_from_extra_args


@register_state
class RecordState(NamedTuple):
    """State of `record`.

    Attributes:
      steps: int32[], the number of steps so far, including skipped steps.
      num_skipped: int32[], the number of steps that a surrounding wrapper skipped.
      name: A tuple with one element, the name of the transformation.
      names: The names of the groups, in the order of the columns.
      last: A dict that maps statistics to their most recent values, float32[] or, with a scope,
        float32[groups]. Values are -inf for groups without leaves, because NaN means that a group
        is non-finite or that the step was skipped.
      ring: float32[window, ...]. The other axes are the statistics, sorted by name, if there are
        several, and the groups if there is a scope. Step n is in row `n % window`.
    """

    NEEDS_OPTIMIZER = True

    steps: Array
    num_skipped: Array
    name: StaticNames
    names: StaticNames
    last: dict[str, Array]
    ring: Array

    def after_skip(self, skip: Array) -> "RecordState":
        """Returns the state after a step that a surrounding wrapper may have skipped."""
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
    """Records statistics of recent steps on the device.

    As the first stage of a chain, `record` measures the raw gradients. As the last stage, it
    measures the updates that are applied to the params. In that case, "ratio" is the norm of the
    update divided by the norm of the params, which is usually about 1e-3. Spikes in this ratio
    often precede loss spikes.

    Inside a skip wrapper, the statistics of skipped steps are NaN. To see the norms of these steps,
    place `record` before the wrapper. Nothing is sent to the host until you call `history`.
    `metrics` and `scalars` return the statistics of the most recent step.

      statistic     | value for a group                                 | if non-finite
      --------------|---------------------------------------------------|----------------------
      norm          | the norm                                          | inf or NaN
      max           | the largest absolute value of an element          | inf or NaN
      mean_abs      | the mean absolute value                           | inf or NaN
      zero_fraction | the fraction of elements that are 0               | that fraction
      share         | its fraction of the total squared L2 norm         | NaN for all groups
      param_norm    | the norm of its params                            | not affected
      ratio         | norm / param_norm, or inf if only param_norm is 0 | inf or NaN
      cosine_param  | cosine similarity to its params, 0 if a norm is 0 | NaN

    On a GPU, statistics that use only the gradients share a pass over them with a neighboring
    clipping stage. The remaining statistics also read the params. Statistics of low-precision
    leaves are as accurate as those of float32 leaves. If all leaves of a group are None, its
    statistics are NaN. Integer leaves are ignored.

    Args:
      window: The number of steps to keep.
      scope: A scope from `optaxclip.scopes`, which defines the groups, for example leaves, layers
        of stacked leaves, experts, or labels. If None, the whole tree is one group. For the scopes
        `axes` and `unit`, the largest value of each leaf is recorded.
      stats: The names of one or more statistics in the table.
      loss: If True, records the loss instead of statistics. Pass the loss to `update` as `value=`
        or `loss=`.
      norm: The norm for "norm", "param_norm", and "ratio", as in `optaxclip.clip_by`.
      **options: Options that can be used with any transformation. See `optaxclip.ShardingOptions`.

    Returns:
      A transformation with a `RecordState`. Its `update` function returns the updates unchanged.

    Raises:
      ValueError: If `window` is less than 1, if the norm or a statistic is unknown, if `stats` is
        empty or contains a name twice, or if `loss` is used with `scope` or `stats`. Also raised by
        `update` if required `params` are missing, or if the loss is missing or is not a scalar.
      TypeError: If an argument has the wrong type.

    Example:
      >>> import jax.numpy as jnp, optax, optaxclip
      >>> from optaxclip import monitor, scopes
      >>> per_leaf = record(window=100, scope=scopes.leaf(), stats=("share", "zero_fraction"))
      >>> tx = optax.chain(per_leaf, optaxclip.clip_by_global_norm(1.0))
      >>> grads = {"head": jnp.array([3.0, 0.0]), "body": jnp.array([1.0, -1.0, 0.0])}
      >>> _, state = tx.update(grads, tx.init(grads))
      >>> print(monitor.history_names(state), monitor.history(state, stat="share").round(2))
      ('body', 'head') [[0.18 0.82]]
    """
    window = check_int(window, 1, "window")
    checked = Options.create(norm=norm, **options)
    stats = _check_stats(stats)
    chosen_scope = scopes.tree() if scope is None else resolve_scope(scope)
    if check_bool(loss, "loss") and (scope is not None or stats != ("norm",)):
        raise ValueError(
            "loss=True cannot be combined with scope or stats; chain a second monitor.record()"
        )
    name = checked.name

    def init(params: PyTree) -> RecordState:
        keys, names, columns = ("loss",), StaticNames(("loss",)), ()
        if not loss:
            flat = flatten(params, "params")
            grouping = apply_scope(chosen_scope, flat, checked.sharding_hints)
            keys, names = stats, grouping.names
            columns = () if grouping.layout == "scalar" else (len(names),)
        rows = (window, len(keys)) if len(keys) > 1 else (window,)
        return RecordState(
            # Two arrays, because the same buffer cannot be donated twice.
            steps=jnp.zeros((), jnp.int32),
            num_skipped=jnp.zeros((), jnp.int32),
            name=StaticNames((name,)),
            names=names,
            last={key: jnp.zeros(columns, jnp.float32) for key in keys},
            ring=jnp.zeros((*rows, *columns), jnp.float32),
        )

    def update(
        updates: PyTree, state: Any, params: PyTree | None = None, **extra_args: Any
    ) -> tuple[PyTree, RecordState]:
        check_state(state, RecordState, name, updates=updates)
        keys = ("loss",) if loss else stats
        if sorted(state.last) != list(keys):
            raise ValueError(
                f"{name}: state must contain the statistics {list(keys)}, got "
                f"{sorted(state.last)}; {REINIT_HINT}"
            )
        names, is_absent = state.names, None
        if loss:
            found = {"loss": loss_from_extra_args(extra_args, name, checked.axis_names)}
        else:
            flat, size = flatten(updates, "updates"), next(iter(state.last.values())).size
            plan = make_plan(flat, chosen_scope, checked, state.names, size)
            found = compute_statistics(flat, params, plan, stats, checked)
            names = plan.grouping.names
            if plan.grouping.layout != "scalar" and not all(plan.grouping.has_leaves):
                is_absent = ~np.array(plan.grouping.has_leaves)  # bool[groups]
        rows = (window, len(found)) if len(found) > 1 else (window,)
        shape = (*rows, *jnp.shape(next(iter(found.values()))))
        check_ring_buffer(state.ring, shape, name)
        steps, last, ring = _append_row(state.steps, state.last, state.ring, found, is_absent)
        return updates, state._replace(steps=steps, names=names, last=last, ring=ring)

    return transformation(init, update)


def _check_stats(stats: str | Sequence[str]) -> tuple[str, ...]:
    """Checks the names of statistics and returns them sorted."""
    given = (stats,) if isinstance(stats, str) else stats
    if not isinstance(given, Sequence) or not all(isinstance(stat, str) for stat in given):
        raise TypeError(f"stats must be a name or a sequence of names, got {stats!r}")
    for stat in given:
        if stat not in STATISTICS:
            hint = did_you_mean(stat, STATISTICS)
            raise ValueError(f"stats must be one or more of {list(STATISTICS)}, got {stat!r}{hint}")
    if not given or len(set(given)) < len(given):
        raise ValueError(
            f"stats must be one or more distinct names from {list(STATISTICS)}, got {stats!r}"
        )
    return tuple(sorted(given))


@global_view(out_like=("steps", "num_skipped", "last", "ring"))
def _after_skip(
    steps: Array, num_skipped: Array, last: dict[str, Array], ring: Array, skip: Array
) -> tuple[Array, Array, dict[str, Array], Array]:
    # The wrapper has restored the old state, so the row still contains an older step.
    at = steps % len(ring)
    ring = ring.at[at].set(jnp.where(skip, jnp.nan, ring[at]))
    last = {key: jnp.where(skip, jnp.nan, x).astype(x.dtype) for key, x in last.items()}
    steps = safe_increment(steps, skip, period=len(ring))
    return steps, safe_increment(num_skipped, skip), last, ring


@global_view(out_like=("steps", "old", "ring"))
def _append_row(
    steps: Array, old: dict[str, Array], ring: Array, found: dict[str, Array], is_absent: Any
) -> tuple[Array, dict[str, Array], Array]:
    """Appends a row, and sets the most recent statistics of absent groups to -inf."""
    last = {key: saturating_cast(found[key], ring.dtype) for key in sorted(found)}
    # f32[], f32[groups], f32[statistics] or f32[statistics, groups]
    row = meshes.stack(list(last.values())) if len(last) > 1 else next(iter(last.values()))
    ring = ring.at[steps % len(ring)].set(row)
    if is_absent is not None:
        last = {key: jnp.where(is_absent, -jnp.inf, x) for key, x in last.items()}
    return safe_increment(steps, period=len(ring)), meshes.reuse_buffers(old, last), ring


@dataclasses.dataclass(eq=False)
class StatisticInputs:
    """Caches the norms and inner products that the statistics need."""

    leaves: list[Any]
    weights: list[Any]
    plan: Plan
    weights_plan: Plan  # Like `plan`, but with the sharding of the params.
    norm: Norm
    with_cosines: bool
    measured: dict[tuple[str, Norm], Array] = dataclasses.field(default_factory=dict)

    def grad_norms(self, norm: Norm) -> Array:
        """Returns the norms of the gradients, f32[groups]."""
        if ("leaves", norm) not in self.measured:
            self.measured["leaves", norm] = measure(self.leaves, self.plan, norm).norm
        return self.measured["leaves", norm]

    def param_norms(self, norm: Norm) -> Array:
        """Returns the norms of the params, f32[groups]."""
        if ("weights", norm) not in self.measured:
            # The pass that computes the cosines also computes the L2 norms of dense params,
            # f32[groups].
            is_shared = self.with_cosines and norm is norms.l2
            if is_shared and not any(map(is_sparse, self.leaves)):
                found = jnp.where(self.plan.has_leaves(), self.products.other_norm, jnp.nan)
            else:
                found = measure(self.weights, self.weights_plan, norm).norm
            self.measured["weights", norm] = found
        return self.measured["weights", norm]

    def zero_fractions(self) -> Array:
        """Returns each group's fraction of zeros, f32[groups], or 0 for groups without elements."""
        not_zero = self.grad_norms(NOT_ZERO)  # f32[groups]
        return jnp.asarray(with_entries(self.leaves, self.plan), not_zero.dtype) - not_zero

    def shares(self) -> Array:
        """Returns each group's fraction of the tree's squared norm, f32[groups]."""
        norm, present = self.grad_norms(norms.l2), self.plan.has_leaves()
        known = jnp.where(present, norm, 0)  # f32[groups]
        # Divide by the largest norm first, because the squares could overflow.
        squares = jnp.square(divide_no_nan(known, jnp.max(known, initial=0), 0.0))
        return jnp.where(present, divide_no_nan(squares, jnp.sum(squares), 0.0), norm)

    def ratios(self) -> Array:
        """Returns the ratios of gradient norms to param norms, f32[groups]."""
        # Gradients and params can have different dtypes.
        found = [self.grad_norms(self.norm), self.param_norms(self.norm)]
        norm, of_weights = promote_dtypes(found)
        return divide_no_nan(norm, of_weights, jnp.where(norm > 0, jnp.inf, norm))

    @functools.cached_property
    def products(self) -> InnerProducts:
        """The inner products and cosines of gradients and params."""
        # The products need both trees, so the pass is local only if neither is sharded.
        placement = self.plan.placement
        is_unsharded = placement.is_unsharded and self.weights_plan.placement.is_unsharded
        placement = dataclasses.replace(placement, is_unsharded=is_unsharded)
        plan = dataclasses.replace(self.plan, placement=placement)
        known = [self.grad_norms(norms.l2)]
        if any(map(is_sparse, self.leaves)):
            known.append(self.param_norms(norms.l2))
        return products(self.leaves, self.weights, plan, *known)


@dataclasses.dataclass(frozen=True)
class GroupStatistic:
    """A statistic with one value per group."""

    compute: Callable[[StatisticInputs], Array]
    needs_params: bool = False


NOT_ZERO = Norm(
    "not_zero",
    lambda x: (x != 0).astype(jnp.finfo(x.dtype).dtype),
    norms.mean_abs.finalize,
    degree=0,
)
"""Returns the fraction of nonzero elements."""

STATISTICS: dict[str, GroupStatistic] = {
    "norm": GroupStatistic(lambda inputs: inputs.grad_norms(inputs.norm)),
    "max": GroupStatistic(lambda inputs: inputs.grad_norms(norms.linf)),
    "mean_abs": GroupStatistic(lambda inputs: inputs.grad_norms(norms.mean_abs)),
    "zero_fraction": GroupStatistic(StatisticInputs.zero_fractions),
    "share": GroupStatistic(StatisticInputs.shares),
    "param_norm": GroupStatistic(lambda inputs: inputs.param_norms(inputs.norm), needs_params=True),
    "ratio": GroupStatistic(StatisticInputs.ratios, needs_params=True),
    "cosine_param": GroupStatistic(lambda inputs: inputs.products.cosine, needs_params=True),
}


def compute_statistics(
    flat: FlatTree, params: PyTree | None, plan: Plan, names: tuple[str, ...], options: Options
) -> dict[str, Array]:
    """Computes the named statistics, with one number per group or one for the whole tree."""
    weights, weights_plan = [], plan
    needing = [name for name in names if STATISTICS[name].needs_params]
    if needing:
        if params is None:
            raise ValueError(
                f"{options.name}: params are required for the statistics {needing}; "
                "call update(updates, state, params)"
            )
        weights, weights_plan = get_param_leaves(flat, params, plan, options)
    static = {"plan": plan, "weights_plan": weights_plan, "names": names, "norm": options.norm}
    return _compute_statistics(flat.inexact_leaves(), weights, **static)


@global_view()
def _compute_statistics(
    leaves: list[Any],
    weights: list[Any],
    *,
    plan: Plan,
    weights_plan: Plan,
    names: tuple[str, ...],
    norm: Norm,
) -> dict[str, Array]:
    arrays, with_cosines = (as_arrays(leaves), as_arrays(weights)), "cosine_param" in names
    inputs = StatisticInputs(*arrays, plan, weights_plan, norm, with_cosines)
    return {name: _reduce_to_names(STATISTICS[name].compute(inputs), plan) for name in names}


def _reduce_to_names(packed: Array, plan: Plan) -> Array:
    """Returns one value per name, which is the largest one if a leaf has several groups."""
    if plan.grouping.layout != "dict":
        return packed
    # f32[groups] -> f32[names]
    found = []
    for x in plan.unpack(packed):
        # On a CPU, a maximum over devices ignores NaN (as of JAX 0.10.2).
        is_unknown = jnp.isnan(x)
        least = jnp.asarray(-jnp.inf, x.dtype)
        largest = jnp.max(jnp.where(is_unknown, least, x), initial=least)
        largest = jnp.where(largest == least, 0, largest)
        found.append(jnp.where(jnp.any(is_unknown), jnp.nan, largest))
    return meshes.stack(found) if found else jnp.zeros(0)

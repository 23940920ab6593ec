"""Counts how many entries of each size there are, at some steps, on the device."""

from typing import Any, Literal, NamedTuple, Unpack

import jax.numpy as jnp
from jax import Array, lax

import optaxclip.scopes as scopes
from optaxclip._base.arguments import check_choice, check_int
from optaxclip._base.numerics import norm_dtype
from optaxclip._base.states import (
    REINIT_HINT,
    StaticNames,
    check_state,
    register_state,
    safe_increment,
)
from optaxclip._base.trees import FlatTree, dtype_of, flatten
from optaxclip._base.types import PyTree
from optaxclip._border.crossing import Transformation, global_view, transformation
from optaxclip._border.entries import as_arrays
from optaxclip._border.entry_counts import num_counts
from optaxclip._border.placement import apply_scope
from optaxclip._engine.counts import compute_group_histograms
from optaxclip._engine.options import Options, ShardingOptions, clip_factory
from optaxclip._engine.plan import Plan, get_param_leaves, make_plan
from optaxclip.scopes.leaves import Scope, resolve_scope


@register_state
class HistogramState(NamedTuple):
    """State of `histogram`; `histograms` reads it.

    Attributes:
      steps: int32[], steps so far, with those that a skip around the stage left out.
      counted: int32[], the step whose entries were counted last; -1 before the first.
      name: the transformation's name, as a tuple of one.
      names: the groups' names in order.
      counts: uint32[groups, 2, counts], how many entries of that step have which size: 0, between
        two of several thresholds, infinite, NaN. A count is `counts[:, 0] + 2**16 * counts[:, 1]`.
    """

    steps: Array
    last_counted_step: Array
    name: StaticNames
    names: StaticNames
    counts: Array

    def after_skip(self, skip: Array) -> "HistogramState":
        """This state after a step, if a skip around the stage left it out."""
        return self._replace(steps=safe_increment(self.steps, skip))


@clip_factory(ShardingOptions)
def histogram(
    every: int = 100,
    *,
    scope: Scope | None = None,
    of: Literal["updates", "params"] = "updates",
    **options: Unpack[ShardingOptions],
) -> Transformation[HistogramState]:
    """Counts at some steps how many entries lie between neighbouring powers of two.

    Updates pass through untouched. In front of a clip it sees the raw gradients, behind the
    optimizer the steps that the weights take. It counts the entries of the first step, of the step
    `every` steps later, and so on; nothing is sent to the host until `histograms` asks for it. A
    step that counts reads the updates once more; the others read nothing. Under `vmap` over
    seeds too, if these began together; the updates of all are read when one of them counts. Inside
    a skip, a step that is left out is not counted, and the next one is in its place.

    Counts are exact, for any number of entries on any number of devices, and for all floating-point
    formats with their subnormal numbers. A complex entry counts by its modulus, which
    is rounded to float32, or float64 in a tree with 64-bit leaves: near the edge of a bin it may
    count in the next one. Integer leaves do not count.

    Args:
      every: after how many steps the entries are counted again.
      scope: which entries belong to one histogram, from `optaxclip.scopes`; each leaf by itself if
        None. With the scopes `axes` and `unit`, which divide a leaf into very many groups, a
        histogram is of the whole leaf.
      of: whether to count entries of the "updates" or of the "params".
      **options: those that all transformations share, `optaxclip.ShardingOptions`; `histograms`
        chooses among several by their `name`.

    Returns:
      A transformation with a `HistogramState`. Its update returns the updates as they are.

    Raises:
      ValueError: if `every` is less than 1, or `of` is neither of both; when used, without `params`
        if these are counted, or for float64 leaves that were not float64 at `init`.
      TypeError: if `every` is not an int, or the scope is not a scope.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> from optaxclip import monitor
      >>> tx = optax.chain(histogram(every=10), optax.sgd(0.1))
      >>> grads = {"w": jnp.array([0.0, 3.0, -4.0, 5.0, jnp.inf])}
      >>> _, state = tx.update(grads, tx.init(grads))
      >>> found = monitor.histograms(state)["w"]
      >>> for low, high, count in zip(found.edges, found.edges[1:], found.counts):
      ...     if count:
      ...         print(f"above {low}, up to {high}: {count}")
      above 2.0, up to 4.0: 2
      above 4.0, up to 8.0: 1
      >>> print(found.zeros, found.nonfinite, found.step)
      1 1 0
    """
    every = check_int(every, 1, "every")
    check_choice(of, ("updates", "params"), "of")
    checked = Options.create(**options)
    chosen_scope = scopes.leaf() if scope is None else resolve_scope(scope)
    name = checked.name

    def init(params: PyTree) -> HistogramState:
        flat = flatten(params, "params")
        names = apply_scope(chosen_scope, flat, checked.sharding_hints).names
        counts = jnp.zeros((len(names), 2, num_counts(wide=_is_wide(flat))), jnp.uint32)
        steps, counted = jnp.zeros((), jnp.int32), jnp.full((), -1, jnp.int32)
        return HistogramState(steps, counted, StaticNames((name,)), names, counts)

    def update(
        updates: PyTree, state: Any, params: PyTree | None = None, **extra_args: Any
    ) -> tuple[PyTree, HistogramState]:
        del extra_args
        check_state(state, HistogramState, name, updates=updates)
        flat = flatten(updates, "updates")
        plan = make_plan(flat, chosen_scope, checked, state.names, state.counts.shape[-3])
        leaves = flat.inexact_leaves()
        if of == "params":
            if params is None:
                raise ValueError(
                    f"{name}: of='params' needs the parameters; pass them: "
                    "update(updates, state, params)"
                )
            leaves, plan = get_param_leaves(flat, params, plan, checked)
        wide = state.counts.shape[-1] == num_counts(wide=True)
        if norm_dtype(map(dtype_of, leaves)) == jnp.float64 and not wide:
            raise ValueError(
                f"{name}: the {of} have float64 leaves, and the params given to init had none. "
                f"Call init with params of the dtypes that are counted. {REINIT_HINT}"
            )
        steps, counted, counts = _write_counts(
            state.steps, state.last_counted_step, state.counts, leaves, plan=plan, every=every, wide=wide
        )
        names = plan.grouping.names
        return updates, state._replace(
            steps=steps, last_counted_step=counted, names=names, counts=counts
        )

    return transformation(init, update)


def _is_wide(flat: FlatTree) -> bool:
    """Whether a leaf is 64-bit."""
    return norm_dtype(map(dtype_of, flat.inexact_leaves())) == jnp.float64


@global_view(out_like=("steps", "counted", "counts"))
def _write_counts(
    steps: Array,
    counted: Array,
    counts: Array,
    leaves: list[Any],
    *,
    plan: Plan,
    every: int,
    wide: bool,
) -> tuple[Array, Array, Array]:
    """The three arrays of the state after a step."""
    leaves = lax.stop_gradient(as_arrays(leaves))

    def count(_: Any) -> tuple[Array, Array, Array]:
        return jnp.zeros((), bool), steps, compute_group_histograms(leaves, plan, wide=wide)

    # A loop of at most one turn: under `vmap`, `lax.cond` would count at all steps, and the loop
    # turns only if a seed has to count.
    # A step that a skip left out is made up for by the next one.
    is_due = (steps % every == 0) | (steps // every > counted // every)
    start = (is_due, counted, counts)
    _, counted, counts = lax.while_loop(lambda carry: carry[0], count, start)
    return safe_increment(steps, period=every), counted, counts

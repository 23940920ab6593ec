"""Recording of the actions of clipping stages and skips at the last steps."""

from typing import Any, NamedTuple, Unpack

import jax.numpy as jnp
import numpy as np
import optax
from jax import Array, lax

import optaxclip._backend.meshes as meshes
import optaxclip.scopes as scopes
from optaxclip._backend.global_view import (
    Transformation,
    global_view,
    put_on_device,
    transformation,
)
from optaxclip._base.numerics import saturating_cast
from optaxclip._base.state import StaticNames, check_state, register_state, safe_increment
from optaxclip._base.trees import flatten
from optaxclip._base.types import ClipState, Path, PyTree
from optaxclip._base.validation import check_int, validate_call
from optaxclip._engine.clip import compute_norms
from optaxclip._engine.options import Options, ShardingOptions, document_options
from optaxclip._engine.plan import make_plan
from optaxclip.monitor._find_states import (
    check_ring_buffer,
    deduplicate,
    iter_states,
    name_of,
    unbox,
)
from optaxclip.monitor._summary import (
    has_entries,
    names_of,
    summary_inputs,
    take_along_columns,
    worst_group,
)
from optaxclip.norms import Norm
from optaxclip.transforms.skip import SkipState, after_skip, check_inner

VERDICTS = ("taken", "clipped", "not finite", "skipped")
"""Possible outcomes of a step. If several apply, the last one is used."""
NOT_RUN = -1
"""Marks a stage that did not run. Leaves are numbered from 1, and 0 marks a tree without leaves."""

_WRAP_STATE = (
    "If the optimizer ran without events until now, put its state into a fresh one: "
    "opt_state = tx.init(params)._replace(inner_state=old_opt_state)"
)


@register_state
class EventsState(NamedTuple):
    """State of `events`.

    Attributes:
      steps: int32[], the number of steps so far.
      name: The name of the transformation, as a tuple with one element.
      names: The names of the leaves among which the worst is chosen. Empty if all clipping stages
        and skips inside have norms of leaves or groups. A leaf that was None at `init` is last.
      numbers: float32[window, judges, 3], the norm, threshold and factor of the clipping stages
        and skips inside, in the order of `read`. For the loss of a skip, the loss and its
        threshold. Step n is in row `n % window`.
      marks: int32[window, 1 + judges], the outcome of the step, and the numbers of the worst
        leaves of the clipping stages and skips. Numbers start at 1. A number is 0 if the tree had
        no leaves and -1 if the stage did not run.
      inner_state: The state of the wrapped transformation.
    """

    steps: Array
    name: StaticNames
    names: StaticNames
    numbers: Array
    flags: Array
    inner_state: PyTree

    def after_skip(self, skip: Array) -> "EventsState":
        """Returns the state with a row for the step if a surrounding skip skipped it."""
        at = self.steps % self.numbers.shape[0]
        row = jnp.full(self.flags.shape[1:], NOT_RUN, jnp.int32).at[0].set(len(VERDICTS) - 1)
        return self._replace(
            steps=safe_increment(self.steps, skip, period=self.numbers.shape[0]),
            numbers=self.numbers.at[at].set(jnp.where(skip, jnp.nan, self.numbers[at])),
            flags=self.flags.at[at].set(jnp.where(skip, row, self.flags[at])),
            inner_state=after_skip(self.inner_state, skip),
        )


@validate_call(transformation=True)
@document_options(ShardingOptions)
def events(
    inner: optax.GradientTransformation,
    window: int = 1000,
    *,
    norm: str | Norm = "l2",
    **options: Unpack[ShardingOptions],
) -> Transformation[EventsState]:
    """Records the actions of the clipping stages and skips in `inner` at the last steps.

    For each step, it records the norm, the threshold, the factor, the outcome, and the worst leaf.
    It can wrap a clipping stage, a skip, or the whole optimizer. The updates are those of `inner`,
    bit for bit. `history` returns the events with their step numbers, so you can find a bad batch
    in the data. `plots.events_over_steps` draws them. Nothing is sent to the host until then.

    A step writes one row of numbers from the records of the clipping stages and skips. If a stage
    or skip has one norm for the whole tree, its worst leaf is the leaf with the largest norm among
    the incoming updates. On a GPU, these norms share a pass over the updates with that stage or
    skip if it measures the same updates by the same norm. Stages that clip leaves, units or groups
    already record their worst group.

    Inside `optax.MultiSteps`, a clipping stage only runs at every k-th step, and its numbers are
    NaN at the other steps. A skip inside `MultiSteps` is rejected, because its record does not show
    the steps at which it ran.

    Args:
      inner: The transformation that contains a clipping stage or a skip.
      window: The number of steps to keep.
      norm: The norm that determines the worst leaf, as in `optaxclip.clip_by`. Use the norm of the
        clipping stage.
      **options: Options that all transformations share, see `optaxclip.ShardingOptions`. `history`
        uses the `name` to choose among several stages.

    Returns:
      A transformation with an `EventsState`.

    Raises:
      ValueError: If `window` is less than 1 or the norm is unknown. `init` and the update also
        raise it if `inner` has no clipping stage and no skip that keeps a record, or if it has a
        skip inside `optax.MultiSteps`.
      TypeError: If `inner` is not a transformation, or if `window` is not an int.

    Example:
      >>> import jax.numpy as jnp, optax, optaxclip
      >>> from optaxclip import monitor
      >>> tx = optax.chain(optaxclip.clip_by_global_norm(2.0), optax.sgd(0.1))
      >>> tx = monitor.events(optaxclip.skip_nonfinite(tx), window=3)
      >>> params = {"b": jnp.zeros(1), "w": jnp.zeros(2)}
      >>> state = tx.init(params)
      >>> for size in (1.0, 3.0, jnp.nan, 1.5):
      ...     grads = {"b": jnp.ones(1), "w": jnp.array([0.0, size])}
      ...     updates, state = tx.update(grads, state, params)
      >>> for event in monitor.history(state):
      ...     print(event["step"], event["verdict"], event["norm"].round(1), event["worst"])
      1 clipped 3.2 w
      2 skipped nan w
      3 taken 1.8 w
    """
    inner, window = check_inner(inner), check_int(window, 1, "window")
    checked = Options.create(norm=norm, **options)
    name = checked.name

    def init(params: PyTree) -> EventsState:
        # In eager mode, zeros_like fails for arrays in another memory (as of JAX 0.10.2).
        inner_state = inner.init(put_on_device(params))
        judges, names = _judges(inner_state, name), StaticNames()
        _check_no_accumulating_skip(inner_state, name)
        if any(not judge.has_entries for judge in judges):
            names = StaticNames(tuple(sorted(flatten(params, "params").names())))
        numbers = jnp.zeros((window, len(judges), 3), jnp.float32)
        marks = jnp.zeros((window, 1 + len(judges)), jnp.int32)
        steps = jnp.zeros((), jnp.int32)
        return EventsState(steps, StaticNames((name,)), names, numbers, marks, inner_state)

    def update(
        updates: PyTree, state: Any, params: PyTree | None = None, **extra_args: Any
    ) -> tuple[PyTree, EventsState]:
        check_state(state, EventsState, name, _WRAP_STATE, updates=updates)
        before = _judges(state.inner_state, name)
        check_ring_buffer(state.numbers, (window, len(before), 3), name, "other events")
        names, norms, places = state.names, None, None
        if any(not judge.has_entries for judge in before):
            flat = flatten(updates, "updates").match_name_style(state.names)
            plan = make_plan(flat, scopes.leaf(), checked)
            norms, found = compute_norms(flat, plan, checked.norm), plan.grouping.names
            names = StaticNames((*names, *(each for each in found if each not in tuple(names))))
            places = np.array([names.index(each) for each in found], np.int32)
        new_updates, inner_state = inner.update(updates, state.inner_state, params, **extra_args)
        after = _judges(inner_state, name)
        steps, numbers, marks = _append_row(
            state.steps,
            state.numbers,
            state.flags,
            [judge.kept for judge in before],
            [judge.kept for judge in after],
            norms,
            places,
            around=tuple(judge.enclosing_skips for judge in after),
        )
        return new_updates, EventsState(steps, state.name, names, numbers, marks, inner_state)

    return transformation(init, update)


class EventSource(NamedTuple):
    """A clipping stage, a skip, or the loss of a skip.

    Attributes:
      name: The name, as in `metrics`. The loss of a skip has the name of the skip.
      kept: The fields of its record that `summary` needs, and the fraction of clipped groups.
      names: The names of its leaves or groups.
      is_loss: True if it checks the loss.
      enclosing_skips: The positions of the skips around it.
    """

    name: str
    kept: dict[str, Any]
    names: StaticNames
    is_loss: bool
    enclosing_skips: tuple[int, ...]

    @property
    def has_entries(self) -> bool:
        """Returns True if the source has numbers for several leaves or groups."""
        return has_entries(self.kept)


def event_sources(inner_state: PyTree) -> list[EventSource]:
    """Returns all clipping stages and skips in a state, in the order of `read`."""
    found, judges = list(iter_states(inner_state, (ClipState, SkipState))), []
    skips: dict[int, Path] = {}
    names = deduplicate([name_of(state) for _, state in found])
    for name, (path, state) in zip(names, found, strict=True):
        kept = summary_inputs(state) | {"fraction": unbox(state.info.fraction)}
        around = tuple(i for i, outer in skips.items() if path[: len(outer)] == outer)
        if isinstance(state, SkipState):
            skips[len(judges)] = path
        judges.append(
            EventSource(name, kept, names_of(state), is_loss=False, enclosing_skips=around)
        )
        if isinstance(state, SkipState) and state.loss:
            of_loss = {"norm": kept["loss"], "threshold": kept["loss_threshold"]}
            judges.append(
                EventSource(
                    name, kept | of_loss, StaticNames(), is_loss=True, enclosing_skips=around
                )
            )
    return judges


def _judges(inner_state: PyTree, name: str) -> list[EventSource]:
    judges = event_sources(inner_state)
    if not judges:
        raise ValueError(
            f"{name} goes around a clip or a skip, and inner has none that keeps a record: wrap "
            f"the chain that has the clip, {name}(optax.chain(clip, optimizer)); clip, "
            "clip_by_value and clip_by_second_moment keep no record, nor does anything with "
            "record=False"
        )
    return judges


def _check_no_accumulating_skip(inner_state: PyTree, name: str) -> None:
    """Rejects a skip in `MultiSteps`, because its record does not show when it ran."""
    of_sums = [state for _, state in iter_states(inner_state, (optax.MultiStepsState,))]
    if any(True for state in of_sums for _ in iter_states(state.inner_opt_state, (SkipState,))):
        raise ValueError(
            f"{name}: a skip is inside of optax.MultiSteps, where it does not run at each step; "
            "put the skip around MultiSteps, skip_nonfinite(optax.MultiSteps(chain, k)"
            ".gradient_transformation())"
        )


@global_view(out_like=("steps", "numbers", "marks"))
def _append_row(
    steps: Array,
    numbers: Array,
    marks: Array,
    before: list[dict[str, Any]],
    after: list[dict[str, Any]],
    norms: Any,
    leaf_positions: Any,
    *,
    around: tuple[tuple[int, ...], ...],
) -> tuple[Array, Array, Array]:
    """Appends a row to the numbers and marks and increments the steps."""
    of_tree = {} if norms is None else {"index": _worst_leaf(norms, leaf_positions)}
    rows, indices, flags = [], [], {verdict: jnp.zeros((), bool) for verdict in VERDICTS[1:]}
    for old, new, skips in zip(before, after, around, strict=True):
        found = worst_group(new) if has_entries(new) else new | of_tree
        if "num_skipped" in new:
            # If the outer skip skips a step, an inner skip keeps its record of an older step.
            was_updated = jnp.ones((), bool)
            for i in skips:
                was_updated &= after[i]["factor"] != 0
            flags["skipped"] |= was_updated & (new["factor"] == 0)
            flags["not finite"] |= was_updated & ~jnp.isfinite(new["norm"])
        else:
            was_updated = new["steps"] != old["steps"]
            flags["clipped"] |= was_updated & jnp.any(new["fraction"] > 0)
            # The norm is finite if non-finite elements are masked, so compare the counts.
            flags["not finite"] |= jnp.any(new["num_nonfinite"] > old["num_nonfinite"])
        row = [found[field].astype(jnp.float32) for field in ("norm", "threshold", "factor")]
        rows.append(meshes.stack(row))
        indices.append(jnp.where(was_updated, 1 + found["index"], NOT_RUN).astype(jnp.int32))
    verdict = jnp.zeros((), jnp.int32)
    for code, each in enumerate(VERDICTS[1:], 1):
        verdict = jnp.where(flags[each], jnp.int32(code), verdict)
    at, marked = steps % len(numbers), meshes.stack([verdict, *indices])
    row = saturating_cast(meshes.stack(rows), numbers.dtype)
    return (
        safe_increment(steps, period=len(numbers)),
        lax.dynamic_update_index_in_dim(numbers, row, at, 0),
        lax.dynamic_update_index_in_dim(marks, marked, at, 0),
    )


def _worst_leaf(norms: Array, places: Array) -> Array:
    """Returns the position of the largest norm, with NaN as the largest, or -1 without leaves."""
    if not norms.size:
        return jnp.full((), -1, jnp.int32)
    norms = lax.stop_gradient(norms)
    at = jnp.argmax(jnp.where(jnp.isnan(norms), jnp.inf, norms))
    return take_along_columns(at, places)

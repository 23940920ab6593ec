"""Records what clipping stages and skip wrappers do on recent steps."""

import dataclasses
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
from optaxclip.monitor._find_states import check_ring_buffer, iter_states, unbox, unique_names
from optaxclip.monitor._summary import (
    EMPTY_RECORD,
    ClipRecord,
    SkipRecord,
    has_elements,
    names_of,
    norm_record_of,
    take_along_columns,
    top_k,
)
from optaxclip.norms import Norm
from optaxclip.transforms.skip import SkipState, after_skip, check_inner

VERDICTS = ("taken", "clipped", "not finite", "skipped")
"""The outcomes of a step. If several apply, the last one is used."""
NOT_RUN = -1  # Positions of leaves start at 1, and 0 means that the tree has no leaves.

_WRAP_STATE = (
    "to add events to a running optimizer, use "
    "opt_state = tx.init(params)._replace(inner_state=old_opt_state)"
)


@register_state
class EventsState(NamedTuple):
    """State of `events`.

    Attributes:
      steps: int32[], the number of steps so far.
      name: The name of the transformation, as a tuple with one element.
      names: The names of the leaves from which the worst leaf is chosen. Empty if every stage
        records its own leaves or groups. Leaves that were None at `init` are appended later.
      numbers: float32[window, sources, 3], the norm, threshold, and factor of each source. The
        sources are the stages and wrappers in the order of `read`, and the losses that the wrappers
        check. Step n is in row `n % window`.
      flags: int32[window, 1 + sources], the outcome of the step and the position of the worst leaf
        in each source. Positions start at 1, 0 means that the tree had no leaves, and -1 means that
        the stage did not run.
      inner_state: The state of the wrapped transformation.
    """

    steps: Array
    name: StaticNames
    names: StaticNames
    numbers: Array
    flags: Array
    inner_state: PyTree

    def after_skip(self, skip: Array) -> "EventsState":
        """Returns the state after a step that a surrounding wrapper may have skipped."""
        at = self.steps % self.numbers.shape[0]
        # i32[1 + sources]
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
    """Records what the clipping stages and skip wrappers in `inner` do on recent steps.

    Each event contains the norm, the threshold, the factor, the outcome, and the worst leaf of a
    step. `inner` can be a clipping stage, a skip wrapper, or the whole optimizer, and its updates
    are not changed. To find a bad batch in the data, read the events and their step numbers with
    `history`. Nothing is sent to the host until then.

    If a stage computes one norm for the whole tree, its worst leaf is the leaf with the largest
    norm among the incoming updates. On a GPU, the norms of the leaves need no extra pass over the
    updates if the stage uses the same `norm`. Stages that clip leaves, units, or groups report
    their worst group.

    Inside `optax.MultiSteps`, a clipping stage runs only on every k-th step, and its numbers are
    NaN on the remaining steps. A skip wrapper is not supported there, because its record does not
    show when it ran.

    Args:
      inner: A transformation that contains a clipping stage or a skip wrapper.
      window: The number of steps to keep.
      norm: The norm that determines the worst leaf, as in `optaxclip.clip_by`. Use the same norm as
        the clipping stage.
      **options: Options that can be used with any transformation. See `optaxclip.ShardingOptions`.

    Returns:
      A transformation with an `EventsState`.

    Raises:
      ValueError: If `window` is less than 1 or the norm is unknown. Also raised by `init` and
        `update` if `inner` keeps no records, or contains a skip wrapper inside `optax.MultiSteps`.
      TypeError: If `inner` is not a transformation, or if `window` is not an int.

    Example:
      >>> import jax.numpy as jnp, optax, optaxclip
      >>> from optaxclip import monitor
      >>> tx = optax.chain(optaxclip.clip_by_global_norm(2.0), optax.sgd(0.1))
      >>> tx = monitor.events(optaxclip.skip_nonfinite(tx))
      >>> state = tx.init({"b": jnp.zeros(1), "w": jnp.zeros(2)})
      >>> for size in (3.0, jnp.nan):
      ...     grads = {"b": jnp.ones(1), "w": jnp.array([0.0, size])}
      ...     updates, state = tx.update(grads, state)
      >>> for event in monitor.history(state):
      ...     print(event["step"], event["verdict"], event["norm"].round(1), event["worst"])
      0 clipped 3.2 w
      1 skipped nan w
    """
    inner, window = check_inner(inner), check_int(window, 1, "window")
    checked = Options.create(norm=norm, **options)
    name = checked.name

    def init(params: PyTree) -> EventsState:
        # In eager mode, zeros_like fails for arrays in another memory space (as of JAX 0.10.2).
        inner_state = inner.init(put_on_device(params))
        sources, names = _find_sources(inner_state, name), StaticNames()
        for _, sums in iter_states(inner_state, (optax.MultiStepsState,)):
            if any(True for _ in iter_states(sums.inner_opt_state, (SkipState,))):
                raise ValueError(
                    f"{name}: inner must not contain a skip wrapper inside optax.MultiSteps; use "
                    "skip_nonfinite(optax.MultiSteps(chain, k).gradient_transformation())"
                )
        if any(not has_elements(source.record) for source in sources):
            names = StaticNames(tuple(sorted(flatten(params, "params").names())))
        return EventsState(
            steps=jnp.zeros((), jnp.int32),
            name=StaticNames((name,)),
            names=names,
            numbers=jnp.zeros((window, len(sources), 3), jnp.float32),
            flags=jnp.zeros((window, 1 + len(sources)), jnp.int32),
            inner_state=inner_state,
        )

    def update(
        updates: PyTree, state: Any, params: PyTree | None = None, **extra_args: Any
    ) -> tuple[PyTree, EventsState]:
        check_state(state, EventsState, name, _WRAP_STATE, updates=updates)
        before = _find_sources(state.inner_state, name)
        check_ring_buffer(state.numbers, (window, len(before), 3), name)
        names, norms, positions = state.names, None, None
        if any(not has_elements(source.record) for source in before):
            flat = flatten(updates, "updates").match_name_style(state.names)
            plan = make_plan(flat, scopes.leaf(), checked)
            norms, present = compute_norms(flat, plan, checked.norm), plan.grouping.names
            # New names are appended, because the ring buffer contains positions of old names.
            names = StaticNames((*names, *(leaf for leaf in present if leaf not in tuple(names))))
            positions = np.array([names.index(leaf) for leaf in present], np.int32)  # i32[leaves]
        new_updates, inner_state = inner.update(updates, state.inner_state, params, **extra_args)
        after = _find_sources(inner_state, name)
        around = tuple(source.enclosing_skips for source in after)
        new_records = [(source.record, source.fraction) for source in after]
        old_records = [source.record for source in before]
        old = state.steps, state.numbers, state.flags
        rows = _append_row(old, old_records, new_records, norms, positions, around=around)
        steps, numbers, flags = rows
        return new_updates, EventsState(steps, state.name, names, numbers, flags, inner_state)

    return transformation(init, update)


class EventSource(NamedTuple):
    """A clipping stage, a skip wrapper, or a loss that a skip wrapper checks."""

    name: str
    record: ClipRecord | SkipRecord  # For a loss, `norm` and `threshold` are of the loss.
    fraction: Any  # f32[] or f32[elements], the fraction of clipped groups.
    names: StaticNames
    is_loss: bool
    enclosing_skips: tuple[int, ...]  # The positions of the surrounding skip wrappers.


def event_sources(inner_state: PyTree) -> list[EventSource]:
    """Returns all sources of events in a state, in the order of `read`."""
    found, sources = list(iter_states(inner_state, (ClipState, SkipState))), []
    skips: dict[int, Path] = {}
    for name, (path, state) in zip(unique_names([x for _, x in found]), found, strict=True):
        record, fraction = norm_record_of(state), unbox(state.info.fraction)
        # The path of a wrapped state starts with the path of the wrapper's state.
        around = tuple(i for i, outer in skips.items() if path[: len(outer)] == outer)
        if isinstance(record, SkipRecord):
            skips[len(sources)] = path
        source = EventSource(name, record, fraction, names_of(state), False, around)
        sources.append(source)
        if isinstance(record, SkipRecord) and record.loss is not None:
            of_loss = dataclasses.replace(record, norm=record.loss, threshold=record.loss_threshold)
            sources.append(source._replace(record=of_loss, names=StaticNames(), is_loss=True))
    return sources


def _find_sources(inner_state: PyTree, name: str) -> list[EventSource]:
    sources = event_sources(inner_state)
    if not sources:
        raise ValueError(
            f"{name}: inner contains no clipping stage or skip wrapper that keeps a record (clip, "
            "clip_by_value, clip_by_second_moment, and stages with record=False do not); use "
            "monitor.events(optax.chain(clip, optimizer))"
        )
    return sources


@global_view(out_like="old")
def _append_row(
    old: tuple[Array, Array, Array],
    before: list[ClipRecord | SkipRecord],
    after: list[tuple[ClipRecord | SkipRecord, Array]],
    norms: Array | None,
    leaf_positions: Any,
    *,
    around: tuple[tuple[int, ...], ...],
) -> tuple[Array, Array, Array]:
    """Increments the steps, and appends a row to the numbers and flags."""
    steps, numbers, flags = old
    worst_leaf = np.int32(-1)
    if norms is not None and norms.size:
        norms = lax.stop_gradient(norms)  # f32[leaves]
        largest = jnp.argmax(jnp.where(jnp.isnan(norms), jnp.inf, norms))
        worst_leaf = take_along_columns(largest, leaf_positions)
    rows, worst = [], []
    is_verdict = {verdict: jnp.zeros((), bool) for verdict in VERDICTS[1:]}
    for last, (new, fraction), skips in zip(before, after, around, strict=True):
        if isinstance(last, ClipRecord) and isinstance(new, ClipRecord):
            was_updated = new.steps != last.steps
            is_verdict["clipped"] |= was_updated & jnp.any(fraction > 0)
            # If non-finite elements are masked, the norm is finite, so the counts are used.
            is_verdict["not finite"] |= jnp.any(new.num_nonfinite > last.num_nonfinite)
        else:
            # If the outer wrapper skips a step, the inner one keeps the record of an older step.
            was_updated = jnp.ones((), bool)
            for i in skips:
                was_updated &= after[i][0].factor != 0
            is_verdict["skipped"] |= was_updated & (new.factor == 0)
            is_verdict["not finite"] |= was_updated & ~jnp.isfinite(new.norm)
        found = {field: getattr(new, field) for field in EMPTY_RECORD} | {"index": worst_leaf}
        if has_elements(new):
            found = next(iter(top_k(new, 1)), EMPTY_RECORD | {"index": jnp.array(-1)})
        # f32[3]
        rows.append(meshes.stack([jnp.asarray(found[x], jnp.float32) for x in EMPTY_RECORD]))
        worst.append(jnp.where(was_updated, 1 + found["index"], NOT_RUN).astype(jnp.int32))
    verdict = jnp.zeros((), jnp.int32)
    for code, name in enumerate(VERDICTS[1:], 1):
        verdict = jnp.where(is_verdict[name], jnp.int32(code), verdict)
    # f32[sources, 3] and i32[1 + sources]
    row, row_flags = meshes.stack(rows), meshes.stack([verdict, *worst])
    at = steps % len(numbers)
    return (
        safe_increment(steps, period=len(numbers)),
        lax.dynamic_update_index_in_dim(numbers, saturating_cast(row, numbers.dtype), at, 0),
        lax.dynamic_update_index_in_dim(flags, row_flags, at, 0),
    )

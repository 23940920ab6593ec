"""Counts elements by size, and computes how well they fit a number format."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

import optaxclip._base.float_formats as float_formats
import optaxclip.monitor._find_states as find_states
import optaxclip.scopes as scopes
from optaxclip._backend.elementwise import as_arrays
from optaxclip._backend.exponent_counts import WORD_BITS, num_counts
from optaxclip._backend.global_view import Transformation, global_view, transformation
from optaxclip._backend.leaf_shardings import apply_scope
from optaxclip._base.numerics import is_real, norm_dtype
from optaxclip._base.state import (
    REINIT_HINT,
    StaticNames,
    check_state,
    register_state,
    safe_increment,
)
from optaxclip._base.trees import dtype_of, flatten
from optaxclip._base.types import PyTree
from optaxclip._base.validation import check_choice, check_int, validate_call
from optaxclip._engine.measure import compute_group_histograms
from optaxclip._engine.options import Options, ShardingOptions, document_options
from optaxclip._engine.plan import Plan, get_param_leaves, make_plan, resolve_scope
from optaxclip.scopes import Scope

Ints = np.ndarray[Any, np.dtype[np.int64]]
Floats = np.ndarray[Any, np.dtype[np.float64]]


@dataclasses.dataclass(frozen=True, eq=False)
class Histogram:
    """Counts of a group's elements by size.

    Attributes:
      counts: int64[bins], the number of elements in each bin. A bin includes its upper edge, but
        not its lower edge.
      edges: float64[bins + 1], powers of two. If the group has float64 leaves, the first edge is 0
        and the last edge is infinite.
      num_zero: The number of elements that are 0.
      num_nonfinite: The number of elements that are infinite or NaN.
      step: The step that was counted. The first update after `init` is step 0. If no step has been
        counted, -1.
      num_nan: The number of elements that are NaN.
      too_large: A dict that maps the overflow threshold of a dtype to the number of finite elements
        above it.
    """

    counts: Ints = dataclasses.field(repr=False)
    edges: Floats = dataclasses.field(repr=False)
    num_zero: int
    num_nonfinite: int
    step: int
    num_nan: int = 0
    too_large: Mapping[float, int] = dataclasses.field(default_factory=dict, repr=False)

    def underflow_fraction(self, dtype: jax.typing.DTypeLike) -> float:
        """Returns the fraction of finite nonzero elements that become 0 in `dtype`.

        The fraction is exact, because half the smallest number of a format, which also rounds to 0,
        is an edge of a bin. It assumes that subnormal numbers are not flushed to zero. If there are
        no finite nonzero elements, the fraction is 0.

        Raises:
          ValueError: If the format is not a real floating-point format with a sign and 0.
          TypeError: If `dtype` is not a dtype.
        """
        threshold = float_formats.underflow_threshold(float_formats.checked_format(dtype))
        is_lost = self.edges[1:] <= threshold  # bool[bins]
        return int(self.counts[is_lost].sum()) / max(int(self.counts.sum()), 1)

    def overflow_fraction(self, dtype: jax.typing.DTypeLike) -> float:
        """Returns the fraction of finite nonzero elements that overflow in `dtype`.

        They become infinite or, in formats without infinity, NaN or the largest number. The
        fraction is exact for all floating-point dtypes of JAX. If there are no finite nonzero
        elements, it is 0.

        Raises:
          ValueError: If `too_large` does not contain the format, or if the format is not a real
            floating-point format with a sign and 0.
          TypeError: If `dtype` is not a dtype.
        """
        threshold = float_formats.overflow_threshold(float_formats.checked_format(dtype))
        if threshold >= self.edges[-1]:
            return 0.0
        if threshold not in self.too_large:
            raise ValueError(
                f"the histogram has no count above the overflow threshold of {dtype}, only above "
                f"{[*self.too_large]}; use a histogram from monitor.histograms"
            )
        return self.too_large[threshold] / max(int(self.counts.sum()), 1)

    def list_by_exponent(self) -> tuple[Ints, Floats]:
        """Returns the counts of the range of nonempty bins, and the exponents of their edges.

        The counts are int64[n], and the edges are float64[n + 1], as in `np.histogram`. Loggers
        accept this format. If no element is finite and nonzero, there is one empty bin.

        Example:
          >>> import numpy as np
          >>> counts, edges = np.array([0, 3, 0, 2]), np.array([0.25, 0.5, 1.0, 2.0, 4.0])
          >>> found = Histogram(counts, edges, num_zero=0, num_nonfinite=0, step=0)
          >>> print(*found.list_by_exponent())
          [3 0 2] [-1.  0.  1.  2.]
        """
        known = np.flatnonzero(self.counts)
        first, last = (known[0], known[-1]) if known.size else (0, 0)
        # float64 cannot represent the outer powers of a histogram of float64 elements.
        inner = np.log2(self.edges[1:-1])
        exponents = np.concatenate([inner[:1] - 1, inner, inner[-1:] + 1])  # f64[bins + 1]
        return self.counts[first : last + 1], exponents[first : last + 2]


def histograms(opt_state: PyTree, name: str | None = None) -> dict[str, Histogram]:
    """Returns the histograms of the step that `histogram` counted most recently.

    Args:
      opt_state: A pytree that contains the state, as in `read`.
      name: The `name` of the `histogram` stage. Required if there are several.

    Returns:
      A dict that maps the names of groups or leaves to `Histogram`, after one `jax.device_get`.

    Raises:
      ValueError: If the stage cannot be identified, if the state has lost the names of its groups,
        or if it contains several seeds under `vmap`.
      TypeError: If called under `jit`, `vmap` or `grad`.

    Example:
      >>> import jax.numpy as jnp
      >>> from optaxclip import monitor
      >>> tx = monitor.histogram()
      >>> grads = {"w": jnp.array([1e-9, 0.5, 1e6])}
      >>> found = histograms(tx.update(grads, tx.init(grads))[1])["w"]
      >>> print(round(found.underflow_fraction("float16"), 2), found.too_large[65520.0])
      0.33 1
    """
    words = {"reader": "histograms", "what": "histogram"}
    state = find_states.find_one_state(opt_state, name, HistogramState, **words)
    arrays = find_states.unbox(state.last_counted_step), find_states.unbox(state.counts)
    step, counts = find_states.fetch_to_host(arrays, "histograms")  # i32[], u32[groups, 2, counts]
    find_states.check_not_vmapped(step, "histograms")
    if not state.names and len(counts):
        raise find_states.names_lost_error("the histogram")
    # i64[groups, counts]
    counts = counts[:, 0].astype(np.int64) + (counts[:, 1].astype(np.int64) << WORD_BITS)
    return dict(zip(state.names, (_histogram(x, int(step)) for x in counts), strict=True))


def _histogram(counts: Any, step: int) -> Histogram:
    """Converts counts between neighboring thresholds to bins with powers of two as edges."""
    wide = len(counts) == num_counts(wide=True)
    powers = float_formats.exponents(is_float64=wide)
    edges = np.ldexp(1.0, [powers[0] - 1, *powers]), [np.inf if wide else 2.0**powers.stop]
    in_bins = np.zeros(len(powers) + 1, np.int64)  # i64[bins]
    np.add.at(in_bins, float_formats.bin_exponents(is_float64=wide) - powers[0] + 1, counts[1:-2])
    # The number of finite elements above an edge is a sum from the right, i64[edges].
    num_above = np.cumsum(counts[-3:0:-1])[::-1]
    above = dict(zip(float_formats.bin_edges(is_float64=wide), num_above, strict=False))
    too_large = {edge.value: int(above.get(edge, 0)) for edge in float_formats.OVERFLOW_EDGES}
    zeros, infinite, nan = (int(counts[place]) for place in (0, -2, -1))
    return Histogram(in_bins, np.concatenate(edges), zeros, infinite + nan, step, nan, too_large)


@dataclasses.dataclass(frozen=True)
class GroupFit:
    """How well the elements of a group fit a number format.

    Attributes:
      below: The fraction of elements that become 0 without a loss scale.
      above: The fraction of elements that overflow without a loss scale.
      lowest: The smallest power of two that is large enough as a loss scale, or 0 if all elements
        are 0.
      highest: The largest power of two known to cause no overflow, or inf if all elements are 0.
    """

    below: float
    above: float
    lowest: float
    highest: float


@dataclasses.dataclass(frozen=True)
class DtypeFit:
    """How well the gradients fit a number format. You can `print` it to see a table.

    Attributes:
      dtype: The number format.
      lost: The allowed fraction of elements that become 0, `max_lost_fraction`.
      groups: A dict that maps names of groups to `GroupFit`.
    """

    dtype: jnp.dtype
    lost: float
    groups: Mapping[str, GroupFit]

    @property
    def lowest(self) -> float:
        """The smallest loss scale large enough for all groups, or 0 if all elements are 0."""
        return max((x.lowest for x in self.groups.values()), default=0.0)

    @property
    def highest(self) -> float:
        """The largest loss scale with which no element of any group overflows."""
        return min((x.highest for x in self.groups.values()), default=math.inf)

    @property
    def loss_scale(self) -> float:
        """The recommended loss scale, 1 if possible and otherwise between the two bounds."""
        low, high = self.lowest, self.highest
        if low <= 1 <= high:
            return 1.0
        # If no scale fits all groups, uses the largest scale without overflow.
        if low > high or not low:
            return high
        if high == math.inf:
            return low
        return 2.0 ** ((math.frexp(low)[1] + math.frexp(high)[1]) // 2 - 1)

    @property
    def poor_fits(self) -> tuple[str, ...]:
        """The groups that lose more than the allowed fraction with the recommended loss scale."""
        return tuple(name for name, x in self.groups.items() if x.lowest > self.loss_scale)

    def __str__(self) -> str:
        rows = [("", "becomes 0", "too large", "loss scale")]
        for name, x in self.groups.items():
            scales = f"{_power(x.lowest)} to {_power(x.highest)}" if x.lowest else "any"
            misfit = "  does not fit" * (name in self.poor_fits)
            rows.append((name, f"{x.below:.2%}", f"{x.above:.2%}", f"{scales}{misfit}"))
        first, *numbers, _ = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            "  ".join([row[0].ljust(first), *map(str.rjust, row[1:-1], numbers), row[-1]]).rstrip()
            for row in rows
        ]
        scale = f"{self.dtype.name}: take the loss scale {_power(self.loss_scale)}"
        fit = f"{len(self.groups) - len(self.poor_fits)} of {len(self.groups)} groups fit"
        return "\n".join([f"{scale}; {fit}", *lines])


def dtype_fit(
    opt_state: PyTree,
    dtype: jax.typing.DTypeLike = jnp.float16,
    *,
    max_lost_fraction: float = 0.001,
    name: str | None = None,
) -> DtypeFit:
    """Recommends a loss scale for a number format, and finds groups that do not fit the format.

    Compute the gradients in float32 or bfloat16 without a loss scale, because elements that float16
    has already rounded to 0 cannot be counted. Pass the recommended scale as `initial=` to
    `optaxclip.scale_loss`.

    Args:
      opt_state: A pytree that contains the state of `histogram`, as in `read`.
      dtype: The number format.
      max_lost_fraction: The fraction of nonzero elements of a group that may become 0.
      name: The `name` of the `histogram` stage. Required if there are several.

    Returns:
      A `DtypeFit`, which you can `print` to see a table.

    Raises:
      ValueError: If `histograms` raises it, if `max_lost_fraction` is not in [0, 1), or if `dtype`
        is not a real floating-point format with a sign and 0.
      TypeError: If `histograms` raises it, or if an argument has the wrong type.

    Example:
      >>> import jax.numpy as jnp
      >>> from optaxclip import monitor
      >>> tx = monitor.histogram()
      >>> grads = {"embed": 2.0 ** -jnp.arange(12.0, 30.0), "head": 2.0 ** -jnp.arange(0.0, 9.0)}
      >>> print(dtype_fit(tx.update(grads, tx.init(grads))[1], jnp.float16))
      float16: take the loss scale 2**10; 2 of 2 groups fit
             becomes 0  too large  loss scale
      embed     27.78%      0.00%  2**5 to 2**27
      head       0.00%      0.00%  2**-16 to 2**15
    """
    if not is_real(max_lost_fraction):
        raise TypeError(f"max_lost_fraction must be a number, got {max_lost_fraction!r}")
    if not 0 <= max_lost_fraction < 1:
        raise ValueError(f"max_lost_fraction must be in [0, 1), got {max_lost_fraction!r}")
    dtype = float_formats.checked_format(dtype)
    found = histograms(opt_state, name)
    groups = {group: _fit(x, dtype, max_lost_fraction) for group, x in found.items()}
    return DtypeFit(dtype, max_lost_fraction, groups)


def _fit(found: Histogram, dtype: jnp.dtype, max_lost_fraction: float) -> GroupFit:
    below, above = found.underflow_fraction(dtype), found.overflow_fraction(dtype)
    total = int(found.counts.sum())  # without zeros, which fit with any scale
    if not total:
        return GroupFit(below, above, 0.0, math.inf)
    # Elements below `smallest` may be lost. Elements up to `largest` must fit.
    smallest = float(found.edges[np.argmax(np.cumsum(found.counts) > max_lost_fraction * total)])
    largest = float(found.edges[np.flatnonzero(found.counts)[-1] + 1])
    low, high = float_formats.underflow_threshold(dtype), float_formats.overflow_threshold(dtype)
    lowest = 0.0
    if low:
        lowest = low / smallest if smallest else math.inf
    # The edges are powers of two, but the largest number of a format is not.
    highest = high if high == math.inf else 2.0 ** (math.frexp(high)[1] - 1) / largest
    return GroupFit(below, above, lowest, highest)


def _power(x: float) -> str:
    return f"2**{math.frexp(x)[1] - 1}" if 0 < x < math.inf else f"{x:g}"


@register_state
class HistogramState(NamedTuple):
    """State of `histogram`. Use `histograms` to read it.

    Attributes:
      steps: int32[], the number of steps so far, including skipped steps.
      last_counted_step: int32[], the step that was counted most recently, or -1.
      name: The name of the transformation, as a tuple with one element.
      names: The names of the groups in order.
      counts: uint32[groups, 2, counts], the numbers of elements that are 0, between neighboring
        thresholds, infinite, and NaN. A number is `counts[:, 0] + 2**16 * counts[:, 1]`.
    """

    steps: Array
    last_counted_step: Array
    name: StaticNames
    names: StaticNames
    counts: Array

    def after_skip(self, skip: Array) -> "HistogramState":
        """Returns the state after a step that a surrounding wrapper may have skipped."""
        return self._replace(steps=safe_increment(self.steps, skip))


@validate_call(transformation=True)
@document_options(ShardingOptions)
def histogram(
    every: int = 100,
    *,
    scope: Scope | None = None,
    of: Literal["updates", "params"] = "updates",
    **options: Unpack[ShardingOptions],
) -> Transformation[HistogramState]:
    """Counts the elements between neighboring powers of two on every k-th step.

    Updates are returned unchanged. Before a clipping stage, `histogram` counts the raw gradients.
    After the optimizer, it counts the updates that are applied to the params. Nothing is sent to
    the host until you call `histograms`. Counting requires one more pass over the updates, and
    other steps have no overhead. Under `vmap`, the updates of all seeds are read if one seed is
    due. If a skip wrapper skips a step that is due, the next step is counted instead.

    Counts are exact, also for subnormal numbers and on several devices. Complex elements are
    counted by their absolute value, which is rounded, so elements near the edge of a bin may be
    counted in the neighboring bin. Integer leaves are ignored.

    Args:
      every: The number of steps from one count to the next. The first step is counted.
      scope: The grouping of elements from `optaxclip.scopes`. If None, leaves have separate
        histograms. For the scopes `axes` and `unit`, a histogram contains the whole leaf.
      of: The tree to count, "updates" or "params".
      **options: Options that can be used with any transformation. See `optaxclip.ShardingOptions`.

    Returns:
      A transformation with a `HistogramState`.

    Raises:
      ValueError: If `every` is less than 1, or if `of` is neither "updates" nor "params". Also
        raised by `update` if required `params` are missing, or for float64 leaves that were not
        float64 at `init`.
      TypeError: If `every` is not an int, or if `scope` is not a scope.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> from optaxclip import monitor
      >>> tx = optax.chain(histogram(every=10), optax.sgd(0.1))
      >>> grads = {"w": jnp.array([0.0, 3.0, -4.0, 5.0, jnp.inf])}
      >>> _, state = tx.update(grads, tx.init(grads))
      >>> found = monitor.histograms(state)["w"]
      >>> print(*found.list_by_exponent(), found.num_zero, found.num_nonfinite)
      [2 1] [1. 2. 3.] 1 1
    """
    every = check_int(every, 1, "every")
    check_choice(of, ("updates", "params"), "of")
    checked = Options.create(**options)
    chosen_scope = scopes.leaf() if scope is None else resolve_scope(scope)
    name = checked.name

    def init(params: PyTree) -> HistogramState:
        flat = flatten(params, "params")
        names = apply_scope(chosen_scope, flat, checked.sharding_hints).names
        wide = norm_dtype(map(dtype_of, flat.inexact_leaves())) == jnp.float64
        counts = jnp.zeros((len(names), 2, num_counts(wide=wide)), jnp.uint32)
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
                    f"{name}: params are required when of='params'; call "
                    "update(updates, state, params)"
                )
            leaves, plan = get_param_leaves(flat, params, plan, checked)
        wide = state.counts.shape[-1] == num_counts(wide=True)
        if norm_dtype(map(dtype_of, leaves)) == jnp.float64 and not wide:
            raise ValueError(
                f"{name}: the {of} have float64 leaves, but the params passed to init had none; "
                f"pass params of the same dtypes to init, or {REINIT_HINT}"
            )
        old = state.steps, state.last_counted_step, state.counts
        steps, counted, counts = _write_counts(old, leaves, plan=plan, every=every, wide=wide)
        names = plan.grouping.names
        return updates, HistogramState(steps, counted, state.name, names, counts)

    return transformation(init, update)


@global_view(out_like="old")
def _write_counts(
    old: tuple[Array, Array, Array], leaves: list[Any], *, plan: Plan, every: int, wide: bool
) -> tuple[Array, Array, Array]:
    """Counts the elements if the step is due."""
    # i32[], i32[], u32[groups, 2, counts]
    steps, counted, counts = old
    leaves = lax.stop_gradient(as_arrays(leaves))

    def count(_: Any) -> tuple[Array, Array, Array]:
        return jnp.zeros((), bool), steps, compute_group_histograms(leaves, plan, wide=wide)

    # A loop with at most one iteration, because `lax.cond` under `vmap` would count on every step.
    # If a surrounding wrapper skips a step that is due, the next step is counted instead.
    is_due = (steps % every == 0) | (steps // every > counted // every)
    start = (is_due, counted, counts)
    _, counted, counts = lax.while_loop(lambda carry: carry[0], count, start)
    return safe_increment(steps, period=every), counted, counts

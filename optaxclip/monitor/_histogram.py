"""Histograms of entries on the host, and how many entries another number format would lose."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

import optaxclip.scopes as scopes
from optaxclip._backend.elementwise import as_arrays
from optaxclip._backend.exponent_counts import WORD_BITS, num_counts
from optaxclip._backend.global_view import Transformation, global_view, transformation
from optaxclip._backend.leaf_shardings import apply_scope
from optaxclip._base.float_formats import (
    OVERFLOW_EDGES,
    bin_edges,
    bin_exponents,
    checked_format,
    exponents,
    overflow_threshold,
    underflow_threshold,
)
from optaxclip._base.numerics import norm_dtype
from optaxclip._base.state import (
    REINIT_HINT,
    StaticNames,
    check_state,
    register_state,
    safe_increment,
)
from optaxclip._base.trees import FlatTree, dtype_of, flatten
from optaxclip._base.types import PyTree
from optaxclip._base.validation import check_choice, check_int, validate_call
from optaxclip._engine.exponent_histogram import compute_group_histograms
from optaxclip._engine.options import Options, ShardingOptions, document_options
from optaxclip._engine.plan import Plan, get_param_leaves, make_plan
from optaxclip.monitor._find_states import (
    check_not_vmapped,
    fetch_to_host,
    find_one_state,
    names_lost_error,
    unbox,
)
from optaxclip.scopes.leaves import Scope, resolve_scope


@dataclasses.dataclass(frozen=True, eq=False)
class Histogram:
    """How many entries of a group have which size.

    Attributes:
      counts: int64[bins], how many entries have a modulus above the lower edge of a bin, and at
        most the upper one.
      edges: float64[bins + 1], powers of two, except that for a group with float64 leaves the first
        is 0 and the last infinite, because float64 cannot hold these two powers.
      zeros: how many entries are 0.
      nonfinite: how many entries are infinite or NaN.
      step: which step it is of; 0 is the first update since `init`, -1 stands for none so far.
      num_nan: how many entries are NaN.
      too_large: for each size inside of a bin at which a number format ends, how many finite
        entries are too large for this format.
    """

    counts: np.ndarray[Any, np.dtype[np.int64]] = dataclasses.field(repr=False)
    edges: np.ndarray[Any, np.dtype[np.float64]] = dataclasses.field(repr=False)
    num_zero: int
    num_nonfinite: int
    step: int
    num_nan: int = 0
    too_large: Mapping[float, int] = dataclasses.field(default_factory=dict, repr=False)

    def underflow_fraction(self, dtype: jax.typing.DTypeLike) -> float:
        """The share of the finite entries other than 0 that become 0 in another number format.

        It is exact: rounding to nearest sends half the format's smallest number and all below it to
        0, and this half is an edge of the bins. Formats with subnormal numbers are taken to use
        them, as IEEE 754 says; some devices take them for 0.

        Args:
          dtype: a floating-point dtype.

        Returns:
          The share, 0 if there is no such entry.

        Raises:
          ValueError: if the format is not a real floating-point format with a sign and 0.
          TypeError: if `dtype` is not a dtype.
        """
        return self._share(
            int(self.counts[self.edges[1:] <= underflow_threshold(checked_format(dtype))].sum())
        )

    def overflow_fraction(self, dtype: jax.typing.DTypeLike) -> float:
        """The share of the finite entries other than 0 that are too large for another format.

        Rounded to nearest, they become infinite; or NaN, or the largest number, in formats without
        infinity. The share is exact, for all floating-point dtypes that JAX has, although their
        largest numbers are no powers of two: entries beyond them are counted by themselves.

        Args:
          dtype: a floating-point dtype.

        Returns:
          The share, 0 if there is no such entry.

        Raises:
          ValueError: if the histogram has no count for this format, or as `below`.
          TypeError: as `below`.
        """
        threshold = overflow_threshold(checked_format(dtype))
        if threshold >= self.edges[-1]:
            return 0.0
        if threshold not in self.too_large:
            raise ValueError(
                f"the histogram has no count of the entries that are too large for {dtype}; those "
                "of monitor.histograms have one for each format of JAX"
            )
        return self._share(self.too_large[threshold])

    def list_by_exponent(
        self,
    ) -> tuple[np.ndarray[Any, np.dtype[np.int64]], np.ndarray[Any, np.dtype[np.float64]]]:
        """The bins that have entries, and those between them, by their exponents of two.

        It is what loggers take, as `np.histogram` would give it of the logarithms to the base 2:
        on an axis of the sizes themselves, nearly all bins would be too narrow to be seen.

        Returns:
          int64[n], the counts, and float64[n + 1], the exponents at the edges of these bins; one
          empty bin if no entry is finite and not 0.

        Example:
          >>> import numpy as np
          >>> counts, edges = np.array([0, 3, 0, 2]), np.array([0.25, 0.5, 1.0, 2.0, 4.0])
          >>> found = Histogram(counts, edges, num_zero=0, num_nonfinite=0, step=0)
          >>> print(*found.list_by_exponent())
          [3 0 2] [-1.  0.  1.  2.]
        """
        known = np.flatnonzero(self.counts)
        first, last = (known[0], known[-1]) if known.size else (0, 0)
        inner = np.log2(self.edges[1:-1])  # float64 holds neither of its outer powers
        exponents = np.concatenate([inner[:1] - 1, inner, inner[-1:] + 1])
        return self.counts[first : last + 1], exponents[first : last + 2]

    def _share(self, count: int) -> float:
        return count / max(int(self.counts.sum()), 1)


def histograms(opt_state: PyTree, name: str | None = None) -> dict[str, Histogram]:
    """The histograms that `histogram` keeps, of the last step that it counted.

    Args:
      opt_state: any pytree that holds the state, as in `read`.
      name: which one, if there are several: the `name=` that `histogram` was given.

    Returns:
      A `Histogram` for each group or leaf by its name, in order, after one `jax.device_get`.

    Raises:
      ValueError: if no stage has the name, or several have; if the state has lost the names of
        groups, or is of several seeds under `vmap`.
      TypeError: under `jit`, `vmap` or `grad`, where there are no numbers yet.

    Example:
      >>> import jax.numpy as jnp
      >>> from optaxclip import monitor
      >>> tx = monitor.histogram()
      >>> grads = {"w": jnp.array([1e-9, 0.5, 1e6])}
      >>> found = histograms(tx.update(grads, tx.init(grads))[1])["w"]
      >>> lost = found.underflow_fraction(jnp.float16), found.overflow_fraction(jnp.float16)
      >>> print("{:.2f} {:.2f}".format(*lost))
      0.33 0.33
    """
    missing = (
        "the state holds no histogram: put monitor.histogram() into the chain, in front of the "
        "clip for the raw gradients, and pass the chain's state"
    )
    told = {"reader": "histograms", "what": "histogram", "missing": missing}
    state = find_one_state(opt_state, name, HistogramState, **told)
    step, words = fetch_to_host((unbox(state.last_counted_step), unbox(state.counts)), "histograms")
    check_not_vmapped(step, "histograms")
    if not state.names and len(words):
        raise names_lost_error("the histogram has lost the names of its groups")
    counts = words[:, 0].astype(np.int64) + (words[:, 1].astype(np.int64) << WORD_BITS)
    return dict(zip(state.names, (_histogram(x, int(step)) for x in counts), strict=True))


def _histogram(counts: Any, step: int) -> Histogram:
    wide = len(counts) == num_counts(wide=True)
    powers = exponents(is_float64=wide)
    edges = np.ldexp(1.0, [powers[0] - 1, *powers]), [np.inf if wide else 2.0**powers.stop]
    in_bins = np.zeros(len(powers) + 1, np.int64)
    np.add.at(in_bins, bin_exponents(is_float64=wide) - powers[0] + 1, counts[1:-2])
    above = dict(zip(bin_edges(is_float64=wide), np.cumsum(counts[-3:0:-1])[::-1], strict=False))
    beyond = {threshold.value: int(above.get(threshold, 0)) for threshold in OVERFLOW_EDGES}
    zeros, infinite, nan = (int(counts[place]) for place in (0, -2, -1))
    return Histogram(in_bins, np.concatenate(edges), zeros, infinite + nan, step, nan, beyond)


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


@validate_call(transformation=True)
@document_options(ShardingOptions)
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
      >>> print(found.num_zero, found.num_nonfinite, found.step)
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
                f"Call init with params of the dtypes that are counted; {REINIT_HINT}"
            )
        steps, counted, counts = _write_counts(
            state.steps,
            state.last_counted_step,
            state.counts,
            leaves,
            plan=plan,
            every=every,
            wide=wide,
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

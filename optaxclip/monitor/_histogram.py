"""Histograms of element sizes, and the elements that another dtype would lose."""

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
from optaxclip._engine.measure import compute_group_histograms
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
    """Number of elements of a group by size.

    Attributes:
      counts: int64[bins], the number of elements with a modulus above the lower edge of a bin and
        at most the upper edge.
      edges: float64[bins + 1], powers of two. For a group with float64 leaves, the first edge is 0
        and the last is infinite, because float64 cannot represent these two powers.
      num_zero: The number of elements that are 0.
      num_nonfinite: The number of elements that are infinite or NaN.
      step: The step that was counted. The first update since `init` is 0, and -1 means no step yet.
      num_nan: The number of elements that are NaN.
      too_large: The number of finite elements that are too large for a number format, by the
        largest size of the format. It covers formats that end inside a bin.
    """

    counts: np.ndarray[Any, np.dtype[np.int64]] = dataclasses.field(repr=False)
    edges: np.ndarray[Any, np.dtype[np.float64]] = dataclasses.field(repr=False)
    num_zero: int
    num_nonfinite: int
    step: int
    num_nan: int = 0
    too_large: Mapping[float, int] = dataclasses.field(default_factory=dict, repr=False)

    def underflow_fraction(self, dtype: jax.typing.DTypeLike) -> float:
        """Returns the fraction of the finite nonzero elements that become 0 in another dtype.

        The fraction is exact, because rounding to nearest maps half the smallest number of the
        format and all smaller numbers to 0, and this half is an edge of the bins. Formats with
        subnormal numbers are assumed to use them, as in IEEE 754. Some devices flush them to zero.

        Args:
          dtype: A floating-point dtype.

        Returns:
          The fraction, or 0 if there are no such elements.

        Raises:
          ValueError: If the format is not a real floating-point format with a sign and 0.
          TypeError: If `dtype` is not a dtype.
        """
        return self._share(
            int(self.counts[self.edges[1:] <= underflow_threshold(checked_format(dtype))].sum())
        )

    def overflow_fraction(self, dtype: jax.typing.DTypeLike) -> float:
        """Returns the fraction of the finite nonzero elements that are too large for another dtype.

        Rounding to nearest makes them infinite. In formats without infinity, they become NaN or the
        largest number. The fraction is exact for all floating-point dtypes of JAX, although their
        largest numbers are not powers of two, because larger elements are counted separately.

        Args:
          dtype: A floating-point dtype.

        Returns:
          The fraction, or 0 if there are no such elements.

        Raises:
          ValueError: If the histogram has no count for this format, or if the format is not a real
            floating-point format with a sign and 0.
          TypeError: If `dtype` is not a dtype.
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
        """Returns the range of nonempty bins by their exponents of two.

        Loggers accept this format. The result is that of `np.histogram` for the base-2 logarithms.
        On an axis of the sizes, nearly all bins would be too narrow to be visible.

        Returns:
          The counts, int64[n], and the exponents at the edges of these bins, float64[n + 1]. If no
          element is finite and nonzero, there is one empty bin.

        Example:
          >>> import numpy as np
          >>> counts, edges = np.array([0, 3, 0, 2]), np.array([0.25, 0.5, 1.0, 2.0, 4.0])
          >>> found = Histogram(counts, edges, num_zero=0, num_nonfinite=0, step=0)
          >>> print(*found.list_by_exponent())
          [3 0 2] [-1.  0.  1.  2.]
        """
        known = np.flatnonzero(self.counts)
        first, last = (known[0], known[-1]) if known.size else (0, 0)
        inner = np.log2(self.edges[1:-1])  # float64 cannot represent the outer powers
        exponents = np.concatenate([inner[:1] - 1, inner, inner[-1:] + 1])
        return self.counts[first : last + 1], exponents[first : last + 2]

    def _share(self, count: int) -> float:
        return count / max(int(self.counts.sum()), 1)


def histograms(opt_state: PyTree, name: str | None = None) -> dict[str, Histogram]:
    """Returns the histograms of the last step that `histogram` counted.

    Args:
      opt_state: A pytree that contains the state, as in `read`.
      name: The `name` of the `histogram` stage, if there are several.

    Returns:
      A dict from names of groups or leaves to `Histogram`, in order. It uses one `jax.device_get`.

    Raises:
      ValueError: If no stage or several stages have the name, if the state has lost the names of
        its groups, or if it belongs to several seeds under `vmap`.
      TypeError: If called under `jit`, `vmap` or `grad`, where numbers are not available.

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
    """State of `histogram`, which `histograms` reads.

    Attributes:
      steps: int32[], the number of steps so far, including steps that a surrounding skip skipped.
      last_counted_step: int32[], the last step that was counted, or -1 before the first.
      name: The name of the transformation, as a tuple with one element.
      names: The names of the groups in order.
      counts: uint32[groups, 2, counts], the number of elements of that step that are 0, between two
        neighboring thresholds, infinite, and NaN. A count is `counts[:, 0] + 2**16 * counts[:, 1]`.
    """

    steps: Array
    last_counted_step: Array
    name: StaticNames
    names: StaticNames
    counts: Array

    def after_skip(self, skip: Array) -> "HistogramState":
        """Returns the state after a step that a surrounding skip may have skipped."""
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
    """Counts the elements between neighboring powers of two at some steps.

    Updates are returned unchanged. Before a clipping stage, it counts the raw gradients, and after
    the optimizer, the updates that are applied to the params. It counts the elements of the first
    step, of the step `every` steps later, and so on. Nothing is sent to the host until you call
    `histograms`. A step that counts reads the updates one more time, and other steps read nothing.
    This also applies under `vmap` over seeds that started together. The updates of all seeds are
    read if one of them counts. Inside a skip, a skipped step is not counted, and the next step
    replaces it.

    Counts are exact for any number of elements, for any number of devices, and for all
    floating-point formats including their subnormal numbers. Complex elements are counted by their
    modulus, which is rounded to float32, or to float64 in a tree with 64-bit leaves. Near the edge
    of a bin, such an element can be counted in the neighboring bin. Integer leaves are ignored.

    Args:
      every: The number of steps between two counts.
      scope: The grouping of elements from `optaxclip.scopes`. If None, leaves have separate
        histograms. The scopes `axes` and `unit` divide a leaf into very many groups, so a histogram
        covers the whole leaf.
      of: The tree to count, "updates" or "params".
      **options: Options that all transformations share, see `optaxclip.ShardingOptions`.
        `histograms` uses the `name` to choose among several stages.

    Returns:
      A transformation with a `HistogramState`. Its update returns the updates unchanged.

    Raises:
      ValueError: If `every` is less than 1, or if `of` is neither "updates" nor "params". The
        update also raises it if `of` is "params" and `params` is missing, or for float64 leaves
        that were not float64 at `init`.
      TypeError: If `every` is not an int, or if `scope` is not a scope.

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
    """Returns True if a leaf is 64-bit."""
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
    """Computes the three arrays of the state after a step."""
    leaves = lax.stop_gradient(as_arrays(leaves))

    def count(_: Any) -> tuple[Array, Array, Array]:
        return jnp.zeros((), bool), steps, compute_group_histograms(leaves, plan, wide=wide)

    # A loop with at most one iteration. Under `vmap`, `lax.cond` would count at all steps, but the
    # loop only runs if a seed has to count. If a skip skips a step that is due, the next step is
    # counted instead.
    is_due = (steps % every == 0) | (steps // every > counted // every)
    start = (is_due, counted, counts)
    _, counted, counts = lax.while_loop(lambda carry: carry[0], count, start)
    return safe_increment(steps, period=every), counted, counts

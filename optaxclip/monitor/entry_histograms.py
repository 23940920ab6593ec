"""Histograms of entries on the host, and how many entries another number format would lose."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from optaxclip._base.ranges import (
    OVERFLOW_EDGES,
    bin_edges,
    bin_exponents,
    checked_format,
    exponents,
    overflow_threshold,
    underflow_threshold,
)
from optaxclip._base.types import PyTree
from optaxclip._border.entry_counts import WORD_BITS, num_counts
from optaxclip.monitor.histogram_stage import HistogramState
from optaxclip.monitor.states import (
    check_not_vmapped,
    fetch_to_host,
    find_one_state,
    names_lost_error,
    unbox,
)


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
          >>> print(*Histogram(counts, edges, zeros=0, nonfinite=0, step=0).by_exponent())
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
      >>> print(f"{found.underflow_fraction(jnp.float16):.2f} {found.overflow_fraction(jnp.float16):.2f}")
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

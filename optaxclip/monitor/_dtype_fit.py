"""Which loss scale a model needs for a number format, and which layers do not fit it."""

import dataclasses
import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from optaxclip._base.float_formats import checked_format, overflow_threshold, underflow_threshold
from optaxclip._base.numerics import is_real
from optaxclip._base.types import PyTree
from optaxclip.monitor._histogram import Histogram, histograms


@dataclasses.dataclass(frozen=True)
class GroupFit:
    """How one group's entries fit a number format.

    Attributes:
      below: the share of its entries that become 0, without a scale.
      above: the share that is too large, without a scale.
      lowest: the smallest power of two by which to scale, so that no more than the allowed share
        becomes 0; 0 for a group without entries other than 0.
      highest: the largest power of two by which to scale, so that no entry is too large; infinite
        for a group without entries other than 0. It may be half of what just fits, because only
        the bin of the largest entry is known.
    """

    below: float
    above: float
    lowest: float
    highest: float


@dataclasses.dataclass(frozen=True)
class DtypeFit:
    """How gradients fit a number format; `print` shows it as a table.

    Attributes:
      dtype: the format.
      lost: the share of a group's entries that may become 0.
      groups: a `GroupFit` for each group by its name.
    """

    dtype: jnp.dtype
    lost: float
    groups: Mapping[str, GroupFit]

    @property
    def lowest(self) -> float:
        """The smallest scale with which every group keeps enough; 0 if all entries are 0."""
        return max((x.lowest for x in self.groups.values()), default=0.0)

    @property
    def highest(self) -> float:
        """The largest scale with which no entry of any group is too large."""
        return min((x.highest for x in self.groups.values()), default=math.inf)

    @property
    def loss_scale(self) -> float:
        """The scale to take: 1 if none is needed, else the power of two midway between the ends.

        If there is no scale with which all groups fit, it is the highest.
        """
        low, high = self.lowest, self.highest
        if low <= 1 <= high:
            return 1.0
        if low > high or not low:
            return high
        if high == math.inf:
            return low
        return 2.0 ** ((math.frexp(low)[1] + math.frexp(high)[1]) // 2 - 1)

    @property
    def poor_fits(self) -> tuple[str, ...]:
        """The groups that lose more than the allowed share with the scale to take."""
        return tuple(name for name, x in self.groups.items() if x.lowest > self.loss_scale)

    def __str__(self) -> str:
        """The table."""
        rows = [("", "becomes 0", "too large", "loss scale")]
        for name, x in self.groups.items():
            ends = f"{_power(x.lowest)} to {_power(x.highest)}" if x.lowest else "any"
            misfit = "  does not fit" * (name in self.poor_fits)
            rows.append((name, f"{x.below:.2%}", f"{x.above:.2%}", f"{ends}{misfit}"))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        first, *numbers, _ = widths
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
    """Which loss scale a model needs for a number format, and which layers do not fit it.

    It reads the histograms of gradients that `histogram` counted, which should have been computed
    in float32 or bfloat16 without a scale: what float16 has rounded to 0 cannot be told from 0. The
    scale is the `initial=` of `optaxclip.scale_loss`.

    Args:
      opt_state: any pytree that holds the state, as in `read`.
      dtype: the number format.
      max_lost_fraction: which share of a group's entries other than 0 may become 0.
      name: which histogram, if there are several.

    Returns:
      A `DtypeFit`; `print` shows it as a table.

    Raises:
      ValueError: as `histograms`; if `lost` is not between 0 and 1; if `dtype` is not a real
        floating-point format with a sign and 0.
      TypeError: as `histograms`; if `lost` is not a number, or `dtype` not a dtype.

    Example:
      >>> import jax.numpy as jnp
      >>> from optaxclip import monitor
      >>> tx = monitor.histogram()
      >>> grads = {"embed": 2.0 ** -jnp.arange(12.0, 30.0), "head": 2.0 ** -jnp.arange(0.0, 9.0)}
      >>> _, state = tx.update(grads, tx.init(grads))
      >>> print(dtype_fit(state, jnp.float16))
      float16: take the loss scale 2**10; 2 of 2 groups fit
             becomes 0  too large  loss scale
      embed     27.78%      0.00%  2**5 to 2**27
      head       0.00%      0.00%  2**-16 to 2**15
    """
    if not is_real(max_lost_fraction):
        raise TypeError(f"lost must be a number, a share such as 0.001, got {max_lost_fraction!r}")
    if not 0 <= max_lost_fraction < 1:
        raise ValueError(f"lost must be a share, from 0 to below 1, got {max_lost_fraction!r}")
    dtype = checked_format(dtype)
    found = histograms(opt_state, name)
    groups = {
        group: _fit(histogram, dtype, max_lost_fraction) for group, histogram in found.items()
    }
    return DtypeFit(dtype, max_lost_fraction, groups)


def _fit(found: Histogram, dtype: jnp.dtype, max_lost_fraction: float) -> GroupFit:
    """The fit of one group, from its bins."""
    below, above = found.underflow_fraction(dtype), found.overflow_fraction(dtype)
    total = int(found.counts.sum())
    if not total:
        return GroupFit(below, above, 0.0, math.inf)
    # Of the bins below this edge all may be lost; up to that one all entries must fit.
    smallest = float(found.edges[np.argmax(np.cumsum(found.counts) > max_lost_fraction * total)])
    largest = float(found.edges[np.flatnonzero(found.counts)[-1] + 1])
    smallest_kept, beyond = underflow_threshold(dtype), overflow_threshold(dtype)
    lowest = 0.0
    if smallest_kept:
        lowest = smallest_kept / smallest if smallest else math.inf
    highest = beyond if beyond == math.inf else 2.0 ** (math.frexp(beyond)[1] - 1) / largest
    return GroupFit(below, above, lowest, highest)


def _power(x: float) -> str:
    return f"2**{math.frexp(x)[1] - 1}" if 0 < x < math.inf else f"{x:g}"

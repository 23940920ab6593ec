"""Means over the microbatches that count, and noise sums."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from optaxclip._base.numerics import divide_by_pow2, floor_pow2
from optaxclip._base.states import register_state
from optaxclip._base.types import PyTree
from optaxclip.accumulate.judging import AccumulateState, ProcessedMicrobatch
from optaxclip.accumulate.losses import MicrobatchGrad
from optaxclip.monitor.noise import NoiseSums, where_or_nan


@register_state
class Accumulated(NamedTuple):
    """What became of the `k` microbatches of a batch; the `i`-th has the examples `i`, `i + k`, ...

    Attributes:
      norm: float[k], the norm of each gradient before the clip, over all leaves and devices; NaN
        with `compute_norms=False`.
      weight: float[k], how much each one counts: its number of examples, or what `weight=` returns.
      rejected: bool[k], which ones were left out. A microbatch of weight 0 adds nothing, but does
        not count as rejected.
      loss: float[k], the loss of each one.
      aux: what else the losses returned, `[k, ...]`; None without `has_aux`.
      state: an `AccumulateState`, to be passed to the next step. It holds the clip's own state,
        with the record of the last microbatch that was not rejected.
      noise: for `optaxclip.monitor.noise_scale`, in units of the weights; NaN with `compute_norms=False`,
        and if fewer than two microbatches count. `jax_debug_nans` stops at a `jit` that returns
        such a NaN, because it checks all that a compiled function returns.
    """

    norm: Array
    weight: Array
    rejected: Array
    loss: Array
    aux: PyTree
    state: AccumulateState
    noise: NoiseSums


class MicrobatchStats(NamedTuple):
    """What is kept of each microbatch: scalars, which `scan` stacks to `[k]`."""

    norm: Array
    norm_after: Array
    weight: Array
    rejected: Array
    loss: Array

    @classmethod
    def values(cls, found: MicrobatchGrad, judgement: ProcessedMicrobatch) -> "MicrobatchStats":
        """The row of one microbatch."""
        weight = jnp.asarray(found.weight)
        return cls(judgement.norm, judgement.norm_after, weight, judgement.is_rejected, found.value)

    @property
    def is_counted(self) -> Array:
        """Which microbatches count in the means: bool."""
        return ~self.rejected & (self.weight != 0)

    def mean(self, of: Array) -> Array:
        """The weighted mean over the microbatches that count; NaN if none does."""
        known = jnp.where(self.is_counted, of, 0)
        # No sum overflows, because numbers are divided by a power of two near the largest of them.
        unit = floor_pow2(jnp.max(jnp.abs(known)))
        weights, _ = self._weights
        return jnp.sum(weights * divide_by_pow2(known, unit)) / jnp.sum(weights) * unit

    @property
    def _weights(self) -> tuple[Array, Array]:
        """The weights that count, divided by a power of two near the largest, and that power."""
        weights = jnp.where(self.is_counted, self.weight, 0)
        unit = floor_pow2(jnp.max(weights))
        return divide_by_pow2(weights, unit), unit

    def noise(self, norm_of_mean: Array) -> NoiseSums:
        """The noise sums, from the norm of the mean gradient."""
        norms = jnp.where(self.is_counted, self.norm_after, 0)
        # The norm of the mean is at most the largest norm. All norms are divided by a power of two
        # near the largest, so that no square and no sum of squares leaves the range.
        unit = floor_pow2(jnp.max(norms))
        square = self.mean(jnp.square(divide_by_pow2(norms, unit)))
        square_of_mean = jnp.square(divide_by_pow2(norm_of_mean, unit))
        # The weighted mean of the squared norms estimates `signal + variance / small` without bias,
        # even if weights differ.
        weights, unit_of_weights = self._weights
        large = jnp.sum(weights)
        small = large / jnp.sum(self.is_counted, dtype=large.dtype)
        is_known = large > small
        spread = jnp.where(is_known, large - small, 1)
        signal = (large * square_of_mean - small * square) / spread
        variance = (square - square_of_mean) * (small * (large / spread))
        # In this order no product leaves the range unless the result does.
        signal, variance = signal * unit * unit, variance * unit * unit_of_weights * unit
        return NoiseSums(*(where_or_nan(is_known, x) for x in (signal, variance)))

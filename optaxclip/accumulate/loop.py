"""Means over the microbatches that count, and noise sums."""

from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
from jax import Array

import optaxclip._backend.meshes as meshes
from optaxclip._backend.elementwise import scale_by_real
from optaxclip._backend.global_view import scan_on_mesh
from optaxclip._backend.meshes import Axes
from optaxclip._base.numerics import divide_by_pow2, divide_no_nan, floor_pow2
from optaxclip._base.state import register_state
from optaxclip._base.trees import FlatTree
from optaxclip._base.types import PyTree
from optaxclip._loss_arguments import LossArguments, MicrobatchSplit
from optaxclip.accumulate.loss import MicrobatchGrad, MicrobatchLoss
from optaxclip.accumulate.rejection import AccumulateState, MicrobatchProcessor, ProcessedMicrobatch
from optaxclip.monitor._noise_scale import NoiseSums, where_or_nan


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
      noise: for `optaxclip.monitor.noise_scale`, in units of the weights; NaN with
        `compute_norms=False`, and if fewer than two microbatches count. `jax_debug_nans` stops at a
        `jit` that returns such a NaN, because it checks all that a compiled function returns.
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


class ScanResult(NamedTuple):
    """The weighted means of the gradients that count, the last state, and the rows of all."""

    leaves: list[Array]
    state: AccumulateState
    row: MicrobatchStats
    aux: PyTree


def scan_microbatches(
    loss: MicrobatchLoss,
    judge: MicrobatchProcessor,
    roles: LossArguments,
    params: FlatTree,
    cut: MicrobatchSplit,
    state: AccumulateState,
) -> ScanResult:
    """The means over all microbatches and devices."""
    axes = (
        Axes() if judge.computes_norms else loss.places.get_deferred_psum_axes(params, roles.batch)
    )
    dtypes = [loss.accumulator_dtype(x.dtype) for x in params.inexact_leaves()]
    measured = [loss.places.vary(x, axes) for x in params.inexact_leaves()]
    param_norm = judge.param_norm(roles.params)
    loss_and_grad_fn = loss.local_loss_and_grad if axes else loss.global_loss_and_grad
    # If all microbatches count alike and none is left out, gradients are added as they are: XLA can
    # then sum over devices once, after the loop.
    is_plain = loss.weight is None and not judge.computes_norms and not axes

    def cast_and_shard(leaves: list[Array]) -> list[Array]:
        """Leaves in the dtypes of the sums, split over devices as the parameters are."""
        rows = zip(leaves, measured, dtypes, strict=True)
        return [meshes.shard_like(x.astype(dtype), like) for x, like, dtype in rows]

    def body(carry: Any, i: Array) -> tuple[Any, tuple[MicrobatchStats, PyTree]]:
        means, state = carry
        found = loss_and_grad_fn(roles, params, cut.size, measured, cut.microbatch(i))
        leaves = cast_and_shard(found.leaves)
        grads = params.replace_with_float0().replace_leaves(leaves)
        judgement = judge(grads, found.value, found.weight, state, roles.params, param_norm)
        row = MicrobatchStats.values(found, judgement)
        if is_plain:
            means = means._replace(leaves=jax.tree.map(jnp.add, means.leaves, judgement.leaves))
        else:
            own = loss.places.vary(jnp.where(row.is_counted, row.weight, 0), axes)
            means = means.added(judgement.leaves, own)
        return (means, judgement.state), (row, found.aux)

    zeros = cast_and_shard([jnp.zeros_like(x) for x in measured])
    none = loss.places.vary(jnp.zeros((), loss.dtype), axes)
    start, beside = (_Means(zeros, none, none), state), (measured, roles.batch)
    (means, state), (row, aux) = scan_on_mesh(body, start, jnp.arange(cut.num_microbatches), beside)
    if is_plain:
        leaves = [x / cut.num_microbatches for x in means.leaves]
    elif axes:
        largest = jnp.asarray(float(cut.size), loss.dtype)
        if loss.weight is not None:
            largest = meshes.pmax(means.largest, axes)
        row = _reduce_losses(row, loss.places.axes_of(row.loss), floor_pow2(largest))
        leaves = means.over_devices(axes, row, largest)
    else:
        leaves = [jnp.where(means.weight > 0, x, jnp.nan) for x in means.leaves]
    chex.assert_shape(leaves, [x.shape for x in measured])
    chex.assert_type(leaves, dtypes)
    chex.assert_shape(list(row), (cut.num_microbatches,))
    return ScanResult(leaves, state, row, aux)


class _Means(NamedTuple):
    """Weighted means of gradients, and the weight that they stand for.

    Attributes:
      leaves: the means.
      weight: the sum of the weights, in units of a power of two near the largest weight, because
        the sum itself may overflow.
      largest: the largest weight.
    """

    leaves: list[Array]
    weight: Array
    largest: Array

    def added(self, leaves: list[Array], own: Array) -> "_Means":
        """The means with one more gradient of this weight; they are finite if both are."""
        largest = jnp.maximum(self.largest, own)
        unit = floor_pow2(largest)
        before = self.weight * divide_by_pow2(floor_pow2(self.largest), unit)
        own = divide_by_pow2(own, unit)
        weight = before + own
        old_share, new_share = (divide_no_nan(x, weight, 0.0) for x in (before, own))

        def moved(mean: Array, x: Array) -> Array:
            # Moved from the array with the larger share, so that equal arrays keep their value, and
            # by halves, because the difference of two large numbers may overflow.
            is_new = new_share > old_share
            start, end = jnp.where(is_new, x, mean), jnp.where(is_new, mean, x)
            path = scale_by_real(end, 0.5) - scale_by_real(start, 0.5)
            move = start + _times(path, 2 * jnp.minimum(old_share, new_share))
            return jnp.where(new_share == 0, mean, jnp.where(old_share == 0, x, move))

        return _Means(list(map(moved, self.leaves, leaves)), weight, largest)

    def over_devices(self, axes: Axes, row: MicrobatchStats, largest: Array) -> list[Array]:
        """The means over all devices, from the rows and the largest weight of all devices."""
        unit = floor_pow2(largest)
        # Divided by an upper bound of the weight of all devices, so that no sum overflows.
        most = 2 * len(row.weight) * meshes.axis_size(axes)
        own = self.weight * divide_by_pow2(floor_pow2(self.largest), unit) / most
        whole = jnp.sum(divide_by_pow2(row.weight, unit)) / most
        leaves = [meshes.psum(_times(x, own), axes) for x in self.leaves]
        return [_times(x, 1 / whole) for x in leaves]


def _times(x: Array, share: Array) -> Array:
    return scale_by_real(x, share.astype(jnp.finfo(x.dtype).dtype))


def _reduce_losses(row: MicrobatchStats, axes: Axes, unit: Array) -> MicrobatchStats:
    """The losses and weights of all devices, from those of each, none above twice the unit."""
    share = divide_by_pow2(row.weight, unit) / (2 * meshes.axis_size(axes))
    weighted = jnp.where(share == 0, 0, share * row.loss)
    sums = (meshes.psum(x, axes) for x in (row.weight, share, weighted))
    weight, whole, loss = sums
    return row._replace(weight=weight, loss=loss / whole)

"""The loop over microbatches: judges, weights and adds up their gradients."""

from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
from jax import Array

import optaxclip._border.devices as devices
from optaxclip._base.numerics import divide_by_pow2, divide_no_nan, floor_pow2
from optaxclip._base.trees import FlatTree
from optaxclip._base.types import PyTree
from optaxclip._batches.cutting import MicrobatchSplit
from optaxclip._batches.roles import LossArguments
from optaxclip._border.crossing import scan_on_mesh
from optaxclip._border.devices import Axes
from optaxclip._border.entries import scale_by_real
from optaxclip.accumulate.judging import AccumulateState, MicrobatchProcessor
from optaxclip.accumulate.losses import MicrobatchLoss
from optaxclip.accumulate.means import MicrobatchStats


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
        return [devices.shard_like(x.astype(dtype), like) for x, like, dtype in rows]

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
            largest = devices.pmax(means.largest, axes)
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
        most = 2 * len(row.weight) * devices.axis_size(axes)
        own = self.weight * divide_by_pow2(floor_pow2(self.largest), unit) / most
        whole = jnp.sum(divide_by_pow2(row.weight, unit)) / most
        leaves = [devices.psum(_times(x, own), axes) for x in self.leaves]
        return [_times(x, 1 / whole) for x in leaves]


def _times(x: Array, share: Array) -> Array:
    return scale_by_real(x, share.astype(jnp.finfo(x.dtype).dtype))


def _reduce_losses(row: MicrobatchStats, axes: Axes, unit: Array) -> MicrobatchStats:
    """The losses and weights of all devices, from those of each, none above twice the unit."""
    share = divide_by_pow2(row.weight, unit) / (2 * devices.axis_size(axes))
    weighted = jnp.where(share == 0, 0, share * row.loss)
    sums = (devices.psum(x, axes) for x in (row.weight, share, weighted))
    weight, whole, loss = sums
    return row._replace(weight=weight, loss=loss / whole)

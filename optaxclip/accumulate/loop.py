"""The loop over microbatches: judges, weights and adds up their gradients."""

from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
from jax import Array

import optaxclip._border.devices as devices
from optaxclip._base.trees import FlatTree
from optaxclip._base.types import PyTree
from optaxclip._batches.cutting import Cut
from optaxclip._batches.roles import Roles
from optaxclip._border.crossing import scanned
from optaxclip._border.devices import Axes
from optaxclip._border.entries import times
from optaxclip.accumulate.judging import AccumulateState, Judge
from optaxclip.accumulate.losses import Loss
from optaxclip.accumulate.means import Row


class Means(NamedTuple):
    """The results of the loop.

    Attributes:
      leaves: for each measured leaf the weighted mean of the gradients that count.
      unit: the power of two that the row's weights were divided by.
      state: after the last microbatch.
      row: what was found for each microbatch.
      aux: what else the losses returned, `[k, ...]`.
    """

    leaves: list[Array]
    unit: Any
    state: AccumulateState
    row: Row
    aux: PyTree


def over_microbatches(
    loss: Loss, judge: Judge, roles: Roles, params: FlatTree, cut: Cut, state: AccumulateState
) -> Means:
    """The means over all microbatches and devices.

    Args:
      loss: the user's loss and weight.
      judge: judges each gradient.
      roles: the arguments of the loss.
      params: the parameters, as arrays.
      cut: the batch.
      state: the state before the first microbatch.
    """
    axes = Axes() if judge.measures else loss.places.axes_summed_last(params, roles.batch)
    dtypes = [loss.dtype_of_sum(x.dtype) for x in params.measured_leaves()]
    measured = [loss.places.vary(x, axes) for x in params.measured_leaves()]
    param_norm = judge.param_norm(roles.params)
    with devices.on_own_mesh(devices.types_of((measured, roles.batch))):
        loss = loss.with_unit_for(cut)
    found_by = loss.of_this_device if axes else loss.over_devices
    # If all microbatches count alike and none is left out, the gradient is added as it is: XLA can
    # then sum over devices once, after the loop.
    is_plain = loss.weight is None and not judge.measures and not axes
    part = 1.0 if is_plain else _part(4 * cut.number * devices.num_devices(axes))

    def like_params(leaves: list[Array]) -> list[Array]:
        """Leaves in the dtypes of the sums, split over devices as the parameters are."""
        rows = zip(leaves, measured, dtypes, strict=True)
        return [devices.alike(x.astype(dtype), like) for x, like, dtype in rows]

    def weighted(x: Array, row: Row) -> Array:
        """What one microbatch adds to a sum."""
        share = part
        if loss.weight is not None:
            share = (part * row.weight).astype(jnp.finfo(x.dtype).dtype)
        is_one_of_some = loss.weight is not None or judge.rejects
        x = times(x, share)
        return jnp.where(row.counts, x, jnp.zeros_like(x)) if is_one_of_some else x

    def body(carry: Any, i: Array) -> tuple[Any, tuple[Row, PyTree]]:
        totals, state = carry
        found = found_by(roles, params, cut.size, measured, cut.microbatch(i))
        leaves = like_params(found.leaves)
        grads = params.without_gradients().replaced(leaves)
        judgement = judge(grads, found.value, found.weight, state, roles.params, param_norm)
        row = Row.of(found, judgement)
        leaves = [weighted(x, row) for x in judgement.leaves]
        totals = jax.tree.map(jnp.add, totals, leaves)
        return (totals, judgement.state), (row, found.aux)

    start = (like_params([jnp.zeros_like(x) for x in measured]), state)
    beside = (measured, roles.batch)
    (totals, state), (row, aux) = scanned(body, start, jnp.arange(cut.number), beside)
    unit = row.weight[0]
    if axes:
        totals = [devices.sum_over_devices(x, axes) for x in totals]
        row = _over_devices(row, loss.places.axes_of(row.loss))
    divisor = row.total_weight if loss.weight is not None else row.total_weight / unit
    divisor = part * divisor
    leaves = [x / divisor.astype(x.dtype) for x in totals]
    chex.assert_shape(leaves, [x.shape for x in measured])
    chex.assert_type(leaves, dtypes)
    chex.assert_shape(list(row), (cut.number,))
    return Means(leaves, loss.unit, state, row, aux)


def _part(number: int) -> float:
    """The largest power of two that is at most `1 / number`, so that sums stay in the range.

    A weight that is divided by its unit is below 4.
    """
    return 0.5 ** (number - 1).bit_length()


def _over_devices(row: Row, axes: Axes) -> Row:
    """The losses and weights of all devices, from those of each."""
    part = _part(4 * devices.num_devices(axes))
    weighted = jnp.where(row.weight == 0, 0, part * row.weight * row.loss)
    weight = devices.sum_over_devices(row.weight, axes)
    loss = devices.sum_over_devices(weighted, axes) / (part * weight)
    return row._replace(weight=weight, loss=loss)

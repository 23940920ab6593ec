"""The loop over microbatches: judges, weights and adds up their gradients."""

from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
from jax import Array

import optaxclip._border.devices as devices
from optaxclip._base.numerics import over_power, power_of_two_below, safe_divide
from optaxclip._base.trees import FlatTree
from optaxclip._base.types import PyTree
from optaxclip._batches.cutting import Cut
from optaxclip._batches.roles import Roles
from optaxclip._border.crossing import scanned
from optaxclip._border.devices import Axes
from optaxclip._border.entries import times
from optaxclip.accumulate.judging import AccumulateState, Judge
from optaxclip.accumulate.losses import MicrobatchLoss
from optaxclip.accumulate.means import Row


class Means(NamedTuple):
    """The weighted means of the gradients that count, the last state, and the rows of all."""

    leaves: list[Array]
    state: AccumulateState
    row: Row
    aux: PyTree


def over_microbatches(
    loss: MicrobatchLoss,
    judge: Judge,
    roles: Roles,
    params: FlatTree,
    cut: Cut,
    state: AccumulateState,
) -> Means:
    """The means over all microbatches and devices."""
    axes = Axes() if judge.measures else loss.places.axes_summed_last(params, roles.batch)
    dtypes = [loss.dtype_of_sum(x.dtype) for x in params.measured_leaves()]
    measured = [loss.places.vary(x, axes) for x in params.measured_leaves()]
    param_norm = judge.param_norm(roles.params)
    found_by = loss.of_this_device if axes else loss.over_devices
    # If all microbatches count alike and none is left out, gradients are added as they are: XLA can
    # then sum over devices once, after the loop.
    is_plain = loss.weight is None and not judge.measures and not axes

    def like_params(leaves: list[Array]) -> list[Array]:
        """Leaves in the dtypes of the sums, split over devices as the parameters are."""
        rows = zip(leaves, measured, dtypes, strict=True)
        return [devices.alike(x.astype(dtype), like) for x, like, dtype in rows]

    def body(carry: Any, i: Array) -> tuple[Any, tuple[Row, PyTree]]:
        means, state = carry
        found = found_by(roles, params, cut.size, measured, cut.microbatch(i))
        leaves = like_params(found.leaves)
        grads = params.without_gradients().replaced(leaves)
        judgement = judge(grads, found.value, found.weight, state, roles.params, param_norm)
        row = Row.of(found, judgement)
        if is_plain:
            means = means._replace(leaves=jax.tree.map(jnp.add, means.leaves, judgement.leaves))
        else:
            own = loss.places.vary(jnp.where(row.counts, row.weight, 0), axes)
            means = means.added(judgement.leaves, own)
        return (means, judgement.state), (row, found.aux)

    zeros = like_params([jnp.zeros_like(x) for x in measured])
    none = loss.places.vary(jnp.zeros((), loss.dtype), axes)
    start, beside = (_Means(zeros, none, none), state), (measured, roles.batch)
    (means, state), (row, aux) = scanned(body, start, jnp.arange(cut.number), beside)
    if is_plain:
        leaves = [x / cut.number for x in means.leaves]
    elif axes:
        largest = jnp.asarray(float(cut.size), loss.dtype)
        if loss.weight is not None:
            largest = devices.largest(means.largest, axes)
        row = _over_devices(row, loss.places.axes_of(row.loss), power_of_two_below(largest))
        leaves = means.over_devices(axes, row, largest)
    else:
        leaves = [jnp.where(means.weight > 0, x, jnp.nan) for x in means.leaves]
    chex.assert_shape(leaves, [x.shape for x in measured])
    chex.assert_type(leaves, dtypes)
    chex.assert_shape(list(row), (cut.number,))
    return Means(leaves, state, row, aux)


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
        unit = power_of_two_below(largest)
        before = self.weight * over_power(power_of_two_below(self.largest), unit)
        own = over_power(own, unit)
        weight = before + own
        old_share, new_share = (safe_divide(x, weight, 0.0) for x in (before, own))

        def moved(mean: Array, x: Array) -> Array:
            # Moved from the array with the larger share, so that equal arrays keep their value, and
            # by halves, because the difference of two large numbers may overflow.
            is_new = new_share > old_share
            start, end = jnp.where(is_new, x, mean), jnp.where(is_new, mean, x)
            path = times(end, 0.5) - times(start, 0.5)
            move = start + _times(path, 2 * jnp.minimum(old_share, new_share))
            return jnp.where(new_share == 0, mean, jnp.where(old_share == 0, x, move))

        return _Means(list(map(moved, self.leaves, leaves)), weight, largest)

    def over_devices(self, axes: Axes, row: Row, largest: Array) -> list[Array]:
        """The means over all devices, from the rows and the largest weight of all devices."""
        unit = power_of_two_below(largest)
        # Divided by an upper bound of the weight of all devices, so that no sum overflows.
        most = 2 * len(row.weight) * devices.num_devices(axes)
        own = self.weight * over_power(power_of_two_below(self.largest), unit) / most
        whole = jnp.sum(over_power(row.weight, unit)) / most
        leaves = [devices.sum_over_devices(_times(x, own), axes) for x in self.leaves]
        return [_times(x, 1 / whole) for x in leaves]


def _times(x: Array, share: Array) -> Array:
    return times(x, share.astype(jnp.finfo(x.dtype).dtype))


def _over_devices(row: Row, axes: Axes, unit: Array) -> Row:
    """The losses and weights of all devices, from those of each, none above twice the unit."""
    share = over_power(row.weight, unit) / (2 * devices.num_devices(axes))
    weighted = jnp.where(share == 0, 0, share * row.loss)
    sums = (devices.sum_over_devices(x, axes) for x in (row.weight, share, weighted))
    weight, whole, loss = sums
    return row._replace(weight=weight, loss=loss / whole)

"""The loop over microbatches: judges, weights and adds up their gradients."""

import functools
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
from jax import Array

import optaxclip._border.devices as devices
from optaxclip._base.numerics import safe_divide
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
        means, weight, state = carry
        found = found_by(roles, params, cut.size, measured, cut.microbatch(i))
        leaves = like_params(found.leaves)
        grads = params.without_gradients().replaced(leaves)
        judgement = judge(grads, found.value, found.weight, state, roles.params, param_norm)
        row = Row.of(found, judgement)
        if is_plain:
            means = jax.tree.map(jnp.add, means, judgement.leaves)
        else:
            own = loss.places.vary(jnp.where(row.counts, row.weight, 0), axes)
            weight = weight + own
            move = functools.partial(_moved, share=safe_divide(own, weight, 0.0))
            means = list(map(move, means, judgement.leaves))
        return (means, weight, judgement.state), (row, found.aux)

    start = like_params([jnp.zeros_like(x) for x in measured])
    start = (start, loss.places.vary(jnp.zeros((), loss.dtype), axes), state)
    beside = (measured, roles.batch)
    (leaves, weight, state), (row, aux) = scanned(body, start, jnp.arange(cut.number), beside)
    if is_plain:
        leaves = [x / cut.number for x in leaves]
    elif axes:
        # Weights are divided by the number of examples, so that no product with them overflows.
        examples = cut.size * devices.num_devices(axes)
        row = _over_devices(row, loss.places.axes_of(row.loss), examples)
        own, whole = (x / (cut.number * examples) for x in (weight, row.total_weight))
        leaves = [devices.sum_over_devices(_times(x, own), axes) for x in leaves]
        leaves = [_times(x, 1 / whole) for x in leaves]
    else:
        leaves = [jnp.where(weight > 0, x, jnp.nan) for x in leaves]
    chex.assert_shape(leaves, [x.shape for x in measured])
    chex.assert_type(leaves, dtypes)
    chex.assert_shape(list(row), (cut.number,))
    return Means(leaves, state, row, aux)


def _moved(mean: Array, x: Array, share: Array) -> Array:
    """A mean with one more array, which has this share of all weight; it is finite if both are."""
    moved = _times(mean, 1 - share) + _times(x, share)
    return jnp.where(share == 0, mean, moved)


def _times(x: Array, share: Array) -> Array:
    return times(x, share.astype(jnp.finfo(x.dtype).dtype))


def _over_devices(row: Row, axes: Axes, examples: int) -> Row:
    """The losses and weights of all devices, from those of each, for microbatches of this size."""
    share = row.weight / examples
    weighted = jnp.where(share == 0, 0, share * row.loss)
    whole, loss = (devices.sum_over_devices(x, axes) for x in (share, weighted))
    return row._replace(weight=whole * examples, loss=loss / whole)

"""Loops over microbatches and computes weighted means of their gradients."""

import dataclasses
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
from jax import Array

import optaxclip._backend.meshes as meshes
from optaxclip._backend.elementwise import scale_by_real
from optaxclip._backend.global_view import scan_on_mesh
from optaxclip._backend.meshes import Axes
from optaxclip._base.numerics import divide_by_pow2, divide_no_nan, floor_pow2, norm_dtype
from optaxclip._base.trees import FlatTree, flatten
from optaxclip._base.types import PyTree
from optaxclip._loss_arguments import LossArguments, MicrobatchSplit, loss_and_aux
from optaxclip.accumulate.microbatch import (
    AccumulateState,
    MicrobatchLoss,
    MicrobatchProcessor,
    MicrobatchStats,
)


def scan_microbatches(
    loss: MicrobatchLoss,
    processor: MicrobatchProcessor,
    args: LossArguments,
    params: FlatTree,
    split: MicrobatchSplit,
    state: AccumulateState,
) -> tuple[list[Array], AccumulateState, MicrobatchStats, PyTree]:
    """Returns the mean gradient leaves, the final state, and stacked statistics and aux."""
    leaves, sharding = params.inexact_leaves(), processor.sharding
    dtypes = [loss.accumulator_dtype(x.dtype) for x in leaves]
    # Losses and weights use the widest dtype of the sums.
    loss = dataclasses.replace(loss, dtype=norm_dtype([loss.dtype, *(x.dtype for x in leaves)]))
    axes = Axes()
    if not processor.computes_norms:
        axes = sharding.get_deferred_psum_axes(params, args.batch)
    varying = [sharding.vary(x, axes) for x in leaves]
    param_norm = None
    if processor.rule is not None and processor.rule.uses_params:
        param_norm = processor.compute_norm(flatten(args.params, "params"))
    accumulation = _Accumulation(
        loss, processor, args, params, split, axes, varying, dtypes, param_norm
    )
    start, closed_over = (accumulation.init(), state), (accumulation.leaves, args.batch)
    indices = jnp.arange(split.num_microbatches)
    (means, state), (stats, aux) = scan_on_mesh(accumulation.step, start, indices, closed_over)
    means, stats = accumulation.finish(means, stats)
    chex.assert_shape(means, [x.shape for x in leaves])
    chex.assert_type(means, dtypes)
    chex.assert_shape(list(stats), (split.num_microbatches,))
    return means, state, stats, aux


@dataclasses.dataclass(frozen=True, eq=False)
class _Accumulation:
    """Values that are constant during the loop over microbatches."""

    loss: MicrobatchLoss
    processor: MicrobatchProcessor
    args: LossArguments
    params: FlatTree
    split: MicrobatchSplit
    axes: Axes  # the axes over which gradients are summed once, after the loop
    leaves: list[Array]  # the differentiated leaves
    dtypes: list[jnp.dtype]  # the dtypes of the sums of their gradients
    param_norm: Array | None  # the norm of the parameters, if the rejection rule uses it

    def init(self) -> "_Means":
        zeros = self._cast_and_shard([jnp.zeros_like(x) for x in self.leaves])
        zero = self.processor.sharding.vary(jnp.zeros((), self.loss.dtype), self.axes)
        return _Means(zeros, zero, zero)

    def step(self, carry: Any, i: Array) -> tuple[Any, tuple[MicrobatchStats, PyTree]]:
        """Adds microbatch `i` to the means."""
        means, state = carry
        loss, weight, leaves, aux = self._loss_and_grad(self.split.microbatch(i))
        grads = self.params.replace_with_float0().replace_leaves(self._cast_and_shard(leaves))
        leaves, stats, state = self.processor.process(
            grads, loss, weight, state, self.args.params, self.param_norm
        )
        if self._is_plain_sum:
            means = means._replace(leaves=jax.tree.map(jnp.add, means.leaves, leaves))
        else:
            counted = jnp.where(stats.is_counted, stats.weight, 0)
            counted = self.processor.sharding.vary(counted, self.axes)
            means = means.add(leaves, counted)
        return (means, state), (stats, aux)

    def finish(
        self, means: "_Means", stats: MicrobatchStats
    ) -> tuple[list[Array], MicrobatchStats]:
        """Returns the means and statistics over all devices."""
        if self._is_plain_sum:
            return [x / self.split.num_microbatches for x in means.leaves], stats
        if not self.axes:
            return [jnp.where(means.weight > 0, x, jnp.nan) for x in means.leaves], stats
        # The losses, weights, and means still cover a single device. All weights are at most twice
        # `unit`. Dividing them by a bound on their sum over devices prevents overflow.
        largest = jnp.asarray(float(self.split.size), self.loss.dtype)
        if self.loss.weight is not None:
            largest = meshes.pmax(means.largest, self.axes)
        unit = floor_pow2(largest)
        axes = self.processor.sharding.axes_of(stats.loss)
        fraction = divide_by_pow2(stats.weight, unit) / (2 * meshes.axis_size(axes))
        weighted = jnp.where(fraction == 0, 0, fraction * stats.loss)
        weight, total, loss = (meshes.psum(x, axes) for x in (stats.weight, fraction, weighted))
        stats = stats._replace(weight=weight, loss=loss / total)

        bound = 2 * len(stats.weight) * meshes.axis_size(self.axes)
        own = means.weight * divide_by_pow2(floor_pow2(means.largest), unit) / bound
        total = jnp.sum(divide_by_pow2(stats.weight, unit)) / bound
        sums = [meshes.psum(_multiply(x, own), self.axes) for x in means.leaves]
        return [_multiply(x, 1 / total) for x in sums], stats

    @property
    def _is_plain_sum(self) -> bool:
        # If all microbatches have the same weight and none can be rejected, gradients are summed
        # without weights. XLA can then sum over devices once, after the loop.
        return self.loss.weight is None and not self.processor.computes_norms and not self.axes

    def _cast_and_shard(self, leaves: list[Array]) -> list[Array]:
        """Casts leaves to the dtypes of the sums, and shards them like the parameters."""
        rows = zip(leaves, self.leaves, self.dtypes, strict=True)
        return [meshes.shard_like(x.astype(dtype), like) for x, like, dtype in rows]

    def _loss_and_grad(
        self, microbatch: tuple[Any, ...]
    ) -> tuple[Array, Array, list[Array], PyTree]:
        """Computes the loss, weight, gradient, and aux of a microbatch, or of a device's part."""
        sharding, dtype = self.processor.sharding, self.loss.dtype
        weight = self.loss.call_weight(microbatch, self.split.size)

        def loss_fn(leaves: list[Array]) -> tuple[Array, PyTree]:
            args = self.args.merge(self.params.unflatten(leaves), microbatch)
            value, aux = loss_and_aux(
                self.loss.fn, args, {}, has_aux=self.loss.has_aux, description="the mean loss"
            )
            if self.axes:
                return value, aux
            # The loss of the whole microbatch is the sum of these terms over devices.
            axes, value = sharding.axes_of(value, weight), value.astype(dtype)
            return value * (weight / sharding.psum(weight, axes)) if axes else value, aux

        (value, aux), grads = jax.value_and_grad(loss_fn, has_aux=True)(self.leaves)
        if self.axes:
            if meshes.has_vma_tracking():
                # If the loss is equal on several devices, their weights are added.
                axes = sharding.axes_of(weight) - sharding.axes_of(value)
                weight = sharding.psum(weight, axes)
            return value.astype(dtype), weight, grads, aux
        axes = sharding.axes_of(value, weight)
        if axes and not meshes.has_vma_tracking():  # with tracking, JAX has summed the gradients
            rows = zip(grads, sharding.get_axes_to_psum(self.params, axes), strict=True)
            grads = [meshes.psum(x, over) for x, over in rows]
        return sharding.psum(value, axes), sharding.psum(weight, axes), grads, aux


class _Means(NamedTuple):
    """Weighted means of gradients, with a scaled sum of the weights that cannot overflow."""

    leaves: list[Array]
    weight: Array  # [], the sum divided by a power of two near the largest weight
    largest: Array  # [], the largest weight

    def add(self, leaves: list[Array], weight: Array) -> "_Means":
        """Adds a weighted gradient. The means stay finite if all gradients are finite."""
        largest = jnp.maximum(self.largest, weight)
        unit = floor_pow2(largest)
        before = self.weight * divide_by_pow2(floor_pow2(self.largest), unit)
        added = divide_by_pow2(weight, unit)
        total = before + added
        old_fraction, new_fraction = (divide_no_nan(x, total, 0.0) for x in (before, added))

        def update_mean(mean: Array, x: Array) -> Array:
            # Starting from the array with the larger weight makes the mean of equal arrays exact.
            # Halves are used because the difference of two large numbers can overflow.
            is_new = new_fraction > old_fraction
            start, end = jnp.where(is_new, x, mean), jnp.where(is_new, mean, x)
            path = scale_by_real(end, 0.5) - scale_by_real(start, 0.5)
            moved = start + _multiply(path, 2 * jnp.minimum(old_fraction, new_fraction))
            return jnp.where(new_fraction == 0, mean, jnp.where(old_fraction == 0, x, moved))

        return _Means(list(map(update_mean, self.leaves, leaves)), total, largest)


def _multiply(x: Array, factor: Array) -> Array:
    return scale_by_real(x, factor.astype(jnp.finfo(x.dtype).dtype))

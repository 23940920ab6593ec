"""The loss, clipping, and rejection of individual microbatches.

Each device's result is weighted by its part of the microbatch. If JAX tracks which values vary
between devices (`check_vma=True`), types show the axes to sum over. Otherwise, users pass these
axes as `axis_name`.
"""

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jax.core import Tracer

import optaxclip._backend.meshes as meshes
import optaxclip.scopes as scopes
from optaxclip._backend.leaf_shardings import as_spec
from optaxclip._backend.meshes import Axes
from optaxclip._backend.skip_step import tree_where
from optaxclip._base.numerics import accumulation_dtype, divide_by_pow2, floor_pow2, is_real
from optaxclip._base.state import copy_arrays, register_state
from optaxclip._base.trees import FlatTree, broadcast_prefix, flatten
from optaxclip._base.types import PyTree, ThresholdRule
from optaxclip._base.validation import check_bool, check_called
from optaxclip._engine.clip import make_clip, scope_norms
from optaxclip._engine.options import Options
from optaxclip._loss_arguments import describe_array
from optaxclip.monitor._noise_scale import NoiseSums, where_or_nan
from optaxclip.thresholds._constant import check_threshold
from optaxclip.transforms.skip import evaluate_rule

NAME = "accumulate.value_and_grad"
NONFINITE = "nonfinite"


@register_state
class AccumulateState(NamedTuple):
    """State that is passed between microbatches, and between steps with `state=`.

    Attributes:
      clip: The clipping state, with a record of the most recent microbatch, or empty without
        clipping.
      reject: The state of the rejection rule. Empty if there is no rule.
    """

    clip: PyTree
    reject: PyTree


@dataclasses.dataclass(frozen=True, eq=False)
class DataSharding:
    """The axes that shard the batch, and the parameter specs, as passed by the user."""

    axis_names: tuple[str, ...] | None
    specs: PyTree

    def check(self) -> None:
        """Checks that the axes that shard the batch are known and mapped."""
        meshes.check_axis_names_bound(self.axis_names or ())
        if meshes.manual_axes() and not meshes.has_vma_tracking() and self.axis_names is None:
            raise ValueError(
                f"{NAME}: axis_name is required inside pmap and shard_map(check_vma=False); pass "
                f"those of the axes {sorted(meshes.manual_axes())} that shard the batch, or an "
                "empty tuple if none of them does, and pass specs if parameters are sharded"
            )

    @property
    def grad_specs(self) -> PyTree:
        """The specs of the gradient sums, for types without sharding information."""
        is_unknown = self.specs is None and meshes.manual_axes() and not meshes.has_vma_tracking()
        return jax.P() if is_unknown else self.specs

    def axes_of(self, *arrays: Any) -> Axes:
        """Returns the axes along which any of these arrays varies."""
        if meshes.has_vma_tracking():
            return meshes.tree_varying_axes(arrays)
        return Axes(self.axis_names or ())

    def vary(self, x: Array, axes: Axes) -> Array:
        """Types `x` as varying along `axes` if JAX tracks this in types."""
        return meshes.pvary(x, axes) if meshes.has_vma_tracking() else x

    def psum(self, x: Any, axes: Axes) -> Any:
        """Sums over devices. Constants are multiplied by their number, without a collective."""
        if not isinstance(x, Tracer):
            return x * meshes.axis_size(axes)
        return meshes.psum(self.vary(x, axes), axes)

    def get_axes_to_psum(self, params: FlatTree, axes: Axes) -> list[Axes]:
        """Returns the axes over which the gradients of the leaves must still be summed."""
        if meshes.has_vma_tracking():
            return [axes - meshes.varying_axes(x) for x in params.inexact_leaves()]
        if self.specs is None:
            return [axes] * len(params.inexact_indices)
        # The transpose of an all-gather already sums over the axes that shard a leaf.
        given = broadcast_prefix(self.specs, params, "specs")
        return [axes - meshes.axes_of(as_spec(spec)) for spec in given]

    def get_deferred_psum_axes(self, params: FlatTree, batch: PyTree) -> Axes:
        """Returns the axes over which gradients can be summed once, after the last microbatch."""
        axes = self.axes_of(*jax.tree.leaves(batch))
        # Gradients of leaves that are sharded along these axes are summed for each microbatch.
        can_wait = all(over == axes for over in self.get_axes_to_psum(params, axes))
        return axes if can_wait else Axes()


@dataclasses.dataclass(frozen=True, eq=False)
class MicrobatchLoss:
    """A loss and its weight, the number of examples by default. Both are summed in `dtype`."""

    fn: Callable[..., Any]
    weight: Callable[..., Any] | None
    has_aux: bool
    dtype: jnp.dtype

    def accumulator_dtype(self, dtype: Any) -> jnp.dtype:
        """Returns the dtype in which gradients of leaves of `dtype` are summed."""
        is_wide = jnp.dtype("float64") in (self.dtype, accumulation_dtype(dtype))
        if jnp.issubdtype(dtype, jnp.complexfloating):
            return jnp.dtype("complex128" if is_wide else "complex64")
        return jnp.dtype("float64" if is_wide else "float32")

    def call_weight(self, microbatch: tuple[Any, ...], size: int) -> Any:
        """Returns the checked weight. Negative traced weights become NaN."""
        weight: Any = size
        if self.weight is not None:
            try:
                inspect.signature(self.weight).bind(*microbatch)
            except TypeError as error:
                raise TypeError(
                    f"weight must accept all batch arguments ({len(microbatch)}), but calling it "
                    f"fails: {error}; for example, use weight(x, mask) for batch_argnums=(1, 2)"
                ) from None
            except ValueError:  # some built-in functions have no signature
                pass
            weight = self.weight(*microbatch)
        if not is_real(weight):
            raise TypeError(f"weight must return a real number, but returned {weight!r:.80}")
        if jnp.shape(weight) != ():
            raise ValueError(
                f"weight must return a scalar, but returned {describe_array(weight)}; sum over the "
                "examples"
            )
        if isinstance(weight, Tracer):
            return jnp.where(weight >= 0, weight.astype(self.dtype), jnp.nan)
        # A weight that is not traced is the same for all microbatches.
        if not weight > 0:
            raise ValueError(f"weight must return a positive number, but returned {weight!r}")
        return np.asarray(weight, self.dtype)


class MicrobatchStats(NamedTuple):
    """Scalars of a microbatch, which `scan` stacks to `[microbatches]`."""

    norm: Array  # before clipping, or 0 if norms are not computed
    norm_after: Array  # after clipping
    weight: Array
    rejected: Array  # bool
    loss: Array

    @property
    def is_counted(self) -> Array:
        """Marks the microbatches that count toward the means, bool."""
        return ~self.rejected & (self.weight != 0)

    @property
    def _scaled_weights(self) -> tuple[Array, Array]:
        """The counted weights divided by a power of two near the largest weight, and that power."""
        weights = jnp.where(self.is_counted, self.weight, 0)
        unit = floor_pow2(jnp.max(weights))
        return divide_by_pow2(weights, unit), unit

    def mean(self, values: Array) -> Array:
        """Computes the weighted mean `[]` of the counted microbatches, or NaN if there are none."""
        known = jnp.where(self.is_counted, values, 0)
        # Dividing by a power of two near the largest value prevents overflow of the sum.
        unit = floor_pow2(jnp.max(jnp.abs(known)))
        weights, _ = self._scaled_weights
        return jnp.sum(weights * divide_by_pow2(known, unit)) / jnp.sum(weights) * unit

    def noise(self, norm_of_mean: Array) -> NoiseSums:
        """Computes the noise sums from the norm of the mean gradient."""
        norms = jnp.where(self.is_counted, self.norm_after, 0)  # [microbatches]
        # The norm of the mean is at most the largest norm. Dividing by a power of two near the
        # largest norm prevents overflow of the squares and their sums.
        unit = floor_pow2(jnp.max(norms))
        square = self.mean(jnp.square(divide_by_pow2(norms, unit)))
        square_of_mean = jnp.square(divide_by_pow2(norm_of_mean, unit))
        # The weighted mean of the squared norms is an unbiased estimate of
        # `signal + variance / small`, even if the weights differ.
        weights, unit_of_weights = self._scaled_weights
        large = jnp.sum(weights)
        small = large / jnp.sum(self.is_counted, dtype=large.dtype)
        is_known = large > small
        spread = jnp.where(is_known, large - small, 1)
        signal = (large * square_of_mean - small * square) / spread
        variance = (square - square_of_mean) * (small * (large / spread))
        # In this order, the intermediate products only overflow if the result does.
        signal, variance = signal * unit * unit, variance * unit * unit_of_weights * unit
        return NoiseSums(where_or_nan(is_known, signal), where_or_nan(is_known, variance))


@dataclasses.dataclass(frozen=True, eq=False)
class MicrobatchProcessor:
    """Clips and rejects microbatches."""

    clip: optax.GradientTransformationExtraArgs | ThresholdRule | None
    rule: ThresholdRule | None
    rejects_nonfinite: bool
    computes_norms: bool
    sharding: DataSharding

    @classmethod
    def create(
        cls, clip: Any, reject_rule: Any, compute_norms: bool, sharding: DataSharding
    ) -> "MicrobatchProcessor":
        """Checks the user's arguments."""
        needs_norms = clip is not None or reject_rule is not None
        if not check_bool(compute_norms, "compute_norms") and needs_norms:
            raise ValueError(
                "clip and reject_rule must be None if compute_norms is False, got "
                f"{clip!r:.60} and {reject_rule!r:.60}"
            )
        clip, rule = _check_clip(clip), _check_reject_rule(reject_rule)
        return cls(clip, rule, reject_rule is not None, compute_norms, sharding)

    def init(self, params: PyTree) -> AccumulateState:
        """Returns the initial state."""
        clip = copy_arrays(self._make_transformation().init(params))
        rule = () if self.rule is None else copy_arrays(self.rule.init(jnp.zeros(())))
        return AccumulateState(clip, rule)

    def process(
        self,
        grads: FlatTree,
        loss: Array,
        weight: Array,
        state: AccumulateState,
        params: PyTree,
        param_norm: Array | None,
    ) -> tuple[list[Array], MicrobatchStats, AccumulateState]:
        """Clips the gradient of a microbatch, and decides whether to reject the microbatch."""
        leaves, false = grads.inexact_leaves(), jnp.zeros((), bool)
        if not self.computes_norms:
            zero = jnp.zeros((), weight.dtype)
            return leaves, MicrobatchStats(zero, zero, jnp.asarray(weight), false, loss), state
        norm = norm_after = self.compute_norm(grads)
        is_rejected, new = false, state
        if self.rejects_nonfinite:
            is_rejected = ~(jnp.isfinite(norm) & jnp.isfinite(loss))
        if self.rule is not None:
            evaluated = evaluate_rule(self.rule, state.reject, norm, NAME, param_norm)
            is_rejected = is_rejected | evaluated.should_skip
            new = new._replace(reject=evaluated.rule_state)
        if self.clip is not None:
            leaves, norm_after, clip_state = self._clip(grads, norm, state.clip, params)
            # Clipping ignores rejected microbatches. The rejection rule must include them.
            # Otherwise, it would reject norms at a new level forever.
            new = new._replace(clip=tree_where(is_rejected, state.clip, clip_state))
        # A microbatch with weight 0 updates neither state. This comparison is not traced for
        # constant weights, which are NumPy arrays.
        has_weight = weight != 0
        state = tree_where(~has_weight, state, new)
        is_rejected = is_rejected & has_weight
        stats = MicrobatchStats(norm, norm_after, jnp.asarray(weight), is_rejected, loss)
        return leaves, stats, state

    def _clip(
        self, grads: FlatTree, norm: Array, state: PyTree, params: PyTree
    ) -> tuple[list[Array], Array, PyTree]:
        """Returns the clipped gradient, its norm, and the next clipping state."""
        clipped, state = self._make_transformation().update(grads.tree(), state, params)
        flat = flatten(clipped, "updates")
        if flat.treedef != grads.treedef or flat.inexact_indices != grads.inexact_indices:
            raise ValueError(
                "clip must return a tree with the same structure and floating-point leaves as the "
                f"gradients, {grads.treedef}, but returned {flat.treedef}"
            )
        if not isinstance(self.clip, ThresholdRule):
            return flat.inexact_leaves(), self.compute_norm(flat), state
        # All elements are multiplied by the same factor, so no further pass is needed. If the
        # factor underflows in the dtype of the record, the norm after clipping is the threshold.
        info = state.info
        tiny = float(jnp.finfo(info.factor.dtype).tiny)
        threshold, factor = info.threshold.astype(norm.dtype), info.factor.astype(norm.dtype)
        norm_after = jnp.where(threshold < tiny * norm, threshold, norm * factor)
        return flat.inexact_leaves(), norm_after, state

    def _make_transformation(self) -> optax.GradientTransformationExtraArgs:
        # The options of a threshold depend on the mapped axes of the caller, so its transformation
        # cannot be created earlier.
        if isinstance(self.clip, ThresholdRule):
            return make_clip(scopes.tree(), self.clip, self._create_options())
        return self.clip or optax.with_extra_args_support(optax.identity())

    def compute_norm(self, flat: FlatTree) -> Array:
        """Computes the global norm of a tree over all devices, `[]`."""
        return scope_norms(scopes.tree(), flat, self._create_options())

    def _create_options(self) -> Options:
        return Options.create(name=NAME, specs=self.sharding.grad_specs)


def _check_clip(clip: Any) -> Any:
    """Converts `clip` to a transformation or a rule for the global norm."""
    if clip is None:
        return None
    if isinstance(clip, optax.GradientTransformation):
        return optax.with_extra_args_support(clip)
    for package in ("optaxclip.transforms", "optaxclip._engine"):
        check_called(clip, package, "clip", "optaxclip")
    threshold = check_threshold(clip, "clip")
    if isinstance(threshold, dict):
        raise TypeError(
            f"clip must be a transformation or a global-norm threshold, got {clip!r:.80}; use "
            "clip_by_group_norm to set a threshold per group"
        )
    return threshold


def _check_reject_rule(reject_rule: Any) -> ThresholdRule | None:
    """Converts `reject_rule` to a rule, or to None for "nonfinite"."""
    if reject_rule is None or (isinstance(reject_rule, str) and reject_rule == NONFINITE):
        return None
    if isinstance(reject_rule, str):
        raise ValueError(
            f"reject_rule must be {NONFINITE!r}, None, or a rule from optaxclip.thresholds, got "
            f"{reject_rule!r}"
        )
    rule = check_threshold(reject_rule, "reject_rule")
    if isinstance(rule, dict):
        raise TypeError(
            f"reject_rule must be a single global-norm threshold, got {reject_rule!r:.80}"
        )
    return rule.as_pytree()

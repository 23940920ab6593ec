"""Judges a microbatch by its norm: what it adds to the sum, and what the state learns of it."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

import optaxclip.scopes as scopes
from optaxclip._backend.skip_step import tree_where
from optaxclip._base.state import copy_arrays, register_state
from optaxclip._base.trees import FlatTree, flatten
from optaxclip._base.types import ClipInfo, ClipState, PyTree, ThresholdRule
from optaxclip._base.validation import check_bool, check_called
from optaxclip._engine.clip import make_clip, scope_norms
from optaxclip._engine.options import Options
from optaxclip.accumulate.loss import DataSharding
from optaxclip.thresholds._constant import check_threshold
from optaxclip.transforms.skip import evaluate_rule

NAME = "accumulate.value_and_grad"
NONFINITE = "nonfinite"


@register_state
class AccumulateState(NamedTuple):
    """What is handed from microbatch to microbatch, and with `state=` from step to step.

    Attributes:
      clip: the clip's own state, with its record of the last microbatch; empty without one.
      reject: the state of the rule that rejects; empty without one.
    """

    clip: PyTree
    reject: PyTree


class ProcessedMicrobatch(NamedTuple):
    """What was found for a microbatch.

    Attributes:
      leaves: its gradient, clipped.
      norm: the gradient's norm before the clip; 0 if norms are not measured.
      norm_after: the gradient's norm after the clip; 0 if norms are not measured.
      is_out: whether it is rejected.
      state: the state after it. A rejected microbatch leaves the clip's part as it was, but the
        rule that rejects learns from it; a microbatch without weight leaves all of it as it was.
    """

    leaves: list[Array]
    norm: Array
    norm_after: Array
    is_rejected: Array
    state: AccumulateState


def is_stateful(state: AccumulateState) -> bool:
    """Whether the thresholds of the rule that rejects, or of the clip, depend on earlier steps."""
    nodes = jax.tree.leaves(state.clip, is_leaf=lambda x: isinstance(x, ClipState))
    rules = [node.rule for node in nodes if isinstance(node, ClipState)]
    return bool(jax.tree.leaves([state.reject, *rules]))


@dataclasses.dataclass(frozen=True, eq=False)
class MicrobatchProcessor:
    """A user's clip and rule, checked; `rejects` microbatches that are not finite."""

    clip: optax.GradientTransformationExtraArgs | ThresholdRule | None
    rule: ThresholdRule | None
    rejects_nonfinite: bool
    computes_norms: bool
    places: DataSharding

    @classmethod
    def create(
        cls, clip: Any, reject_rule: Any, compute_norms: bool, places: DataSharding
    ) -> "MicrobatchProcessor":
        """A `MicrobatchProcessor` for what a user passed."""
        if not check_bool(compute_norms, "compute_norms") and not (
            clip is None and reject_rule is None
        ):
            raise ValueError(
                "compute_norms=False leaves nothing to judge microbatches by: pass clip=None and "
                f"reject_rule=None with it, got clip={clip!r:.60} and "
                f"reject_rule={reject_rule!r:.60}"
            )
        rule = _check_reject_rule(reject_rule)
        return cls(_check_clip(clip), rule, reject_rule is not None, compute_norms, places)

    def init(self, params: PyTree) -> AccumulateState:
        """The state before the first microbatch."""
        clip = copy_arrays(self._transformation().init(params))
        rule = () if self.rule is None else copy_arrays(self.rule.init(jnp.zeros(())))
        return AccumulateState(clip, rule)

    def param_norm(self, params: PyTree) -> Array | None:
        """The norm of the parameters, if the rule needs it."""
        if self.rule is None or not self.rule.uses_params:
            return None
        return self.compute_norm(flatten(params, "params"))

    def __call__(
        self,
        grads: FlatTree,
        value: Array,
        weight: Array,
        state: AccumulateState,
        params: PyTree,
        param_norm: Array | None,
    ) -> ProcessedMicrobatch:
        """Judges the gradient of one microbatch."""
        leaves = grads.inexact_leaves()
        if not self.computes_norms:
            unmeasured = jnp.zeros((), weight.dtype)
            return ProcessedMicrobatch(leaves, unmeasured, unmeasured, jnp.zeros((), bool), state)
        norm = self.compute_norm(grads)
        is_out, new = jnp.zeros((), bool), state
        if self.rejects_nonfinite:
            is_out = ~(jnp.isfinite(norm) & jnp.isfinite(value))
        if self.rule is not None:
            of_norm = evaluate_rule(self.rule, state.reject, norm, NAME, param_norm)
            is_out, new = is_out | of_norm.should_skip, new._replace(reject=of_norm.rule_state)
        norm_after = norm
        if self.clip is not None:
            leaves, norm_after, clip_state = self._clip(grads, norm, state.clip, params)
            # A clip learns nothing from a rejected microbatch. The rule that rejects must learn, or
            # it would reject norms at a new level for ever.
            new = new._replace(clip=tree_where(is_out, state.clip, clip_state))
        has_weight = weight != 0
        state = tree_where(~has_weight, state, new)
        return ProcessedMicrobatch(leaves, norm, norm_after, is_out & has_weight, state)

    def _clip(
        self, grads: FlatTree, norm: Array, state: PyTree, params: PyTree
    ) -> tuple[list[Array], Array, PyTree]:
        """The clipped gradient, its norm, and the clip's state."""
        clipped, state = self._transformation().update(grads.tree(), state, params)
        after = _check_same_structure(grads, clipped)
        of_threshold = isinstance(self.clip, ThresholdRule)
        norm_after = (
            _norm_after_clip(norm, state.info) if of_threshold else self.compute_norm(after)
        )
        return after.inexact_leaves(), norm_after, state

    def _transformation(self) -> optax.GradientTransformationExtraArgs:
        """The clip as a transformation.

        A threshold's clip is made at each call, because its `specs` depend on the mapped axes
        there.
        """
        if not isinstance(self.clip, ThresholdRule):
            return self.clip or optax.with_extra_args_support(optax.identity())
        return make_clip(scopes.tree(), self.clip, self._options())

    def compute_norm(self, flat: FlatTree) -> Array:
        """The norm of a tree over all devices."""
        return scope_norms(scopes.tree(), flat, self._options())

    def _options(self) -> Options:
        return Options.create(name=NAME, specs=self.places.specs_of_gradients)


def _check_clip(clip: Any) -> Any:
    """A transformation, or a threshold of the global norm, checked."""
    if clip is None:
        return None
    if isinstance(clip, optax.GradientTransformation):
        return optax.with_extra_args_support(clip)
    for package in ("optaxclip.transforms", "optaxclip._engine"):
        check_called(clip, package, "clip", "optaxclip")
    threshold = check_threshold(clip, "clip")
    if isinstance(threshold, dict):
        raise TypeError(
            "clip must be a transformation, or one threshold of the global norm, got "
            f"{clip!r:.80}; "
            "for groups with a threshold each pass clip_by_group_norm"
        )
    return threshold


def _check_reject_rule(reject_rule: Any) -> ThresholdRule | None:
    """`reject_rule`, checked, as a rule; None if it is not a rule."""
    if reject_rule is None:
        return None
    if isinstance(reject_rule, str):
        if reject_rule == NONFINITE:
            return None
        raise ValueError(
            f"reject_rule must be {NONFINITE!r}, None, or a rule of optaxclip.thresholds, got "
            f"{reject_rule!r}"
        )
    rule = check_threshold(reject_rule, "reject_rule")
    if isinstance(rule, dict):
        raise TypeError(
            "reject_rule must be one rule, for the norm of the whole gradient, got "
            f"{reject_rule!r:.80}"
        )
    return rule.as_pytree()


def _norm_after_clip(norm: Array, info: ClipInfo) -> Array:
    """The norm after a clip with a threshold of the global norm, from the clip's record.

    The clip multiplies all entries by one factor, and so the norm too. If that factor is 0 in the
    record's dtype, the norm after the clip is the threshold.
    """
    tiny = float(jnp.finfo(info.factor.dtype).tiny)
    threshold, factor = info.threshold.astype(norm.dtype), info.factor.astype(norm.dtype)
    return jnp.where(threshold < tiny * norm, threshold, norm * factor)


def _check_same_structure(grads: FlatTree, clipped: PyTree) -> FlatTree:
    """A transformation's result, checked to have the structure of the gradients."""
    found = flatten(clipped, "updates")
    if found.treedef != grads.treedef or found.inexact_indices != grads.inexact_indices:
        raise ValueError(
            f"clip must return a tree like the gradients, {grads.treedef}, got {found.treedef}"
        )
    return found

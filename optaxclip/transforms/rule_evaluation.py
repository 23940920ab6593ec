"""Judges a number by a threshold rule."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec

import optaxclip._backend.meshes as meshes
from optaxclip._backend.global_view import global_view
from optaxclip._base.numerics import saturating_cast
from optaxclip._base.state import safe_increment
from optaxclip._base.types import ClipInfo, PyTree, ThresholdRule
from optaxclip.thresholds.constant import evaluate_schedules
from optaxclip.thresholds.rule import update_rule


class RuleResult(NamedTuple):
    """A number `[]`, its threshold, the rule's next state, and what is wrong with the number."""

    number: Array
    threshold: Array
    rule_state: PyTree
    is_above: Array
    is_bad: Array

    @property
    def should_skip(self) -> Array:
        """Whether the number is a reason to skip the step."""
        return self.is_above | self.is_bad

    def find_offending(self, parts: Array) -> Array:
        """Which parts are the reason to skip, from the norm of each part."""
        is_above = parts > self.threshold.astype(parts.dtype)
        is_largest = parts == jnp.max(parts, initial=0)
        is_above = jnp.where(jnp.any(is_above), is_above, is_largest)
        return jnp.where(self.is_bad, ~jnp.isfinite(parts), is_above & self.is_above)

    def update_info(self, info: ClipInfo, skip: Array) -> ClipInfo:
        """The record after this step, which was skipped if `skip` is True."""
        new = info._replace(
            norm=saturating_cast(self.number, info.norm.dtype),
            threshold=saturating_cast(self.threshold, info.threshold.dtype),
            factor=1 - skip.astype(info.factor.dtype),
            fraction=self.is_above.astype(info.fraction.dtype),
            num_clipped=safe_increment(info.num_clipped, self.is_above),
            num_nonfinite=safe_increment(info.num_nonfinite, self.is_bad),
        )
        return meshes.reuse_buffers(info, new)


def evaluate_rule(
    rule: ThresholdRule,
    state: PyTree,
    number: Array,
    name: str,
    param_norm: Any = None,
    *,
    any_sign: bool = False,
) -> RuleResult:
    """Judges a number, such as a norm, by a rule in this state.

    A rule that is relative to the parameters needs their norm. With `any_sign` the number is a
    loss, whose threshold may be negative.
    """
    thresholds, state = _thresholds_of(
        evaluate_schedules(rule, state), state, number, param_norm, name=name, any_sign=any_sign
    )
    is_finite = jnp.isfinite(number)
    is_above = is_finite & (number > thresholds.trigger.astype(number.dtype))
    return RuleResult(number, thresholds.trigger, state, is_above, ~is_finite)


def _out_specs(rule: ThresholdRule, state: PyTree, *_: Any) -> tuple[PartitionSpec, PyTree]:
    del rule
    return PartitionSpec(), state


_thresholds_of = global_view(out_like=_out_specs)(update_rule)

"""Compares a number with a threshold rule."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec

import optaxclip._backend.meshes as meshes
from optaxclip._backend.global_view import global_view
from optaxclip._base.numerics import saturating_cast
from optaxclip._base.state import safe_increment
from optaxclip._base.types import ClipInfo, PyTree, ThresholdRule
from optaxclip.thresholds._constant import evaluate_schedules
from optaxclip.thresholds._rule import update_rule


class RuleResult(NamedTuple):
    """A number, its threshold and the next state of the rule.

    Attributes:
      number: The number, [].
      threshold: The threshold, [].
      rule_state: The next state of the rule.
      is_above: bool[], True if the number is finite and above the threshold.
      is_bad: bool[], True if the number is non-finite.
    """

    number: Array
    threshold: Array
    rule_state: PyTree
    is_above: Array
    is_bad: Array

    @property
    def should_skip(self) -> Array:
        """True if the number is a reason to skip the step."""
        return self.is_above | self.is_bad

    def find_offending(self, parts: Array) -> Array:
        """Returns flags for the parts that are the reason to skip, from the norms of the parts."""
        # bool[parts]
        is_above = parts > self.threshold.astype(parts.dtype)
        is_largest = parts == jnp.max(parts, initial=0)
        # If no part is above the threshold, the largest part is the reason.
        is_above = jnp.where(jnp.any(is_above), is_above, is_largest)  # bool[parts]
        return jnp.where(self.is_bad, ~jnp.isfinite(parts), is_above & self.is_above)

    def update_info(self, info: ClipInfo, skip: Array) -> ClipInfo:
        """Returns the record after this step, which was skipped if `skip` is True."""
        new = info._replace(
            norm=saturating_cast(self.number, info.norm.dtype),
            threshold=saturating_cast(self.threshold, info.threshold.dtype),
            # A skip multiplies the step by 0.
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
    """Compares a number, such as a norm, with the threshold of a rule.

    Rules that are relative to the parameters require `param_norm`. If `any_sign` is True, the
    threshold can be negative, as for a loss.
    """
    thresholds, state = _update_rule_globally(
        evaluate_schedules(rule, state), state, number, param_norm, name=name, any_sign=any_sign
    )
    is_finite = jnp.isfinite(number)
    is_above = is_finite & (number > thresholds.trigger.astype(number.dtype))
    return RuleResult(number, thresholds.trigger, state, is_above, ~is_finite)


# The thresholds are replicated scalars, and the new state is sharded like the old state.
_update_rule_globally = global_view(out_like=lambda _, state, *__: (PartitionSpec(), state))(
    update_rule
)

"""Judging: a number and a limit rule come in, whether it is out and what is kept then go out."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from optaxclip._base.counters import increased
from optaxclip._base.numerics import match_weak_type, narrowed
from optaxclip._base.types import ClipInfo, PyTree, Threshold
from optaxclip._engine.checks import check_rule_state


class Judged(NamedTuple):
    """A number and its limit."""

    number: Array
    limit: Array
    rule_state: PyTree
    is_above: Array
    is_bad: Array

    @property
    def is_out(self) -> Array:
        """Whether it is a reason to skip."""
        return self.is_above | self.is_bad

    def blamed(self, parts: Array) -> Array:
        """Which of the parts of a norm are why it is out."""
        is_above = parts > self.limit.astype(parts.dtype)
        is_largest = parts == jnp.max(parts, initial=0)
        is_above = jnp.where(jnp.any(is_above), is_above, is_largest)
        return jnp.where(self.is_bad, ~jnp.isfinite(parts), is_above & self.is_above)

    def recorded(self, info: ClipInfo, skip: Array) -> ClipInfo:
        """The record, of a step that was skipped or not."""
        return info._replace(
            norm=narrowed(self.number, info.norm.dtype),
            limit=narrowed(self.limit, info.limit.dtype),
            factor=1 - skip.astype(jnp.float32),
            fraction=self.is_above.astype(jnp.float32),
            num_clipped=increased(info.num_clipped, self.is_above),
            num_nonfinite=increased(info.num_nonfinite, self.is_bad),
        )


def judged(
    rule: Threshold, state: PyTree, number: Array, name: str, param_norm: Any = None
) -> Judged:
    """A number as a rule in this state judges it, for the transformation of that name."""
    check_rule_state(rule, state, number, name)
    limits, state = rule.update(number, state, param_norm)
    is_finite = jnp.isfinite(number)
    is_above = is_finite & (number > limits.trigger.astype(number.dtype))
    return Judged(number, limits.trigger, state, is_above, ~is_finite)


def kept_where(where: Array, old: PyTree, new: PyTree) -> PyTree:
    """`old` where `where`, else `new`, in the dtypes and with the names of `new`.

    `float0` is left alone.
    """

    def choose(y: Any, x: Any) -> Any:
        if getattr(y, "dtype", None) == jax.dtypes.float0:
            return y
        if is_opaque(y):
            return jnp.where(where, x, y)
        return _chosen(where, x, y)

    return jax.tree.map(choose, new, old)


def zero_where(where: Array, tree: PyTree) -> PyTree:
    """Zeros where `where`, else the tree; keys and `float0` stay."""
    zeros = jax.tree.map(lambda x: x if is_opaque(x) else jnp.zeros_like(x), tree)
    return kept_where(where, zeros, tree)


# Compiled by itself so that it is traced once for leaves that are alike.
@jax.jit
def _chosen(where: Array, x: Array, y: Array) -> Array:
    chosen = jnp.where(where, x.astype(y.dtype), y)
    # A weak type that came and went would compile the step again.
    return match_weak_type(chosen, x) if x.dtype == y.dtype else chosen


def is_opaque(x: Any) -> bool:
    """Whether a leaf has no numbers to compute with: `float0` or a PRNG key."""
    dtype = getattr(x, "dtype", None)
    if dtype is None:
        return False
    return dtype == jax.dtypes.float0 or jnp.issubdtype(dtype, jax.dtypes.extended)

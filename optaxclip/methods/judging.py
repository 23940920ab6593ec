"""Judges a number by a limit rule, and selects what a step keeps after the judgement."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec

import optaxclip._border.devices as devices
from optaxclip._base.numerics import match_weak_type, narrowed, select
from optaxclip._base.states import increased
from optaxclip._base.types import ClipInfo, PyTree, Threshold
from optaxclip._border.crossing import global_view
from optaxclip.thresholds.calling import limits_of
from optaxclip.thresholds.fixed import at_step


class Judged(NamedTuple):
    """A number `[]`, its limit, the rule's next state, and what is wrong with the number."""

    number: Array
    limit: Array
    rule_state: PyTree
    is_above: Array
    is_bad: Array

    @property
    def is_out(self) -> Array:
        """Whether the number is a reason to skip the step."""
        return self.is_above | self.is_bad

    def blamed(self, parts: Array) -> Array:
        """Which parts are the reason to skip, from the norm of each part."""
        is_above = parts > self.limit.astype(parts.dtype)
        is_largest = parts == jnp.max(parts, initial=0)
        is_above = jnp.where(jnp.any(is_above), is_above, is_largest)
        return jnp.where(self.is_bad, ~jnp.isfinite(parts), is_above & self.is_above)

    def recorded(self, info: ClipInfo, skip: Array) -> ClipInfo:
        """The record after this step, which was skipped if `skip` is True."""
        new = info._replace(
            norm=narrowed(self.number, info.norm.dtype),
            limit=narrowed(self.limit, info.limit.dtype),
            factor=1 - skip.astype(info.factor.dtype),
            fraction=self.is_above.astype(info.fraction.dtype),
            num_clipped=increased(info.num_clipped, self.is_above),
            num_nonfinite=increased(info.num_nonfinite, self.is_bad),
        )
        return devices.in_place_of(info, new)


def judged(
    rule: Threshold,
    state: PyTree,
    number: Array,
    name: str,
    param_norm: Any = None,
    *,
    any_sign: bool = False,
) -> Judged:
    """Judges a number, such as a norm, by a rule in this state.

    A rule that is relative to the parameters needs their norm. With `any_sign` the number is a
    loss, whose limit may be negative.
    """
    limits, state = _limits_of(
        at_step(rule, state), state, number, param_norm, name=name, any_sign=any_sign
    )
    is_finite = jnp.isfinite(number)
    is_above = is_finite & (number > limits.trigger.astype(number.dtype))
    return Judged(number, limits.trigger, state, is_above, ~is_finite)


def _judgement(rule: Threshold, state: PyTree, *_: Any) -> tuple[PartitionSpec, PyTree]:
    del rule
    return PartitionSpec(), state


_limits_of = global_view(out_like=_judgement)(limits_of)


def kept_where(where: Array, old: PyTree, new: PyTree) -> PyTree:
    """`old` where `where` is True, else `new`, in the dtypes and structure of `new`."""

    def choose(y: Any, x: Any) -> Any:
        if getattr(y, "dtype", None) == jax.dtypes.float0:
            return y
        if is_opaque(y):
            return jnp.where(where, x, y)
        return _chosen(where, x, y)

    return jax.tree.map(choose, new, old)


def zero_where(where: Array, tree: PyTree) -> PyTree:
    """Zeros where `where` is True, else the tree; PRNG keys and `float0` leaves stay."""
    return jax.tree.map(lambda x: x if is_opaque(x) else _zeroed(where, x), tree)


# A compiled function of its own, so that it is traced once for leaves that are alike.
@jax.jit
def _zeroed(where: Array, x: Array) -> Array:
    return match_weak_type(select(where, 0, x), x)


@global_view(out_like="y")
def _chosen(where: Array, x: Array, y: Array) -> Array:
    chosen = lax.select(where, x.astype(y.dtype), y)
    # The weak type stays: if a state's type changed, the next step would be compiled again.
    return match_weak_type(chosen, x) if x.dtype == y.dtype else chosen


def is_opaque(x: Any) -> bool:
    """Whether a leaf has no numbers to compute with: `float0` or a PRNG key."""
    dtype = getattr(x, "dtype", None)
    if dtype is None:
        return False
    return dtype == jax.dtypes.float0 or jnp.issubdtype(dtype, jax.dtypes.extended)

"""What becomes of a group whose norm is not finite.

  policy    | the group | for
  ----------|-----------|--------------------------------------------------------------
  `"nan"`   | all NaN   | failing loudly, and for `optax.apply_if_finite` around the chain
  `"zero"`  | all 0     | going on without this group's step (Adam's moments still decay)
  `"mask"`  | bad entries 0, the rest clipped by its own norm | a few bad entries
  `"error"` | a `checkify` error that names the leaves | debugging

A group is handled as one: never half NaN, half zero.
"""

import functools
from typing import Any, get_args

import jax.numpy as jnp
from jax import Array
from jax.experimental import checkify

from optaxclip._collectives import anywhere
from optaxclip._placement import of_slots, split_over
from optaxclip._trees import is_sparse, with_data
from optaxclip._types import NonFinite
from optaxclip.scopes import Grouping

_POLICIES = get_args(NonFinite)


def as_policy(policy: str) -> NonFinite:
    """`policy`, checked.

    Raises:
      ValueError: for an unknown policy.
    """
    for known in _POLICIES:
        if policy == known:
            return known
    raise ValueError(f"nonfinite must be one of {list(_POLICIES)}, got {policy!r}")


def mask(leaves: list[Any], grouping: Grouping) -> tuple[list[Any], list[Array]]:
    """Leaves with their non-finite entries replaced by 0, and which groups had such entries."""
    masked, bad = [], []
    for leaf, axes in zip(leaves, grouping.axes, strict=True):
        data = leaf.data if is_sparse(leaf) else leaf
        finite = jnp.isfinite(data)
        clean = jnp.where(finite, data, jnp.zeros((), data.dtype))
        masked.append(with_data(leaf, clean))
        bad.append(jnp.any(~finite, axis=None if is_sparse(leaf) else axes))
    slots = [
        functools.reduce(
            jnp.logical_or, [bad[i] for i in slot.members], jnp.zeros(slot.shape, bool)
        )
        for slot in grouping.slots
    ]
    over = of_slots(grouping, split_over(leaves, grouping))
    return masked, [anywhere(*slot) for slot in zip(slots, over, strict=True)]


def check(bad: Array, name: str, leaves: list[str]) -> None:
    """Reports a bad group to `checkify`.

    Args:
      bad: bool, any shape; whether the group, or which of its slices, are not finite.
      name: the transformation's name.
      leaves: the names of the group's leaves.
    """
    checkify.check(
        ~jnp.any(bad), f"{name}: the gradient norm is not finite; leaves: {', '.join(leaves)}"
    )

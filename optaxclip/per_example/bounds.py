"""From one limit of an example's contribution to a limit for each of its groups."""

import math
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.core import Tracer

from optaxclip._base.exact import MOST_ENTRIES, MOST_GROUPS, two_product
from optaxclip._base.numerics import safe_divide
from optaxclip._base.trees import FlatTree
from optaxclip._engine.step import zero_norms
from optaxclip.scopes import Grouping
from optaxclip.thresholds.fixed import check_limit, rule_for

Split = Literal["uniform", "size"]
ExampleLimit: TypeAlias = jax.typing.ArrayLike | Mapping[str, jax.typing.ArrayLike]


def check_example_limit(limit: Any, argument: str) -> ExampleLimit:
    """`limit`, if it can be one: a number, or numbers by the names of the groups.

    Raises:
      ValueError: if a number is not a scalar or, where it is concrete, is negative or NaN.
      TypeError: if it is no number.
    """
    if isinstance(limit, Mapping):
        items = limit.items()
        return {name: _check_number(value, f"{argument}[{name!r}]") for name, value in items}
    return _check_number(limit, argument)


def check_split(split: str) -> Split:
    """`split`, checked.

    Raises:
      ValueError: for an unknown one.
    """
    for known in get_args(Split):
        if split == known:
            return known
    raise ValueError(f"split must be one of {list(get_args(Split))}, got {split!r}")


class GroupLimits(NamedTuple):
    """The limits of an example's groups of one slot, `high + low`.

    Attributes:
      high: the limits to the nearest number of their dtype, of the slot's shape.
      low: what they lack, at most 0, of the same shape.
    """

    high: Array
    low: Array


def group_limits(
    limit: ExampleLimit, grouping: Grouping, one: FlatTree, split: Split
) -> tuple[list[GroupLimits], Array]:
    """The limits of an example's groups, and the limit of the whole that follows from them.

    Args:
      limit: checked. A number holds for the whole example and is split among the groups, so that
        the squares of their limits sum to its square; numbers by name hold as they are.
      grouping: the groups of one example.
      one: the tree of one example.
      split: "uniform" gives each of `K` groups `limit / sqrt(K)`, "size" gives a group of `D_i` of
        all `D` entries `limit * sqrt(D_i / D)`.

    Returns:
      Limits for each slot of the grouping, and the limit of an example's norm, `[]`.
    """
    if isinstance(limit, Mapping):
        highs = _limits_by_name(dict(limit), grouping)
        squares = sum((jnp.sum(jnp.square(high)) for high in highs), jnp.zeros(()))
        return [GroupLimits(high, jnp.zeros_like(high)) for high in highs], jnp.sqrt(squares)
    # A limit that fell below 0 or is NaN while traced lets nothing through.
    bound = jnp.maximum(_as_float(limit), 0)
    sizes = [math.prod(np.shape(leaf)) for leaf in one.picked()]
    shares = _shares(grouping, sizes, split)
    pairs = _split(bound, shares, _order(grouping, sizes))
    slots = zip(grouping.slots, pairs, strict=True)
    filled = [[jnp.broadcast_to(x, slot.shape) for x in pair] for slot, pair in slots]
    return [GroupLimits(*pair) for pair in filled], bound


def small_slots(grouping: Grouping, sizes: list[int]) -> list[int]:
    """The slots of one small group, which are measured exactly, if there are few of them.

    Args:
      grouping: the groups of one example.
      sizes: the number of entries of each measured leaf.
    """
    slots = enumerate(zip(grouping.slots, _entries(grouping, sizes), strict=True))
    small = [i for i, (slot, n) in slots if slot.shape == () and 0 < n <= MOST_ENTRIES]
    return small if len(small) <= MOST_GROUPS else []


def _order(grouping: Grouping, sizes: list[int]) -> tuple[list[int], int]:
    """The small slots, and the largest one, of the others if there are others."""
    small = small_slots(grouping, sizes)
    others = [i for i in range(len(grouping.slots)) if i not in small]
    entries = _entries(grouping, sizes)
    largest = max(others or range(len(grouping.slots)), key=entries.__getitem__, default=0)
    return small, largest


def _split(
    bound: Array, shares: list[float], order: tuple[list[int], int]
) -> list[tuple[Array, Array]]:
    """Each share's root of the limit, so that no rounding adds up to more than the limit.

    The limits of small groups are rounded to the nearest number, as their entries are not lowered
    against rounding; the largest group makes up for it.
    """
    small, largest = order
    pairs = [_product(bound, math.sqrt(share)) for share in shares]
    if len(shares) < 2:
        return pairs
    high, low = pairs[largest]
    for other in set(small) - {largest}:
        # Their ratio first: products of limits may leave the range.
        low = low + pairs[other][1] * safe_divide(pairs[other][0], high, 0)
    low = low - high * 2.0**-40
    low = jnp.where(jnp.isfinite(low), jnp.minimum(low, 0), 0)
    return [
        (high, low if i == largest else jnp.zeros_like(high)) for i, (high, _) in enumerate(pairs)
    ]


def _product(bound: Array, factor: float) -> tuple[Array, Array]:
    """`bound * factor` rounded, and the rounding error."""
    high = jnp.full_like(bound, factor)
    product, error = two_product(bound, high)
    error = error + bound * (factor - float(np.asarray(factor, high.dtype)))
    error = jnp.where(jnp.isfinite(error), error, 0)
    nearest = lax.optimization_barrier(product + error)
    return nearest, error - (nearest - product)


def _limits_by_name(limit: dict[str, Any], grouping: Grouping) -> list[Array]:
    rule = rule_for(limit, grouping.names, grouping.layout)
    norms = zero_norms(grouping, jnp.dtype(jnp.float32))
    limits, _ = rule.update(norms, rule.init(norms), None)
    return grouping.unpack(limits.target)


def _shares(grouping: Grouping, sizes: list[int], split: Split) -> list[float]:
    """What each group of a slot has of the square of the limit; they sum to 1 over all groups."""
    groups = [math.prod(slot.shape) for slot in grouping.slots]
    if split == "uniform":
        return [1 / max(sum(groups), 1)] * len(groups)
    # Of slots without groups there is nothing to share.
    counts = [max(count, 1) * max(sum(sizes), 1) for count in groups]
    return [own / count for own, count in zip(_entries(grouping, sizes), counts, strict=True)]


def _entries(grouping: Grouping, sizes: list[int]) -> list[int]:
    """The number of entries of each slot."""
    return [sum(sizes[i] for i in slot.members) for slot in grouping.slots]


def _as_float(limit: Any) -> Array:
    number = jnp.asarray(limit)
    return number if number.dtype == jnp.float64 else number.astype(jnp.float32)


def _check_number(limit: Any, argument: str) -> Any:
    limit = check_limit(limit, argument)
    # A bound on privacy is looked at wherever it can be, on the device too.
    if (
        isinstance(limit, jax.Array)
        and not isinstance(limit, Tracer)
        and limit.is_fully_addressable
    ):
        check_limit(np.asarray(limit, np.float64)[()], argument)
    return limit

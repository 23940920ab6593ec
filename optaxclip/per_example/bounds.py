"""From one limit of an example's contribution to a limit for each of its groups."""

import math
from collections.abc import Mapping
from typing import Any, Literal, TypeAlias, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer

from optaxclip._base.grouping import Grouping
from optaxclip._base.numerics import norm_dtype
from optaxclip._base.trees import FlatTree
from optaxclip.thresholds.fixed import check_limit, rule_for

Split = Literal["uniform", "size"]
ExampleLimit: TypeAlias = jax.typing.ArrayLike | Mapping[str, jax.typing.ArrayLike]


def check_example_limit(limit: Any, argument: str) -> ExampleLimit:
    """`limit`, if it can be one: a number, or numbers by the names of the groups.

    Raises:
      ValueError: if a number is not a scalar or, where it is concrete, is negative or NaN.
      TypeError: if it is not a number.
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


def group_limits(
    limit: ExampleLimit, grouping: Grouping, one: FlatTree, split: Split
) -> tuple[list[Array], Array]:
    """The limits of an example's groups, and the limit of the whole that follows from them.

    Args:
      limit: checked. A number holds for the whole example and is split among the groups, so that
        the squares of their limits sum to its square at most; numbers by name hold as they are.
      grouping: the groups of one example.
      one: the tree of one example.
      split: "uniform" gives each of `K` groups `limit / sqrt(K)`, "size" gives a group of `D_i` of
        all `D` entries `limit * sqrt(D_i / D)`.

    Returns:
      For each group, or array of groups, limits of its shape, float64 if a leaf is, else float32;
      and that of an example's norm, `[]`.
    """
    dtype = norm_dtype({jnp.result_type(leaf) for leaf in one.picked()})
    if isinstance(limit, Mapping):
        limits = _limits_by_name(dict(limit), grouping, dtype)
        squares = (jnp.sum(jnp.square(each)) for each in limits)
        return limits, jnp.sqrt(sum(squares, jnp.zeros((), dtype)))
    # A limit that fell below 0 or is NaN while traced lets nothing through.
    bound = jnp.maximum(jnp.asarray(limit).astype(dtype), 0)
    sizes = [math.prod(np.shape(leaf)) for leaf in one.picked()]
    shares = _shares(grouping, sizes, split)
    roots = [jnp.asarray(math.sqrt(share)).astype(dtype) for share in shares]
    rows = zip(roots, grouping.groups, strict=True)
    return [jnp.broadcast_to(bound * root, group.shape) for root, group in rows], bound


def _limits_by_name(limit: dict[str, Any], grouping: Grouping, dtype: jnp.dtype) -> list[Array]:
    if grouping.layout == "dict":
        entries = [(group.names[0], group.shape) for group in grouping.groups]
    else:
        entries = [(name, ()) for name in grouping.names]
    rule = rule_for(limit, entries)
    norms = [jnp.zeros(shape, dtype) for _, shape in entries]
    limits, _ = rule.update(norms, rule.init(norms), None)
    if grouping.layout == "dict":
        return limits.target
    column = jnp.stack(limits.target)
    return grouping.from_tree(column[0] if grouping.layout == "scalar" else column)


def _shares(grouping: Grouping, sizes: list[int], split: Split) -> list[float]:
    """What each group has of the square of the limit; they sum to 1 over all groups."""
    groups = [math.prod(group.shape) for group in grouping.groups]
    if split == "uniform":
        return [1 / max(sum(groups), 1)] * len(groups)
    # Of leaves without groups there is nothing to share.
    counts = [max(count, 1) * max(sum(sizes), 1) for count in groups]
    return [own / count for own, count in zip(_entries(grouping, sizes), counts, strict=True)]


def _entries(grouping: Grouping, sizes: list[int]) -> list[int]:
    """The number of entries of each group."""
    return [sum(sizes[i] for i in group.members) for group in grouping.groups]


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

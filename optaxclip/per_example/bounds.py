"""The limits of an example's groups, from the limit of the whole example."""

import math
from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

import jax.numpy as jnp
import numpy as np
from jax import Array

from optaxclip._base.arguments import short
from optaxclip._base.grouping import Grouping
from optaxclip._base.numerics import norm_dtype, norm_of_all
from optaxclip._base.trees import FlatTree
from optaxclip._base.types import ArrayLike
from optaxclip._border.packing import concatenated, split_up
from optaxclip.per_example.quantile import QuantileLimit
from optaxclip.thresholds.calling import limits_of
from optaxclip.thresholds.checks import checked_limit
from optaxclip.thresholds.fixed import rule_for

Split = Literal["uniform", "size"]
ExampleLimit: TypeAlias = ArrayLike | Mapping[str, ArrayLike]


def checked_example_limit(limit: Any, argument: str) -> ExampleLimit:
    """`limit`, checked to be a number, or a dict of numbers by the names of the groups."""
    if isinstance(limit, Mapping):
        items = limit.items()
        return {name: _check_number(value, f"{argument}[{name!r}]") for name, value in items}
    return _check_number(limit, argument)


def group_limits(
    limit: ExampleLimit, grouping: Grouping, one: FlatTree, split: Split
) -> tuple[list[Array], Array]:
    """The limits of an example's groups, and the limit of the whole example.

    Args:
      limit: checked. A number is the limit of the whole example; the groups get shares of it, so
        that the squares of their limits sum to at most its square. Numbers by name are the limits
        of groups.
      grouping: the groups of one example.
      one: the tree of one example.
      split: "uniform" gives each of `K` groups `limit / sqrt(K)`; "size" gives a group with `D_i`
        of all `D` entries `limit * sqrt(D_i / D)`.

    Returns:
      For each group, or array of groups, limits of its shape; and the limit of the whole example's
      norm, `[]`. All are float64 if a leaf is 64-bit, else float32.
    """
    dtype = norm_dtype({jnp.result_type(leaf) for leaf in one.measured_leaves()})
    if isinstance(limit, Mapping):
        limits = _limits_by_name(dict(limit), grouping, dtype)
        return limits, norm_of_all(concatenated(limits))
    # A traced limit may be negative; then it acts as 0.
    bound = jnp.maximum(jnp.asarray(limit).astype(dtype), 0)
    sizes = [math.prod(np.shape(leaf)) for leaf in one.measured_leaves()]
    shares = _shares(grouping, sizes, split)
    roots = [jnp.asarray(math.sqrt(share)).astype(dtype) for share in shares]
    rows = zip(roots, grouping.groups, strict=True)
    return [jnp.broadcast_to(bound * root, group.shape) for root, group in rows], bound


def change_of(relation: Any) -> int:
    """How many limits the sum can change by between neighbouring data sets."""
    name = getattr(relation, "name", relation)
    name = name.lower() if isinstance(name, str) else name
    if name not in _CHANGES:
        raise ValueError(f"relation must be one of {list(_CHANGES)}, got {relation!r}")
    return _CHANGES[name]


_CHANGES = {"add_or_remove_one": 1, "replace_special": 1, "replace_one": 2}


def _limits_by_name(limit: dict[str, Any], grouping: Grouping, dtype: jnp.dtype) -> list[Array]:
    if grouping.layout == "dict":
        entries = [(group.names[0], group.shape) for group in grouping.groups]
    else:
        entries = [(name, ()) for name in grouping.names]
    rule, norms = rule_for(limit, entries), concatenated([jnp.zeros(x, dtype) for _, x in entries])
    limits, _ = limits_of(rule, rule.init(norms), norms, None, "limit")
    return split_up(limits.target, [group.shape for group in grouping.groups])


def _shares(grouping: Grouping, sizes: list[int], split: Split) -> list[float]:
    """The share of the square of the limit that each group gets; all shares sum to 1."""
    groups = [math.prod(group.shape) for group in grouping.groups]
    if split == "uniform":
        return [1 / max(sum(groups), 1)] * len(groups)
    # At least 1, so that nothing is divided by 0 for an empty tree or an array without groups.
    counts = [max(count, 1) * max(sum(sizes), 1) for count in groups]
    return [own / count for own, count in zip(_entries(grouping, sizes), counts, strict=True)]


def _entries(grouping: Grouping, sizes: list[int]) -> list[int]:
    """The number of entries of each group."""
    return [sum(sizes[i] for i in group.members) for group in grouping.groups]


def _check_number(limit: Any, argument: str) -> Any:
    if callable(limit) or isinstance(limit, QuantileLimit):
        raise TypeError(
            f"{argument} must be a number or scalar array, got {short(limit)}: pass its limit at "
            "this step, or use per_example_clip_and_aggregate, whose limit may be a schedule or "
            "quantile_limit()"
        )
    return checked_limit(limit, argument, by_name=True)

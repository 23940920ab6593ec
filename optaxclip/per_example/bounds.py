"""The thresholds of an example's groups, from the threshold of the whole example."""

import math
from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

import jax.numpy as jnp
import numpy as np
from jax import Array

from optaxclip._base.arguments import short_repr
from optaxclip._base.grouping import Grouping
from optaxclip._base.numerics import combine_norms, norm_dtype
from optaxclip._base.trees import FlatTree
from optaxclip._base.types import ArrayLike
from optaxclip._border.packing import ravel_and_concatenate, split_and_reshape
from optaxclip.per_example.quantile import QuantileThreshold
from optaxclip.thresholds.calling import update_rule
from optaxclip.thresholds.checks import check_threshold_value
from optaxclip.thresholds.fixed import resolve_rule

Split = Literal["uniform", "size"]
ExampleThreshold: TypeAlias = ArrayLike | Mapping[str, ArrayLike]


def check_example_threshold(threshold: Any, argument: str) -> ExampleThreshold:
    """`threshold`, checked to be a number, or a dict of numbers by the names of the groups."""
    if isinstance(threshold, Mapping):
        items = threshold.items()
        return {name: _check_number(value, f"{argument}[{name!r}]") for name, value in items}
    return _check_number(threshold, argument)


def group_thresholds(
    threshold: ExampleThreshold, grouping: Grouping, one: FlatTree, split: Split
) -> tuple[list[Array], Array]:
    """The thresholds of an example's groups, and the threshold of the whole example.

    Args:
      threshold: checked. A number is the threshold of the whole example; the groups get shares of it, so
        that the squares of their thresholds sum to at most its square. Numbers by name are the thresholds
        of groups.
      grouping: the groups of one example.
      one: the tree of one example.
      split: "uniform" gives each of `K` groups `threshold / sqrt(K)`; "size" gives a group with `D_i`
        of all `D` entries `threshold * sqrt(D_i / D)`.

    Returns:
      For each group, or array of groups, thresholds of its shape; and the threshold of the whole example's
      norm, `[]`. All are float64 if a leaf is 64-bit, else float32.
    """
    dtype = norm_dtype({jnp.result_type(leaf) for leaf in one.inexact_leaves()})
    if isinstance(threshold, Mapping):
        thresholds = _thresholds_by_name(dict(threshold), grouping, dtype)
        return thresholds, combine_norms(ravel_and_concatenate(thresholds))
    # A traced threshold may be negative; then it acts as 0.
    bound = jnp.maximum(jnp.asarray(threshold).astype(dtype), 0)
    sizes = [math.prod(np.shape(leaf)) for leaf in one.inexact_leaves()]
    shares = _split_weights(grouping, sizes, split)
    roots = [jnp.asarray(math.sqrt(share)).astype(dtype) for share in shares]
    rows = zip(roots, grouping.groups, strict=True)
    return [jnp.broadcast_to(bound * root, group.shape) for root, group in rows], bound


def sensitivity_factor(relation: Any) -> int:
    """How many thresholds the sum can change by between neighbouring data sets."""
    name = getattr(relation, "name", relation)
    name = name.lower() if isinstance(name, str) else name
    if name not in _CHANGES:
        raise ValueError(f"relation must be one of {list(_CHANGES)}, got {relation!r}")
    return _CHANGES[name]


_CHANGES = {"add_or_remove_one": 1, "replace_special": 1, "replace_one": 2}


def _thresholds_by_name(
    threshold: dict[str, Any], grouping: Grouping, dtype: jnp.dtype
) -> list[Array]:
    if grouping.layout == "dict":
        entries = [(group.names[0], group.shape) for group in grouping.groups]
    else:
        entries = [(name, ()) for name in grouping.names]
    rule, norms = (
        resolve_rule(threshold, entries),
        ravel_and_concatenate([jnp.zeros(x, dtype) for _, x in entries]),
    )
    thresholds, _ = update_rule(rule, rule.init(norms), norms, None, "threshold")
    return split_and_reshape(thresholds.target, [group.shape for group in grouping.groups])


def _split_weights(grouping: Grouping, sizes: list[int], split: Split) -> list[float]:
    """The share of the square of the threshold that each group gets; all shares sum to 1."""
    groups = [math.prod(group.shape) for group in grouping.groups]
    if split == "uniform":
        return [1 / max(sum(groups), 1)] * len(groups)
    # At least 1, so that nothing is divided by 0 for an empty tree or an array without groups.
    counts = [max(count, 1) * max(sum(sizes), 1) for count in groups]
    return [own / count for own, count in zip(_entries(grouping, sizes), counts, strict=True)]


def _entries(grouping: Grouping, sizes: list[int]) -> list[int]:
    """The number of entries of each group."""
    return [sum(sizes[i] for i in group.leaf_indices) for group in grouping.groups]


def _check_number(threshold: Any, argument: str) -> Any:
    if callable(threshold) or isinstance(threshold, QuantileThreshold):
        raise TypeError(
            f"{argument} must be a number or scalar array, got {short_repr(threshold)}: pass its threshold at "
            "this step, or use per_example_clip_and_aggregate, whose threshold may be a schedule or "
            "quantile_threshold()"
        )
    return check_threshold_value(threshold, argument, by_name=True)

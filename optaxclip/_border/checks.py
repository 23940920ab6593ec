"""Checks of what a user passes to a step: groups, parameters, a norm."""

import math
import warnings
from typing import Any

import jax.numpy as jnp
from jax import Array

from optaxclip._base.grouping import Grouping
from optaxclip._base.numerics import fixed_size
from optaxclip._base.states import GIVE_BACK, Names
from optaxclip._base.trees import FlatTree, flatten, leaf_name
from optaxclip._base.types import PyTree
from optaxclip.thresholds.checks import checked_limit


def with_groups_of_state(grouping: Grouping, stored: Names, size: int, name: str) -> Grouping:
    """The grouping, with an empty group for each name in the state that the tree lacks.

    The state has `size` groups; their names `stored` are empty if the state went through
    `optax.tree_map_params`.
    """
    if grouping.layout == "scalar":
        return grouping
    if not stored and size == len(grouping.names):
        return grouping
    if not stored and size:
        raise ValueError(
            f"{name}: the state has lost the names of its {size} groups, as after "
            f"optax.tree_map_params, and the updates have {len(grouping.names)}; {GIVE_BACK}"
        )
    if len(stored) != size:
        raise ValueError(
            f"{name}: the state has {size} entries for its {len(stored)} groups, as if it had been "
            "made under jax.vmap; make the update under jax.vmap too, or begin with a fresh state"
        )
    unknown = sorted(set(grouping.names) - set(stored))
    if unknown:
        raise ValueError(
            f"{name}: the updates have groups {unknown} that the params given to init did not have"
        )
    return grouping.with_groups_for(stored)


MANY_NORMS = 2**24
"""With more norms than this, a clip's own arrays take a good part of the gradients' memory."""


def warn_of_many_norms(grouping: Grouping, name: str) -> None:
    """Warns where the norms are so many that leaves are likely to be grouped by the wrong axes."""
    counts = {group.names[0]: math.prod(group.shape) for group in grouping.groups}
    if any(fixed_size(count) is None for count in counts.values()):
        return
    total = sum(counts.values())
    if total > MANY_NORMS:
        most = max(counts, key=lambda leaf: counts[leaf])
        warnings.warn(
            f"{name}: these leaves have {total:,} norms, of which '{most}' alone has "
            f"{counts[most]:,}; norms, limits and factors of all are kept in memory. If a norm "
            "should cover more entries, name its axes (axis=), or say which leaves stack layers: "
            "scopes.unit(stacked=...)",
            UserWarning,
            stacklevel=2,
        )


def matching_params(flat: FlatTree, params: PyTree, name: str) -> FlatTree:
    """The tree of updates with the parameters in place of its measured leaves."""
    found = flatten(params, "params")
    by_path = {found.paths[i]: found.leaves[i] for i in found.measured}
    for i in flat.measured:
        path, shape = flat.paths[i], jnp.shape(flat.leaves[i])
        if path not in by_path or jnp.shape(by_path[path]) != shape:
            there = f"has shape {jnp.shape(by_path[path])}" if path in by_path else "is missing"
            raise ValueError(
                f"{name}: params must match the updates; leaf '{leaf_name(path)}' of shape {shape} "
                f"{there} in params"
            )
    return flat.replaced([by_path[flat.paths[i]] for i in flat.measured])


def given_norm(norm: Any, argument: str) -> Array:
    """The norm that the caller passes, checked, as a float32 or float64 scalar.

    It may be negative or NaN.
    """
    given = jnp.asarray(checked_limit(norm, argument, allow_any_number=True))
    return given.astype(jnp.float64 if given.dtype == jnp.float64 else jnp.float32)

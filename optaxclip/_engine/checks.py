"""What a user passes to a step, checked: groups, parameters, a norm; each with a message."""

from typing import Any

import jax.numpy as jnp
from jax import Array

from optaxclip._base.devices import manual_axes
from optaxclip._base.grouping import Grouping
from optaxclip._base.trees import FlatTree, flatten, leaf_name
from optaxclip._base.types import ClipInfo, PyTree, Threshold
from optaxclip.thresholds.fixed import check_limit

_PART_OF_A_STACK = (
    "; if they are this device's part of a stack of layers or experts, take scopes.axes with "
    "specs= in the place of scopes.leaf(stacked=), or clip outside of the region"
)


def among_known(grouping: Grouping, info: ClipInfo, name: str) -> Grouping:
    """The grouping with all groups known since `init`, of which a tree may lack some."""
    if grouping.layout == "scalar":
        return grouping
    unknown = sorted(set(grouping.names) - set(info.names))
    if unknown:
        raise ValueError(
            f"{name}: the updates have groups {unknown} that the params given to init did not have"
            + (_PART_OF_A_STACK if manual_axes() else "")
        )
    return grouping.among(info.names)


def params_for(rule: Threshold, params: PyTree | None, name: str) -> PyTree | None:
    """The parameters, if the limit is relative to them.

    Raises:
      ValueError: if they are missing.
    """
    if rule.uses_params and params is None:
        raise ValueError(
            f"{name}: the limit is relative to the parameters; pass them: "
            "update(grads, state, params)"
        )
    return params if rule.uses_params else None


def matching_params(flat: FlatTree, params: PyTree | None, name: str) -> list[Any] | None:
    """The parameters that belong to the measured leaves."""
    if params is None:
        return None
    found = flatten(params, "params")
    by_path = {found.paths[i]: found.leaves[i] for i in found.measured}
    matching = []
    for i in flat.measured:
        path, shape = flat.paths[i], jnp.shape(flat.leaves[i])
        if path not in by_path or jnp.shape(by_path[path]) != shape:
            there = f"has shape {jnp.shape(by_path[path])}" if path in by_path else "is missing"
            raise ValueError(
                f"{name}: params must match the updates; leaf '{leaf_name(path)}' of shape {shape} "
                f"{there} in params"
            )
        matching.append(by_path[path])
    return matching


def usable_norm(norm: Any, argument: str, grouping: Grouping, nonfinite: str) -> Array | None:
    """The caller's norm of the whole tree, where it can stand for our own.

    Other scopes need other norms, and masked entries are not in it.
    """
    if norm is None or grouping.layout != "scalar" or nonfinite == "mask":
        return None
    return as_norm_given(norm, argument)


def as_norm_given(norm: Any, argument: str) -> Array:
    """A norm that the caller has, as a float32 or float64 scalar; it may be anything but a vector.

    Raises:
      ValueError: if it is not a scalar.
      TypeError: if it is not a number.
    """
    given = jnp.asarray(check_limit(norm, argument, allow_any_number=True))
    return given.astype(jnp.float64 if given.dtype == jnp.float64 else jnp.float32)

"""Finds the states of clipping stages, skip wrappers and records in pytrees."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.tree_util import GetAttrKey, keystr

from optaxclip._base.state import REINIT_HINT, RESTORE_NAMES_HINT, StaticNames
from optaxclip._base.trees import leaf_name
from optaxclip._base.types import ClipInfo, ClipState, Path, PyTree
from optaxclip._base.validation import did_you_mean
from optaxclip.transforms.loss_scale import LossScaleState
from optaxclip.transforms.skip import LossState, SkipState

NAME_FIELDS = {"name", "names", "leaves"}
FIELDS_WITHOUT_ARRAYS = {"rule", "loss", "inner_state", "skip_state"}
"""Fields without arrays, which Flax omits when it converts states to dicts."""


def find(tree: PyTree, *kinds: Any) -> dict[str, Any]:
    """Returns the states of the given kinds by key."""
    found = list(iter_states(tree, kinds))
    keys = unique_keys([(path, (name_of(state),)) for path, state in found])
    return dict(zip(keys, (state for _, state in found), strict=True))


def records(opt_state: PyTree, caller: str, *more: type) -> list[tuple[Path, Any]]:
    """Returns the paths and states of all clipping stages, skip wrappers, and `more` kinds."""
    found = list(iter_states(opt_state, (ClipState, SkipState, *more)))
    if not found:
        raise ValueError(
            f"monitor.{caller}: opt_state must contain a clipping stage or skip wrapper that keeps "
            "a record (clip, clip_by_value, clip_by_second_moment, and stages with record=False do "
            f"not), got {describe_tree(opt_state)}; pass the optimizer's state, a TrainState, or "
            "an nnx.Optimizer"
        )
    return found


def find_one_state(
    opt_state: PyTree, name: str | None, *kinds: type, reader: str, what: str
) -> Any:
    """Returns the only state of these kinds, or the only one with the name."""
    found = list(find(opt_state, *kinds).values())
    fitting = [state for state in found if name in (None, name_of(state))]
    if len(fitting) == 1:
        return fitting[0]
    if not found:
        raise ValueError(f"opt_state contains no {what}; add monitor.{what}() to the chain")
    names = [name_of(state) for state in found]
    if name is not None and not fitting:
        hint = did_you_mean(str(name), names)
        raise ValueError(f"name must be one of {names}, got {name!r}{hint}")
    remedy = f"pass one of these names to {reader}"
    if len(set(names)) < len(names):
        remedy = f"give them different names and {remedy}"
    raise ValueError(
        f"name must match exactly one {what}, but {name=} matches {len(fitting)} of {names}; "
        f"{remedy}"
    )


def check_not_vmapped(steps: Any, reader: str) -> None:
    """Checks that the step counter is a scalar, which it is not for several seeds under `vmap`."""
    if np.ndim(steps):
        raise ValueError(
            f"monitor.{reader}: opt_state must be a single state, but contains {steps.size} states "
            "stacked by vmap; pass one of them, as in jax.tree.map(lambda x: x[0], opt_state)"
        )


def learning_rates(opt_state: PyTree) -> dict[str, Any]:
    """Returns the learning rates that `optax.inject_hyperparams` keeps in a state."""
    found = []
    for path, x in jax.tree_util.tree_leaves_with_path(opt_state):
        names = [getattr(key, "name", getattr(key, "key", None)) for key in path]
        if ("hyperparams", "learning_rate") in itertools.pairwise(names):
            found.append(x)
    return dict(zip(deduplicate(["learning_rate"] * len(found)), found, strict=True))


def unique_keys(places: Sequence[tuple[Path, tuple[str, ...]]]) -> list[str]:
    """Returns a unique key for each path followed by its names."""
    simple = [
        "/".join(filter(None, (keystr(path, simple=True, separator="/"), *names)))
        for path, names in places
    ]
    if len(set(simple)) == len(simple):
        return simple
    # Dict keys with a slash can make simple paths equal, but not paths in Python's notation.
    return deduplicate(["/".join((keystr(path), *names)) for path, names in places])


def deduplicate(names: Sequence[str]) -> list[str]:
    """Appends numbers to repeated names."""
    given: dict[str, None] = {}
    for name in names:
        chosen, number = name, 0
        while chosen in given:
            number += 1
            chosen = f"{name}_{number}"
        given[chosen] = None
    return list(given)


def iter_states(tree: PyTree, kinds: Sequence[Any], path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Iterates over the paths and states of the given kinds, outer states first."""
    # A skip state is always a leaf, because its `inner_state` is traversed separately.
    stop = (*kinds, SkipState)
    pairs = jax.tree_util.tree_leaves_with_path(
        tree, is_leaf=lambda x: isinstance(_restore_if_dict(x, stop), stop)
    )
    for rest, node in pairs:
        state = _restore_if_dict(node, stop)
        _check_not_deleted(state)
        if isinstance(state, tuple(kinds)):
            yield (*path, *rest), state
        if isinstance(state, LossScaleState):  # The skip inside is not a separate state.
            rest, state = (*rest, GetAttrKey("skip")), state.skip
        if hasattr(state, "inner_state"):
            inside = (*path, *rest, GetAttrKey("inner_state"))
            yield from iter_states(state.inner_state, kinds, inside)


def _check_not_deleted(state: Any) -> None:
    fields = getattr(state, "_fields", ())
    own = [getattr(state, field) for field in fields if field not in ("inner_state", "skip")]
    if any(map(is_deleted, jax.tree.leaves(own))):
        raise ValueError(
            "opt_state contains arrays that were donated to a compiled step; use the state "
            "returned by that step"
        )


def is_deleted(x: Any) -> bool:
    """Returns `True` if an array was donated."""
    return isinstance(x, jax.Array) and not isinstance(x, Tracer) and x.is_deleted()


def _restore_if_dict(node: Any, kinds: Sequence[Any]) -> Any:
    """Restores a state that Flax converted to a dict."""
    for kind in kinds:
        if _has_fields(node, kind) and ("info" not in node or _has_fields(node["info"], ClipInfo)):
            name = kind.__name__.removesuffix("State").lower()
            return _state_from_dict(node, kind, StaticNames((name,)))
    return node


def _has_fields(node: Any, kind: Any) -> bool:
    """Returns `True` if a node is a dict with the fields of a kind of state."""
    if not isinstance(node, Mapping):
        return False
    keys, fields = set(node), set(kind._fields)
    return fields - NAME_FIELDS - FIELDS_WITHOUT_ARRAYS <= keys <= fields


def _state_from_dict(node: Mapping[str, Any], kind: Any, name: StaticNames) -> Any:
    # Flax also converts the states inside this state, and does not keep their names.
    known = {key: value for key, value in node.items() if key not in NAME_FIELDS}
    if "info" in known:
        known["info"] = _state_from_dict(known["info"], ClipInfo, name)
    if known.get("loss"):
        known["loss"] = _state_from_dict(known["loss"], LossState, name)
    if "skip" in known:
        known["skip"] = _state_from_dict(known["skip"], SkipState, StaticNames(("skip",)))
    known |= {"name": name, "names": StaticNames(), "leaves": StaticNames()}
    return kind(**{field: known.get(field, ()) for field in kind._fields})


def unique_names(states: Sequence[Any]) -> list[str]:
    """Returns the names of states in `metrics`."""
    return deduplicate([name_of(state) for state in states])


def name_of(state: Any) -> str:
    return next(iter(state.info.name if hasattr(state, "info") else state.name))


def describe_tree(tree: PyTree) -> str:
    """Describes a tree by its type and its first leaves, for messages."""
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
    names = ", ".join(f"'{leaf_name(path)}'" for path in paths[:3])
    leaves = f"with the leaves {names}{', ...' if len(paths) > 3 else ''}"
    return f"a pytree of type {type(tree).__name__} {leaves if paths else 'without leaves'}"


def names_lost_error(what: str) -> ValueError:
    return ValueError(
        f"names are missing from {what} because Flax or optax.tree_map_params removed them; pass "
        f"the nnx.Optimizer instead of its nnx.state, or {RESTORE_NAMES_HINT}"
    )


def check_ring_buffer(ring: Any, shape: tuple[int, ...], name: str) -> None:
    if unbox(ring).shape != shape:
        raise ValueError(
            f"{name}: the ring buffer in the state must have shape {shape}, but has shape "
            f"{unbox(ring).shape}; use the same window, scope, and stages as in init, or "
            f"{REINIT_HINT}"
        )


def unbox(value: Any) -> Any:
    """Returns the array in a box, or any other value unchanged."""
    # An `nnx.Optimizer` wraps the fields of states in boxes, which are pytrees with one leaf.
    leaves = jax.tree.leaves(value)
    return leaves[0] if len(leaves) == 1 else value


def fetch_to_host(arrays: PyTree, caller: str) -> PyTree:
    """Copies the arrays to the host in one transfer."""
    if any(isinstance(x, Tracer) for x in jax.tree.leaves(arrays)):
        raise TypeError(
            f"monitor.{caller} cannot be called inside jit, vmap, or grad because opt_state "
            "contains tracers there; pass the state that the compiled step returns"
        )
    return jax.device_get(arrays)

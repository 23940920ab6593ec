"""Finds the named parts of an optimizer's state, such as Adam's `mu`.

A path into a state ends with a path into the parameters: `mu` in `0/mu/layers/kernel` is the name
of a part, and `layers` is not.
"""

from collections.abc import Sequence
from typing import Any

import jax
from jax.tree_util import DictKey, GetAttrKey

from optaxclip._base.types import Path, PyTree

COUNTERS = ("count", "steps")
"""The names of fields that count the steps of the parts beside them."""


def marked(state: PyTree, only: Sequence[str], like: PyTree) -> tuple[list[bool], list[Any], Any]:
    """Which leaves of a state belong to the named parts, or count the steps of such a part.

    Names inside of trees `like` the parameters are not names of parts. With the flags come the
    leaves and the structure of the state.
    """
    pairs, treedef = jax.tree_util.tree_flatten_with_path(state)
    own = [_own_names(path, _paths(like)) for path, _ in pairs]
    homes = {names[:i] for names in own for i, name in enumerate(names) if name in only}
    flags = [
        any(name in only for name in names)
        or (len(names) > 0 and names[-1] in COUNTERS and names[:-1] in homes)
        for names in own
    ]
    return flags, [leaf for _, leaf in pairs], treedef


def named(state: PyTree, name: str, params: PyTree) -> bool:
    """Whether a state has a part of this name."""
    return any(marked(state, [name], (params,))[0])


def names_in(state: PyTree, params: PyTree) -> list[str]:
    """The names of all parts of a state, for messages."""
    paths = _paths((params,))
    pairs, _ = jax.tree_util.tree_flatten_with_path(state)
    found = [_own_names(path, paths) for path, _ in pairs]
    return sorted({str(names[-1]) for names in found if names and names[-1] not in COUNTERS})


def _paths(trees: PyTree) -> set[Path]:
    """The paths of the leaves of trees."""
    found: set[Path] = set()
    for tree in trees:
        pairs, _ = jax.tree_util.tree_flatten_with_path(tree)
        found |= {path for path, _ in pairs}
    return found


def _own_names(path: Path, of_params: set[Path]) -> tuple[Any, ...]:
    """The keys of a leaf's path in a state, without its path in the parameters."""
    start = next((i for i in range(len(path)) if path[i:] in of_params), len(path))
    names = tuple(_name(key) for key in path[:start])
    # `optax.inject_hyperparams` keeps arguments under `hyperparams`; these are not parts either.
    return names[: names.index("hyperparams")] if "hyperparams" in names else names


def _name(key: Any) -> Any:
    """The name of a field, or a dict's key if that is a string; other keys as they are."""
    if isinstance(key, GetAttrKey):
        return key.name
    return key.key if isinstance(key, DictKey) and isinstance(key.key, str) else key

"""Finding the states of clips, skips and records in any pytree, and their numbers on the host."""

from collections.abc import Iterator
from typing import Any

import jax
from jax.core import Tracer
from jax.tree_util import GetAttrKey, keystr

from optaxclip._base.types import Path, PyTree
from optaxclip.methods.skipping import SkipState


def _walk(tree: PyTree, kinds: tuple[type, ...], path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """All states of the given kinds, with their paths; those inside of a skip come after it."""
    stop = (*kinds, SkipState)
    pairs = jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda x: isinstance(x, stop))
    for rest, node in pairs:
        if isinstance(node, kinds):
            yield (*path, *rest), node
        if isinstance(node, SkipState):
            yield from _walk(node.inner_state, kinds, (*path, *rest, GetAttrKey("inner_state")))


def find(tree: PyTree, *kinds: type) -> dict[str, Any]:
    """The states of the given kinds under their keys."""
    found = list(_walk(tree, kinds))
    by_key = {
        f"{keystr(path, simple=True, separator='/')}/{name_of(node)}".removeprefix("/"): node
        for path, node in found
    }
    if len(by_key) == len(found):
        return by_key
    return {f"{keystr(path)}/{name_of(node)}": node for path, node in found}


def name_of(state: Any) -> str:
    """The name that a transformation was given, from its state."""
    return next(iter(state.info.name if hasattr(state, "info") else state.name))


def unboxed(value: Any) -> Any:
    """The array itself, of one in a box, as the fields of states in an `nnx.Optimizer` are."""
    leaves = jax.tree.leaves(value)
    return leaves[0] if len(leaves) == 1 else value


def to_host(arrays: PyTree, caller: str) -> PyTree:
    """The arrays in NumPy, after one transfer.

    Raises:
      TypeError: under a trace, naming the caller.
    """
    if any(isinstance(x, Tracer) for x in jax.tree.leaves(arrays)):
        raise TypeError(
            f"monitor.{caller} needs numbers, and under jit, vmap or grad there are none yet: call "
            "it on the state that the compiled step returns; monitor.read works inside"
        )
    return jax.device_get(arrays)

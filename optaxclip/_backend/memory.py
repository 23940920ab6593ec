""""""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import Array
from jax.core import Tracer

from optaxclip._base.types import PyTree


def memory_spaces(tree: PyTree) -> list[Any]:
    """For each leaf, the memory that holds it; None for the device's default memory."""
    return [_memory(x) for x in jax.tree.leaves(tree)]


def _memory(x: Any) -> Any:
    if isinstance(x, Tracer):
        # A traced key's type does not name a memory.
        memory = getattr(jax.typeof(x), "memory_space", jax.memory.Space.Device)
        return None if memory == jax.memory.Space.Device else memory
    is_in_host = isinstance(x, Array) and x.sharding.memory_kind == "pinned_host"
    return jax.memory.Space.Host if is_in_host else None


def move_to_device_memory(
    *trees: PyTree,
) -> tuple[tuple[PyTree, ...], Callable[..., tuple[PyTree, ...]]]:
    """The trees with all arrays in the default memory of their device, and a function back.

    That function takes results like the first of the trees, and moves each array of a result to the
    memory that the tree's array was in. A result for a tree that was None stays where it is.
    """
    if set(memory_spaces(trees)) <= {None}:
        return trees, lambda *results: results

    def restore_memory_spaces(*results: PyTree) -> tuple[PyTree, ...]:
        with_homes = zip(results, trees, strict=False)
        return tuple(
            x if tree is None else put_leaves(x, memory_spaces(tree)) for x, tree in with_homes
        )

    return tuple(map(put_on_device, trees)), restore_memory_spaces


def put_on_device(tree: PyTree) -> PyTree:
    """The tree with all arrays in the default memory of their device."""
    homes = memory_spaces(tree)
    return put_leaves(tree, [None if home is None else jax.memory.Space.Device for home in homes])


def template_on_device(x: Any) -> Any:
    """`x`, or a template like it for `jnp.zeros_like`, in the default memory of its device."""
    if _memory(x) is None or isinstance(x, Tracer):
        return x
    memory_space = x.sharding.with_memory_kind(
        next(iter(x.sharding.device_set)).default_memory().kind
    )
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=memory_space)


def put_leaves(tree: PyTree, to: Sequence[Any]) -> PyTree:
    """The tree with each leaf in the memory given for it; a leaf with None stays where it is."""
    leaves, treedef = jax.tree.flatten(tree)
    with_homes = zip(leaves, to, strict=True)
    return treedef.unflatten([x if m is None else jax.device_put(x, m) for x, m in with_homes])

"""Moves arrays between the memories of devices and hosts."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import Array
from jax.core import Tracer

from optaxclip._base.types import PyTree


def memory_spaces(tree: PyTree) -> list[Any]:
    """Returns the memory spaces of the leaves, with None for the default memory of a device."""
    return list(map(_memory_space, jax.tree.leaves(tree)))


def _memory_space(x: Any) -> Any:
    if isinstance(x, Tracer):
        # The type of a traced key has no memory space.
        space = getattr(jax.typeof(x), "memory_space", jax.memory.Space.Device)
        return None if space == jax.memory.Space.Device else space
    is_on_host = isinstance(x, Array) and x.sharding.memory_kind == "pinned_host"
    return jax.memory.Space.Host if is_on_host else None


def move_to_device_memory(
    *trees: PyTree,
) -> tuple[tuple[PyTree, ...], Callable[..., tuple[PyTree, ...]]]:
    """Moves all arrays to the default memory of their devices.

    Args:
      *trees: Pytrees of arrays in any memory.

    Returns:
      The trees, and a function that accepts results with the structures of the first trees. It
      moves the arrays of these results to the original memories. If the tree was None, the result
      is returned unchanged.
    """
    if set(memory_spaces(trees)) <= {None}:
        return trees, lambda *results: results

    def restore(*results: PyTree) -> tuple[PyTree, ...]:
        return tuple(
            x if tree is None else put_leaves(x, memory_spaces(tree))
            for x, tree in zip(results, trees, strict=False)
        )

    return tuple(map(put_on_device, trees)), restore


def put_on_device(tree: PyTree) -> PyTree:
    """Moves all arrays to the default memory of their devices."""
    device = jax.memory.Space.Device
    return put_leaves(tree, [None if space is None else device for space in memory_spaces(tree)])


def template_on_device(x: Any) -> Any:
    """Returns `x`, or a template for `jnp.zeros_like`, in the default memory of its device."""
    if _memory_space(x) is None or isinstance(x, Tracer):
        return x
    device = next(iter(x.sharding.device_set))
    sharding = x.sharding.with_memory_kind(device.default_memory().kind)
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)


def put_leaves(tree: PyTree, to: Sequence[Any]) -> PyTree:
    """Moves leaves to the given memory spaces. Leaves with None are returned unchanged."""
    leaves, treedef = jax.tree.flatten(tree)
    pairs = zip(leaves, to, strict=True)
    return treedef.unflatten([x if m is None else jax.device_put(x, m) for x, m in pairs])

"""Leaves alike: what is done to every leaf is traced and lowered but a few times."""

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax

TOGETHER = 8


def for_each(
    step: Callable[..., Any], rows: Sequence[tuple[Any, ...]], statics: Sequence[tuple[Any, ...]]
) -> list[Any]:
    """`step(*row, *static)` for every leaf.

    To trace a call takes longer than to run what it does to a small leaf. So of leaves alike
    several go through one call, of a function that is traced for the first of them.

    Args:
      step: a function that lives as long as the module, as what is traced is kept for it.
      rows: for each leaf, the leaf and other pytrees of arrays.
      statics: for each leaf, what is not traced, hashable.
    """
    leaves = zip([row[0] for row in rows], statics, strict=True)
    kinds = [(leaf.shape, leaf.dtype, static) for leaf, static in leaves]
    results: dict[int, Any] = {}
    for positions in alike(kinds):
        whole = len(positions) // TOGETHER * TOGETHER
        chunks = [positions[start : start + TOGETHER] for start in range(0, whole, TOGETHER)]
        for some in chunks + [[i] for i in positions[whole:]]:
            arrays, treedef = jax.tree.flatten([rows[i] for i in some])
            # What rows share is passed once.
            distinct = {id(array): array for array in arrays}
            order = {key: n for n, key in enumerate(distinct)}
            several = _several(
                list(distinct.values()),
                places=tuple(order[id(array)] for array in arrays),
                treedef=treedef,
                step=step,
                static=statics[positions[0]],
            )
            results.update(zip(some, several, strict=True))
    return [results[i] for i in range(len(rows))]


def alike(kinds: Sequence[Hashable]) -> list[list[int]]:
    """Positions of equal elements, together."""
    found: dict[Hashable, list[int]] = {}
    for i, kind in enumerate(kinds):
        found.setdefault(kind, []).append(i)
    return list(found.values())


@functools.partial(jax.jit, static_argnames=("places", "treedef", "step", "static"))
def _several(
    arrays: list[Any],
    *,
    places: tuple[int, ...],
    treedef: Any,
    step: Callable[..., Any],
    static: tuple[Any, ...],
) -> list[Any]:
    rows = treedef.unflatten([arrays[place] for place in places])
    return [step(*row, *static) for row in rows]

"""Groups: which entries of a tree share a norm, as a scope finds for one tree."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from optaxclip._base.arguments import warn
from optaxclip._base.derivatives import custom_jvp
from optaxclip._base.numerics import fixed_size, promoted
from optaxclip._base.states import GIVE_BACK, Names
from optaxclip._base.types import NormTree


@dataclasses.dataclass(frozen=True)
class Group:
    """Entries that share a norm; or an array of such groups that together make up one leaf.

    Attributes:
      names: the name of the group; for an array of groups, the name of each, or in the layout
        "dict" only the leaf's name.
      members: the positions of the group's leaves among the measured leaves; empty if the tree of
        this step lacks them.
      shape: the shape of the groups' norms, counted over all devices; `()` for a single group.
    """

    names: tuple[str, ...]
    members: tuple[int, ...]
    shape: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Grouping:
    """The groups of a tree; hashable, because compiled functions take it as a static argument.

    Attributes:
      groups: the groups, in an order in which all of their names, one after another, are sorted.
      axes: for each measured leaf, the axes over which its norms are taken.
      layout: the form in which users see norms: "scalar", one number for the whole tree; "vector",
        an array with one entry for each name; "dict", one array for each leaf.
      has_labels: whether the names are labels that a user gave.
    """

    groups: tuple[Group, ...]
    axes: tuple[tuple[int, ...], ...]
    layout: Literal["scalar", "vector", "dict"]
    has_labels: bool = False

    @functools.cached_property
    def names(self) -> Names:
        """The names of all entries of a `ClipInfo`."""
        shapes = tuple(group.shape for group in self.groups) if self.layout == "dict" else ()
        names = tuple(name for group in self.groups for name in group.names)
        return Names(names, shapes, self.has_labels)

    @property
    def present(self) -> list[bool]:
        """For each name, whether its group has leaves at this step."""
        return [bool(group.members) for group in self.groups for _ in group.names]

    def with_groups_of_state(self, stored: Names, size: int, name: str) -> "Grouping":
        """This grouping, with an empty group for each name in the state that the tree lacks.

        The state has `size` groups; their names `stored` are empty if the state went through
        `optax.tree_map_params`.
        """
        if self.layout == "scalar" or (not stored and size == len(self.names)):
            return self
        if not stored and size:
            raise ValueError(
                f"{name}: the state has lost the names of its {size} groups, as after "
                f"optax.tree_map_params, and the updates have {len(self.names)}; {GIVE_BACK}"
            )
        if len(stored) != size:
            raise ValueError(
                f"{name}: the state has {size} entries for its {len(stored)} groups, as if it had "
                "been made under jax.vmap; make the update under jax.vmap too, or begin with a "
                "fresh state"
            )
        own = set(self.names)
        if unknown := sorted(own - set(stored)):
            raise ValueError(
                f"{name}: the updates have groups {unknown} that the params given to init did not "
                "have"
            )
        with_shapes = zip(stored, stored.shapes or ((),) * size, strict=True)
        absent = [Group((each,), (), shape) for each, shape in with_shapes if each not in own]
        ordered = tuple(sorted([*self.groups, *absent], key=lambda group: group.names))
        return dataclasses.replace(self, groups=ordered)

    def tree(self, arrays: Sequence[Array]) -> NormTree:
        """The norms as `layout` says, from one array for each group."""
        if self.layout == "scalar":
            return arrays[0]
        if self.layout == "dict":
            return {group.names[0]: x for group, x in zip(self.groups, arrays, strict=True)}
        return concatenated(arrays)

    def by_leaf(self, arrays: Sequence[Any]) -> list[Any]:
        """For each measured leaf, the value of its group, from a value for each group."""
        of_leaf: dict[int, Any] = {}
        for x, group in zip(arrays, self.groups, strict=True):
            of_leaf |= dict.fromkeys(group.members, x)
        return [of_leaf[i] for i in range(len(of_leaf))]


MANY_NORMS = 2**24
"""With more norms than this, a clip's own arrays take much memory beside the gradients."""


def warn_of_many_norms(grouping: Grouping, name: str) -> None:
    """Warns if there are so many norms that leaves are probably grouped by the wrong axes."""
    counts = {group.names[0]: math.prod(group.shape) for group in grouping.groups}
    if any(fixed_size(count) is None for count in counts.values()):
        return
    total = sum(counts.values())
    if total > MANY_NORMS:
        most = max(counts, key=lambda leaf: counts[leaf])
        warn(
            f"{name}: these leaves have {total:,} norms, of which '{most}' alone has "
            f"{counts[most]:,}; norms, limits and factors of all are kept in memory. If a norm "
            "should cover more entries, name its axes (axis=), or say which leaves stack layers: "
            "scopes.unit(stacked=...)"
        )


def concatenated(arrays: Iterable[Array]) -> Array:
    """The entries of all arrays in one vector, in the widest of the arrays' dtypes."""
    arrays = tuple(arrays)
    return _concatenated(arrays) if arrays else jnp.zeros(0)


# A compiled function of its own, so that it is traced once for all arrays of the same groups.
@jax.jit
def _concatenated(arrays: Sequence[Array]) -> Array:
    flat = [x if x.ndim == 1 else lax.reshape(x, (x.size,)) for x in arrays]
    return lax.concatenate(promoted(flat), 0)


def split_up(vector: Array, shapes: Sequence[tuple[int, ...]]) -> list[Array]:
    """The arrays that a vector holds one after another; undoes `concatenated`.

    Start positions are operands, not constants, so that XLA compiles one kernel for all arrays of
    one shape. For block RMS over 200 leaves of two shapes it compiles 14 kernels; slices at
    constant positions take 211 and, on a CPU, eight times as long to compile.

    Args:
      vector: `[..., entries]`.
      shapes: for each array, the shape of the axes that replace `entries`.

    Returns:
      Arrays `[..., *shape]`.
    """
    # In `jax.export` sizes may be symbolic; then start positions are operands in any case.
    is_symbolic = fixed_size(vector.shape[-1]) is None
    return _split(vector, shapes) if is_symbolic else _split_up(vector, tuple(shapes))


def _split(vector: Array, shapes: Sequence[tuple[int, ...]]) -> list[Array]:
    pieces = lax.split(vector, list(map(math.prod, shapes)), axis=vector.ndim - 1)
    return _reshaped(pieces, shapes)


def _reshaped(pieces: Sequence[Array], shapes: Sequence[tuple[int, ...]]) -> list[Array]:
    with_shapes = zip(pieces, shapes, strict=True)
    return [x.reshape(*x.shape[:-1], *shape) for x, shape in with_shapes]


@custom_jvp(nondiff_argnums=(1,))
def _split_up(vector: Array, shapes: tuple[tuple[int, ...], ...]) -> list[Array]:
    starts, sizes = _start_positions(vector, shapes), map(math.prod, shapes)
    pieces = [_piece(vector, *where) for where in zip(starts, sizes, strict=True)]
    return _reshaped(pieces, shapes)


@_split_up.defjvp
def _(
    shapes: tuple[tuple[int, ...], ...], primals: tuple[Array], tangents: tuple[Array]
) -> tuple[list[Array], list[Array]]:
    (vector,), (change,) = primals, tangents
    # JAX transposes this to one concatenation, but each `_piece` to an array of the vector's size:
    # with these, a derivative for 200 leaves with a norm each takes 2.3 seconds longer to compile.
    return _split_up(vector, shapes), _split(change, shapes)


def _start_positions(vector: Array, shapes: Sequence[tuple[int, ...]]) -> list[np.ndarray]:
    """For each array, its start position in each row of the flattened vector."""
    count, length, sizes = math.prod(vector.shape[:-1]), vector.shape[-1], map(math.prod, shapes)
    starts = list(itertools.accumulate(sizes, initial=0))[:-1]
    if count > 1:
        rows = np.arange(count)[:, None] * length
        return [np.asarray(rows + start, np.int32) for start in starts]
    # XLA (JAX 0.10.2) turns a single start position into a constant, so each array gets a second
    # start position, which is ignored.
    last_starts = [max(length - math.prod(shape), 0) for shape in shapes]
    return [
        np.array([[start], [0 if start else last]], np.int32)
        for start, last in zip(starts, last_starts, strict=True)
    ]


# A compiled function of its own, so that it is traced once for all pieces of one size.
@functools.partial(jax.jit, static_argnums=2)
def _piece(vector: Array, starts: Array, size: int) -> Array:
    gathered, sliced = (functools.partial(way, size=size) for way in (_gathered, _sliced))
    return lax.platform_dependent(vector, starts, cpu=gathered, default=sliced)


def _gathered(vector: Array, starts: Array, *, size: int) -> Array:
    numbers = lax.GatherDimensionNumbers((1,), (), (0,))
    mode = lax.GatherScatterMode.PROMISE_IN_BOUNDS
    rows, front = lax.reshape(vector, (vector.size,)), vector.shape[:-1]
    pieces = lax.gather(rows, starts, numbers, (size,), mode=mode)
    return pieces[: math.prod(front)].reshape(*front, size)


def _sliced(vector: Array, starts: Array, *, size: int) -> Array:
    return lax.dynamic_slice_in_dim(vector, starts[0, 0], size, axis=-1)

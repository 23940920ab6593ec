"""Groups: which entries of a tree share a norm, as a scope finds for one tree."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, Literal

from optaxclip._base.arguments import warn
from optaxclip._base.numerics import static_size_or_none
from optaxclip._base.states import RESTORE_NAMES_HINT, StaticNames


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
    leaf_indices: tuple[int, ...]
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
    def names(self) -> StaticNames:
        """The names of all entries of a `ClipInfo`."""
        shapes = tuple(group.shape for group in self.groups) if self.layout == "dict" else ()
        names = tuple(name for group in self.groups for name in group.names)
        return StaticNames(names, shapes, self.has_labels)

    @property
    def has_leaves(self) -> list[bool]:
        """For each name, whether its group has leaves at this step."""
        return [bool(group.leaf_indices) for group in self.groups for _ in group.names]

    def align_with_state(self, stored: StaticNames, size: int, name: str) -> "Grouping":
        """This grouping, with an empty group for each name in the state that the tree lacks.

        The state has `size` groups; their names `stored` are empty if the state went through
        `optax.tree_map_params`.
        """
        if self.layout == "scalar" or (not stored and size == len(self.names)):
            return self
        if not stored and size:
            raise ValueError(
                f"{name}: the state has lost the names of its {size} groups, as after "
                f"optax.tree_map_params, and the updates have {len(self.names)}; {RESTORE_NAMES_HINT}"
            )
        if len(stored) != size:
            raise ValueError(
                f"{name}: the state has {size} entries for its {len(stored)} groups, as if it had "
                "been made under jax.vmap; make the update under jax.vmap too, or begin with a "
                "fresh state"
            )
        own = set(self.names)
        if unknown := sorted(own - set(stored)):
            fast = (
                ". Those were the two copies of optax.lookahead: put the clip inside of it, as in "
                "optax.lookahead(optax.chain(clip, optimizer), 5, 0.5)"
            )
            are_copies = all(each.startswith(("fast/", "slow/")) for each in stored or ("",))
            raise ValueError(
                f"{name}: the updates have groups {unknown} that the params given to init did not "
                f"have{fast * are_copies}"
            )
        with_shapes = zip(stored, stored.shapes or ((),) * size, strict=True)
        absent = [Group((each,), (), shape) for each, shape in with_shapes if each not in own]
        ordered = tuple(sorted([*self.groups, *absent], key=lambda group: group.names))
        return dataclasses.replace(self, groups=ordered)

    def broadcast_to_leaves(self, arrays: Sequence[Any]) -> list[Any]:
        """For each measured leaf, the value of its group, from a value for each group."""
        of_leaf: dict[int, Any] = {}
        for x, group in zip(arrays, self.groups, strict=True):
            of_leaf |= dict.fromkeys(group.leaf_indices, x)
        return [of_leaf[i] for i in range(len(of_leaf))]


NUM_NORMS_WARNING = 2**24
"""With more norms than this, a clip's own arrays take much memory beside the gradients."""


def warn_if_many_norms(grouping: Grouping, name: str) -> None:
    """Warns if there are so many norms that leaves are probably grouped by the wrong axes."""
    counts = [math.prod(group.shape) for group in grouping.groups]
    if any(static_size_or_none(count) is None for count in counts):
        return
    total = sum(counts)
    if total > NUM_NORMS_WARNING:
        most = counts.index(max(counts))
        warn(
            f"{name}: these leaves have {total:,} norms, of which "
            f"'{grouping.groups[most].names[0]}' alone has {counts[most]:,}; norms, thresholds and "
            "factors of all are kept in memory. If a norm should cover more entries, name its axes "
            "(axis=), or say which leaves stack layers: scopes.unit(stacked=...)"
        )

"""How norms, limits and factors of groups are stored during a step.

Together: one array for all groups. An operation on it is compiled once, and takes few kernels.
Apart: one array for each group, which stays split over devices as its leaf is.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import PartitionSpec

from optaxclip._base.grouping import Group, Grouping, concatenated, split_up
from optaxclip._base.types import NormTree
from optaxclip._engine.placement import Placement

Rows: TypeAlias = list[Array]
"""Stored together: a list of one array for all groups. Apart: one array per group, of its shape."""

_MANY_NORMS = 2**18
"""If a leaf has more norms than this, all norms are stored apart.

No model has a larger vocabulary, so a matrix with one norm per column does not have more norms, and
they are few beside its entries. In a leaf that stacks layers, a norm may cover as few entries as
there are layers: as compiled for an H100, AGC on a stacked GPT-2 in bfloat16 moves 3.3 times the
gradients with norms apart, 9.6 times with norms together. On Llama 3 8B, not stacked, with one norm
per column and 1.6 million in all, AGC takes 1566 kernels with norms apart; with norms together it
takes 1004, and half the time to compile.
"""


@dataclasses.dataclass(frozen=True)
class Groups:
    """Which entries share a norm, where they lie, and how norms are stored; static.

    Attributes:
      grouping: the groups, by their names.
      placement: how the leaves lie on devices.
      together: whether norms are stored together.
    """

    grouping: Grouping
    placement: Placement
    together: bool

    @classmethod
    def of(cls, grouping: Grouping, placement: Placement) -> "Groups":
        """Groups, stored apart if they are many, or if not every device can have all norms."""
        is_dict = grouping.layout == "dict"
        together = not is_dict or (placement.can_replicate and _are_few(grouping))
        return cls(grouping, placement, together)

    @property
    def order(self) -> list[int]:
        """The positions of the groups in the order in which they are stored: sorted by shape."""
        groups = self.grouping.groups
        if self.grouping.layout != "dict":
            return list(range(len(groups)))
        return sorted(range(len(groups)), key=lambda n: (groups[n].shape, n))

    @property
    def ordered(self) -> list[Group]:
        """The groups in that order."""
        return [self.grouping.groups[n] for n in self.order]

    def pack(self, arrays: Sequence[Array]) -> Rows:
        """The `Rows`, from one array per group in the grouping's order."""
        ordered = [arrays[n] for n in self.order]
        if not self.together:
            return ordered
        return [ordered[0] if self.grouping.layout == "scalar" else concatenated(ordered)]

    def unpack(self, rows: Rows) -> list[Array]:
        """An array for each group, in the order of the grouping."""
        if self.together and self.grouping.layout != "scalar":
            rows = split_up(rows[0], [group.shape for group in self.ordered])
        return [x for _, x in sorted(zip(self.order, rows, strict=True), key=lambda pair: pair[0])]

    def by_leaf(self, rows: Rows, leaves: Sequence[Any]) -> list[Array]:
        """For each measured leaf, its group's part of `rows`.

        Inside `shard_map`, that is the part for what this device holds of the leaf. Axes before
        those of the groups stay.
        """
        of_leaves = self.grouping.by_leaf(self.unpack(rows))
        kept = [
            tuple(size for axis, size in enumerate(np.shape(leaf)) if axis not in axes)
            for leaf, axes in zip(leaves, self.grouping.axes, strict=True)
        ]
        return [self.placement.own_part(i, x, kept[i]) for i, x in enumerate(of_leaves)]

    def entries(self) -> list[tuple[str, tuple[int, ...]]]:
        """The name and the shape of each entry that a limit rule sees, in order."""
        if self.grouping.layout == "dict":
            return [(group.names[0], group.shape) for group in self.ordered]
        return [(name, ()) for name in self.grouping.names]

    def repeated(self, of_groups: Sequence[Any]) -> list[Any]:
        """For each row the numbers of its groups, or one number if all have the same.

        Args:
          of_groups: a number for each group, in the order of the grouping.
        """
        ordered = [of_groups[n] for n in self.order]
        if not self.together:
            return ordered
        if len(set(ordered)) == 1:
            return [ordered[0]]
        sizes = [math.prod(group.shape) for group in self.ordered]
        if all(isinstance(number, (int, float)) for number in ordered):
            return [np.repeat(np.asarray(ordered, np.float64), sizes)]
        # In `jax.export` a number may be symbolic.
        rows = zip(ordered, sizes, strict=True)
        return [jnp.concatenate([jnp.broadcast_to(jnp.asarray(x, float), n) for x, n in rows])]

    def replicated(self) -> list[PartitionSpec]:
        """For each row a spec that says that it is the same on all devices."""
        return [PartitionSpec()] * (1 if self.together else len(self.ordered))

    def zeros(self, dtype: jnp.dtype) -> Rows:
        """Zeros in the form in which norms are stored; nothing is concatenated."""
        shapes = [group.shape for group in self.ordered]
        if self.together and self.grouping.layout != "scalar":
            shapes = [(sum(map(math.prod, shapes)),)]
        return [jnp.zeros(shape, dtype) for shape in shapes]

    def have_leaves(self) -> Rows:
        """Which groups have leaves at this step.

        The single group of the scope `tree` always counts as having some.
        """
        groups, is_tree = self.grouping.groups, self.grouping.layout == "scalar"
        return self.pack([jnp.full(x.shape, bool(x.members) or is_tree) for x in groups])

    def for_rule(self, rows: Rows) -> NormTree:
        """The norms in the structure that limit rules get."""
        return rows[0] if self.together else rows

    def from_rule(self, limits: NormTree) -> Rows:
        """The `Rows`, from limits in that structure."""
        return [limits] if self.together else list(limits)

    def as_tree(self, rows: Rows) -> NormTree:
        """What users see: a scalar, `[names]`, or a dict of arrays."""
        return self.grouping.tree(self.unpack(rows)) if self.grouping.layout == "dict" else rows[0]

    def from_tree(self, tree: NormTree) -> Rows:
        """From what users see: a scalar, `[names]`, or a dict of arrays."""
        return self.pack(self.grouping.from_tree(tree))


def _are_few(grouping: Grouping) -> bool:
    shapes = [group.shape for group in grouping.groups]
    are_fixed = all(isinstance(size, int) for shape in shapes for size in shape)
    return are_fixed and max(map(math.prod, shapes), default=0) <= _MANY_NORMS

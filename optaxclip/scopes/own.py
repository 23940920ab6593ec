"""Checks what a user's own scope returns."""

from typing import Any, get_args, get_type_hints

import numpy as np

from optaxclip._base.arguments import short_repr
from optaxclip._base.grouping import Group, Grouping
from optaxclip._base.trees import FlatTree


def check_grouping(found: Any, flat: FlatTree) -> Grouping:
    """The groups that a user's scope found, in the order of their names."""
    if not isinstance(found, Grouping):
        raise TypeError(
            "a scope must return an optaxclip.scopes.Grouping, got "
            f"{short_repr(found)} of type {type(found).__name__}; a function that gives labels is one "
            "for scopes.group(fn)"
        )
    layouts = get_args(get_type_hints(Grouping)["layout"])
    if found.layout not in layouts:
        raise ValueError(f"the layout of a Grouping must be one of {layouts}, got {found.layout!r}")
    for group in found.groups:
        if not isinstance(group, Group):
            raise TypeError(
                f"the groups of a Grouping must be scopes.Group, got {short_repr(group)}"
            )
    shapes, names = flat.shapes(), flat.names()
    members = sorted(i for group in found.groups for i in group.leaf_indices)
    if len(found.axes) != len(shapes) or members != list(range(len(shapes))):
        raise ValueError(
            f"a scope must put each of the {len(shapes)} measured leaves into one group, and say "
            f"the axes of its norm; got the leaves {members} in groups, and {len(found.axes)} axes"
        )
    for group in found.groups:
        for i in group.leaf_indices:
            rest = tuple(n for k, n in enumerate(shapes[i]) if k not in found.axes[i])
            if rest != group.shape or not {*found.axes[i]} <= {*range(len(shapes[i]))}:
                raise ValueError(
                    f"leaf '{names[i]}' of shape {shapes[i]} with norms over the axes "
                    f"{found.axes[i]} does not fit its group {group.names}, whose shape is "
                    f"{group.shape}"
                )
        number = int(np.prod(group.shape)) if found.layout == "vector" else 1
        if len(group.names) != number:
            raise ValueError(f"a group must have {number} names here, got {group.names}")
    if found.layout == "scalar" and (len(found.groups) != 1 or found.groups[0].shape):
        raise ValueError(f'the layout "scalar" is for one group, got {len(found.groups)}')
    groups = tuple(sorted(found.groups, key=lambda group: group.names))
    return Grouping(groups, tuple(map(tuple, found.axes)), found.layout, found.has_labels)

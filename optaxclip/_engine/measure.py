"""From leaves to one norm per group, exact whatever the range and the number format."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec
from jax.typing import ArrayLike

import optaxclip._base.devices as collectives
from optaxclip._base.exact import refined_root
from optaxclip._base.numerics import power_of_two_below, rounding_slack
from optaxclip._engine.across import norms_across
from optaxclip._engine.blocks import Blocks
from optaxclip._engine.groups import Groups
from optaxclip._engine.placement import known_shardings, norm_spec
from optaxclip._engine.within import norms_within
from optaxclip.norms import Norm
from optaxclip.scopes import Grouping


class Measured(NamedTuple):
    """The norms of a block's groups, `mantissa * unit`.

    Attributes:
      mantissa: the norms divided by `unit`, of the block's shape.
      unit: powers of two: 1, but for groups whose powers leave the range of the dtype.
      slack: of that shape or `[]`, how much factors must be lowered against rounding.
      error: the relative rounding error of `mantissa`, where it is known, in small groups; it
        takes the place of the slack.
    """

    mantissa: Array
    unit: Array
    slack: Array
    error: Array | None = None

    @property
    def norm(self) -> Array:
        """The norms; a finite one that the dtype cannot hold is its largest number."""
        return _product(self.mantissa, self.unit)


# Compiled by itself so that it is traced once for all blocks.
@jax.jit
def _product(mantissa: Array, unit: Array) -> Array:
    norm = jnp.minimum(mantissa * unit, jnp.finfo(mantissa.dtype).max)
    return jnp.where(jnp.isfinite(mantissa), norm, mantissa)


def measure(
    leaves: list[Any], grouping: Grouping, norm: Norm, *, side_by_side: bool = True
) -> tuple[Blocks, list[Measured]]:
    """The norms of all groups, over all devices.

    Leaves are mapped and summed where they lie: nothing is ravelled, concatenated or stored.

    Args:
      leaves: floating or complex arrays (or `BCOO`), in the order of the grouping.
      grouping: from a scope.
      norm: the norm.
      side_by_side: whether leaves of several groups may share a block.

    Returns:
      Which groups are handled together, and the norms of each block of them, float32 or, with
      64-bit leaves, float64.
    """
    known = known_shardings(leaves, grouping)
    if known is None:
        groups = Groups.of(leaves, grouping, norm, side_by_side=side_by_side)
        return groups.blocks, _measure(groups)
    # One collective of our own in the place of one per leaf.
    mesh, specs = known
    within, blocks = dataclasses.replace(grouping, specs=specs), Blocks.of(grouping)

    def local(leaves: list[Any]) -> list[Measured]:
        return _measure(Groups.of(leaves, within, norm)._replace(small=[], blocks=blocks))

    by_block = [norm_spec(grouping, specs, block[0]) for block in blocks.slots]
    results: list[Any] = [(spec, spec, PartitionSpec(), None) for spec in by_block]
    results = [Measured(*block) for block in results]
    return blocks, collectives.region(local, mesh, (list(specs),), results)(leaves)


def _measure(groups: Groups) -> list[Measured]:
    """The norms of leaves in one piece, or of what one device holds of them."""
    mantissas, units = norms_across(groups) if any(groups.split) else norms_within(groups)
    slacks = groups.of_sizes(lambda size: rounding_slack(size, groups.dtype))
    blocks = zip(groups.blocks.slots, mantissas, units, slacks, strict=True)
    return [_measured(groups, *block) for block in blocks]


def already_measured(norm: Array, size: Any) -> list[Measured]:
    """A norm of the whole tree that the caller has, as `measure` would return it.

    Args:
      norm: `[]`, float32 or float64.
      size: the number of entries of the tree.
    """
    unit = power_of_two_below(norm)
    slack = jnp.asarray(rounding_slack(size, norm.dtype)).astype(norm.dtype)
    return [Measured(norm / unit, unit, slack)]


def _measured(
    groups: Groups, block: tuple[int, ...], mantissa: Array, unit: Array, slack: ArrayLike
) -> Measured:
    """The norms of a block, to more digits if it is one of small groups."""
    measured = Measured(mantissa, unit, jnp.asarray(slack).astype(mantissa.dtype))
    if block[0] not in groups.small or groups.norm.weight is None:
        return measured
    parts = zip(block, groups.blocks.split(block, (mantissa, unit)), strict=True)
    refined = [
        refined_root(*part, groups.members(slot), weight=groups.norm.weight(groups.sizes[slot]))
        for slot, part in parts
    ]
    columns = zip(*refined, strict=True)
    mantissa, error = (jnp.stack(column).reshape(mantissa.shape) for column in columns)
    return measured._replace(mantissa=mantissa, error=error)

"""Norms of groups that lie in one place, with a second look at those that leave the range.

Where a total overflows or underflows, all entries of the group are divided by a power of two and
reduced again. How the second reduction is put off until it is needed depends on the leaves:

- Large ones are reduced in kernels of their own, as cheap as a read if nothing stands between the
  entries and the sum: they are reduced as they are and, behind `lax.cond`, once more.
- Of small ones each kernel costs more to compile and to start than to run, and a branch costs that
  even when it is not taken: they are reduced in a loop that mostly runs once.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

import optaxclip._base.devices as collectives
from optaxclip._base.numerics import select
from optaxclip._base.trees import is_sparse
from optaxclip._engine.groups import Groups, is_small
from optaxclip._engine.rescaled import is_any_out, norms_of
from optaxclip.norms import Norm


def norms_within(groups: Groups) -> tuple[list[Array], list[Array]]:
    """The norms of all blocks, as mantissas and units.

    Args:
      groups: leaves in one piece, or what one device holds of groups of its own.
    """
    rescued = _in_loop if _is_for_loop(groups) else _in_branch
    return norms_of(groups, Groups.joined, rescued)


def _is_for_loop(groups: Groups) -> bool:
    """Whether the leaves are small, and of a kind that a loop takes."""
    # The loop's variables would have to be typed like sharded leaves, and XLA crashes if all are
    # empty.
    return not any(0 in shape for shape in groups.blocks.shapes()) and not any(
        is_sparse(leaf) or not is_small(leaf) or collectives.is_on_mesh(leaf)
        for leaf in groups.leaves
    )


def _in_branch(groups: Groups) -> tuple[list[Array], list[Array]]:
    parts = groups.parts()
    totals = groups.joined(parts)
    scales = _rescalings(groups, totals)

    def plain() -> list[Array]:
        return groups.norms(totals)

    def rescaled() -> list[Array]:
        again = groups.norms(groups.joined(groups.parts_scaled(scales, parts)))
        blocks = zip(scales, plain(), again, strict=True)
        # Groups that stayed in range keep their norm bit for bit.
        return [_either(*block) for block in blocks]

    # Roots taken after the branch made whole steps slower by some per cent.
    return lax.cond(is_any_out(scales), rescaled, plain), _units(groups, scales)


def _in_loop(groups: Groups) -> tuple[list[Array], list[Array]]:
    def step(carry: Any) -> Any:
        _, scales, _ = carry
        totals = groups.joined(groups.parts_scaled(scales))
        is_second = is_any_out(scales)
        found = zip(scales, _rescalings(groups, totals), strict=True)
        return scales, [select(is_second, old, new) for old, new in found], totals

    def is_unsettled(carry: Any) -> Array:
        last, scales, _ = carry
        return functools.reduce(_or_differ, zip(last, scales, strict=True), jnp.zeros((), bool))

    ones = [jnp.ones(shape, groups.dtype) for shape in groups.blocks.shapes()]
    zeros = [jnp.zeros_like(one) for one in ones]
    scales, _, totals = lax.while_loop(is_unsettled, step, (zeros, ones, ones))
    return groups.norms(totals), _units(groups, scales)


def _rescalings(groups: Groups, totals: list[Array]) -> list[Array]:
    """What the entries of each block must be multiplied by."""
    blocks = zip(totals, groups.least(), strict=True)
    return [_rescaling(*block, norm=groups.norm) for block in blocks]


def _units(groups: Groups, scales: list[Array]) -> list[Array]:
    return [groups.norm.unit_of(scale) for scale in scales]


# Steps that every block takes are compiled by themselves, so that each is traced once.


@functools.partial(jax.jit, static_argnames="norm")
def _rescaling(total: Array, least: Array, *, norm: Norm) -> Array:
    return norm.rescaling(total, least)


@jax.jit
def _or_differ(flag: Array, pair: tuple[Array, Array]) -> Array:
    return flag | jnp.any(pair[0] != pair[1])


@jax.jit
def _either(scale: Array, plain: Array, rescaled: Array) -> Array:
    return jnp.where(scale == 1, plain, rescaled)

"""What a clip reports: the record of one step, with running counts."""

import jax
import jax.numpy as jnp
from jax import Array

from optaxclip._scale import Multiplier
from optaxclip._types import ClipInfo, NormTree
from optaxclip.scopes import Grouping


def initial_info(norms: NormTree, grouping: Grouping) -> ClipInfo:
    """The record before the first step: no limit, nothing clipped.

    Args:
      norms: one array per group, of which the structure, shapes and dtypes count.
      grouping: tells whether a leaf's groups are summarized.
    """

    def full(value: float, dtype: jax.typing.DTypeLike | None = None) -> NormTree:
        def entry(norm: Array) -> Array:
            shape = () if grouping.is_summarized else norm.shape
            return jnp.full(shape, value, dtype or norm.dtype)

        return jax.tree.map(entry, norms)

    return ClipInfo(
        norm=full(0),
        limit=full(jnp.inf),
        factor=full(1),
        fraction=full(0),
        num_clipped=full(0, jnp.int32),
        num_nonfinite=full(0, jnp.int32),
    )


def updated_info(
    old: ClipInfo,
    grouping: Grouping,
    norms: list[Array],
    triggers: list[Array],
    multipliers: list[Multiplier],
    bad: list[Array],
) -> ClipInfo:
    """The record after a step; groups that this step's tree lacks keep their last one."""
    entries = []
    for norm, trigger, by, is_bad in zip(norms, triggers, multipliers, bad, strict=True):
        clipped = ((norm > trigger) & ~is_bad).astype(jnp.float32)
        step = (norm, trigger, by.factor, clipped, is_bad.astype(jnp.float32))
        entries.append(_summary(*step) if grouping.is_summarized else step)
    columns = [grouping.pack(column) for column in zip(*entries, strict=True)]
    norm, limit, factor, clipped, nonfinite = (
        {**previous, **column} if isinstance(previous, dict) else column
        for previous, column in zip(_without_events(old), columns, strict=True)
    )

    def as_before(tree: NormTree) -> NormTree:
        return jax.tree.map(lambda x, like: x.astype(like.dtype), tree, old.norm)

    def counted(total: NormTree, share: NormTree) -> NormTree:
        return jax.tree.map(lambda n, x: n + (x > 0).astype(jnp.int32), total, share)

    return ClipInfo(
        norm=as_before(norm),
        limit=as_before(limit),
        factor=as_before(factor),
        fraction=as_before(clipped),
        num_clipped=counted(old.num_clipped, clipped),
        num_nonfinite=counted(old.num_nonfinite, nonfinite),
    )


def _without_events(old: ClipInfo) -> tuple[NormTree, ...]:
    """The last record with no group clipped or bad: what an absent group contributes."""
    nothing = jax.tree.map(jnp.zeros_like, old.fraction)
    return old.norm, old.limit, old.factor, nothing, nothing


def _summary(
    norm: Array, trigger: Array, factor: Array, clipped: Array, bad: Array
) -> tuple[Array, ...]:
    """One scalar per field for a leaf of many groups: those of its worst group."""
    # Where the limit is 0 or the norm is not finite, nothing is worse.
    usable = (trigger > 0) & jnp.isfinite(norm)
    ratio = jnp.where(usable, norm / jnp.where(usable, trigger, 1), jnp.inf)
    worst = ratio == jnp.max(ratio, initial=0)

    def of_worst(x: Array) -> Array:
        return jnp.max(jnp.where(worst, x, -jnp.inf), initial=-jnp.inf)

    share = jnp.sum(clipped) / max(clipped.size, 1)
    return of_worst(norm), of_worst(trigger), of_worst(factor), share, jnp.max(bad, initial=0)

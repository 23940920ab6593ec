"""Attention heads: where they are in a weight, and the multiplier that their factors give it."""

import dataclasses
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax


@dataclasses.dataclass(frozen=True)
class Heads:
    """The place of the heads in an attention weight, and the power of the factor that shrinks it.

    A head's logits are products of its queries and keys, so the powers of the two must sum to 1.

    Attributes:
      axis: the axis of the weight that runs over the heads. If layers are stacked, the axes that
        run over the axes of `max_logits`, in their order, such as `(0, -2)` for layers and heads.
      power: the power of the factor, for the whole weight; or pairs `(entries, power)`, which
        divide a head's entries along the axis `along`, in this order, into parts with a power each.
      along: the axis of those entries. If it is the last of `axis`, that axis holds the entries of
        one head after another, as in a kernel `[in, heads * entries]`.

    Example:
      >>> from optaxclip import Heads
      >>> multi_head = Heads(axis=-2)  # kernels [in, heads, entries], of queries and of keys
      >>> grouped_query = Heads(axis=-2, power=1.0)  # of queries; the keys are left alone
      >>> in_one_axis = Heads(axis=-1, power=((64, 0.5),))  # kernels [in, heads * 64]
      >>> queries_keys_values = Heads(axis=-2, power=((64, 0.5), (64, 0.5), (64, 0.0)))
      >>> latent_query = Heads(axis=-2, power=((128, 0.5), (64, 1.0)))  # 64 with rotary positions
      >>> latent_key = Heads(axis=-2, power=((128, 0.5), (128, 0.0)))  # 128 of the values
    """

    axis: int | Sequence[int]
    power: float | Sequence[tuple[int, float]] = 0.5
    head_dim_axis: int = -1

    def __post_init__(self) -> None:
        try:
            axes, pairs, along = (
                _axes(self.axis),
                _pairs(self.power),
                operator.index(self.head_dim_axis),
            )
        except (TypeError, ValueError):
            raise TypeError(
                f"axis must be an int or a sequence of ints, power a number or pairs (entries, "
                f"power), and along an int; got {self.axis!r}, {self.power!r} and {self.head_dim_axis!r}"
            ) from None
        if not all(count >= 1 and 0 <= power <= 1 for count, power in pairs):
            raise ValueError(f"power must be from 0 to 1, for 1 entry or more, got {self.power!r}")
        # Tuples make it hashable, because compiled functions take it as a static argument.
        object.__setattr__(self, "axis", axes)
        object.__setattr__(self, "along", along)
        if isinstance(self.power, Sequence):
            object.__setattr__(self, "power", pairs)


class HeadLayout(NamedTuple):
    """`Heads`, checked for one leaf.

    Attributes:
      rank: the rank of the leaf.
      axes: the axes of the heads, counted from 0.
      along: the axis of a head's entries, counted from 0.
      pairs: numbers of entries and their powers; a single pair with the number 1 if all entries
        have the same power.
    """

    rank: int
    axes: tuple[int, ...]
    along: int
    segments: tuple[tuple[int, float], ...]

    @property
    def shares_axis(self) -> bool:
        """Whether one axis holds both the heads and their entries."""
        return self.along in self.axes


def resolve_heads(
    heads: Heads, shape: tuple[int, ...], name: str
) -> tuple[HeadLayout, tuple[int, ...]]:
    """The place of heads in a leaf of this shape, and the shape of its logits."""
    rank, axes, pairs = len(shape), _axes(heads.axis), _pairs(heads.power)
    is_divided = isinstance(heads.power, Sequence)
    if any(
        not -rank <= axis < rank for axis in (*axes, heads.head_dim_axis)[: len(axes) + is_divided]
    ):
        raise ValueError(f"{heads} has axes that leaf '{name}' of shape {shape} does not have")
    axes = tuple(axis % rank for axis in axes)
    if len(set(axes)) < len(axes):
        raise ValueError(f"{heads} names an axis of leaf '{name}' of shape {shape} twice")
    sizes = [shape[axis] for axis in axes]
    if not is_divided:
        others = [axis for axis in range(rank) if axis not in axes]
        # Any other axis serves as that of the entries; if there is none, a head has one entry.
        return HeadLayout(rank, axes, (others or axes)[-1], pairs), tuple(sizes)
    along, entries = heads.head_dim_axis % rank, sum(count for count, _ in pairs)
    if along == axes[-1] and sizes[-1] % entries == 0:
        sizes[-1] //= entries
    elif along in axes or shape[along] != entries:
        raise ValueError(
            f"{heads} divides heads of {entries} entries, which does not fit axis {along} of leaf "
            f"'{name}' of shape {shape}"
        )
    return HeadLayout(rank, axes, along, pairs), tuple(sizes)


def multiplier(factor: Array, place: HeadLayout) -> Array:
    """The multiplier of a weight from the factors of its heads, broadcastable to the weight."""
    factor = jnp.transpose(factor, [int(i) for i in np.argsort(place.axes)])
    factor = lax.expand_dims(factor, [i for i in range(place.rank) if i not in place.axes])
    counts, powers = zip(*place.segments, strict=True)
    powers = np.repeat(powers, counts)
    # If one axis holds both heads and entries, the entries get a temporary axis of their own.
    at = place.along + place.shares_axis
    split = lax.expand_dims(factor, [at]) if place.shares_axis else factor
    by = _power(split, powers.reshape([len(powers) if i == at else 1 for i in range(split.ndim)]))
    shape = [*factor.shape]
    shape[place.along] *= len(powers)
    return by.reshape(shape)


def _axes(axis: int | Sequence[int]) -> tuple[int, ...]:
    return tuple(map(operator.index, axis if isinstance(axis, Sequence) else (axis,)))


def _pairs(power: float | Sequence[tuple[int, float]]) -> tuple[tuple[int, float], ...]:
    if not isinstance(power, Sequence):
        return ((1, float(power)),)
    return tuple((operator.index(count), float(part)) for count, part in power)


def _power(x: Array, powers: np.ndarray[Any, Any]) -> Array:
    """Powers of numbers from 0 to 1; those of 1, and those with exponent 0, are exactly 1."""
    exponents = jnp.asarray(powers, x.dtype)
    between = (x > 0) & (x < 1)
    power = jnp.where(between, x, 1) ** exponents
    return jnp.where(between | (x != 0) | (exponents == 0), power, 0)

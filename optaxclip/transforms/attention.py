"""Attention heads: where they are in a weight, and the multiplier that their factors give it."""

import dataclasses
import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

import optaxclip._backend.meshes as meshes
import optaxclip.scopes as scopes
from optaxclip._backend.elementwise import scale_by_real
from optaxclip._backend.global_view import Transformation, stateless, transformation
from optaxclip._base.numerics import (
    accumulation_dtype,
    cast_elements,
    divide_no_nan,
    match_weak_type,
    norm_dtype,
    promote_dtypes,
)
from optaxclip._base.state import check_state
from optaxclip._base.trees import (
    FlatTree,
    align_params,
    broadcast_prefix,
    flatten,
    is_sparse,
    leaf_name,
)
from optaxclip._base.types import ClipState, Path, PyTree
from optaxclip._base.validation import check_bool, check_name, transformation_factory
from optaxclip._engine.clip import clip_by, fresh_if_none
from optaxclip.thresholds.constant import ScalarOrSchedule, check_threshold


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


@transformation_factory()
def clip_attention_logits(
    tau: ScalarOrSchedule = 100.0,
    *,
    heads: Callable[[str, Array], Heads | None],
    specs: PyTree = None,
    record: bool = True,
    name: str = "clip_attention_logits",
) -> Transformation[ClipState]:
    """Shrinks the query and key weights of attention heads whose logits exceed a threshold (QK-Clip).

    Let `S` be the largest logit of a head in this step's batch, after the division by the root of
    the head's size and before the softmax. The head's factor is `min(1, tau / S)`. This must be the
    last stage of a chain: it changes the update `u` of weights `w` so that the weights become
    `factor**power * (w + u)`. With these, the logits of the same batch would be at most about
    `tau`. A head below the threshold is left alone, bit for bit.

    `heads` says how the factor is divided between the weights of queries and of keys:

      attention                        | queries                | keys
      ---------------------------------|------------------------|-------------------------
      multi-head                       | power 0.5              | power 0.5
      grouped-query, multi-query       | power 1                | left alone: heads share them
      multi-head latent: each head's   | power 0.5              | power 0.5
      ... with rotary positions        | power 1                | left alone: heads share them

    Biases of queries and keys must be scaled too: `axis=-2` finds the heads of both a kernel
    `[in, heads, entries]` and a bias `[heads, entries]`. If queries and keys are normalized
    (QK-norm), their weights do not scale logits, and there is nothing to clip.

    The update takes `max_logits=`: a pytree of arrays `[heads]`, each at the path of its attention
    in the tree of parameters, such as `{"layers/0/attention": S}`. What Flax's `sow` collects under
    the name `max_logits` is such a tree. A single array serves all. Pass the largest logits over
    the whole batch: over all microbatches (`optax.MultiSteps` passes on only those of the last
    one), and inside `shard_map` over all devices (`jax.lax.pmax`). A logit that is not finite
    changes no weight. In bfloat16 weights a factor within 0.2 % of 1 is lost to rounding.

    Source: Kimi Team, 2025, arXiv 2507.20534.

    Args:
      tau: the largest logit.
      heads: `fn(path, leaf) -> Heads`, or None for leaves that are left alone; the path is text
        such as `layers/0/attention/query/kernel`. Because it is a function but not a schedule,
        `optax.inject_hyperparams` needs `static_args=("heads",)`.
      specs: how the weights are split over devices, as in `optaxclip.clip_by`; needed inside
        `shard_map` if heads are split.
      record: whether the state keeps what was done. With False the state is an `optax.EmptyState`,
        and any state is accepted and returned as it is. A schedule needs the step count, so
        `record=False` is an error with it.
      name: the name in messages.

    Returns:
      A transformation with a `ClipState`, whose record has an entry for each weight; its `norm` is
      the logit of the weight's worst head. The update returns a tree with the shapes, dtypes and
      weak types of the updates that it is given.

    Raises:
      ValueError: for a threshold that is negative, NaN or not a scalar; when used, if `heads` finds
        heads in no leaf, or `params` or `max_logits` is missing or has the wrong shapes.
      TypeError: for a threshold that is not a number, or if `heads` is not a function.

    Example:
      >>> import jax, jax.numpy as jnp, optax, optaxclip
      >>> def heads(path, leaf):
      ...     return optaxclip.Heads(-2) if path.split("/")[-1] in ("query", "key") else None
      >>> clip = optaxclip.clip_attention_logits(100.0, heads=heads)
      >>> tx = optax.chain(optax.sgd(0.0), clip)
      >>> params = {"query": jnp.ones((1, 2, 2)), "key": jnp.ones((1, 2, 2))}
      >>> grads, state = optax.tree.zeros_like(params), tx.init(params)
      >>> updates, state = tx.update(grads, state, params, max_logits=jnp.array([50.0, 400.0]))
      >>> print(jax.tree.map(jnp.add, params, updates)["query"])
      [[[1.  1. ]
        [0.5 0.5]]]
    """
    if not callable(heads):
        raise TypeError(
            "heads must be a function (path, leaf) -> optaxclip.Heads or None that says which "
            "leaves are weights of queries and keys, and on which axis their heads are; got "
            f"{heads!r}"
        )
    threshold, name = check_threshold(tau, "tau"), check_name(name)

    def clip(specs: PyTree = None) -> Transformation[ClipState]:
        # In the tree of logits each head is one entry, which is a group of its own.
        of_heads = {"specs": specs, "record": record, "name": name}
        return clip_by(scopes.axes(()), threshold, norm="linf", **of_heads)

    def init(params: PyTree) -> ClipState:
        flat = flatten(params, "params")
        weights = _weights(flat, heads)
        # A tree without leaves is no error: `optax.tree_map_params` makes a state from one.
        if flat.inexact_indices and not weights:
            raise ValueError(
                f"{name}: heads must give optaxclip.Heads for some leaf, and gave None for all of "
                f"{flat.names()}"
            )
        return clip().init({weight.name: jnp.zeros(weight.shape) for weight in weights})

    def update_fn(
        updates: PyTree, state: Any, params: PyTree | None, max_logits: PyTree = None, **_: Any
    ) -> tuple[PyTree, Any]:
        flat = flatten(updates, "updates")
        for given, missing in ((params, "params"), (max_logits, "max_logits")):
            if given is None:
                raise ValueError(
                    f"{name}: {missing} is missing; pass it: update(updates, state, params, "
                    "max_logits=...), with the largest attention logit of each head in this step"
                )
        weights = _weights(flat, heads)
        only = flat._replace(inexact_indices=[weight.position for weight in weights])
        logits = _logits_of(weights, max_logits, name)
        clipped, state = clip(_specs_of(weights, specs, only)).update(logits, state)
        names = [weight.name for weight in weights]
        leaves = _rescale_weights(
            only.inexact_leaves(),
            align_params(only, params, name).inexact_leaves(),
            [logits[key] for key in names],
            [clipped[key] for key in names],
            places=tuple(weight.layout for weight in weights),
        )
        return only.unflatten(leaves), state

    if not check_bool(record, "record"):
        clip()  # refuses a threshold that depends on earlier steps
        return stateless(
            lambda updates, params, **extra: update_fn(updates, (), params, **extra)[0]
        )

    def update(
        updates: PyTree, state: Any, params: PyTree | None = None, **extra_args: Any
    ) -> tuple[PyTree, ClipState]:
        state = fresh_if_none(state, init, updates)
        check_state(state, ClipState, name, updates=updates)
        return update_fn(updates, state, params, **extra_args)

    return transformation(init, update)


class _Weight(NamedTuple):
    """A leaf with heads: its position among all leaves, its name, and the shape of its logits."""

    position: int
    name: str
    path: tuple[str, ...]
    layout: HeadLayout
    shape: tuple[int, ...]


def _weights(flat: FlatTree, heads: Callable[[str, Any], Heads | None]) -> list[_Weight]:
    found = []
    for position, leaf, name in zip(
        flat.inexact_indices, flat.inexact_leaves(), flat.names(), strict=True
    ):
        own = heads(name, leaf)
        if own is None:
            continue
        if not isinstance(own, Heads):
            raise TypeError(f"heads must give optaxclip.Heads or None, got {own!r} for '{name}'")
        if is_sparse(leaf):
            raise TypeError(f"heads must leave sparse leaves alone, got Heads for '{name}'")
        path = _split_path(flat.paths[position])
        found.append(_Weight(position, name, path, *resolve_heads(own, np.shape(leaf), name)))
    return found


def _split_path(path: Path) -> tuple[str, ...]:
    return tuple(leaf_name(path).split("/")) if path else ()


def _specs_of(weights: list[_Weight], specs: PyTree, flat: FlatTree) -> PyTree:
    """How the logits are split over devices: as the heads of the weights are."""
    if specs is None or not weights:
        return None

    rows = zip(broadcast_prefix(specs, flat, "specs"), weights, strict=True)
    return {
        weight.name: meshes.select_spec_entries(spec, weight.layout.axes, weight.layout.rank)
        for spec, weight in rows
    }


def _logits_of(weights: list[_Weight], max_logits: PyTree, name: str) -> dict[str, Array]:
    """The logits of each weight's heads, by its name; negative ones become 0."""
    flat = flatten(max_logits, "max_logits", integer_policy="error")
    found: dict[tuple[str, ...], list[Any]] = {}
    for i in flat.inexact_indices:
        if jnp.iscomplexobj(flat.leaves[i]):
            raise TypeError(f"max_logits must have real leaves, got {flat.leaves[i]!r:.80}")
        parts = _split_path(flat.paths[i])
        end = parts.index("max_logits") if "max_logits" in parts else len(parts)
        found.setdefault(parts[:end], []).append(flat.leaves[i])
    largest = {}
    for weight in weights:
        above = [place for place in found if weight.path[: len(place)] == place]
        if not above:
            raise ValueError(
                f"{name}: max_logits has no array for the weight '{weight.name}', only for "
                f"{['/'.join(place) for place in found]}; put one at the path of its attention, "
                "such as {'layers/0/attention': array}"
            )
        arrays = found[max(above, key=len)]
        for array in arrays:
            if np.shape(array) != weight.shape:
                raise ValueError(
                    f"{name}: max_logits must have an array of shape {weight.shape} for the heads "
                    f"of weight '{weight.name}', got {np.shape(array)}; pass the largest logit of "
                    "each head, and with grouped queries give None for the weights of keys"
                )
        largest[weight.name] = arrays
    return _largest(largest)


@jax.jit
def _largest(arrays: dict[str, list[Any]]) -> dict[str, Array]:
    def largest(some: list[Any]) -> Array:
        wide = [x.astype(accumulation_dtype(x.dtype)) for x in map(jnp.asarray, some)]
        found = jnp.maximum(functools.reduce(jnp.maximum, promote_dtypes(wide)), 0)
        # A logit that is not finite changes no weight, so it has the derivative 0.
        return jnp.where(jnp.isfinite(found), found, lax.stop_gradient(found))

    return {name: largest(some) for name, some in arrays.items()}


@functools.partial(jax.jit, static_argnames="places")
def _rescale_weights(
    updates: list[Any],
    weights: list[Any],
    logits: list[Array],
    clipped: list[Array],
    *,
    places: tuple[HeadLayout, ...],
) -> list[Array]:
    """Updates that lead to the weights of the given updates times the factors."""
    rescaled = []
    for u, w, before, after, place in zip(updates, weights, logits, clipped, places, strict=True):
        u, w = jnp.asarray(u), jnp.asarray(w)
        quotient = jnp.where(jnp.isfinite(before), divide_no_nan(after, before, 1.0), 1)
        wide = norm_dtype([u.dtype, w.dtype])
        by = multiplier(quotient.astype(wide), place)
        new = scale_by_real(cast_elements(u, wide), by)
        new = new - scale_by_real(cast_elements(w, wide), 1 - by).astype(new.dtype)
        rescaled.append(match_weak_type(jnp.where(by == 1, u, new.astype(u.dtype)), u))
    return rescaled

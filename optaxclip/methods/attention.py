"""QK-Clip: shrinks the weights of attention heads with logits that are too large."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import NamedSharding, PartitionSpec

import optaxclip.scopes as scopes
from optaxclip._base.arguments import checked_bool, checked_name, makes_transformation
from optaxclip._base.numerics import (
    accumulation_dtype,
    entries,
    match_weak_type,
    norm_dtype,
    promoted,
    safe_divide,
)
from optaxclip._base.states import check_state
from optaxclip._base.trees import FlatTree, flatten, is_sparse, leaf_name, matching_params, per_leaf
from optaxclip._base.types import ClipState, Path, PyTree
from optaxclip._border.crossing import Transformation, stateless, transformation
from optaxclip._border.entries import times
from optaxclip._border.placement import as_spec
from optaxclip._engine.clip import clip_by, fresh_if_none
from optaxclip.methods.heads import Heads, Place, multiplier, placed
from optaxclip.thresholds.fixed import ScalarOrSchedule, as_limit


@makes_transformation()
def clip_attention_logits(
    tau: ScalarOrSchedule = 100.0,
    *,
    heads: Callable[[str, Array], Heads | None],
    specs: PyTree = None,
    record: bool = True,
    name: str = "clip_attention_logits",
) -> Transformation[ClipState]:
    """Shrinks the query and key weights of attention heads whose logits exceed a limit (QK-Clip).

    Let `S` be the largest logit of a head in this step's batch, after the division by the root of
    the head's size and before the softmax. The head's factor is `min(1, tau / S)`. This must be the
    last stage of a chain: it changes the update `u` of weights `w` so that the weights become
    `factor**power * (w + u)`. With these, the logits of the same batch would be at most about
    `tau`. A head below the limit is left alone, bit for bit.

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
      ValueError: for a limit that is negative, NaN or not a scalar; when used, if `heads` finds
        heads in no leaf, or `params` or `max_logits` is missing or has the wrong shapes.
      TypeError: for a limit that is not a number, or if `heads` is not a function.

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
    limit, name = as_limit(tau, "tau"), checked_name(name)

    def clip(specs: PyTree = None) -> Transformation[ClipState]:
        # In the tree of logits each head is one entry, which is a group of its own.
        of_heads = {"specs": specs, "record": record, "name": name}
        return clip_by(scopes.axes(()), limit, norm="linf", **of_heads)

    def init(params: PyTree) -> ClipState:
        flat = flatten(params, "params")
        weights = _weights(flat, heads)
        # A tree without leaves is no error: `optax.tree_map_params` makes a state from one.
        if flat.measured and not weights:
            raise ValueError(
                f"{name}: heads must give optaxclip.Heads for some leaf, and gave None for all of "
                f"{flat.names()}"
            )
        return clip().init({weight.name: jnp.zeros(weight.shape) for weight in weights})

    def rescaled(
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
        only = flat._replace(measured=[weight.position for weight in weights])
        logits = _logits_of(weights, max_logits, name)
        clipped, state = clip(_specs_of(weights, specs, only)).update(logits, state)
        names = [weight.name for weight in weights]
        leaves = _rescaled(
            only.measured_leaves(),
            matching_params(only, params, name).measured_leaves(),
            [logits[key] for key in names],
            [clipped[key] for key in names],
            places=tuple(weight.place for weight in weights),
        )
        return only.rebuild(leaves), state

    if not checked_bool(record, "record"):
        clip()  # refuses a limit that depends on earlier steps
        return stateless(lambda updates, params, **extra: rescaled(updates, (), params, **extra)[0])

    def update(
        updates: PyTree, state: Any, params: PyTree | None = None, **extra_args: Any
    ) -> tuple[PyTree, ClipState]:
        state = fresh_if_none(state, init, updates)
        check_state(state, ClipState, name, updates=updates)
        return rescaled(updates, state, params, **extra_args)

    return transformation(init, update)


class _Weight(NamedTuple):
    """A leaf with heads: its position among all leaves, its name, and the shape of its logits."""

    position: int
    name: str
    path: tuple[str, ...]
    place: Place
    shape: tuple[int, ...]


def _weights(flat: FlatTree, heads: Callable[[str, Any], Heads | None]) -> list[_Weight]:
    found = []
    for position, leaf, name in zip(
        flat.measured, flat.measured_leaves(), flat.names(), strict=True
    ):
        own = heads(name, leaf)
        if own is None:
            continue
        if not isinstance(own, Heads):
            raise TypeError(f"heads must give optaxclip.Heads or None, got {own!r} for '{name}'")
        if is_sparse(leaf):
            raise TypeError(f"heads must leave sparse leaves alone, got Heads for '{name}'")
        path = _parts(flat.paths[position])
        found.append(_Weight(position, name, path, *placed(own, np.shape(leaf), name)))
    return found


def _parts(path: Path) -> tuple[str, ...]:
    return tuple(leaf_name(path).split("/")) if path else ()


def _specs_of(weights: list[_Weight], specs: PyTree, flat: FlatTree) -> PyTree:
    """How the logits are split over devices: as the heads of the weights are."""
    if specs is None or not weights:
        return None

    def of_heads(spec: Any, weight: _Weight) -> Any:
        padded = [*as_spec(spec), *[None] * weight.place.rank]
        own = PartitionSpec(*(padded[axis] for axis in weight.place.axes))
        return NamedSharding(spec.mesh, own) if isinstance(spec, NamedSharding) else own

    rows = zip(per_leaf(specs, flat, "specs"), weights, strict=True)
    return {weight.name: of_heads(spec, weight) for spec, weight in rows}


def _logits_of(weights: list[_Weight], max_logits: PyTree, name: str) -> dict[str, Array]:
    """The logits of each weight's heads, by its name; negative ones become 0."""
    flat = flatten(max_logits, "max_logits", integers="error")
    found: dict[tuple[str, ...], list[Any]] = {}
    for i in flat.measured:
        if jnp.iscomplexobj(flat.leaves[i]):
            raise TypeError(f"max_logits must have real leaves, got {flat.leaves[i]!r:.80}")
        parts = _parts(flat.paths[i])
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
        found = jnp.maximum(functools.reduce(jnp.maximum, promoted(wide)), 0)
        # A logit that is not finite changes no weight, so it has the derivative 0.
        return jnp.where(jnp.isfinite(found), found, lax.stop_gradient(found))

    return {name: largest(some) for name, some in arrays.items()}


@functools.partial(jax.jit, static_argnames="places")
def _rescaled(
    updates: list[Any],
    weights: list[Any],
    logits: list[Array],
    clipped: list[Array],
    *,
    places: tuple[Place, ...],
) -> list[Array]:
    """Updates that lead to the weights of the given updates times the factors."""
    rescaled = []
    for u, w, before, after, place in zip(updates, weights, logits, clipped, places, strict=True):
        u, w = jnp.asarray(u), jnp.asarray(w)
        quotient = jnp.where(jnp.isfinite(before), safe_divide(after, before, 1.0), 1)
        wide = norm_dtype([u.dtype, w.dtype])
        by = multiplier(quotient.astype(wide), place)
        new = times(entries(u, wide), by)
        new = new - times(entries(w, wide), 1 - by).astype(new.dtype)
        rescaled.append(match_weak_type(jnp.where(by == 1, u, new.astype(u.dtype)), u))
    return rescaled

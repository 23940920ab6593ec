"""QK-Clip: scales the query and key parameters of attention heads with large logits."""

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
import optaxclip._base.numerics as numerics
import optaxclip._base.trees as trees
import optaxclip.scopes as scopes
from optaxclip._backend.elementwise import scale_by_real
from optaxclip._backend.global_view import Transformation, stateless, transformation
from optaxclip._base.state import check_state
from optaxclip._base.types import ClipState, Path, PyTree
from optaxclip._base.validation import check_bool, check_name, validate_call
from optaxclip._engine.clip import clip_by, fresh_if_none
from optaxclip.thresholds._constant import ScalarOrSchedule, check_threshold


@dataclasses.dataclass(frozen=True)
class Heads:
    """Describes the heads of an attention parameter and how QK-Clip scales them.

    A head is multiplied by its factor raised to a power. Logits are products of queries and keys,
    so the powers of queries and keys must sum to 1.

    Attributes:
      axis: The axis of the heads. If layers are stacked, a sequence of the axes that correspond to
        the axes of `max_logits`, such as `(0, -2)` for layers and heads.
      power: The power for all elements, or a sequence of pairs `(elements, power)` for consecutive
        elements of a head along `head_dim_axis`.
      head_dim_axis: The axis of the elements of a head. If it is also the axis of the heads, the
        parameter contains one head after another, as in a kernel `[in, heads * elements]`.

    Example:
      >>> from optaxclip import Heads
      >>> multi_head = Heads(axis=-2)  # kernels [in, heads, elements] of queries and keys
      >>> grouped_query = Heads(axis=-2, power=1.0)  # queries, with unchanged keys
      >>> in_one_axis = Heads(axis=-1, power=((64, 0.5),))  # kernels [in, heads * 64]
      >>> queries_keys_values = Heads(axis=-2, power=((64, 0.5), (64, 0.5), (64, 0.0)))
      >>> latent_query = Heads(axis=-2, power=((128, 0.5), (64, 1.0)))  # 64 with rotary positions
      >>> latent_key = Heads(axis=-2, power=((128, 0.5), (128, 0.0)))  # 128 values
    """

    axis: int | Sequence[int]
    power: float | Sequence[tuple[int, float]] = 0.5
    head_dim_axis: int = -1

    def __post_init__(self) -> None:
        try:
            axes, segments = _axes(self.axis), _segments(self.power)
            head_dim_axis = operator.index(self.head_dim_axis)
        except (TypeError, ValueError):
            raise TypeError(
                "Heads must have an int or a sequence of ints as axis, an int as head_dim_axis, "
                f"and a number or pairs (elements, power) as power, got {self}"
            ) from None
        if not all(count >= 1 and 0 <= power <= 1 for count, power in segments):
            raise ValueError(f"power must be between 0 and 1, got {self.power!r}")
        # Tuples are hashable and can be static arguments of compiled functions.
        object.__setattr__(self, "axis", axes)
        object.__setattr__(self, "head_dim_axis", head_dim_axis)
        if isinstance(self.power, Sequence):
            object.__setattr__(self, "power", segments)


class HeadLayout(NamedTuple):
    """The `Heads` of a leaf with non-negative axes."""

    rank: int
    axes: tuple[int, ...]
    head_dim_axis: int
    segments: tuple[tuple[int, float], ...]  # ((1, power),) if all elements have the same power


def resolve_heads(
    heads: Heads, shape: tuple[int, ...], name: str
) -> tuple[HeadLayout, tuple[int, ...]]:
    """Checks the heads of a leaf and returns their layout and the shape of their logits."""
    rank, axes, segments = len(shape), _axes(heads.axis), _segments(heads.power)
    is_divided = isinstance(heads.power, Sequence)
    used_axes = (*axes, heads.head_dim_axis) if is_divided else axes
    if any(not -rank <= axis < rank for axis in used_axes):
        raise ValueError(f"heads uses axes {used_axes}, but leaf '{name}' has shape {shape}")
    axes = tuple(axis % rank for axis in axes)
    if len(set(axes)) < len(axes):
        raise ValueError(f"heads must use distinct axes of leaf '{name}', got {axes}")
    sizes = [shape[axis] for axis in axes]
    if not is_divided:
        others = [axis for axis in range(rank) if axis not in axes]
        # Use any remaining axis, because all elements have the same power.
        return HeadLayout(rank, axes, (others or axes)[-1], segments), tuple(sizes)
    head_dim_axis, elements = heads.head_dim_axis % rank, sum(count for count, _ in segments)
    if head_dim_axis == axes[-1] and sizes[-1] % elements == 0:
        sizes[-1] //= elements
    elif head_dim_axis in axes or shape[head_dim_axis] != elements:
        raise ValueError(
            f"power sets a head size of {elements} along axis {head_dim_axis}, but leaf '{name}' "
            f"has shape {shape}"
        )
    return HeadLayout(rank, axes, head_dim_axis, segments), tuple(sizes)


def multiplier(factor: Array, layout: HeadLayout) -> Array:
    """Returns the multiplier of a leaf from the factors of its heads. It broadcasts to the leaf."""
    # [*heads] -> the order of the axes in the leaf, with size 1 along the remaining axes
    factor = jnp.transpose(factor, [int(i) for i in np.argsort(layout.axes)])
    factor = lax.expand_dims(factor, [i for i in range(layout.rank) if i not in layout.axes])
    counts, powers = zip(*layout.segments, strict=True)
    powers = np.repeat(powers, counts)  # [elements]
    # If heads and their elements share an axis, add a temporary axis for the elements.
    has_shared_axis = layout.head_dim_axis in layout.axes
    axis = layout.head_dim_axis + has_shared_axis
    # For example, [heads, 1] for a kernel [heads * elements]
    x = lax.expand_dims(factor, [axis]) if has_shared_axis else factor
    exponents = jnp.asarray(
        powers.reshape([len(powers) if i == axis else 1 for i in range(x.ndim)]), x.dtype
    )
    # Factors of 1 and factors with the power 0 have the result 1 exactly.
    is_between = (x > 0) & (x < 1)
    by = jnp.where(is_between, x, 1) ** exponents
    by = jnp.where(is_between | (x != 0) | (exponents == 0), by, 0)
    # Merge the temporary axis again, for example to [heads * elements].
    shape = [*factor.shape]
    shape[layout.head_dim_axis] *= len(powers)
    return by.reshape(shape)


def _axes(axis: int | Sequence[int]) -> tuple[int, ...]:
    return tuple(map(operator.index, axis if isinstance(axis, Sequence) else (axis,)))


def _segments(power: float | Sequence[tuple[int, float]]) -> tuple[tuple[int, float], ...]:
    if not isinstance(power, Sequence):
        return ((1, float(power)),)
    return tuple((operator.index(count), float(part)) for count, part in power)


@validate_call(transformation=True)
def clip_attention_logits(
    tau: ScalarOrSchedule = 100.0,
    *,
    heads: Callable[[str, Array], Heads | None],
    specs: PyTree = None,
    record: bool = True,
    name: str = "clip_attention_logits",
) -> Transformation[ClipState]:
    """Scales the query and key parameters of attention heads with large logits (QK-Clip).

    Let `S` be the largest logit of a head in the current batch, after the division by the square
    root of the head size and before the softmax. The head is scaled by `factor = min(1, tau / S)`:
    the update `u` of a parameter `w` is changed to set the new parameter to
    `factor**power * (w + u)`, so the logits of this batch would be at most about `tau`. Use this
    transformation as the last stage of a chain.

    The function `heads` returns these powers:

      attention                        | queries                | keys
      ---------------------------------|------------------------|-------------------------
      multi-head                       | power 0.5              | power 0.5
      grouped-query, multi-query       | power 1                | None, because heads share keys
      multi-head latent, per head      | power 0.5              | power 0.5
      ... with rotary positions        | power 1                | None, because heads share keys

    You must also scale the biases of queries and keys. For example, `axis=-2` is correct for both a
    kernel `[in, heads, elements]` and a bias `[heads, elements]`. If queries and keys are
    normalized (QK-norm), you do not need this transformation.

    You must pass `max_logits=` to `update`, either an array `[heads]` for all layers or a pytree of
    arrays at the paths of the attention layers, such as `{"layers/0/attention": S}`. Flax's `sow`
    with the name `max_logits` collects such a tree. The arrays must contain the maximum over the
    whole batch. Inside `shard_map`, use `jax.lax.pmax`. Note that `optax.MultiSteps` only passes
    the maximum of the last microbatch. Non-finite logits do not change the parameters. In bfloat16,
    factors within 0.2% of 1 are lost to rounding.

    Source: Kimi Team, 2025, arXiv 2507.20534.

    Args:
      tau: The maximum logit.
      heads: A function `(path, leaf) -> Heads | None`, where None excludes a leaf and paths are
        strings such as `layers/0/attention/query/kernel`. `optax.inject_hyperparams` requires
        `static_args=("heads",)`.
      specs: The sharding of the parameters, as in `optaxclip.clip_by`. Required inside `shard_map`
        if heads are sharded.
      record: If False, the state is an `optax.EmptyState`, any state is accepted and returned
        unchanged, and schedules are not supported.
      name: The name used in messages.

    Returns:
      A transformation with a `ClipState`. The record has one element per parameter with heads, and
      `norm` is the logit with the largest ratio to its threshold. Updates keep their shapes,
      dtypes, and weak types.

    Raises:
      ValueError: If the threshold is negative, NaN, or not a scalar. Also raised by `init` and
        `update` if `heads` returns None for all leaves, and by `update` if `params` or `max_logits`
        is missing or has wrong shapes.
      TypeError: If the threshold is not a number, or if `heads` is not a function.

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
            f"heads must be a function (path, leaf) -> optaxclip.Heads | None, got {heads!r}; "
            "return Heads(axis) for query and key parameters"
        )
    threshold, name = check_threshold(tau, "tau"), check_name(name)

    def clip_logits(specs: PyTree = None) -> Transformation[ClipState]:
        # Each logit is a separate group.
        options = {"specs": specs, "record": record, "name": name}
        return clip_by(scopes.axes(()), threshold, norm="linf", **options)

    def init(params: PyTree) -> ClipState:
        flat = trees.flatten(params, "params")
        head_leaves = _find_head_leaves(flat, heads)
        # `optax.tree_map_params` initializes with trees without leaves.
        if flat.inexact_indices and not head_leaves:
            raise ValueError(
                f"{name}: heads must return optaxclip.Heads for some leaves, but returned None for "
                f"all of {flat.names()}"
            )
        return clip_logits().init({leaf.name: jnp.zeros(leaf.shape) for leaf in head_leaves})

    def update_fn(
        updates: PyTree, state: Any, params: PyTree | None, max_logits: PyTree = None, **_: Any
    ) -> tuple[PyTree, Any]:
        flat = trees.flatten(updates, "updates")
        for value, argument in ((params, "params"), (max_logits, "max_logits")):
            if value is None:
                raise ValueError(
                    f"{name}: {argument} is required; call update(updates, "
                    "state, params, max_logits=...) with the maximum attention logit of each head"
                )
        head_leaves = _find_head_leaves(flat, heads)
        only = flat._replace(inexact_indices=[leaf.position for leaf in head_leaves])
        logits = _logits_by_name(head_leaves, max_logits, name)  # name -> [*heads]
        clipped, state = clip_logits(_head_specs(head_leaves, specs, only)).update(logits, state)
        weights = trees.align_params(only, params, name).inexact_leaves()
        before, after = ([tree[leaf.name] for leaf in head_leaves] for tree in (logits, clipped))
        layouts = tuple(leaf.layout for leaf in head_leaves)
        leaves = _rescale_params(only.inexact_leaves(), weights, before, after, layouts=layouts)
        return only.unflatten(leaves), state

    if not check_bool(record, "record"):
        clip_logits()  # rejects thresholds that depend on earlier steps
        return stateless(lambda grads, params, **extra: update_fn(grads, (), params, **extra)[0])

    def update(
        updates: PyTree, state: Any, params: PyTree | None = None, **extra_args: Any
    ) -> tuple[PyTree, ClipState]:
        state = fresh_if_none(state, init, updates)
        check_state(state, ClipState, name, updates=updates)
        return update_fn(updates, state, params, **extra_args)

    return transformation(init, update)


class _HeadLeaf(NamedTuple):
    position: int  # in the tree
    name: str
    path: tuple[str, ...]
    layout: HeadLayout
    shape: tuple[int, ...]  # of the logits


def _find_head_leaves(
    flat: trees.FlatTree, heads: Callable[[str, Any], Heads | None]
) -> list[_HeadLeaf]:
    head_leaves = []
    rows = zip(flat.inexact_indices, flat.inexact_leaves(), flat.names(), strict=True)
    for position, leaf, name in rows:
        own = heads(name, leaf)
        if own is None:
            continue
        if not isinstance(own, Heads):
            must = "heads must return optaxclip.Heads or None"
            raise TypeError(f"{must}, but returned {own!r} for leaf '{name}'")
        if trees.is_sparse(leaf):
            raise TypeError(f"leaf '{name}' is sparse, so heads must return None instead of Heads")
        path = _split_path(flat.paths[position])
        layout, shape = resolve_heads(own, np.shape(leaf), name)
        head_leaves.append(_HeadLeaf(position, name, path, layout, shape))
    return head_leaves


def _split_path(path: Path) -> tuple[str, ...]:
    return tuple(trees.leaf_name(path).split("/")) if path else ()


def _head_specs(head_leaves: list[_HeadLeaf], specs: PyTree, flat: trees.FlatTree) -> PyTree:
    """Returns the sharding of the logits from the sharding of the parameters."""
    if specs is None or not head_leaves:
        return None
    pairs = zip(head_leaves, trees.broadcast_prefix(specs, flat, "specs"), strict=True)
    select = meshes.select_spec_entries
    return {leaf.name: select(spec, leaf.layout.axes, leaf.layout.rank) for leaf, spec in pairs}


def _logits_by_name(
    head_leaves: list[_HeadLeaf], max_logits: PyTree, name: str
) -> dict[str, Array]:
    """Returns a dict that maps leaf names to the logits of heads. Negative logits become 0."""
    flat = trees.flatten(max_logits, "max_logits", integer_policy="error")
    arrays_by_path: dict[tuple[str, ...], list[Any]] = {}
    for i in flat.inexact_indices:
        if jnp.iscomplexobj(flat.leaves[i]):
            raise TypeError(f"max_logits must be real-valued arrays, got {flat.leaves[i]!r:.80}")
        parts = _split_path(flat.paths[i])
        # Flax's `sow` appends the name and the indices of a tuple to the path.
        end = parts.index("max_logits") if "max_logits" in parts else len(parts)
        arrays_by_path.setdefault(parts[:end], []).append(flat.leaves[i])
    arrays_by_name = {}
    for leaf in head_leaves:
        prefixes = [path for path in arrays_by_path if leaf.path[: len(path)] == path]
        if not prefixes:
            raise ValueError(
                f"{name}: max_logits must contain an array for leaf '{leaf.name}', but has arrays "
                f"only for {['/'.join(path) for path in arrays_by_path]}; use the paths of "
                "attention layers as keys, as in {'layers/0/attention': array}"
            )
        arrays = arrays_by_path[max(prefixes, key=len)]
        for array in arrays:
            if np.shape(array) != leaf.shape:
                raise ValueError(
                    f"{name}: max_logits must have shape {leaf.shape} for leaf '{leaf.name}', got "
                    f"{np.shape(array)}; return None from heads for keys that heads share"
                )
        arrays_by_name[leaf.name] = arrays
    return _reduce_logits(arrays_by_name)


@jax.jit
def _reduce_logits(arrays_by_name: dict[str, list[Any]]) -> dict[str, Array]:
    """Computes the elementwise maximum of the arrays with the same name and 0."""
    result = {}
    for name, arrays in arrays_by_name.items():
        wide = [x.astype(numerics.accumulation_dtype(x.dtype)) for x in map(jnp.asarray, arrays)]
        wide = numerics.promote_dtypes(wide)
        largest = jnp.maximum(functools.reduce(jnp.maximum, wide), 0)  # [*heads]
        # Non-finite logits do not change the parameters, so they have no derivative.
        result[name] = jnp.where(jnp.isfinite(largest), largest, lax.stop_gradient(largest))
    return result


@functools.partial(jax.jit, static_argnames="layouts")
def _rescale_params(
    updates: list[Any],
    params: list[Any],
    logits: list[Array],
    clipped: list[Array],
    *,
    layouts: tuple[HeadLayout, ...],
) -> list[Array]:
    """Returns `multiplier * (w + u) - w` for updates `u` of parameters `w`."""
    rescaled = []
    for u, w, before, after, layout in zip(updates, params, logits, clipped, layouts, strict=True):
        u, w = jnp.asarray(u), jnp.asarray(w)
        # [*heads]
        quotient = jnp.where(jnp.isfinite(before), numerics.divide_no_nan(after, before, 1.0), 1)
        wide = numerics.norm_dtype([u.dtype, w.dtype])
        by = multiplier(quotient.astype(wide), layout)
        # by * u - (1 - by) * w, which is exactly u if by is 1
        new = scale_by_real(numerics.cast_elements(u, wide), by)
        new = new - scale_by_real(numerics.cast_elements(w, wide), 1 - by).astype(new.dtype)
        rescaled.append(numerics.match_weak_type(jnp.where(by == 1, u, new.astype(u.dtype)), u))
    return rescaled

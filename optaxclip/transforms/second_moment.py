"""Elementwise clipping by moving averages: `clip_by_moving_max` and `clip_by_second_moment`."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

import optaxclip._base.numerics as numerics
import optaxclip.norms as norms
import optaxclip.thresholds as thresholds
from optaxclip._backend.elementwise import coalesce_values
from optaxclip._backend.global_view import (
    Transformation,
    global_view,
    template_on_device,
    transformation,
)
from optaxclip._base.state import check_state, register_state, safe_increment
from optaxclip._base.trees import FlatTree, flatten, is_sparse, replace_values
from optaxclip._base.types import ArrayLike, ClipState, PyTree
from optaxclip._base.validation import check_int, check_name, validate_call
from optaxclip._engine.clip import ClipMethod, make_clip
from optaxclip._engine.options import Options, RescaleOptions, document_options
from optaxclip._engine.scale import Multiplier
from optaxclip.thresholds._adaptive import DEFAULT_FLOOR, check_minimum, check_range
from optaxclip.thresholds._rule import check_threshold_value
from optaxclip.transforms.elementwise import clamp_leaf
from optaxclip.transforms.norm_clips import leaf_scope


class NamedMoments(NamedTuple):
    """The averages in a state, by the names of their leaves."""

    flat: FlatTree
    names: list[str]

    @classmethod
    def create(cls, tree: PyTree) -> "NamedMoments":
        """Flattens the tree in a state."""
        flat = flatten(tree, "state")
        return cls(flat, flat.names())

    def get(self, gradients: FlatTree, name: str) -> list[Array]:
        """Returns the averages of the leaves of the gradients."""
        # Match by name, because some gradients may be None.
        by_name = dict(zip(self.names, self.flat.inexact_leaves(), strict=True))
        averages = [by_name[path] for path in gradients.names()]
        rows = zip(gradients.names(), gradients.inexact_leaves(), averages, strict=True)
        for path, leaf, average in rows:
            if np.shape(leaf) != np.shape(average):
                raise ValueError(
                    f"{name}: leaf '{path}' has shape {np.shape(leaf)}, but had shape "
                    f"{np.shape(average)} at init; reinitialize the state"
                )
        return averages

    def replace(self, gradients: FlatTree, leaves: Sequence[Array]) -> PyTree:
        """Replaces the averages of the leaves that have gradients."""
        new = dict(zip(gradients.names(), leaves, strict=True))
        rows = zip(self.names, self.flat.inexact_leaves(), strict=True)
        return self.flat.unflatten([new.get(name, old) for name, old in rows])


def check_dense(flat: FlatTree, name: str) -> FlatTree:
    """Checks that a tree has no sparse leaves and returns it."""
    for leaf, path in zip(flat.inexact_leaves(), flat.names(), strict=True):
        if is_sparse(leaf):
            raise TypeError(
                f"{name}: leaf '{path}' must be dense, but is a BCOO array; pass leaf.todense()"
            )
    return flat


def zero_moments(flat: FlatTree, *, real_only: bool = False) -> PyTree:
    """Returns zeros for floating-point leaves and None for other leaves."""
    leaves: list[Any] = [None] * len(flat.leaves)
    for i, leaf in zip(flat.inexact_indices, flat.inexact_leaves(), strict=True):
        # Averages are sharded like the leaves, but are always in device memory.
        dtype = wide_dtype(jnp.result_type(leaf), real=real_only)
        leaves[i] = jnp.zeros_like(template_on_device(leaf), dtype=dtype)
    return jax.tree_util.tree_unflatten(flat.treedef, leaves)


def wide_dtype(dtype: jnp.dtype, *, real: bool = False) -> Any:
    """Returns float32 or wider. The result is complex for complex dtypes unless `real` is True."""
    own = numerics.accumulation_dtype(dtype)
    if real or not jnp.issubdtype(dtype, jnp.complexfloating):
        return own
    return jnp.complex128 if own == jnp.float64 else jnp.complex64


@register_state
class SecondMomentState(NamedTuple):
    """State of `clip_by_second_moment`.

    Attributes:
      steps: int32[], the number of steps.
      moments: The moving averages of the squared elements, a pytree like the parameters, float32
        (float64 for 64-bit leaves). Leaves that are not clipped are None.
    """

    NEEDS_OPTIMIZER = True

    steps: Array
    moments: PyTree


@validate_call(transformation=True)
@document_options(RescaleOptions)
def clip_by_moving_max(
    *,
    decay: ArrayLike = 0.999,
    stacked: PyTree | Callable[[str, Array], int] | None = None,
    floor: float = DEFAULT_FLOOR,
    **options: Unpack[RescaleOptions],
) -> Transformation[ClipState]:
    """Clips elements that exceed a moving average of the largest absolute value in their leaf.

    The average is debiased and includes the current step. Elements above it are multiplied by the
    ratio of the average to the largest absolute value.

    Non-finite values are never recorded. In the published code, a NaN remains in the average
    forever. That code also resets its step count together with Adam's moments, which disables
    clipping for many steps because the average is not reset. Here, neither is reset.

    Source: Huang et al., 2025, Stable-SPAM's AdaClip, arXiv 2502.17055.

    Args:
      decay: The decay of the average.
      stacked: The number of leading axes that stack layers, as in `optaxclip.scopes.leaf`.
      floor: The minimum threshold. Smaller maxima are not recorded.
      **options: Options that can be used with any transformation. See `optaxclip.RescaleOptions`.

    Example:
      >>> import jax.numpy as jnp, optaxclip
      >>> tx = optaxclip.clip_by_moving_max(decay=0.5)
      >>> state = tx.init(jnp.zeros(3))
      >>> for largest in (1.0, 1.0, 4.0):
      ...     updates, state = tx.update(jnp.array([largest, -3.0, 0.5]) / 2, state)
      >>> print(updates, state.info.threshold)
      [ 1.78571 -1.5      0.25   ] [1.78571]
    """
    rule = thresholds.ema(decay, 1.0, debias=True, inclusive=True, floor=floor, patience=None)
    checked = Options.create(norm="linf", **options)
    return make_clip(leaf_scope(stacked), rule, checked, _ClipElementsAbove())


@dataclasses.dataclass(frozen=True)
class _ClipElementsAbove(ClipMethod):
    """Scales only the elements of a group that exceed its threshold."""

    def leaf_operands(self, by: Multiplier, threshold_values: Array) -> Sequence[Array]:
        """Returns the multipliers and the thresholds of the elements, [groups]."""
        # All elements of non-finite groups are multiplied.
        return (*by, numerics.select(by.ratio > 0, threshold_values, -1))

    def apply(self, leaf: Any, columns: Array, axes: tuple[int, ...], options: Options) -> Any:
        """Scales a leaf. For `BCOO` leaves, the sums of values with equal indices are compared."""
        if not is_sparse(leaf) or leaf.unique_indices:
            return super().apply(leaf, columns, axes, options)
        power, ratio, threshold = columns  # [groups of the leaf]
        is_at_most = jnp.abs(coalesce_values(leaf, threshold.dtype)[0]) <= threshold
        # [3, stored], where unchanged values have an infinite threshold
        by: Any = [jnp.broadcast_to(x, is_at_most.shape) for x in (power, ratio)]
        by.append(jnp.where(is_at_most, jnp.inf, -1).astype(threshold.dtype))
        return replace_values(leaf, super().apply(leaf.data, by, (), options))


@validate_call(transformation=True)
def clip_by_second_moment(
    *,
    threshold: ArrayLike = 5000.0,
    decay: ArrayLike = 0.999,
    warmup_steps: int = 20,
    reset_every: int | None = None,
    name: str = "clip_by_second_moment",
) -> Transformation[SecondMomentState]:
    """Clips elements to a multiple of the root of their second moments (SPAM).

    Let `v` be the moving average of the squares of an element `g` before the current step. If
    `|g|**2 > threshold * v`, the absolute value of the element becomes `sqrt(threshold * v)`. `v`
    is updated with the clipped element. NaN is unchanged, and infinite elements become the bounds.

    In SPAM, an element that was always zero, for example in the embedding of a rare token, stays at
    zero until the next reset. Here, elements with `v = 0` are unchanged, and non-finite elements
    are never included in `v`. As in the paper, `v` is not debiased, so clipping is stricter on the
    first steps.

    Squares can exceed the range of float32 (or float64 for 64-bit leaves). If elements stay below
    about `1e-19 / sqrt(1 - decay)`, `v` is 0 and spikes are not clipped. Elements above 1.3e19 are
    included in `v` as 1.3e19.

    Source: Huang et al., 2025, SPAM, arXiv 2501.06842.

    Args:
      threshold: The maximum ratio of the square of an element to its second moment.
      decay: The decay of the second moment. Use the `b2` of a subsequent Adam.
      warmup_steps: The number of steps without clipping at the start and after a reset, including
        non-finite steps.
      reset_every: The number of steps after which `v` is reset to zero. SPAM resets it every 500
        steps together with Adam's moments. By default, it is never reset. It must be static in
        `optax.inject_hyperparams`.
      name: The name used in messages.

    Returns:
      A transformation with a `SecondMomentState`. Updates keep their shapes, dtypes, and weak
      types. Like `clip`, it does not record which elements were clipped.

    Raises:
      ValueError: If an option is out of range. Also raised by `update` for leaves that were missing
        in `init`.
      TypeError: If an option is not a number. Also raised by `init` and `update` for sparse leaves.

    Example:
      >>> import jax.numpy as jnp, optaxclip
      >>> tx = optaxclip.clip_by_second_moment(threshold=4.0, decay=0.5, warmup_steps=2)
      >>> state = tx.init(jnp.zeros(2))
      >>> for spike in (1.0, 1.0, 1.0, 10.0):
      ...     updates, state = tx.update(jnp.array([spike, 0.5]), state)
      >>> print(updates)
      [1.870829 0.5     ]
    """
    settings = _MomentSettings(
        check_threshold_value(threshold, "threshold", disabled_value="math.inf"),
        check_range(decay, 0, 1, "decay"),
        check_minimum(warmup_steps, 0, "warmup_steps"),
    )
    period = None
    if reset_every is not None:
        period = min(check_int(reset_every, 1, "reset_every"), 2**31 - 1)
    check_name(name)

    def init(params: PyTree) -> SecondMomentState:
        flat = check_dense(flatten(params, "params"), name)
        return SecondMomentState(jnp.zeros((), jnp.int32), zero_moments(flat, real_only=True))

    def update(
        updates: PyTree, state: Any, params: PyTree | None = None, **extra_args: Any
    ) -> tuple[PyTree, SecondMomentState]:
        del params, extra_args
        flat = check_dense(flatten(updates, "updates"), name)
        check_state(state, SecondMomentState, name, updates=updates)
        old = NamedMoments.create(state.moments)
        unknown = sorted(set(flat.names()) - set(old.names))
        if unknown:
            raise ValueError(
                f"{name}: updates contain the leaves {unknown}, which were not passed to init; "
                "reinitialize the state"
            )
        leaves, moments = flat.inexact_leaves(), old.get(flat, name)
        clipped, count, moments = _clip_and_update(
            settings, leaves, moments, state.steps, period=period
        )
        return flat.unflatten(clipped), SecondMomentState(count, old.replace(flat, moments))

    return transformation(init, update)


class _MomentSettings(NamedTuple):
    threshold: Any
    decay: Any
    warmup_steps: Any


@global_view(out_like=("leaves", "count", "moments"))
def _clip_and_update(
    settings: _MomentSettings,
    leaves: list[Any],
    moments: list[Array],
    count: Array,
    *,
    period: int | None,
) -> tuple[list[Any], Array, list[Array]]:
    step = count
    if period is not None:
        step = count % period  # the number of steps since the most recent reset
        moments = [jnp.where(step == 0, 0, v) for v in moments]
    is_active = step >= settings.warmup_steps
    pairs = [
        _clip_and_update_leaf(leaf, moment, settings.threshold, settings.decay, is_active)
        for leaf, moment in zip(leaves, moments, strict=True)
    ]
    clipped, moments = ([pair[k] for pair in pairs] for k in range(2))
    return clipped, safe_increment(count, period=period or 1), moments


# Jitted so that leaves with equal shapes and dtypes share one trace.
@jax.jit
def _clip_and_update_leaf(
    leaf: Any, moment: Array, threshold: Any, decay: Any, is_active: Array
) -> tuple[Any, Array]:
    threshold = jnp.asarray(threshold).astype(moment.dtype)
    is_finite = lax.ne(threshold, threshold.dtype.type(jnp.inf))
    # Replace an infinite threshold by 1, because a product with infinity would have the derivative
    # NaN. Negative thresholds act as 0.
    finite = numerics.select(is_finite, threshold, 1)
    scale = numerics.safe_sqrt(lax.max(finite, threshold.dtype.type(0)))
    is_positive, root = numerics.sqrt_where_positive(moment)
    is_bounded = lax.bitwise_and(is_positive, lax.bitwise_and(is_active, is_finite))
    bound = numerics.select(is_bounded, numerics.multiply(root, scale), jnp.inf)
    clipped = clamp_leaf(leaf, None, bound)
    square = norms.l2.map(numerics.cast_elements(jnp.asarray(clipped), moment.dtype))
    # With a decay of 1/2, XLA on GPUs adds the moment and the square before it multiplies them, and
    # the sum must be finite (as of JAX 0.10.2).
    square = lax.min(square, jnp.finfo(moment.dtype).max / 2)
    decay = jnp.asarray(decay).astype(moment.dtype)
    new = lax.add(numerics.multiply(moment, decay), numerics.multiply(square, 1 - decay))
    return clipped, lax.select(jnp.isfinite(leaf), new, moment)

"""Elementwise clipping by moving averages: `clip_by_moving_max` and `clip_by_second_moment`.

`NamedMoments` and `zero_moments` store averages of elements in trees like the parameters.
`scale_by_stable_adam` uses them too.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

import optaxclip.norms as norms
import optaxclip.thresholds as thresholds
from optaxclip._backend.elementwise import coalesce_values
from optaxclip._backend.global_view import (
    Transformation,
    global_view,
    template_on_device,
    transformation,
)
from optaxclip._base.numerics import (
    accumulation_dtype,
    cast_elements,
    multiply,
    safe_sqrt,
    select,
    sqrt_where_positive,
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
    """The averages in a state. The gradients of a step may lack leaves with an average."""

    flat: FlatTree
    names: list[str]

    @classmethod
    def create(cls, tree: PyTree) -> "NamedMoments":
        """Makes `NamedMoments` from the tree in a state."""
        flat = flatten(tree, "state")
        return cls(flat, flat.names())

    def get(self, gradients: FlatTree, name: str) -> list[Array]:
        """Returns the averages of the leaves of the gradients."""
        # Use the names, because the gradients may lack leaves.
        by_name = dict(zip(self.names, self.flat.inexact_leaves(), strict=True))
        averages = [by_name[path] for path in gradients.names()]
        rows = zip(gradients.names(), gradients.inexact_leaves(), averages, strict=True)
        for path, leaf, average in rows:
            if np.shape(leaf) != np.shape(average):
                raise ValueError(
                    f"{name}: leaf '{path}' must have the shape {np.shape(average)} of the params "
                    f"passed to init, got {np.shape(leaf)} in the updates; use a fresh state"
                )
        return averages

    def replace(self, gradients: FlatTree, leaves: Sequence[Array]) -> PyTree:
        """Replaces the averages of the leaves of the gradients and keeps the other averages."""
        new = dict(zip(gradients.names(), leaves, strict=True))
        rows = zip(self.names, self.flat.inexact_leaves(), strict=True)
        return self.flat.unflatten([new.get(name, old) for name, old in rows])


def check_dense(flat: FlatTree, name: str) -> FlatTree:
    """Checks that a tree has no sparse leaves and returns it."""
    for leaf, path in zip(flat.inexact_leaves(), flat.names(), strict=True):
        if is_sparse(leaf):
            raise TypeError(f"{name}: leaf '{path}' must be dense, got a BCOO; pass leaf.todense()")
    return flat


def zero_moments(flat: FlatTree, *, real_only: bool = False) -> PyTree:
    """Returns zeros for the floating-point leaves and None for the other leaves."""
    leaves: list[Any] = [None] * len(flat.leaves)
    for i, leaf in zip(flat.inexact_indices, flat.inexact_leaves(), strict=True):
        # The averages are sharded like the leaves, but always in device memory.
        dtype = wide_dtype(jnp.result_type(leaf), real=real_only)
        leaves[i] = jnp.zeros_like(template_on_device(leaf), dtype=dtype)
    return jax.tree_util.tree_unflatten(flat.treedef, leaves)


def wide_dtype(dtype: jnp.dtype, *, real: bool = False) -> Any:
    """Returns float32 or wider, or the complex counterpart for complex dtypes unless `real`."""
    own = accumulation_dtype(dtype)
    if real or not jnp.issubdtype(dtype, jnp.complexfloating):
        return own
    return jnp.complex128 if own == jnp.float64 else jnp.complex64


@register_state
class SecondMomentState(NamedTuple):
    """State of `clip_by_second_moment`.

    Attributes:
      steps: int32[], the number of steps.
      moments: The moving averages of the squared elements, a pytree like the parameters, float32
        (float64 for 64-bit leaves). It has None for leaves that are not clipped.
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
    """Clips the elements of leaves that exceed a moving average of the largest elements.

    The average is debiased and includes the current step. Only elements above the average are
    changed. They are multiplied by the ratio of the average to the largest modulus of the leaf.

    Non-finite moduli are never recorded. However, a NaN stays in the average
    forever in the published code.
    The published code also restarts its step count at resets of Adam's moments, but not the
    average, which disables clipping for many steps. Here, neither is reset.

    Source: Huang et al., 2025, Stable-SPAM's AdaClip, arXiv 2502.17055.

    Args:
      decay: The decay of the average.
      stacked: The number of leading axes of the leaves that stack separate tensors, as in
        `optaxclip.scopes.leaf`. Defaults to 0.
      floor: The lower bound on thresholds. Smaller moduli are not recorded.
      **options: The options shared by all transformations. See `optaxclip.RescaleOptions`.

    Returns:
      A transformation with a `ClipState`. `norm` is the largest modulus of a leaf. The update
      returns a tree with the shapes, dtypes and weak types of the gradients.

    Example:
      >>> import jax.numpy as jnp, optaxclip
      >>> tx = optaxclip.clip_by_moving_max(decay=0.5)
      >>> state = tx.init(jnp.zeros(3))
      >>> for largest in (1.0, 1.0, 4.0):
      ...     updates, state = tx.update(jnp.array([largest, -3.0, 0.5]) / 2, state)
      >>> print(updates, state.info.threshold)
      [ 1.78571 -1.5      0.25   ] [1.78571]
    """
    # The published rule has no patience and includes the current step in its average.
    rule = thresholds.ema(decay, 1.0, debias=True, inclusive=True, floor=floor, patience=None)
    checked = Options.create(norm="linf", **options)
    return make_clip(leaf_scope(stacked), rule, checked, _ClipElementsAbove())


@dataclasses.dataclass(frozen=True)
class _ClipElementsAbove(ClipMethod):
    """Scales only the elements of a group that are above its threshold."""

    def leaf_operands(self, by: Multiplier, threshold_values: Array) -> Sequence[Array]:
        """Returns the multiplier and the modulus above which elements are multiplied, [groups].

        This modulus is -1 for non-finite groups, because all of their elements are multiplied.
        """
        return (*by, select(by.ratio > 0, threshold_values, -1))

    def apply(self, leaf: Any, columns: Array, axes: tuple[int, ...], options: Options) -> Any:
        """Scales a leaf, including all summands of an element above the threshold in a `BCOO`."""
        if not is_sparse(leaf) or leaf.unique_indices:
            return super().apply(leaf, columns, axes, options)
        power, ratio, threshold = columns  # [groups of the leaf]
        is_at_most = jnp.abs(coalesce_values(leaf, threshold.dtype)[0]) <= threshold
        # [3, stored], with a threshold of infinity for unchanged values
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

    Let `v` be the moving average of the squares of an element `g` before this step. If
    `|g|**2 > threshold * v`, the modulus of the element becomes `sqrt(threshold * v)`, and `v` is
    updated with the clipped element. NaN is returned unchanged and infinite elements become their
    bounds.

    In SPAM, an element that was always zero stays at zero until the next reset, for example in the
    embedding of a token that has not occurred yet. Here, elements with `v = 0` are unchanged, and
    non-finite elements are never included in `v`. As in the paper, `v` is not debiased, so clipping
    is stricter in the first steps.

    Squares can exceed the range of float32. If elements stay below about
    `1e-19 / sqrt(1 - decay)`, `v` is 0 and even spikes are not clipped. Elements above 1.3e19 are
    included in `v` as 1.3e19. No bound is therefore above `1.3e19 * sqrt(threshold)`, and larger
    elements are clipped at all steps after the warmup. For 64-bit leaves, the range is that of
    float64.

    Source: Huang et al., 2025, SPAM, arXiv 2501.06842.

    Args:
      threshold: The maximum ratio of the square of an element to its second moment.
      decay: The decay of the second moment. Use the `b2` of the subsequent Adam.
      warmup_steps: The number of steps without clipping at the start and after resets. Non-finite
        steps are included.
      reset_every: The number of steps after which `v` is reset to zero. SPAM resets it every 500
        steps together with the moments of Adam. By default, it is never reset. It must be static in
        `optax.inject_hyperparams`.
      name: The name in messages.

    Returns:
      A transformation with a `SecondMomentState`, which contains one array per leaf. The update
      returns a tree with the shapes, dtypes and weak types of the gradients. Like `clip`, it does
      not record which elements were clipped.

    Raises:
      ValueError: If an option is out of its range. Also raised by `update` for leaves that the
        parameters at `init` did not have.
      TypeError: If an option is not a number. `init` and the update raise it for sparse
        leaves.

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
        # Leaves that were None at `init` have no average.
        unknown = sorted(set(flat.names()) - set(old.names))
        if unknown:
            raise ValueError(
                f"{name}: the updates must have leaves of the params passed to init, got the other "
                f"leaves {unknown}; use a fresh state"
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
        step = count % period  # the steps since the last reset
        moments = [jnp.where(step == 0, 0, v) for v in moments]
    # bool[]
    is_active = step >= settings.warmup_steps
    rows = zip(leaves, moments, strict=True)
    pairs = [
        _clip_and_update_leaf(*row, settings.threshold, settings.decay, is_active) for row in rows
    ]
    clipped, moments = ([pair[k] for pair in pairs] for k in range(2))
    return clipped, safe_increment(count, period=period or 1), moments


# Jitted so that leaves with equal shapes and dtypes share one trace.
@jax.jit
def _clip_and_update_leaf(
    leaf: Any, moment: Array, threshold: Any, decay: Any, is_active: Array
) -> tuple[Any, Array]:
    """Clips a leaf by its second moment and returns the new moment."""
    # The bound of the elements, [*leaf]
    threshold = jnp.asarray(threshold).astype(moment.dtype)
    is_finite = lax.ne(threshold, threshold.dtype.type(jnp.inf))
    # An infinite threshold is replaced by 1, because a product with infinity would have the
    # derivative NaN. A negative threshold is treated as 0.
    scale = safe_sqrt(lax.max(select(is_finite, threshold, 1), threshold.dtype.type(0)))
    is_positive, root = sqrt_where_positive(moment)
    is_bounded = lax.bitwise_and(is_positive, lax.bitwise_and(is_active, is_finite))
    clipped = clamp_leaf(leaf, None, select(is_bounded, multiply(root, scale), jnp.inf))
    # The new moment includes the squares of the clipped elements if the given ones are finite.
    square = norms.l2.map(cast_elements(jnp.asarray(clipped), moment.dtype))
    # Squares are at most half of the largest number. For a decay of 1/2, XLA on GPUs adds both
    # numbers before the multiplication, and the sum must be finite (as of JAX 0.10.2).
    square = lax.min(square, jnp.finfo(moment.dtype).max / 2)
    decay = jnp.asarray(decay).astype(moment.dtype)
    new = lax.add(multiply(moment, decay), multiply(square, 1 - decay))
    return clipped, lax.select(jnp.isfinite(leaf), new, moment)

"""Transformations that clip individual elements: `clip` and `clip_by_value`."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.core import Tracer

import optaxclip._base.numerics as numerics
import optaxclip._base.trees as trees
from optaxclip._backend.elementwise import coalesce_values, valid_mask
from optaxclip._backend.global_view import Transformation, global_view, stateless, transformation
from optaxclip._base.state import check_state, register_state, safe_increment
from optaxclip._base.types import ArrayLike, PyTree
from optaxclip._base.validation import check_bool, short_repr, validate_call
from optaxclip.thresholds._constant import ScalarOrSchedule, needs_state_message
from optaxclip.thresholds._rule import check_schedule, check_threshold_value


@register_state
class ClipByValueState(NamedTuple):
    """State of elementwise clipping.

    Attributes:
      steps: int32[], the number of steps.
    """

    NEEDS_OPTIMIZER = True

    steps: Array


@validate_call(
    transformation=True,
    one_shot_call="ops.clip_by_value(grads, -1.0, 1.0)",
    too_many_hint=", or use clip_by_value(min_value, max_value) for two bounds",
)
def clip(max_delta: ScalarOrSchedule, *, record: bool = True) -> Transformation[ClipByValueState]:
    """Clips elements to `[-max_delta, max_delta]`.

    Complex elements are scaled down to an absolute value of at most `max_delta`. NaN is unchanged,
    and infinite elements become the bounds.

    Args:
      max_delta: The maximum absolute value, which can be a schedule.
      record: If True, the state counts the steps. If False, the state is an `optax.EmptyState`, any
        state is accepted and returned unchanged, and schedules are not supported.

    Returns:
      A transformation with a `ClipByValueState`. The state does not contain which elements were
      clipped, because computing this would take longer than clipping.

    Raises:
      ValueError: If `max_delta` is negative, NaN, or not a scalar, or if it is a schedule and
        `record` is False.
      TypeError: If `max_delta` is not a number.

    Example:
      >>> import jax.numpy as jnp, optaxclip
      >>> tx = optaxclip.clip(2.0)
      >>> grads = jnp.array([jnp.nan, jnp.inf, -jnp.inf, 3.0, 1.0])
      >>> print(tx.update(grads, tx.init(grads))[0])
      [nan  2. -2.  2.  1.]
    """
    if callable(max_delta):
        check_schedule(max_delta, "max_delta", any_shape=True)
    else:
        max_delta = check_threshold_value(
            max_delta, "max_delta", disabled_value="math.inf", schedule=True
        )
    return _clip_by_bounds(None, max_delta, ("max_delta", "max_delta"), record)


@validate_call(transformation=True, one_shot_call="ops.clip_by_value(grads, -1.0, 1.0)")
def clip_by_value(
    min_value: ScalarOrSchedule, max_value: ScalarOrSchedule, *, record: bool = True
) -> Transformation[ClipByValueState]:
    """Clips elements to `[min_value, max_value]`.

    Complex elements are scaled down to an absolute value of at most `max_value`. NaN is unchanged,
    and infinite elements become the bounds.

    Args:
      min_value: A scalar, an array that broadcasts to all leaves, or a schedule.
      max_value: A scalar, an array that broadcasts to all leaves, or a schedule.
      record: If False, the state does not count the steps, as in `clip`.

    Returns:
      A transformation with a `ClipByValueState`.

    Raises:
      ValueError: If a minimum exceeds its maximum (unless traced), if a bound does not broadcast to
        the shape of a leaf, or if a bound is a schedule and `record` is False.
      TypeError: If a bound is not a number.

    Example:
      >>> import jax.numpy as jnp, optaxclip
      >>> tx = optaxclip.clip_by_value(-1.0, 4.0)
      >>> grads = jnp.array([-3.0, 2.0, 6.0])
      >>> print(tx.update(grads, tx.init(grads))[0])
      [-1.  2.  4.]
    """
    bounds = (("min_value", min_value), ("max_value", max_value))
    for argument, bound in bounds:
        if callable(bound):
            check_schedule(bound, argument, any_shape=True)
        else:
            check_bound(bound, argument)
    if not callable(min_value) and not callable(max_value):
        check_order(min_value, max_value, ("min_value", "max_value"))
    return _clip_by_bounds(min_value, max_value, ("min_value", "max_value"), record)


def _clip_by_bounds(
    low: ScalarOrSchedule | None, high: ScalarOrSchedule, arguments: tuple[str, str], record: bool
) -> Transformation[ClipByValueState]:
    name = "clip" if low is None else "clip_by_value"
    bounds: tuple[Any, Any] = (low, high)
    is_scheduled = callable(low) or callable(high)
    if not check_bool(record, "record"):
        if is_scheduled:
            raise ValueError(needs_state_message(name))
        return stateless(
            lambda grads, *_, **__: clamp(trees.flatten(grads, "updates"), *bounds, arguments)
        )

    def init(params: PyTree) -> ClipByValueState:
        trees.flatten(params, "params")
        return ClipByValueState(jnp.zeros((), jnp.int32))

    def update(
        updates: PyTree, state: Any, params: PyTree | None = None, **extra_args: Any
    ) -> tuple[PyTree, ClipByValueState]:
        del params, extra_args
        # Without a schedule, the step count is not needed and None can be used as a state.
        is_fresh = state is None and not is_scheduled
        state = ClipByValueState(jnp.zeros((), jnp.int32)) if is_fresh else state
        check_state(state, ClipByValueState, name, updates=updates)
        lowest, highest = (
            check_bound(bound(state.steps), "the schedule's value") if callable(bound) else bound
            for bound in bounds
        )
        clipped = clamp(trees.flatten(updates, "updates"), lowest, highest, arguments)
        return clipped, ClipByValueState(safe_increment(state.steps))

    return transformation(init, update)


def clamp(
    flat: trees.FlatTree, low: ArrayLike | None, high: ArrayLike, arguments: tuple[str, str]
) -> PyTree:
    """Clips elements to `[low, high]`, or to `[-high, high]` if `low` is None.

    If `low` exceeds `high`, elements become `low`. If `low` is None, negative `high` act as 0. For
    `BCOO` leaves, stored values with equal indices are added before clipping. Messages use the
    names `arguments` for the bounds.
    """
    leaves = flat.inexact_leaves()
    for bound, argument in zip((low, high), arguments, strict=True):
        if bound is None or not np.shape(bound):
            continue
        for leaf, name in zip(leaves, flat.names(), strict=True):
            shape = np.shape(trees.get_stored_values(leaf))
            try:
                fits = np.broadcast_shapes(np.shape(bound), shape) == shape
            except ValueError:
                fits = False
            if not fits:
                raise ValueError(
                    f"{argument} must be broadcastable to the shape {shape} of leaf '{name}', got "
                    f"shape {np.shape(bound)}; pass a scalar"
                )
    # Use one bound per dtype instead of per leaf, because operands of compiled calls take time.
    dtypes = set(map(_canonical, {trees.dtype_of(leaf) for leaf in leaves}))
    lows, highs = (
        {str(dtype): None if x is None else _clip_bound_to_dtype(x, dtype) for dtype in dtypes}
        for x in (low, high)
    )
    return flat.unflatten(_clamp_by_dtype(leaves, lows, highs))


def check_bound(bound: Any, argument: str) -> Any:
    """Checks that `bound` is a real number or a real array and returns it."""
    if not numerics.is_real(bound):
        raise TypeError(
            f"{argument} must be a number or an array, got {short_repr(bound)} of type "
            f"{type(bound).__name__}"
        )
    return bound


def check_order(low: Any, high: Any, names: tuple[str, str]) -> None:
    """Checks that no minimum exceeds its maximum and that no bound is NaN, unless traced."""
    if any(isinstance(bound, Tracer) for bound in (low, high)):
        return
    if not np.all(np.asarray(low) <= np.asarray(high)):
        raise ValueError(f"{names[0]} must be at most {names[1]}, got {low!r} and {high!r}")


def _clip_bound_to_dtype(bound: Any, dtype: Any) -> Any:
    """Converts a bound so that JAX can cast it to the dtype without errors or overflow."""
    if jnp.issubdtype(dtype, jnp.integer):
        low, high = int(jnp.iinfo(dtype).min), int(jnp.iinfo(dtype).max)
        if isinstance(bound, int):
            return np.asarray(min(max(bound, low), high), dtype)
        # Clip the bound in its dtype, which may have a smaller or a larger range.
        own = jnp.iinfo(bound.dtype)
        low, high = (bound.dtype.type(min(max(x, own.min), own.max)) for x in (low, high))
        library = jnp if isinstance(bound, jax.Array) else np
        return library.minimum(library.maximum(bound, low), high).astype(dtype)
    if isinstance(bound, (int, float)):
        # NumPy would warn about numbers that exceed the default float dtype.
        is_large = abs(bound) > float(jnp.finfo(jnp.result_type(float)).max)
        return math.copysign(math.inf, bound > 0 or -1) if is_large else float(bound)
    # JAX would truncate 64-bit integers to 32 bits (as of JAX 0.10.2).
    is_numpy = isinstance(bound, (np.ndarray, np.generic))
    return bound.astype(float) if is_numpy and bound.dtype.kind in "iu" else bound


# Without 64-bit mode, JAX converts NumPy's float64 to float32.
_canonical = jax.dtypes.canonicalize_dtype


@global_view(out_like="leaves")
def _clamp_by_dtype(leaves: list[Any], lows: dict[str, Any], highs: dict[str, Any]) -> list[Any]:
    pairs = [(leaf, str(_canonical(trees.dtype_of(leaf)))) for leaf in leaves]
    return [_clamp_leaf_jitted(leaf, lows[dtype], highs[dtype]) for leaf, dtype in pairs]


def clamp_leaf(leaf: Any, low: Array | None, high: Array) -> Any:
    """Clips a leaf to bounds that broadcast to its elements."""
    x = jnp.asarray(trees.get_stored_values(leaf))
    if not trees.is_sparse(leaf) or leaf.unique_indices:
        return trees.replace_values(leaf, numerics.match_weak_type(_clamp_array(x, low, high), x))
    is_exact = jnp.issubdtype(x.dtype, jnp.integer)
    dtype = x.dtype if is_exact else numerics.accumulation_dtype(x.dtype)
    sums, is_first = coalesce_values(leaf, dtype)
    # [stored], the sum of all values with the same index
    element = sums if is_exact else numerics.saturating_cast(sums, x.dtype)
    bounded = _clamp_array(element, low, high)
    # The first value of a clipped element becomes the bound, and its other values become 0.
    changed = jnp.where(is_first, bounded, jnp.zeros_like(x))
    is_kept = (bounded == element) | ~valid_mask(leaf)
    return trees.replace_values(leaf, numerics.match_weak_type(jnp.where(is_kept, x, changed), x))


# Jitted so that leaves with equal shapes and dtypes share one trace.
_clamp_leaf_jitted = jax.jit(clamp_leaf)


def _clamp_array(x: Array, low: Array | None, high: Array) -> Array:
    largest = _cast_bound(x, high)
    if low is None:
        # Schedules can return negative numbers, which would swap the bounds.
        largest = lax.max(largest, jnp.zeros_like(largest))
    if jnp.iscomplexobj(x):
        return _clip_complex(x, largest)
    smallest = lax.neg(largest) if low is None else _cast_bound(x, low)
    # Elements equal to a bound have the derivative 1. A NaN in a bound is propagated.
    # `lax` functions are faster to trace than operators such as `x > largest` (as of JAX 0.10.2).
    y = lax.select(lax.bitwise_or(lax.gt(x, largest), lax.ne(largest, largest)), largest, x)
    return lax.select(lax.bitwise_or(lax.lt(y, smallest), lax.ne(smallest, smallest)), smallest, y)


def _cast_bound(x: Array, bound: ArrayLike) -> Array:
    """Casts a bound to the shape and the real dtype of an array, and clips it to its range."""
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        return jnp.broadcast_to(bound, x.shape)
    bound, dtype = jnp.asarray(bound), jnp.finfo(x.dtype).dtype
    # Cast integers to float32 or wider first, because a low-precision dtype may not represent them.
    if not jnp.issubdtype(bound.dtype, jnp.floating):
        bound = bound.astype(numerics.accumulation_dtype(dtype))
    return jnp.broadcast_to(numerics.saturating_cast(bound, dtype), x.shape)


def _clip_complex(z: Array, high: Array) -> Array:
    """Scales complex elements down to absolute values of at most `high`."""
    high = jnp.maximum(high, 0)
    is_infinite = jnp.isinf(z.real) | jnp.isinf(z.imag)
    # Divide by a power of two, because absolute values of finite elements may overflow.
    unit = lax.stop_gradient(numerics.floor_pow2(jnp.maximum(jnp.abs(z.real), jnp.abs(z.imag))))

    def scale_part(part: Array) -> Array:
        # The infinite parts determine the phase of an infinite element.
        sign = jnp.where(jnp.isinf(part), jnp.sign(part), 0)
        return jnp.where(is_infinite, sign, numerics.divide_by_pow2(part, unit))

    direction = lax.complex(scale_part(z.real), scale_part(z.imag))
    # [*leaf], from 1 to 2 * sqrt(2) for finite nonzero elements
    size = jnp.abs(jnp.where(direction == 0, 1, direction))
    keep = (direction == 0) | ((size <= numerics.divide_by_pow2(high, unit)) & ~is_infinite)
    by = high / size
    return jnp.where(keep, z, lax.complex(direction.real * by, direction.imag * by))

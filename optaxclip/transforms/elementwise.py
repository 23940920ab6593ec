"""Transformations that clip each entry by its own value."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.core import Tracer

from optaxclip._backend.elementwise import stored_as_entries, valid_mask
from optaxclip._backend.global_view import Transformation, global_view, stateless, transformation
from optaxclip._base.numerics import (
    accumulation_dtype,
    divide_by_pow2,
    floor_pow2,
    is_real,
    match_weak_type,
    saturating_cast,
)
from optaxclip._base.state import check_state, register_state, safe_increment
from optaxclip._base.trees import (
    FlatTree,
    dtype_of,
    flatten,
    get_stored_values,
    is_sparse,
    replace_values,
)
from optaxclip._base.types import ArrayLike, PyTree
from optaxclip._base.validation import check_bool, short_repr, validate_call
from optaxclip.thresholds.constant import ScalarOrSchedule, needs_state_message
from optaxclip.thresholds.rule import check_schedule, check_threshold_value


@register_state
class ClipByValueState(NamedTuple):
    """State of elementwise clipping.

    Attributes:
      steps: int32[], steps so far.
    """

    NEEDS_OPTIMIZER = True

    steps: Array


@validate_call(
    transformation=True,
    one_shot_call="ops.clip_by_value(grads, -1.0, 1.0)",
    too_many_hint=", or use clip_by_value(min_value, max_value) for two bounds",
)
def clip(max_delta: ScalarOrSchedule, *, record: bool = True) -> Transformation[ClipByValueState]:
    """Clips each entry to `[-max_delta, max_delta]`, a complex one to the modulus `max_delta`.

    NaN stays NaN, and infinite entries become the bounds.

    Args:
      max_delta: the largest absolute value, or a schedule of it.
      record: whether the state counts the steps. With False the state is an `optax.EmptyState`, and
        any state is accepted and returned as it is. A schedule needs the step count, so
        `record=False` is an error with it.

    Returns:
      A transformation with a `ClipByValueState`. It does not record what was clipped, because that
      would read the gradients more often than the clip does.

    Raises:
      ValueError: if `max_delta` is negative, NaN or not a scalar, or is a schedule while `record`
        is False.
      TypeError: if it is not a number.

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
    """Clips each entry to `[min_value, max_value]`, a complex one to the modulus `max_value`.

    NaN stays NaN, and infinite entries become the bounds.

    Args:
      min_value: a scalar, an array that broadcasts to every leaf, or a schedule of one of these.
      max_value: as `min_value`.
      record: as in `clip`.

    Returns:
      A transformation with a `ClipByValueState`, which counts only the steps.

    Raises:
      ValueError: if a minimum exceeds its maximum (traced values are not compared), if a bound does
        not broadcast to the shape of a leaf, or if one is a schedule while `record` is False.
      TypeError: if a bound is not a number.

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

    def update_fn(updates: PyTree, smallest: Any, largest: Any) -> PyTree:
        return clamp(flatten(updates, "updates"), smallest, largest, arguments)

    is_scheduled = callable(low) or callable(high)
    if not check_bool(record, "record"):
        if is_scheduled:
            raise ValueError(needs_state_message(name))
        return stateless(lambda updates, *_, **__: update_fn(updates, low, high))

    def init(params: PyTree) -> ClipByValueState:
        flatten(params, "params")
        return ClipByValueState(jnp.zeros((), jnp.int32))

    def update(
        updates: PyTree, state: Any, params: PyTree | None = None, **extra_args: Any
    ) -> tuple[PyTree, ClipByValueState]:
        del params, extra_args
        is_fresh = state is None and not is_scheduled
        state = ClipByValueState(jnp.zeros((), jnp.int32)) if is_fresh else state
        check_state(state, ClipByValueState, name, updates=updates)
        smallest, largest = (_evaluate_bound(bound, state.steps) for bound in (low, high))
        return update_fn(updates, smallest, largest), ClipByValueState(safe_increment(state.steps))

    return transformation(init, update)


def _evaluate_bound(bound: ScalarOrSchedule | None, steps: Array) -> Any:
    """A bound, or the value of a schedule, checked."""
    if not callable(bound):
        return bound
    return check_bound(bound(steps), "the schedule's value")


def clamp(
    flat: FlatTree, low: ArrayLike | None, high: ArrayLike, arguments: tuple[str, str]
) -> PyTree:
    """The tree with real entries clipped to `[low, high]`, complex ones to the modulus `high`.

    NaN stays NaN; infinite entries become the bounds. If `low` is above `high`, entries become
    `low`; if it is None, it is `-high`, and a negative `high` acts as 0. Bounds broadcast to every
    leaf. Of `BCOO` leaves the stored entries are clipped, after values with the same index were
    added. Messages call the bounds by `arguments`.
    """
    leaves = flat.inexact_leaves()
    for bound, argument in zip((low, high), arguments, strict=True):
        if bound is not None and np.shape(bound):
            _check_broadcastable(bound, argument, flat)
    # One bound for each dtype, not for each leaf: each operand of a compiled call takes time.
    dtypes = set(map(_canonical, {dtype_of(leaf) for leaf in leaves}))
    highs = {str(dtype): _clip_bound_to_dtype(high, dtype) for dtype in dtypes}
    lows = (
        None if low is None else {str(dtype): _clip_bound_to_dtype(low, dtype) for dtype in dtypes}
    )
    return flat.unflatten(_clamp_by_dtype(leaves, lows, highs))


def check_bound(bound: Any, argument: str) -> Any:
    """`bound`, checked to be a real number or an array of these."""
    if not is_real(bound):
        raise TypeError(
            f"{argument} must be a number or an array, got {short_repr(bound)} of type "
            f"{type(bound).__name__}"
        )
    return bound


def check_order(low: Any, high: Any, names: tuple[str, str]) -> None:
    """Checks that no minimum exceeds its maximum and no bound is NaN; skips traced bounds."""
    if any(isinstance(bound, Tracer) for bound in (low, high)):
        return
    if not np.all(np.asarray(low) <= np.asarray(high)):
        raise ValueError(f"{names[0]} must be at most {names[1]}, got {low!r} and {high!r}")


def _check_broadcastable(bound: ArrayLike, argument: str, flat: FlatTree) -> None:
    for leaf, name in zip(flat.inexact_leaves(), flat.names(), strict=True):
        shape = np.shape(get_stored_values(leaf))
        try:
            fits = np.broadcast_shapes(np.shape(bound), shape) == shape
        except ValueError:
            fits = False
        if not fits:
            raise ValueError(
                f"{argument} of shape {np.shape(bound)} does not broadcast to leaf '{name}' of "
                f"shape {shape}"
            )


def _clip_bound_to_dtype(bound: ArrayLike, dtype: Any) -> ArrayLike:
    """A bound that JAX can convert to a leaf's dtype without an error, a warning or wrapping."""
    if jnp.issubdtype(dtype, jnp.integer):
        return _integer_in_range(bound, dtype)
    if isinstance(bound, (int, float)):
        # A number too large for the default float dtype becomes infinite; NumPy would warn of it.
        is_large = abs(bound) > float(jnp.finfo(jnp.result_type(float)).max)
        return math.copysign(math.inf, bound > 0 or -1) if is_large else float(bound)
    # JAX would cut 64-bit integers to 32 bits.
    is_numpy = isinstance(bound, (np.ndarray, np.generic))
    return bound.astype(float) if is_numpy and bound.dtype.kind in "iu" else bound


def _integer_in_range(bound: Any, dtype: Any) -> ArrayLike:
    """An integer bound in the dtype of an integer leaf, clipped to the range of that dtype."""
    low, high = int(jnp.iinfo(dtype).min), int(jnp.iinfo(dtype).max)
    if isinstance(bound, int):
        return np.asarray(min(max(bound, low), high), dtype)
    # Clipped in the bound's own dtype, whose range may be smaller or larger than the leaf's.
    own = jnp.iinfo(bound.dtype)
    low, high = (bound.dtype.type(min(max(x, own.min), own.max)) for x in (low, high))
    library = jnp if isinstance(bound, jax.Array) else np
    return library.minimum(library.maximum(bound, low), high).astype(dtype)


# JAX turns NumPy's float64 into float32.
_canonical = jax.dtypes.canonicalize_dtype


@global_view(out_like="leaves")
def _clamp_by_dtype(
    leaves: list[Any], lows: dict[str, Any] | None, highs: dict[str, Any]
) -> list[Any]:
    """`clamp` for leaves with a bound for each dtype."""
    names = [str(_canonical(dtype_of(leaf))) for leaf in leaves]
    lows_of_leaves = [None if lows is None else lows[name] for name in names]
    rows = zip(leaves, lows_of_leaves, (highs[name] for name in names), strict=True)
    return [_clamped(*row) for row in rows]


def clamp_leaf(leaf: Any, low: Array | None, high: Array) -> Any:
    """`clamp` for a leaf with its own bounds, which broadcast to its entries."""
    x = jnp.asarray(get_stored_values(leaf))
    if not is_sparse(leaf) or leaf.unique_indices:
        return replace_values(leaf, match_weak_type(_clamp_array(x, low, high), x))
    is_exact = jnp.issubdtype(x.dtype, jnp.integer)
    sums, is_first = stored_as_entries(leaf, x.dtype if is_exact else accumulation_dtype(x.dtype))
    entry = sums if is_exact else saturating_cast(sums, x.dtype)
    bounded = _clamp_array(entry, low, high)
    # The first summand of an entry beyond its bounds becomes the bound, and the others 0.
    changed = jnp.where(is_first, bounded, jnp.zeros_like(x))
    is_kept = (bounded == entry) | ~valid_mask(leaf)
    return replace_values(leaf, match_weak_type(jnp.where(is_kept, x, changed), x))


# A compiled function of its own, so that it is traced once for leaves that are alike.
_clamped = jax.jit(clamp_leaf)


def _clamp_array(x: Array, low: Array | None, high: Array) -> Array:
    largest = _cast_bound(x, high)
    if low is None:
        largest = lax.max(largest, jnp.zeros_like(largest))
    if jnp.iscomplexobj(x):
        return _bound_modulus(x, largest)
    smallest = lax.neg(largest) if low is None else _cast_bound(x, low)
    # An entry at a bound keeps the derivative 1. If a bound is NaN, the entry becomes NaN.
    # Operators such as `x > largest` would be nested calls, which take longer to trace.
    y = lax.select(lax.bitwise_or(lax.gt(x, largest), lax.ne(largest, largest)), largest, x)
    return lax.select(lax.bitwise_or(lax.lt(y, smallest), lax.ne(smallest, smallest)), smallest, y)


def _cast_bound(x: Array, bound: ArrayLike) -> Array:
    """A bound in the shape of an array and the dtype of its real part, and within its range."""
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        return jnp.broadcast_to(bound, x.shape)
    bound, dtype = jnp.asarray(bound), jnp.finfo(x.dtype).dtype
    if not jnp.issubdtype(bound.dtype, jnp.floating):
        bound = bound.astype(accumulation_dtype(dtype))
    return jnp.broadcast_to(saturating_cast(bound, dtype), x.shape)


def _bound_modulus(z: Array, high: Array) -> Array:
    """Complex entries with moduli of at most `high` and the same phases."""
    high = jnp.maximum(high, 0)
    is_infinite = jnp.isinf(z.real) | jnp.isinf(z.imag)
    # Entries are divided by a power of two near them: the modulus of a finite entry may overflow.
    top = jnp.maximum(jnp.abs(z.real), jnp.abs(z.imag))
    unit = lax.stop_gradient(floor_pow2(top))

    def toward(part: Array) -> Array:
        return jnp.where(
            is_infinite, jnp.where(jnp.isinf(part), jnp.sign(part), 0), divide_by_pow2(part, unit)
        )

    direction = lax.complex(toward(z.real), toward(z.imag))
    size = jnp.abs(jnp.where(direction == 0, 1, direction))
    keep = (direction == 0) | ((size <= divide_by_pow2(high, unit)) & ~is_infinite)
    by = high / size
    return jnp.where(keep, z, lax.complex(direction.real * by, direction.imag * by))

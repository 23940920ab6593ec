"""Dynamic loss scaling for gradients in float16 or fp8: `scale_loss`.

The scale is a power of two, so dividing gradients by it does not cause rounding errors. The result
is float32, because float16 could underflow.
"""

import functools
import math
from typing import Any, NamedTuple, Unpack

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jax.core import Tracer

import optaxclip._base.numerics as numerics
from optaxclip._backend.elementwise import scale_by_real
from optaxclip._backend.global_view import (
    Transformation,
    global_view,
    put_on_device,
    transformation,
)
from optaxclip._base.state import check_state, register_state, safe_increment
from optaxclip._base.trees import dtype_of, flatten, get_stored_values, is_sparse, replace_values
from optaxclip._base.types import ClipInfo, PyTree
from optaxclip._base.validation import check_int_or_scalar, short_repr, validate_call
from optaxclip._engine.options import Options, ShardingOptions, document_options
from optaxclip.transforms.skip import SkipState, check_inner, skip_wrapper


@register_state
class LossScaleState(NamedTuple):
    """State of `scale_loss`.

    Attributes:
      loss_scale: float32[], the scale for the next loss, a power of two.
      good_steps: int32[], the number of steps with finite gradients since the scale changed or a
        step was skipped.
      skip: The `SkipState` of the wrapped optimizer.
    """

    loss_scale: Array
    good_steps: Array
    skip: SkipState

    @property
    def info(self) -> ClipInfo:
        """The record of the most recent step. Its `norm` is the norm of the unscaled gradients."""
        return self.skip.info


class _ScaleConfig(NamedTuple):
    growth_interval: Any
    factor: Any
    minimum: Any
    maximum: Any


@validate_call(transformation=True)
@document_options(ShardingOptions)
def scale_loss(
    inner: optax.GradientTransformation,
    *,
    initial: float | Array = 2.0**15,
    growth_interval: int | Array = 2000,
    factor: float | Array = 2.0,
    minimum: float | Array = 1.0,
    maximum: float | Array = 2.0**24,
    **options: Unpack[ShardingOptions],
) -> Transformation[LossScaleState]:
    """Prevents underflow and overflow of float16 and fp8 gradients with dynamic loss scaling.

    In the training step, multiply the loss by `optaxclip.monitor.loss_scale(opt_state)`. The
    transformation divides the gradients by this scale before it passes them to `inner`. If a
    gradient is non-finite, the step is skipped as in `skip_nonfinite`, and the scale is divided by
    `factor`. After `growth_interval` consecutive steps without a skip, the scale is multiplied by
    `factor`.

    `scale_loss` must be the outermost wrapper. Clipping before it would use scaled gradients, and
    `optax.MultiSteps` or another skip wrapper around it would prevent the scale from decreasing. If
    `MultiSteps` is inside, each microbatch is a step. If you use `accumulate.value_and_grad`, set
    `reject_rule=None`, because overflows must not be ignored, and do not use its `clip`, because
    the gradients are scaled.

    The scale changes as in jmp's `DynamicLossScale`, which has no `maximum`. In Flax's
    `DynamicScale`, it grows one step later.

    Source: Micikevicius et al., 2018, Mixed Precision Training, arXiv 1710.03740.

    Args:
      inner: The optimizer, including its clipping stages.
      initial: The initial scale. `optaxclip.monitor.dtype_fit` can find a scale from float32
        gradients, and layers that do not fit the format at any scale.
      growth_interval: The number of consecutive steps without a skip after which the scale grows.
      factor: The number by which the scale is multiplied or divided.
      minimum: The minimum scale. Steps that are still non-finite at this scale are skipped, and
        `optaxclip.monitor.step_status` then returns "roll back".
      maximum: The maximum scale.
      **options: Options that can be used with any transformation. See `optaxclip.ShardingOptions`.

    Returns:
      A transformation with a `LossScaleState`. `inner` receives float32 instead of float16 and fp8
      gradients and parameters. Updates are rounded to the float16 or fp8 formats of their
      parameters if you pass `params`, and are returned in float32 otherwise. Other dtypes do not
      change. A skipped step returns zero updates. Extra arguments are passed to `inner`, so they
      must contain unscaled losses and norms.

    Raises:
      ValueError: If `initial`, `factor`, `minimum`, or `maximum` is not a power of two from 2**-126
        to 2**126, if `factor` is not above 1, if `initial` is not between `minimum` and `maximum`,
        or if `growth_interval` is less than 1.
      TypeError: If one of these is not a number, or if `inner` is not a transformation.

    Example:
      >>> import jax, jax.numpy as jnp, optax, optaxclip
      >>> from optaxclip import monitor
      >>> tx = optaxclip.scale_loss(optax.sgd(1.0), initial=2.0**16)
      >>> def loss_fn(params, scale):
      ...     loss = jnp.mean((params.astype(jnp.float16) * jnp.float16(1e-4)) ** 2)
      ...     return loss.astype(jnp.float32) * scale
      >>> params = jnp.ones(4)
      >>> state = tx.init(params)
      >>> for _ in range(2):
      ...     grads = jax.grad(loss_fn)(params, monitor.loss_scale(state))
      ...     updates, state = tx.update(grads, state, params)
      ...     print(updates[0], monitor.loss_scale(state), monitor.step_was_applied(state))
      0.0 32768.0 False
      -5.00e-09 32768.0 True

      In float16, the scale 2**16 is infinite. Without a scale, the gradient 5e-9 would be 0.
    """
    checked = Options.create(**options)
    initial = _check_pow2(initial, "initial")
    numbers = _ScaleConfig(
        growth_interval=check_int_or_scalar(growth_interval, "growth_interval"),
        factor=_check_pow2(factor, "factor"),
        minimum=_check_pow2(minimum, "minimum"),
        maximum=_check_pow2(maximum, "maximum"),
    )
    _check_order(initial, numbers)
    skip = skip_wrapper(check_inner(inner), math.inf, None, options=checked)

    def init(params: PyTree) -> LossScaleState:
        skip_state = skip.init(_upcast_params(put_on_device(params)))
        return LossScaleState(jnp.array(initial, jnp.float32), jnp.zeros((), jnp.int32), skip_state)

    def update(
        updates: PyTree, state: Any, params: PyTree | None = None, **extra_args: Any
    ) -> tuple[PyTree, LossScaleState]:
        check_state(state, LossScaleState, checked.name, _MIGRATION_HINT, updates=updates)
        flat, scale = flatten(updates, "updates"), round_to_pow2(state.loss_scale)
        grads = flat.unflatten(_unscale(flat.inexact_leaves(), scale))
        new, skip_state = skip.update(grads, state.skip, _upcast_params(params), **extra_args)
        # The factor is 0 if the step was skipped.
        is_good = skip_state.info.factor > 0
        loss_scale, good_steps = _next_scale(numbers, scale, state.good_steps, is_good)
        # A trainer may have cast the state to a narrower dtype.
        loss_scale = numerics.saturating_cast(loss_scale, jnp.result_type(state.loss_scale))
        return _round_updates(new, params), LossScaleState(loss_scale, good_steps, skip_state)

    return transformation(init, update)


_MIGRATION_HINT = (
    "To continue a run without a loss scale, insert the old state into a new state: new = "
    "tx.init(params); opt_state = new._replace(skip=new.skip._replace(inner_state=old_opt_state))"
)


def round_to_pow2(loss_scale: Array) -> Array:
    """Rounds a scale to a float32 power of two. Scales that are 0 or non-finite become 1."""
    # Other code may set the scale.
    return numerics.floor_pow2(jnp.asarray(loss_scale).astype(jnp.float32))


@global_view()
def _next_scale(
    numbers: _ScaleConfig, scale: Array, good_steps: Array, is_good: Array
) -> tuple[Array, Array]:
    """Returns the next scale and the number of good steps since its last change."""
    # All arrays are [].
    interval, *powers = numbers
    factor, minimum, maximum = (jnp.asarray(x, jnp.float32) for x in powers)
    good_steps = jnp.where(is_good, safe_increment(good_steps), 0)
    grows = good_steps >= interval
    by = jnp.where(grows, factor, jnp.where(is_good, 1, numerics.reciprocal_pow2(factor)))
    return jnp.clip(scale * by, minimum, maximum), jnp.where(grows, 0, good_steps)


@global_view(out_like="leaves")
def _unscale(leaves: list[Any], scale: Array) -> list[Any]:
    """Divides the leaves by the scale in float32 or wider."""
    inverse = numerics.reciprocal_pow2(scale)  # exact, because the scale is a power of two
    return [
        replace_values(leaf, _product(jnp.asarray(get_stored_values(leaf)), inverse))
        for leaf in leaves
    ]


# Jitted so that leaves with equal shapes and dtypes share one trace.
@jax.jit
def _product(x: Array, by: Array) -> Array:
    wide = _upcast_aval(x)
    product = scale_by_real(wide, by.astype(jnp.finfo(wide.dtype).dtype))
    return numerics.match_weak_type(product, wide)


@functools.cache
def _is_narrow(dtype: Any) -> bool:
    if dtype is None or not jnp.issubdtype(dtype, jnp.inexact):
        return False
    # bfloat16 has the exponents of float32, unlike float16 and the fp8 formats.
    return jnp.finfo(dtype).minexp > jnp.finfo(jnp.float32).minexp


def _upcast_aval(x: Any) -> Any:
    """Casts arrays and `ShapeDtypeStruct`s in formats with a smaller range to float32."""
    if not _is_narrow(dtype_of(x)):
        return x
    if isinstance(x, jax.ShapeDtypeStruct):
        return x.update(dtype=jnp.float32)
    return jnp.asarray(x).astype(jnp.float32)


def _upcast_params(params: PyTree) -> PyTree:
    return jax.tree.map(
        lambda x: replace_values(x, _upcast_aval(get_stored_values(x))), params, is_leaf=is_sparse
    )


def _round_updates(updates: PyTree, params: PyTree) -> PyTree:
    """Rounds updates to the formats of parameters that have a smaller range than float32."""
    dtypes = [dtype_of(x) for x in jax.tree.leaves(params)]
    if not any(map(_is_narrow, dtypes)):
        return updates
    # Match leaves by path, because updates or parameters may not have all leaves.
    flat, given = flatten(updates, "updates"), flatten(params, "params")
    of_params = {given.paths[i]: given.leaves[i] for i in given.inexact_indices}

    def round_leaf(i: int) -> Any:
        leaf, dtype = flat.leaves[i], dtype_of(get_stored_values(of_params.get(flat.paths[i])))
        if not _is_narrow(dtype):
            return leaf
        return replace_values(leaf, get_stored_values(leaf).astype(dtype))

    return flat.unflatten([round_leaf(i) for i in flat.inexact_indices])


def _check_pow2(value: Any, argument: str) -> Any:
    """Checks that `value` is a power of two and returns it. Traced values are rounded down."""
    expected = "a power of two between 2.0**-126 and 2.0**126"
    message = f"{argument} must be {expected}, got {short_repr(value)}"
    if not numerics.is_real(value) or jnp.ndim(value):
        raise TypeError(message)
    # The value of a tracer is unknown, for example in `optax.inject_hyperparams`.
    if isinstance(value, Tracer):
        return numerics.floor_pow2(value.astype(jnp.float32))
    number = float(value)
    if not (2.0**-126 <= number <= 2.0**126 and math.frexp(number)[0] == 0.5):
        raise ValueError(message)
    return value if isinstance(value, Array) else number


def _check_order(initial: Any, numbers: _ScaleConfig) -> None:
    # Traced values cannot be compared.
    if any(isinstance(x, Tracer) for x in (initial, *numbers)):
        return
    if numbers.factor <= 1:
        raise ValueError(f"factor must be greater than 1, got {short_repr(numbers.factor)}")
    if not numbers.minimum <= initial <= numbers.maximum:
        raise ValueError(
            f"initial must be between minimum and maximum, got initial={short_repr(initial)}, "
            f"minimum={short_repr(numbers.minimum)}, maximum={short_repr(numbers.maximum)}"
        )

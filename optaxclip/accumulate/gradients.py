"""Computes gradients in microbatches, and clips or rejects individual microbatches."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

import optaxclip._backend.meshes as meshes
import optaxclip._loss_arguments as loss_arguments
from optaxclip._base.state import check_state, register_state
from optaxclip._base.trees import flatten
from optaxclip._base.types import AxisName, ClipState, PyTree, ThresholdRule
from optaxclip._base.validation import check_bool, check_int, normalize_axis_names, validate_call
from optaxclip.accumulate.loop import scan_microbatches
from optaxclip.accumulate.microbatch import (
    NAME,
    AccumulateState,
    DataSharding,
    MicrobatchLoss,
    MicrobatchProcessor,
)
from optaxclip.monitor._noise_scale import NoiseSums, nan_like, where_or_nan
from optaxclip.thresholds._constant import ScalarOrSchedule


@register_state
class Accumulated(NamedTuple):
    """Values of the `k` microbatches of a batch, and the state for the next step.

    Attributes:
      norm: float[k], the global gradient norms before clipping, or NaN if `compute_norms` is False.
      weight: float[k], the microbatch weights.
      rejected: bool[k], True for rejected microbatches. A microbatch with weight 0 does not
        contribute to the mean, but it is not marked as rejected.
      loss: float[k], the losses.
      aux: The stacked auxiliary outputs of the loss, `[k, ...]`. None if `has_aux` is False.
      state: An `AccumulateState` to pass to the next call. Its clipping record describes the most
        recent accepted microbatch.
      noise: The input for `optaxclip.monitor.noise_scale`. It is NaN if `compute_norms` is False,
        or if fewer than two microbatches contribute to the mean.
    """

    norm: Array
    weight: Array
    rejected: Array
    loss: Array
    aux: PyTree
    state: AccumulateState
    noise: NoiseSums


@validate_call(
    replacements={
        "num_microbatches": "microbatch_size, the number of examples divided by num_microbatches"
    }
)
def value_and_grad(
    loss_fn: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    *,
    batch_argnums: int | Sequence[int] | None = 1,
    has_aux: bool = False,
    microbatch_size: int,
    weight: Callable[..., Any] | None = None,
    clip: optax.GradientTransformation | ScalarOrSchedule | ThresholdRule | None = None,
    reject_rule: Literal["nonfinite"] | ScalarOrSchedule | ThresholdRule | None = "nonfinite",
    compute_norms: bool = True,
    dtype: jax.typing.DTypeLike = jnp.float32,
    axis_name: AxisName = None,
    specs: PyTree = None,
) -> "ValueAndGrad":
    """Computes a loss and its gradient in microbatches, and clips or rejects microbatches.

    Use it instead of `jax.value_and_grad` if the batch is too large for a single gradient
    computation. Microbatch `i` of `k` contains examples `i`, `i + k`, ... of the batch. The result
    is the weighted mean over the accepted microbatches, which is the gradient of the batch if
    nothing is clipped or rejected. Sums are accumulated in float32 or wider, and stay finite if all
    gradients and weights are finite. Only one sum and one gradient are in memory at a time.

    Rejected microbatches and their weights are excluded from the mean. Clipping microbatch
    gradients is also known as PS-Clip-SGD (Nobile and Grohs, 2026, arXiv 2605.02701).

    Under `jit`, a sharded batch stays sharded if the number of devices divides the microbatch size,
    and the sum is sharded like the parameters. Each microbatch requires an all-reduce or
    reduce-scatter of its gradient because its norm is computed across all devices. On GPUs, XLA
    communicates only once, after the last microbatch, if `compute_norms=False` and `weight=None`.

    Inside `shard_map`, sizes and weights are per device, and losses that differ between devices are
    averaged with these weights. Even if a device's part of a microbatch has weight 0, its loss must
    be finite, or the whole microbatch is rejected. If `compute_norms` is False, replicated
    parameters need only one all-reduce.

    Args:
      loss_fn: A function that returns the mean loss of a microbatch as a scalar. The mean is over
        the examples, or over the tokens or other units that `weight` counts.
      argnums: The positions of the differentiated arguments, as in `jax.grad`. The gradients of
        integer leaves are `float0` zeros.
      batch_argnums: The positions of the arguments with a leading example axis, which can be
        pytrees of arrays or PRNG keys. If None, all arguments except `argnums` are used.
        Microbatches share the other arguments. To get independent random numbers per example, pass
        `jax.random.split(key, examples)` as a batch argument.
      has_aux: If True, `loss_fn` returns `(loss, aux)`.
      microbatch_size: The number of examples in a microbatch. It must divide the batch size because
        the norms of microbatches with different sizes are not comparable.
      weight: A function of the batch arguments that returns the weight of a microbatch, such as its
        number of tokens. Defaults to the number of examples. A microbatch with weight 0 is ignored,
        even if its loss is non-finite. The results are NaN if a weight is negative or NaN, or if
        all weights are 0.
      clip: A transformation that clips microbatch gradients, or a threshold for their global norm,
        as in `optaxclip.clip_by`. Its state is passed from one microbatch to the next, and is not
        updated by rejected microbatches.
      reject_rule: The rule that rejects microbatches. If "nonfinite" (the default), microbatches
        with a non-finite loss or gradient norm are rejected. A number, a schedule, or a rule from
        `optaxclip.thresholds` also rejects norms above that threshold. If None, nothing is
        rejected. If all microbatches are rejected, the loss and the gradients are NaN.
        `optaxclip.skip_nonfinite` can skip such a step.
      compute_norms: If False, `clip` and `reject_rule` must be None, and `norm` and `noise` are
        NaN, which `jax_debug_nans` reports as an error. If `weight` is None, the sum of the
        gradients must be finite too.
      dtype: The dtype of sums and gradients, float32 or wider. Float64 and complex leaves are
        summed in float64 and complex dtypes.
      axis_name: The mapped axes over which the batch is sharded, inside `pmap`, `vmap(axis_name=)`,
        and `shard_map(check_vma=False)`.
      specs: The sharding of the parameters, as in `optaxclip.ShardingOptions`, if array types do
        not contain it. If `axis_name` is required, None means that the parameters are replicated.

    Returns:
      A function `(*args, state=None) -> (value, grads, accumulated)` of the arguments of `loss_fn`.
      `value` is the mean loss, float[], or `(value, aux)` if `has_aux` is True. `accumulated` is an
      `Accumulated`. Pass its `state` to the next step, and create the first state with
      `init(*args)`. The state is optional unless a threshold depends on earlier steps. Call the
      function inside `jax.jit`. Otherwise, every call recompiles the loop.

    Raises:
      ValueError: If an argument is out of range, or if `compute_norms=False` is used with `clip` or
        `reject_rule`. Also raised by the returned function if the batch is empty or cannot be
        split, if positions are invalid, if a loss or weight is not a scalar, if a constant weight
        is not positive, if `clip` changes the structure of the gradients, or if `axis_name` or a
        required state is missing.
      TypeError: If an argument has the wrong type. Also raised by the returned function if a loss
        or weight is not a real number, or if a Flax NNX or Equinox model contains more than
        parameters (see `docs/recipes/modules.md`).

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from optaxclip import accumulate
      >>> def loss_fn(w, x):
      ...     return jnp.mean((x - w) ** 2)
      >>> grad_fn = jax.jit(accumulate.value_and_grad(loss_fn, microbatch_size=1))
      >>> value, grads, accumulated = grad_fn(0.0, jnp.array([1.0, 3.0, jnp.inf]))
      >>> print(value, grads, accumulated.rejected)
      5.0 -4.0 [False False  True]
    """
    positions = loss_arguments.check_argnums(argnums, batch_argnums)
    size = check_int(microbatch_size, 1, "microbatch_size")
    sharding = DataSharding(normalize_axis_names(axis_name), specs)
    sum_dtype = jnp.dtype(jax.dtypes.canonicalize_dtype(dtype))
    if not jnp.issubdtype(sum_dtype, jnp.floating) or sum_dtype.itemsize < 4:
        raise ValueError(f"dtype must be float32 or wider, got {sum_dtype}")
    for argument, fn in (("loss_fn", loss_fn), ("weight", weight)):
        if fn is not None and not callable(fn):
            raise TypeError(f"{argument} must be a function, got {fn!r:.80}")
    loss = MicrobatchLoss(loss_fn, weight, check_bool(has_aux, "has_aux"), sum_dtype)
    processor = MicrobatchProcessor.create(clip, reject_rule, compute_norms, sharding)
    return ValueAndGrad(loss, processor, *positions, size)


@dataclasses.dataclass(frozen=True, eq=False)
class ValueAndGrad:
    """The result of `value_and_grad`, a function `fn(*args, state=None)`."""

    _loss: MicrobatchLoss
    _processor: MicrobatchProcessor
    _argnums: int | tuple[int, ...]
    _batch_argnums: int | tuple[int, ...] | None
    _size: int

    def init(self, *args: Any) -> AccumulateState:
        """Returns the initial state, for example to carry it through a loop."""
        split_args = loss_arguments.LossArguments.split(args, self._argnums, self._batch_argnums)
        params = loss_arguments.flatten_params(split_args.params)
        # Gradients are clipped in the dtypes of the sums, so the clipping state uses these dtypes.
        arrays = map(jnp.asarray, params.inexact_leaves())
        wide = [x.astype(self._loss.accumulator_dtype(x.dtype)) for x in arrays]
        return self._processor.init(params.unflatten(wide))

    def __call__(
        self, *args: Any, state: AccumulateState | None = None
    ) -> tuple[Any, PyTree, Accumulated]:
        """Returns the mean loss (and aux), the mean gradient, and an `Accumulated`."""
        self._processor.sharding.check()
        split_args = loss_arguments.LossArguments.split(args, self._argnums, self._batch_argnums)
        params = loss_arguments.flatten_params(split_args.params)
        params = params.replace_leaves([jnp.asarray(x) for x in params.inexact_leaves()])
        remedy = "pass the previous accumulated.state, or grad_fn.init(*args) on the first step"
        if state is None:
            state = self.init(*args)
            nodes = jax.tree.leaves(state.clip, is_leaf=lambda x: isinstance(x, ClipState))
            rules = [node.rule for node in nodes if isinstance(node, ClipState)]
            if jax.tree.leaves([state.reject, *rules]):
                raise ValueError(
                    f"{NAME}: state is required because a threshold depends on earlier steps; "
                    f"{remedy}"
                )
        check_state(state, AccumulateState, NAME, remedy)
        split = self._split_batch(split_args.batch)
        means, state, stats, aux = scan_microbatches(
            self._loss, self._processor, split_args, params, split, state
        )
        grads = params.replace_with_float0().replace_leaves(means)
        if self._processor.computes_norms:
            norm, noise = stats.norm, stats.noise(self._processor.compute_norm(grads))
        else:
            # NaNs are computed from outputs of the loop because XLA on GPUs uses more memory for a
            # loop if its outputs are unused (as of JAX 0.10.2).
            norm = where_or_nan(stats.rejected, stats.norm)
            noise = NoiseSums(*[nan_like(stats.weight[0])] * 2)
        value = stats.mean(stats.loss)
        info = Accumulated(norm, stats.weight, stats.rejected, stats.loss, aux, state, noise)
        return (value, aux) if self._loss.has_aux else value, grads.tree(), info

    def _split_batch(self, batch: tuple[Any, ...]) -> loss_arguments.MicrobatchSplit:
        examples = loss_arguments.get_batch_size(flatten(batch, "the batch"), "the batch")
        if not examples:
            raise ValueError("the batch has no examples; pass at least one example")
        number, rest = divmod(examples, self._size)
        if rest:
            part = "per-device " if meshes.manual_axes() else ""
            divisor = max(n for n in range(1, self._size + 1) if examples % n == 0)
            raise ValueError(
                f"microbatch_size must divide the {part}batch size, got {self._size} for "
                f"{examples} examples; use {divisor} or pad the batch with zero-weight examples"
            )
        return loss_arguments.MicrobatchSplit.split(batch, self._size, number)

"""Gradients of a batch, a microbatch at a time, each judged before it is added up."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax

import optaxclip._backend.meshes as meshes
from optaxclip._base.state import check_state
from optaxclip._base.trees import FlatTree, flatten
from optaxclip._base.types import AxisName, PyTree, ThresholdRule
from optaxclip._base.validation import check_bool, check_int, normalize_axis_names, validate_call
from optaxclip._loss_arguments import (
    LossArguments,
    MicrobatchSplit,
    check_argnums,
    flatten_params,
    get_batch_size,
)
from optaxclip.accumulate.loop import Accumulated, scan_microbatches
from optaxclip.accumulate.loss import DataSharding, MicrobatchLoss
from optaxclip.accumulate.rejection import NAME, AccumulateState, MicrobatchProcessor, is_stateful
from optaxclip.monitor._noise_scale import NoiseSums, nan_like, where_or_nan
from optaxclip.thresholds._constant import ScalarOrSchedule


@validate_call(
    replacements={
        "num_microbatches": "microbatch_size=, the number of examples divided by num_microbatches"
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
    """`jax.value_and_grad` of a batch, one microbatch at a time; each microbatch is judged.

    The batch is cut along its leading axis: the `i`-th of `k` microbatches has the examples `i`,
    `i + k`, ... The result is the weighted mean over the microbatches that were not rejected. If
    none is rejected or clipped, it is the gradient of the whole batch. Sums are in float32 or
    wider, and finite if all gradients and weights are. The memory needed is that of the sum and of
    one gradient, whatever `k` is.

    Clipping each microbatch is PS-Clip-SGD (Nobile and Grohs, 2026, arXiv 2605.02701). A rejected
    microbatch is left out of the mean, and so is its weight.

    Under `jit`, a batch that is split over devices stays split if the number of devices divides the
    microbatch size: each device has its share of each microbatch, nothing of the batch is gathered,
    and the sum is split as the parameters are. Each microbatch needs one all-reduce or
    reduce-scatter of its gradient, because its norm is taken over all devices. With
    `compute_norms=False` and without `weight`, XLA on GPUs does this only once, after the last
    microbatch.

    Inside `shard_map`, sizes and weights count what one device holds, and a loss that differs
    between devices is averaged over them by its weights. Even a device whose part of a microbatch
    has weight 0 needs a finite loss, or the whole microbatch is rejected. With
    `compute_norms=False`, parameters that every device holds in full need one all-reduce after the
    last microbatch, with or without `weight`.

    Args:
      loss_fn: the mean loss of a microbatch, a scalar: the mean over its examples, or over what
        `weight` counts.
      argnums: which arguments to differentiate, as in `jax.grad`. Their integer leaves get `float0`
        zeros.
      batch_argnums: which arguments have a leading axis of examples: pytrees of arrays or of PRNG
        keys; if None, all that are not in `argnums`. All microbatches get the same key if it is in
        another argument: for noise pass `jax.random.split(key, examples)` as a batch argument.
      has_aux: whether `loss_fn` returns `(loss, aux)`.
      microbatch_size: how many examples to differentiate at once; it has to divide the batch,
        because norms of microbatches of different sizes cannot be judged by each other.
      weight: a function of the batch arguments that returns how much a microbatch counts, such as
        its number of tokens; if None, its number of examples. A microbatch of weight 0 adds
        nothing, whatever its loss is. If a weight is negative or NaN, or all weights are 0, the
        results are NaN.
      clip: a transformation of each microbatch's gradient, whose state goes from one microbatch to
        the next, and which rejected microbatches do not change; or a threshold of the global norm,
        as `optaxclip.clip_by` takes it.
      reject_rule: which microbatches are left out. "nonfinite": those whose loss or gradient norm
        is not finite. A number, schedule or rule of `optaxclip.thresholds`: also those with a norm
        above it. None: none. If all are rejected, loss and gradients are NaN, so that
        `optaxclip.skip_nonfinite` skips the step.
      compute_norms: whether norms are measured. If False, `clip` and `reject` must be None, and
        `norm` and `noise` are NaN; `jax_debug_nans` stops at a `jit` that returns these. Without
        `weight`, gradients are then added as they are, so their sum must be finite, not only their
        mean.
      dtype: of sums and gradients, float32 or wider; for float64 and complex leaves they are
        float64 and complex.
      axis_name: inside `pmap`, `vmap(axis_name=)` and `shard_map(check_vma=False)`, the names of
        the mapped axes over which the batch is split.
      specs: how parameters are split over devices, as in `optaxclip.ShardingOptions`, if their
        types do not say it; where `axis_name` is needed, None means that they are not split.

    Returns:
      A function `(*args, state=None) -> (value, grads, accumulated)` of the arguments of `loss_fn`.
      `value` is the mean loss, float[], or with `has_aux` the pair `(value, aux)`; `grads` is the
      tree of gradients, `accumulated` an `Accumulated`. Pass its `state` to the next step; the
      method `init(*args)` makes the first one. Without a state each call begins with a fresh one,
      which is an error if a threshold depends on earlier steps. Call the function inside of
      `jax.jit`: otherwise the loop is compiled again at each call.

    Raises:
      ValueError: for a microbatch size below 1, an unknown name, a threshold that is negative or
        NaN, a narrow dtype, and `compute_norms=False` with a clip or a rule; when called, for the
        state None if a threshold depends on earlier steps, a batch that is empty or that the size
        does not divide, arguments that do not share an axis of examples, positions that do not
        exist or come twice, a loss or weight that is not a scalar, a weight that is known not to be
        above 0, a clip that returns another tree, and a missing `axis_name`.
      TypeError: if `loss_fn` or `weight` is not a function, `clip` neither a transformation nor a
        threshold, `reject` not a rule, or a position or size not an int; when called, for a loss or
        a weight that is not a real number, `specs` that hold something other than specs, or a model
        of Flax NNX or Equinox that holds more than its parameters (`docs/recipes/modules.md`).

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from optaxclip import accumulate
      >>> def loss_fn(w, x, mask):
      ...     return jnp.sum(mask * (x - w) ** 2) / jnp.sum(mask)
      >>> def tokens(x, mask):
      ...     return jnp.sum(mask)
      >>> grad_fn = jax.jit(accumulate.value_and_grad(
      ...     loss_fn, batch_argnums=(1, 2), microbatch_size=1, weight=tokens))
      >>> x = jnp.array([[1.0, 3.0], [5.0, 0.0], [jnp.inf, 1.0]])
      >>> mask = jnp.array([[1.0, 1.0], [1.0, 0.0], [1.0, 1.0]])
      >>> value, grads, accumulated = grad_fn(0.0, x, mask)
      >>> print(value, grads, accumulated.weight, accumulated.rejected)
      11.666667 -6.0 [2. 1. 2.] [False False  True]
    """
    roles = check_argnums(argnums, batch_argnums)
    size = check_int(microbatch_size, 1, "microbatch_size")
    places, wide = DataSharding(normalize_axis_names(axis_name), specs), _check_dtype(dtype)
    for argument, fn in (("loss_fn", loss_fn), ("weight", weight)):
        if fn is not None and not callable(fn):
            raise TypeError(f"{argument} must be a function, got {fn!r:.80}")
    loss = MicrobatchLoss(loss_fn, weight, check_bool(has_aux, "has_aux"), wide, places)
    judge = MicrobatchProcessor.create(clip, reject_rule, compute_norms, places)
    return ValueAndGrad(loss, judge, *roles, size)


@dataclasses.dataclass(frozen=True, eq=False)
class ValueAndGrad:
    """What `value_and_grad` makes: `fn(*args, state=None)` of the arguments of a loss."""

    _loss: MicrobatchLoss
    _judge: MicrobatchProcessor
    _argnums: int | tuple[int, ...]
    _batch_argnums: int | tuple[int, ...] | None
    _size: int

    def init(self, *args: Any) -> AccumulateState:
        """The state before the first step, for a loop or a checkpoint."""
        roles = LossArguments.split(args, self._argnums, self._batch_argnums)
        return self._judge.init(self._cast_params(flatten_params(roles.params)))

    def __call__(
        self, *args: Any, state: AccumulateState | None = None
    ) -> tuple[Any, PyTree, Accumulated]:
        """The mean loss (and aux), the mean gradient, and an `Accumulated`."""
        self._loss.places.check(NAME)
        roles = LossArguments.split(args, self._argnums, self._batch_argnums)
        params = flatten_params(roles.params)
        params = params.replace_leaves([jnp.asarray(x) for x in params.inexact_leaves()])
        remedy = "Pass accumulated.state of the last step, at the first one grad_fn.init(*args)"
        if state is None:
            state = self._judge.init(self._cast_params(params))
            if is_stateful(state):
                raise ValueError(
                    f"{NAME}: got the state None, and with a fresh state at each step what judges "
                    f"the microbatches would never learn of earlier steps. {remedy}"
                )
        check_state(state, AccumulateState, NAME, remedy)
        cut = self._split_batch(roles.batch)
        loss = self._loss.use_wide_dtype(params)
        means = scan_microbatches(loss, self._judge, roles, params, cut, state)
        row, grads = means.row, params.replace_with_float0().replace_leaves(means.leaves)
        if self._judge.computes_norms:
            norm, noise = row.norm, row.noise(self._judge.compute_norm(grads))
        else:
            # NaN, because nothing was measured. It is made from outputs of the loop, because XLA on
            # a GPU (JAX 0.10.2) needs more memory for a loop that does not return them.
            norm = where_or_nan(row.rejected, row.norm)
            noise = NoiseSums(*[nan_like(row.weight[0])] * 2)
        value = row.mean(row.loss)
        info = Accumulated(norm, row.weight, row.rejected, row.loss, means.aux, means.state, noise)
        return (value, means.aux) if self._loss.has_aux else value, grads.tree(), info

    def _split_batch(self, batch: tuple[Any, ...]) -> MicrobatchSplit:
        """The batch, cut into microbatches."""
        examples = get_batch_size(flatten(batch, "the batch"), "the batch")
        if not examples:
            raise ValueError("the batch has no examples, so it has no gradient; pass at least one")
        number, rest = divmod(examples, self._size)
        if rest:
            part = " that a device has" if meshes.manual_axes() else ""
            fits = max(n for n in range(1, self._size + 1) if examples % n == 0)
            raise ValueError(
                f"microbatch_size must divide the batch{part}, got {self._size} for {examples} "
                f"examples: pass {fits}, or fill the batch up with examples that weight= does not "
                "count. Norms of microbatches are judged by each other, so all must have one size; "
                "per_example.clipped_grad, which judges none, takes any"
            )
        return MicrobatchSplit.split(batch, self._size, number)

    def _cast_params(self, params: FlatTree) -> PyTree:
        """The parameters in the dtypes of the sums, which the clip's gradients have too."""
        arrays = [jnp.asarray(x) for x in params.inexact_leaves()]
        return params.unflatten([x.astype(self._loss.accumulator_dtype(x.dtype)) for x in arrays])


def _check_dtype(dtype: Any) -> jnp.dtype:
    """A real dtype of 32 bits or more."""
    wide = jnp.dtype(jax.dtypes.canonicalize_dtype(dtype))
    if not jnp.issubdtype(wide, jnp.floating) or wide.itemsize < 4:
        raise ValueError(
            f"dtype must be float32 or wider, because narrower sums lose small gradients, got "
            f"{wide}"
        )
    return wide

"""Trains with several thresholds in one compiled program."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from optaxclip._base.types import HostArrayLike, PyTree
from optaxclip._base.validation import check_int, short_repr, validate_call
from optaxclip._engine.clip import group_norms
from optaxclip.scopes import tree

Numbers = np.ndarray[Any, Any]
InitFn = Callable[[Array], PyTree]
StepFn = Callable[[PyTree, PyTree, Array], tuple[PyTree, Array, Array]]


@dataclasses.dataclass(frozen=True, eq=False)
class SweepResult:
    """The results of a sweep. You can `print` it to see a table.

    Attributes:
      thresholds: float32[thresholds], in ascending order.
      loss: float32[thresholds, steps], the losses that the step function returned.
      norm: float32[thresholds, steps], the global norms before clipping.
      clipped_fraction: float32[thresholds, steps], the fractions of groups above the threshold.
      final_loss: float32[thresholds], the mean loss over the last tenth of the steps, or infinity
        if the run diverged.
      diverged: bool[thresholds], True if the final loss is non-finite or exceeds the first one.
      loss_noise: float[thresholds], the noise of the final loss, or NaN if all runs diverged.
      threshold: The suggested threshold, or NaN if all runs diverged.
    """

    thresholds: Numbers
    loss: Numbers
    norm: Numbers
    clipped_fraction: Numbers
    final_loss: Numbers
    diverged: Numbers
    loss_noise: Numbers
    threshold: float

    def __str__(self) -> str:
        """Formats a table with one row per threshold."""
        rows = [f"{'threshold':>10}  {'final loss':>10}  {'noise':>8}  {'clipped':>8}"]
        for i, threshold in enumerate(self.thresholds):
            lost = self.diverged[i]
            loss = "diverged" if lost else f"{self.final_loss[i]:.4g}"
            noise = "" if lost else f"{self.loss_noise[i]:.2g}"
            mark = "  <- suggested" if threshold == np.float32(self.threshold) else ""
            clipped = f"{self.clipped_fraction[i].mean():.1%}"
            rows.append(f"{threshold:>10.4g}  {loss:>10}  {noise:>8}  {clipped:>8}{mark}")
        rows.append(
            "no threshold is suggested, because all runs diverged; use a lower learning rate"
            if math.isnan(self.threshold)
            else f"threshold {self.threshold:.4g}: the largest within noise of the best final loss"
        )
        if self.diverged.any():
            rows.append("diverged: the final loss is non-finite or above the first loss")
        return "\n".join((*rows, "note: the result may depend on the key"))


@validate_call()
def sweep(
    init_fn: InitFn,
    step_fn: StepFn,
    thresholds: HostArrayLike,
    steps: int,
    *,
    key: HostArrayLike,
    data: PyTree,
) -> SweepResult:
    """Trains the same model with several thresholds and suggests the best threshold.

    All runs use the same initial state and batches, and run together in one compiled program. The
    suggested threshold is the largest one with a final loss within noise of the lowest final loss.
    The noise is the standard deviation of the difference from the best run over the last tenth of
    the steps. However, it is at most the standard deviation of the best run, because differences
    from an unstable run are very noisy.

    Args:
      init_fn: A function `init_fn(key) -> state`. The state is a pytree of arrays, such as the
        parameters and the optimizer state.
      step_fn: A function `step_fn(state, batch, threshold) -> (state, loss, norm)` for one training
        step. The threshold is a traced float32[], and the loss is a float[]. `norm` is the norm
        before clipping, float[], or the norms of groups, float[groups].
      thresholds: float[thresholds], positive. All runs must fit into memory together.
      steps: The number of steps of a run.
      key: A PRNG key, or an int to make a key.
      data: The batches, a pytree of arrays `[steps, ...]`. The first axis can be longer.

    Returns:
      A `SweepResult`.

    Raises:
      ValueError: If the thresholds are not positive or do not have one axis, if `steps` is less
        than 1, or if `data` contains no arrays or fewer steps.
      TypeError: If `step_fn` does not return a state with the types of its argument, a loss, and a
        norm, or if another argument has the wrong type.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from optaxclip import ops
      >>> def step_fn(params, target, threshold):
      ...     loss, grads = jax.value_and_grad(lambda p: jnp.sum((p - target) ** 2))(params)
      ...     grads, norm = ops.clip_by_global_norm(grads, threshold)
      ...     return params - 0.1 * grads, loss, norm
      >>> result = sweep(jax.random.normal, step_fn, [0.01, 1.0, 9.0], 40, key=0, data=jnp.ones(40))
      >>> print(result.threshold, result.diverged)
      9.0 [False False False]
    """
    values = np.asarray(thresholds, np.float32)
    if values.ndim != 1 or not values.size or not (values > 0).all():
        raise ValueError(f"thresholds must be one or more positive numbers, got {thresholds!r}")
    values = np.unique(values)
    steps = check_int(steps, 1, "steps")
    data = _check_data(data, steps)
    if isinstance(key, int) and not isinstance(key, bool):
        key = jax.random.key(key)
    dtype = getattr(key, "dtype", np.dtype(object))
    if np.ndim(key) or not jnp.issubdtype(dtype, jax.dtypes.prng_key):
        raise TypeError(f"key must be a single JAX PRNG key or an int seed, got {short_repr(key)}")
    # All runs start from the same state.
    state = jax.jit(init_fn)(key)
    _check_step(step_fn, state, jax.tree.map(lambda x: x[0], data))

    # `vmap` maps only the threshold, so the batches are not copied.
    @jax.jit
    @jax.vmap
    def run(threshold: Array) -> tuple[Array, Array, Array]:
        def one_step(state: PyTree, batch: PyTree) -> tuple[PyTree, tuple[Array, Array, Array]]:
            state, loss, norm = step_fn(state, batch, threshold)
            norms = jnp.atleast_1d(norm).astype(jnp.float32)  # f32[groups]
            whole_norm = group_norms(norms, scope=tree())  # f32[]
            fraction = jnp.mean((norms > threshold).astype(jnp.float32))
            return state, (jnp.asarray(loss, jnp.float32), whole_norm, fraction)

        return jax.lax.scan(one_step, state, data)[1]

    records = run(jnp.asarray(values))
    loss, norm, fraction = map(np.asarray, records)  # f32[thresholds, steps]
    return _evaluate(values, loss, norm, fraction)


def _check_data(data: PyTree, steps: int) -> PyTree:
    shapes = [np.shape(leaf) for leaf in jax.tree.leaves(data)]
    if not shapes:
        raise ValueError(
            "data must contain at least one array whose leading axis indexes the steps, got "
            f"{short_repr(data)}; use np.arange({steps}) if the steps need no data"
        )
    for shape in shapes:
        if not shape or shape[0] < steps:
            raise ValueError(
                f"leaves of data need a leading axis of at least {steps} steps, got shape {shape}"
            )
    return jax.tree.map(lambda x: jnp.asarray(x[:steps]), data)


def _check_step(step_fn: StepFn, state: PyTree, batch: PyTree) -> None:
    out = jax.eval_shape(step_fn, state, batch, jnp.float32(1.0))
    if not (isinstance(out, tuple) and len(out) == 3):
        got = f"{len(out)} values" if isinstance(out, tuple) else f"a single {type(out).__name__}"
        raise TypeError(f"step_fn must return three values (state, loss, norm), but returned {got}")
    before, (after, loss, norm) = jax.eval_shape(lambda state: state, state), out
    # The text contains the structure, the shapes and the dtypes.
    if str(before) != str(after):
        raise TypeError(
            "step_fn must return a state with the same structure, shapes, and dtypes as its input "
            f"({before}), but returned {after}"
        )
    if jnp.shape(loss) != () or jnp.ndim(norm) > 1:
        raise TypeError(
            "step_fn must return a scalar loss and a scalar or one-dimensional norm, but returned "
            f"arrays of shapes {jnp.shape(loss)} and {jnp.shape(norm)}"
        )


def _evaluate(thresholds: Numbers, loss: Numbers, norm: Numbers, fraction: Numbers) -> SweepResult:
    # f32[thresholds, last steps]
    last = loss[:, -max(1, round(loss.shape[1] / 10)) :]
    # Use the first finite loss, because a run with one bad initial batch has not diverged.
    # f32[thresholds]
    first = np.take_along_axis(loss, np.argmax(np.isfinite(loss), 1)[:, None], 1)[:, 0]
    with np.errstate(over="ignore", invalid="ignore"):
        final = last.mean(axis=1)
        diverged = ~(np.isfinite(final) & (final <= first))
        final = np.where(diverged, np.inf, final)
        best = int(np.argmin(final))
        noise, threshold = np.full(len(thresholds), math.nan), math.nan
        if np.isfinite(final[best]):
            # All runs use the same batches, so noise cancels in differences of losses.
            noise = np.minimum(np.std(last - last[best], axis=1), np.std(last[best]))
            is_near = final <= final[best] + np.where(diverged, 0.0, noise)
            threshold = float(thresholds[np.flatnonzero(is_near)[-1]])
    return SweepResult(thresholds, loss, norm, fraction, final, diverged, noise, threshold)

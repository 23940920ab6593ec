"""Runs one training with many thresholds at once, in one compiled program."""

import contextlib
import dataclasses
import math
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from optaxclip._base.host import ArrayLike
from optaxclip._base.types import PyTree
from optaxclip._base.validation import check_bool, check_int, short_repr, validate_call
from optaxclip.tuning.replaying import UNCHOSEN, beside, replayed
from optaxclip.tuning.runs import Numbers, Progress, StepFn, all_steps, in_groups

FINAL_SHARE = 0.1
NOISE = 2.0
"""The noise is this many standard errors."""

InitFn = Callable[[Array], PyTree]


@dataclasses.dataclass(frozen=True, eq=False)
class SweepResult:
    """The records of all runs of a sweep; `print` it for a table.

    Below, `runs...` stands for the axes of the runs: the thresholds, then the learning rates if they
    were given, then the seeds if there are several.

    Attributes:
      thresholds: float32[thresholds], ascending.
      learning_rates: float32[learning_rates], or None.
      loss: float32[runs..., steps], the losses that the step function returned.
      norm: float32[runs..., steps], the raw norm; for several groups, the root of the sum of their
        squared norms.
      share_clipped: float32[runs..., steps], the share of groups with a norm above the threshold.
      final_loss: float32[runs...], the mean over the last tenth of the steps; inf if diverged.
      diverged: bool[runs...], whether the final loss is not finite, or above the first
        loss that is.
      noise: the entry of `noises` for the suggested threshold; NaN if no threshold is suggested.
      threshold: the largest threshold whose final loss is within noise of the best; NaN if for each threshold a
        run diverged.
      learning_rate: the learning rate of the best run; None without learning rates.
      noises: float[thresholds], by how much the final loss of each threshold may exceed the best loss and
        still count as equal; 0 for the best threshold, NaN if all runs diverged.
      unchosen_threshold: the threshold at which AdaGC ends on the norms of the first run with the suggested
        threshold; NaN without one.
    """

    thresholds: Numbers
    learning_rates: Numbers | None
    loss: Numbers
    norm: Numbers
    share_clipped: Numbers
    final_loss: Numbers
    diverged: Numbers
    noise: float
    threshold: float
    learning_rate: float | None
    noises: Numbers
    unchosen_threshold: float = math.nan

    def __str__(self) -> str:
        """A table with a row for each threshold, over the seeds and at the best learning rate."""
        return self.table()

    def table(self, more_seeds: str = "seeds=3") -> str:
        """The table of `print`; its note on seeds says that `more_seeds` asks for more of them."""
        diverged, final, clipped = map(
            self.by_threshold, (self.diverged, self.final_loss, self.share_clipped.mean(axis=-1))
        )
        rows = [f"{'threshold':>10}  {'final loss':>10}  {'noise':>8}  {'clipped':>8}"]
        for i, threshold in enumerate(self.thresholds):
            loss = f"{final[i].mean():.4g}"
            if diverged[i].any():
                loss = "diverged" if diverged[i].size == 1 else f"{diverged[i].mean():.0%} div."
            mark = "  <- suggested" if threshold == np.float32(self.threshold) else ""
            noise = "" if diverged[i].any() else f"{self.noises[i]:.2g}"
            rows.append(
                f"{threshold:>10.4g}  {loss:>10}  {noise:>8}  {clipped[i].mean():>8.1%}{mark}"
            )
        rows.append(self._suggested())
        if final.shape[1] == 1:
            rows.append(f"other seeds may give other results: pass {more_seeds} or more")
        if diverged.any():
            rows.append("diverged: the final loss is not finite, or above the first loss")
        return "\n".join(rows)

    def by_threshold(self, values: Numbers) -> Numbers:
        """The values at the best learning rate, [thresholds, seeds], from [runs...]."""
        if self.learning_rates is not None:
            best = np.searchsorted(self.learning_rates, np.float32(self.learning_rate))
            values = values[:, best]
        return values.reshape(len(self.thresholds), -1)

    def _suggested(self) -> str:
        if math.isnan(self.threshold):
            remedy = "try lower thresholds or a lower learning rate"
            return f"no threshold is suggested: runs of each diverged; {remedy}"
        rate = "" if self.learning_rate is None else f", learning rate {self.learning_rate:.4g}"
        suggested = (
            f"threshold {self.threshold:.4g}{rate}: the largest within noise of the best final loss"
        )
        if math.isnan(self.unchosen_threshold):
            return suggested
        return (
            f"{suggested}\n{UNCHOSEN}, meant to clip nearly every step: on that run's norms its "
            f"threshold ends at {self.unchosen_threshold:.3g}, {beside(self.unchosen_threshold, self.threshold)}"
        )


@validate_call()
def sweep(
    init_fn: InitFn,
    step_fn: StepFn,
    thresholds: ArrayLike,
    steps: int,
    *,
    key: ArrayLike,
    data: PyTree,
    learning_rates: ArrayLike | None = None,
    seeds: int = 1,
    parallel: int | None = None,
    progress: Progress | bool = True,
) -> SweepResult:
    """Trains the same model with many thresholds at once, and names the best of them.

    A threshold is a traced number, so one program serves all thresholds: it has a `vmap` over the runs and
    a `scan` over the steps; on a CPU the cores share the runs. All runs get the same batches, and
    runs with the same seed have the same initial values. The suggested threshold is the largest whose
    final loss is within noise of the best one. The noise is the smaller one of two numbers: the
    noise of the difference between the two losses, and the noise of the best loss alone. The second
    one keeps an unstable run, whose difference is very noisy, from passing as a good one. With
    several seeds, noise is two standard errors over the seeds; with one seed, it is the standard
    deviation over the last steps.

    Args:
      init_fn: `init_fn(key) -> state`, any pytree of arrays: parameters and optimizer state.
      step_fn: `step_fn(state, batch, threshold) -> (state, loss, norm)`, one training step; with
        `learning_rates`, `step_fn(state, batch, threshold, learning_rate)`. The threshold is a traced
        float32[], `loss` a float[], and `norm` the raw norm or norms that the threshold applies to,
        float[] or float[groups].
      thresholds: float[thresholds], positive.
      steps: how many steps each run takes.
      key: a PRNG key, or an int to make one from; the keys of the seeds are split from it.
      data: the batches, a pytree whose leaves have a first axis of at least `steps`. If the data
        does not fit into memory, pass indices, and let the step look up the batch.
      learning_rates: float[learning_rates]; each threshold is tried with each of them.
      seeds: how many runs for each threshold and learning rate.
      parallel: how many runs go at a time; the others wait. By default all runs go at once under
        `vmap`; on a CPU, one on each core. Pass fewer if they do not fit into memory, and on a CPU
        more if the model is too small to keep a core busy.
      progress: whether to show a progress bar, which needs Rich and a terminal; or a function that
        is called with the number of steps just done.

    Returns:
      A `SweepResult`.

    Raises:
      ValueError: for thresholds or learning rates that are not positive or not in one axis; for
        `steps`, `seeds` or `parallel` below 1; and for data of fewer steps, or without arrays.
      TypeError: if `step_fn` does not return a state like the one that it got, a loss and a norm;
        if `key` is not a key; if `steps`, `seeds` or `parallel` is not an int; or if `progress` is
        not True, False or a function.

    Example:
      >>> import jax, jax.numpy as jnp, optax, optaxclip
      >>> from optaxclip import ops, tuning
      >>> def init_fn(key):
      ...     return jax.random.normal(key, (3,))
      >>> def step_fn(params, target, threshold):
      ...     loss, grads = jax.value_and_grad(lambda p: jnp.sum((p - target) ** 2))(params)
      ...     grads, norm = ops.clip_by_global_norm(grads, threshold)
      ...     return params - 0.1 * grads, loss, norm
      >>> key, data = jax.random.key(0), jnp.ones((40, 3))
      >>> result = tuning.sweep(init_fn, step_fn, [0.01, 1.0, 100.0], 40, key=key, data=data)
      >>> print(result.threshold, result.diverged)
      100.0 [False False False]
    """
    thresholds = _axis(thresholds, "thresholds")
    rates = None if learning_rates is None else _axis(learning_rates, "learning_rates")
    steps, seeds = check_int(steps, 1, "steps"), check_int(seeds, 1, "seeds")
    parallel = None if parallel is None else check_int(parallel, 1, "parallel")
    if not callable(progress):
        check_bool(progress, "progress", "; or pass a function of the number of steps")
    data = _check_data(data, steps)
    keys = jax.random.split(_as_key(key), seeds)
    grid = np.meshgrid(thresholds, np.ones(1) if rates is None else rates, np.arange(seeds))
    axes = [np.swapaxes(axis, 0, 1).ravel() for axis in grid]
    step = step_fn if rates is not None else _without_rate(step_fn)
    init = jax.jit(jax.vmap(init_fn))
    groups, at_once = in_groups(len(axes[0]), parallel)
    states = [init(keys[axes[2][group].astype(int)]) for group in groups]
    runs = [tuple(jnp.asarray(axis[group], jnp.float32) for axis in axes[:2]) for group in groups]
    _check_step(step, states[0], data, runs[0])
    with _reporter(progress, steps) as report:
        records = all_steps(step, at_once, states, runs, data, steps, report)
    records = [record[: len(axes[0])] for record in records]
    shape = [len(thresholds), *([] if rates is None else [len(rates)]), *([seeds] * (seeds > 1))]
    loss, norm, share = (record.reshape(*shape, steps) for record in records)
    return _result(thresholds, rates, loss, norm, share, seeds)


def _axis(values: ArrayLike, name: str) -> Numbers:
    array = np.asarray(values, np.float32)
    if array.ndim != 1 or not array.size or not (array > 0).all():
        raise ValueError(f"{name} must be positive numbers in one axis, got {values!r}")
    return np.unique(array)


def _check_data(data: PyTree, steps: int) -> PyTree:
    leaves = jax.tree.leaves(data)
    if not leaves:
        remedy = f"if the steps need none, pass np.arange({steps})"
        raise ValueError(
            f"data must hold an array with a batch for each step, got {short_repr(data)}; {remedy}"
        )
    for leaf in leaves:
        if not np.ndim(leaf) or np.shape(leaf)[0] < steps:
            raise ValueError(
                f"data must have a first axis of at least the {steps} steps, got a leaf of the "
                f"shape {np.shape(leaf)}"
            )
    return jax.tree.map(lambda x: x if isinstance(x, Array) else np.asarray(x), data)


def _as_key(key: ArrayLike) -> Array:
    """A typed key, from a typed key, a raw uint32 key, or an int."""
    dtype = getattr(key, "dtype", None)
    if dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key) and np.ndim(key) == 0:
        return jnp.asarray(key)
    if isinstance(key, int) and not isinstance(key, bool):
        return jax.random.key(key)
    if dtype == jnp.uint32 and np.ndim(key) == 1:
        return jax.random.wrap_key_data(jnp.asarray(key))
    raise TypeError(f"key must be one key from jax.random, or an int, got {short_repr(key)}")


def _without_rate(step_fn: StepFn) -> StepFn:
    return lambda state, batch, threshold, rate: step_fn(state, batch, threshold)  # noqa: ARG005


def _check_step(step: StepFn, states: PyTree, data: PyTree, runs: tuple[Array, ...]) -> None:
    """Checks what `step` returns, by its shapes; nothing is computed."""
    one = jax.tree.map(lambda x: x[0], (states, data, *runs))
    out = jax.eval_shape(step, *one)
    if not (isinstance(out, tuple) and len(out) == 3):
        got = f"{len(out)} values" if isinstance(out, tuple) else f"one {type(out).__name__}"
        raise TypeError(
            f"step_fn must return three values, (state, loss, norm), got {got}; the norm is that "
            "from before clipping, which ops.clip_by_global_norm returns with the gradients"
        )
    before, after = jax.eval_shape(lambda state: state, one[0]), out[0]
    kinds = [[(x.shape, x.dtype) for x in jax.tree.leaves(tree)] for tree in (before, after)]
    if jax.tree.structure(before) != jax.tree.structure(after) or kinds[0] != kinds[1]:
        raise TypeError(
            f"step_fn must return a state like the one that it gets, {before}; got {after}"
        )
    loss, norm = out[1:]
    if jnp.shape(loss) != () or jnp.ndim(norm) > 1:
        raise TypeError(
            "step_fn must return a scalar loss, and a norm that is a scalar or has one axis, got "
            f"the shapes {jnp.shape(loss)} and {jnp.shape(norm)}"
        )


@contextlib.contextmanager
def _reporter(progress: Progress | bool, steps: int) -> Iterator[Progress]:
    if callable(progress):
        yield progress
        return
    if not (progress and sys.stderr.isatty() and find_spec("rich")):
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import Progress as Bar

    with Bar(console=Console(stderr=True)) as bar:
        task = bar.add_task("sweep: compiling", total=steps)
        yield lambda done: bar.update(task, advance=done, description="sweep")


def _result(
    thresholds: Numbers,
    rates: Numbers | None,
    loss: Numbers,
    norm: Numbers,
    share: Numbers,
    seeds: int,
) -> SweepResult:
    tail = max(1, round(loss.shape[-1] * FINAL_SHARE))
    last = loss[..., -tail:]
    # The first loss that is finite: a bad first batch does not make a run that learns a lost one.
    first = np.take_along_axis(loss, np.argmax(np.isfinite(loss), -1)[..., None], -1)
    with np.errstate(over="ignore", invalid="ignore"):
        final = last.mean(axis=-1)
        diverged = ~(np.isfinite(final) & (final <= first[..., 0]))
    final = np.where(diverged, np.inf, final)
    # [thresholds, rates, seeds, last steps], and the means over seeds.
    each = last.reshape(len(thresholds), 1 if rates is None else len(rates), seeds, tail)
    means = final.reshape(each.shape[:-1]).mean(axis=-1)
    best = np.unravel_index(np.argmin(means), means.shape)
    chosen, noise, unchosen, noises = (
        math.nan,
        math.nan,
        math.nan,
        np.full(len(thresholds), math.nan),
    )
    if np.isfinite(means[best]):
        # All runs share batches and seeds, so their noise cancels in a difference of losses. But
        # the difference from an unstable run is very noisy: the noise of the best loss is its cap.
        of_differences = [_noise(losses - each[best]) for losses in each[:, best[1]]]
        noises = np.minimum(of_differences, _noise(each[best]))
        near = np.isfinite(means[:, best[1]]) & (means[:, best[1]] <= means[best] + noises)
        index = int(np.flatnonzero(near)[-1])
        chosen, noise = float(thresholds[index]), float(noises[index])
        norms = norm.reshape(*each.shape[:-1], -1)[index, best[1], 0].astype(np.float64)
        norms = norms[np.isfinite(norms) & (norms > 0)]
        unchosen = replayed(norms, "unchosen")[1] if norms.size else math.nan
    rate = None if rates is None else float(rates[best[1]])
    return SweepResult(
        thresholds, rates, loss, norm, share, final, diverged, noise, chosen, rate, noises, unchosen
    )


def _noise(losses: Numbers) -> float:
    """The noise of the mean of [seeds, last steps]."""
    with np.errstate(over="ignore", invalid="ignore"):
        if len(losses) == 1:
            return float(np.std(losses))
        finals = losses.mean(axis=-1)
        return NOISE * float(np.std(finals, ddof=1) / math.sqrt(len(finals)))

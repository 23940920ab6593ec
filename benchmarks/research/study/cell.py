"""Compiles a cell of the study: a task, an optimizer and a method.

Learning rates, faults, seeds and thresholds are inputs. Runs are computed sequentially, which is
faster on CPUs than `vmap` for all but the smallest networks.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from benchmarks.research.study import faults
from benchmarks.research.study.faults import Faults
from benchmarks.research.study.methods import Method, Setting, get_num_changed
from benchmarks.research.study.optimizers import build_optimizer
from benchmarks.research.study.task import Task
from optaxclip import accumulate, monitor, ops


class Begin(NamedTuple):
    """The start of a run, which does not depend on the method.

    `held_out` is the initial loss, float32[]. `keys` are those of the batches, [steps], and `noise`
    is that of the noise.
    """

    params: Any
    held_out: Array
    keys: Array
    noise: Array
    faults: Faults


class Runs(NamedTuple):
    """The inputs of a program with a leading axis of runs."""

    begin: Begin
    rate: Array
    threshold: Array


class Outcome(NamedTuple):
    """The results of runs.

    Attributes:
      held_out: The losses before the first and after every `every` steps, [runs, evaluations].
      changed: The number of steps that the method changed, int32[runs], or -1 if unknown.
      onset: The first bad step, int32[runs], or -1.
      norms: The norms of the gradients before the method, float32[runs, steps].
    """

    held_out: Array
    changed: Array
    onset: Array
    norms: Array


def build_program(
    task: Task, optimizer_name: str, method: Method, steps: int, every: int, use_vmap: bool = False
) -> Callable[[Runs], Outcome]:
    """Returns the jitted function of a cell, which computes runs sequentially or together."""
    grad_fn = _build_grad_fn(task, method)

    def run(begin: Begin, rate: Array, threshold: Array) -> Outcome:
        # The best learning rate of SGD depends on the scale of the loss.
        scale_factor = 1 / begin.faults.scale if optimizer_name == "sgd" else 1.0
        parts = build_optimizer(optimizer_name, rate * scale_factor * begin.faults.rate, steps)
        setting = Setting(*parts, threshold, task.noise or 0.0, begin.noise, task.examples)
        tx = optax.with_extra_args_support(method.make(setting))

        def step(carry: Any, inputs: Any) -> tuple[Any, Array]:
            (params, state), (key, factor, is_scrambled, is_nan) = carry, inputs
            batch = task.batch(params, key, is_scrambled)
            weights = faults.compute_weights(factor, is_nan, task.examples)
            scale = monitor.loss_scale(state) if method.is_scaled else 1.0
            loss, grads = grad_fn(params, batch, scale * weights, threshold)
            updates, state = tx.update(grads, state, params, value=loss / scale)
            return (optax.apply_updates(params, updates), state), ops.global_norm(grads) / scale

        def run_until_evaluation(carry: Any, inputs: Any) -> tuple[Any, Any]:
            carry, norms = jax.lax.scan(step, carry, inputs)
            return carry, (task.held_out(carry[0]), norms)

        run_faults = begin.faults
        each = (begin.keys, run_faults.factor, run_faults.is_scrambled, run_faults.is_nan)
        each = jax.tree.map(lambda x: x.reshape(-1, every, *x.shape[1:]), each)
        carry = (begin.params, tx.init(begin.params))
        (_, state), (losses, norms) = jax.lax.scan(run_until_evaluation, carry, each)
        held_out = jnp.append(begin.held_out, losses)
        changed = jnp.int32(-1) if method.microbatches else get_num_changed(state)
        return Outcome(held_out, changed, run_faults.onset, norms.reshape(-1))

    if use_vmap:
        return jax.jit(lambda runs: jax.vmap(run)(*runs))
    return jax.jit(lambda runs: jax.lax.map(lambda each: run(*each), runs))


def build_begin(task: Task, steps: int) -> Callable[[Array, Array], Begin]:
    """Returns a jitted function of seeds and numbers of faults, both int32[runs].

    It is not part of the cells, because all methods share it.
    """

    def begin(seed: Array, fault: Array) -> Begin:
        first, data, fault_key, noise = jax.random.split(jax.random.key(seed), 4)
        params, keys = task.initial(first), jax.random.split(data, steps)
        run_faults = faults.draw(fault, fault_key, steps)
        return Begin(params, task.held_out(params), keys, noise, run_faults)

    return jax.jit(lambda *of: jax.lax.map(lambda each: begin(*each), of))


def _build_grad_fn(task: Task, method: Method) -> Callable[..., tuple[Array, Any]]:
    def loss_fn(params: Any, batch: Any, weights: Array) -> Array:
        return jnp.mean(weights * task.losses(params, batch))

    def compute_batch_grads(
        params: Any, batch: Any, weights: Array, threshold: Array
    ) -> tuple[Array, Any]:
        return jax.value_and_grad(loss_fn)(params, batch, weights)

    def compute_example_grads(
        params: Any, batch: Any, weights: Array, threshold: Array
    ) -> tuple[Array, Any]:
        singles = jax.tree.map(lambda x: x[:, None], (batch, weights))
        losses, grads = jax.vmap(jax.value_and_grad(loss_fn), (None, 0, 0))(params, *singles)
        return losses.mean(), grads

    def compute_microbatch_grads(
        params: Any, batch: Any, weights: Array, threshold: Array
    ) -> tuple[Array, Any]:
        grad_fn = accumulate.value_and_grad(
            loss_fn,
            batch_argnums=(1, 2),
            microbatch_size=task.examples // faults.MICROBATCHES,
            clip=None if method.threshold is None else threshold,
        )
        loss, grads, _ = grad_fn(params, batch, weights)
        return loss, grads

    if task.noise is not None:
        return compute_example_grads
    return compute_microbatch_grads if method.microbatches else compute_batch_grads

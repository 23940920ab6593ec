"""Computes the norm of each example's gradient, and explains how."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import Array

import optaxclip._backend.meshes as meshes
import optaxclip.scopes as scopes
from optaxclip._base.types import PyTree
from optaxclip._base.validation import check_bool, check_int, validate_call
from optaxclip._loss_arguments import LossArguments, check_argnums
from optaxclip.per_example._batched_clip import ClippedSums
from optaxclip.per_example._clip_sum import ExampleClip, padding_flags
from optaxclip.per_example._clipped_grad import Method, check_method
from optaxclip.per_example._example_loss import (
    ExampleLoss,
    RunningSums,
    scan_microbatches,
    with_retry,
)
from optaxclip.per_example._programs import mixes_examples
from optaxclip.per_example.ghost.clip import check_scope, compute_norms, format_plan
from optaxclip.per_example.ghost.plan import GhostNormPlan
from optaxclip.scopes.leaves import Scope, resolve_scope


@dataclasses.dataclass(frozen=True, eq=False)
class GradNorms:
    """The function that `grad_norms` returns; its fields are the arguments."""

    loss_fn: Callable[..., Any]
    argnums: int | tuple[int, ...]
    batch_argnums: int | tuple[int, ...] | None
    has_aux: bool
    microbatch_size: int | None
    scope: Scope
    method: Method
    specs: PyTree = None

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        """The norms, the losses, and with `has_aux` the auxiliary outputs."""
        roles = LossArguments.split(args, self.argnums, self.batch_argnums)
        loss = ExampleLoss.create(self.loss_fn, self.has_aux, roles, keywords)
        batch = (roles.batch, padding_flags(None, loss.examples))
        measured = loss.local_params(batch, self.specs)
        program, output = loss.program(measured)
        grouping, size = self.scope(loss.params), self.microbatch_size
        if self.method == "ghost":
            check_scope(grouping, loss.params)
            plan = GhostNormPlan.create(program, output, len(measured))
            size = plan.microbatch_size(loss.examples) if size is None else size
            step = functools.partial(compute_norms, plan, loss, measured, grouping)
        else:
            step = functools.partial(_microbatch_norms, loss, measured, self.scope)
        nothing = meshes.pvary_like(batch, RunningSums.empty())
        if mixes_examples(program.jaxpr):
            step = with_retry(step, nothing)
        sums, losses, aux = scan_microbatches(step, batch, loss.examples, size, nothing)
        return (sums.norms, losses, aux) if self.has_aux else (sums.norms, losses)


@validate_call(
    replacements={
        "num_microbatches": "microbatch_size=, how many examples are differentiated at once"
    }
)
def grad_norms(
    loss_fn: Callable[..., Any],
    *,
    argnums: int | Sequence[int] = 0,
    batch_argnums: int | Sequence[int] | None = None,
    has_aux: bool = False,
    microbatch_size: int | None = None,
    scope: Scope | None = None,
    method: Method = "ghost",
    specs: PyTree = None,
) -> GradNorms:
    """Makes a function that returns the norm of each example's gradient: which example is it?

    The method "ghost" computes no gradient of an example. It runs the program of the loss forward
    and backward once, as for the gradient of the batch. Where a parameter meets data, as in
    `x @ w`, it keeps the inputs `x` and the cotangents of the outputs, which give the norm. It does
    so for matrix products, convolutions and rows of tables, even inside of `scan`, `jit` and
    `jax.checkpoint`. Parameters that meet anything else, such as biases and gains, are
    differentiated for each example. That is right for every operation, but takes memory if they are
    large; `explain` says which parameters these are.

    The norms are never below those of the exact products of the inputs and cotangents that
    backpropagation computes, because they include bounds on all rounding, which hold for any order
    of summation. (`jax.grad` rounds these products to the dtype of the layer: if float32 parameters
    are cast to bfloat16 inside of the loss, its gradient's norm may be 3e-4 larger. What
    `clipped_grad` adds up has the norms that are shown here.) These bounds make the norms larger:
    by about 1e-6 if each parameter is used at only one position, as in a perceptron on vectors;
    with many positions (tokens or pixels), by 1e-4 (16 of them) to 4e-3 (4096), and by at most 1 %
    if positions do not cancel.

    By default GPUs and TPUs round the factors of products (to TF32 or bfloat16). All products for
    norms and sums ask for the highest precision, unless their factors are in bfloat16, whose
    products are exact in float32. The products of the loss itself have the precision that it asks
    for, so the norms are those of the gradients that the loss gives.

    Sources: Goodfellow, 2015, arXiv 1510.01799; Li, Tramèr, Liang and Hashimoto, 2021, arXiv
    2110.05679 ("ghost clipping"); Bu, Wang, Zha and Karypis, 2022, arXiv 2210.00038.

    Args:
      loss_fn: the loss of one example, a scalar: `loss_fn(params, *example)`.
      argnums: which arguments to differentiate, as in `jax.grad`.
      batch_argnums: which arguments, pytrees of arrays or of keys, have a leading axis of examples;
        if None, all that are not in `argnums`.
      has_aux: whether `loss_fn` returns `(loss, aux)`.
      microbatch_size: how many examples to differentiate at once; if None, all of them. With
        "ghost", None means fewer if what is kept for norms alone would exceed both 256 MiB and
        twice the memory of the parameters: then as many examples as fit into the larger of these.
      scope: which entries of an example share one norm; all of them if None. With "ghost", a group
        has to consist of whole leaves.
      method: "ghost"; or "vmap", which computes the gradient of each example.
      specs: as in `clipped_grad`.

    Returns:
      A function `(*args, **keywords) -> (norms, losses)`, or `(norms, losses, aux)`, of the
      arguments of `loss_fn`; those in `batch_argnums` have a leading axis of examples. Norms are
      float32 or wider, `[examples]`, or for a scope of several groups `[examples, groups]`, in the
      order of the groups' names; for the scopes `axes` and `unit`, a dict of arrays. Norms are NaN
      or infinite for examples whose gradients are not finite. With microbatches, call the function
      inside of `jax.jit`.

    Raises:
      ValueError: for a microbatch size below 1 or an unknown method; when called, for arguments
        that do not share an axis of examples, positions that do not exist or come twice, a loss
        that is not a scalar, and with "ghost" for a scope with several norms for one leaf; inside
        `shard_map` and `pmap` as `clipped_grad`.
      TypeError: for a scope that is not a scope, and positions or sizes that are not ints; when
        called, for a model of Flax NNX or Equinox that holds more than its parameters
        (`docs/recipes/modules.md`).

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from optaxclip import per_example
      >>> def loss_fn(w, x, y):
      ...     return (jnp.dot(w, x) - y) ** 2
      >>> x, y = jnp.array([[3.0, 4.0], [0.1, 0.0], [0.0, 2.0]]), jnp.array([1.0, -1.0, 0.5])
      >>> norms, losses = jax.jit(per_example.grad_norms(loss_fn))(jnp.zeros(2), x, y)
      >>> print(norms, losses)
      [10.   0.2  2. ] [1.   1.   0.25]
    """
    has_aux = check_bool(has_aux, "has_aux")
    if microbatch_size is not None:
        microbatch_size = check_int(microbatch_size, 1, "microbatch_size")
    positions = check_argnums(argnums, batch_argnums)
    scope = scopes.tree() if scope is None else resolve_scope(scope)
    method = check_method(method)
    return GradNorms(loss_fn, *positions, has_aux, microbatch_size, scope, method, specs)


def _microbatch_norms(
    loss: ExampleLoss, measured: list[Any], scope: Scope, batch: tuple[Any, Array]
) -> tuple[ClippedSums, Array, PyTree]:
    """The norms of a microbatch, from the gradients of its examples."""
    examples, is_padding = batch
    value, leaves = jax.vmap(loss.value_and_grad, in_axes=(None, 0))(measured, examples)
    no_threshold = ExampleClip.create(math.inf, scope, "clip", "uniform")
    sums = no_threshold.sums(leaves, loss.params, is_padding)
    return ClippedSums(*RunningSums.empty(), sums.norms), *loss.split(value)


def explain(
    loss_fn: Callable[..., Any],
    *args: Any,
    argnums: int | Sequence[int] = 0,
    batch_argnums: int | Sequence[int] | None = None,
    has_aux: bool = False,
    **keywords: Any,
) -> str:
    """Explains how the method "ghost" measures each parameter of a loss, and what it costs.

    Args:
      loss_fn: the loss of one example.
      args: the loss's arguments; those in `batch_argnums` have a leading axis of examples. A
        `jax.ShapeDtypeStruct` can stand for an array, because nothing is computed.
      argnums: which arguments are differentiated.
      batch_argnums: which arguments have a leading axis of examples; if None, all that are not in
        `argnums`.
      has_aux: whether `loss_fn` returns `(loss, aux)`.
      keywords: keyword arguments of `loss_fn`.

    Returns:
      A text with a line for each parameter: its shape; how its norms are found, and if its
      gradients are computed, why; the number of positions at which an example uses it; and the
      bytes that an example takes for its norm, beside those for backpropagation.

    Raises:
      ValueError: as `grad_norms`.
      TypeError: as `grad_norms`.

    Example:
      >>> import jax.numpy as jnp
      >>> from optaxclip import per_example
      >>> def loss_fn(params, x):
      ...     return jnp.sum(jnp.tanh(x @ params["w"] + params["b"]))
      >>> params = {"w": jnp.zeros((30, 20)), "b": jnp.zeros(20)}
      >>> print(per_example.explain(loss_fn, params, jnp.ones((8, 30))))
      parameter  shape     norms from                                     positions  memory
      b          (20,)     gradients of examples, as it is used by 'add'          -    80 B
      w          (30, 20)  norms of its inputs and of their cotangents            1     0 B
    """
    has_aux = check_bool(has_aux, "has_aux")
    roles = LossArguments.split(args, *check_argnums(argnums, batch_argnums))
    loss = ExampleLoss.create(loss_fn, has_aux, roles, keywords)
    measured = loss.params.inexact_leaves()
    plan = GhostNormPlan.create(*loss.program(measured), len(measured))
    return format_plan(plan, loss.params.names())

"""Computes the norms of per-example gradients, and describes the method."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, get_args

import jax
import numpy as np
from jax import Array

import optaxclip._backend.meshes as meshes
import optaxclip.scopes as scopes
from optaxclip._base.trees import Grouping
from optaxclip._base.types import PyTree
from optaxclip._base.validation import check_bool, check_choice, check_int, validate_call
from optaxclip._engine.plan import resolve_scope
from optaxclip._loss_arguments import LossArguments, check_argnums
from optaxclip.per_example._batched_clip import ClippedSums, compute_example_norms
from optaxclip.per_example._clip_sum import padding_flags
from optaxclip.per_example._clipped_grad import Method
from optaxclip.per_example._example_loss import (
    ExampleLoss,
    RunningSums,
    mixes_examples,
    retry_separately,
    scan_microbatches,
)
from optaxclip.per_example._ghost_clip import check_scope, compute_norms
from optaxclip.per_example._ghost_plan import GhostNormPlan
from optaxclip.scopes import Scope


@dataclasses.dataclass(frozen=True, eq=False)
class GradNorms:
    """The function returned by `grad_norms`, with checked arguments as fields."""

    loss_fn: Callable[..., Any]
    argnums: int | tuple[int, ...]
    batch_argnums: int | tuple[int, ...] | None
    has_aux: bool
    microbatch_size: int | None
    scope: Scope
    method: Method
    specs: PyTree = None

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        """Returns the norms and losses, and aux if `has_aux` is True."""
        roles = LossArguments.split(args, self.argnums, self.batch_argnums)
        loss = ExampleLoss.create(self.loss_fn, self.has_aux, roles, keywords)
        batch = (roles.batch, padding_flags(None, loss.examples))  # [examples, ...]
        measured = loss.local_params(batch, self.specs)
        program, output = loss.program(measured)
        grouping, size = self.scope(loss.params), self.microbatch_size
        if self.method == "ghost":
            check_scope(grouping, loss.params)
            plan = GhostNormPlan.create(program, output, len(measured))
            size = plan.microbatch_size(loss.examples) if size is None else size
            step = functools.partial(compute_norms, plan, measured, grouping)
        else:
            step = functools.partial(_microbatch_norms, loss, measured, grouping)
        zeros = meshes.pvary_like(batch, RunningSums.empty())
        if mixes_examples(program.jaxpr):
            step = functools.partial(retry_separately, step, zeros)
        sums, losses, aux = scan_microbatches(step, batch, loss.examples, size, zeros)
        return (sums.norms, losses, aux) if self.has_aux else (sums.norms, losses)


@validate_call(
    replacements={"num_microbatches": "microbatch_size=, the number of examples in a microbatch"}
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
    """Returns a function that computes the norms and losses of all examples.

    You can use it to find examples with large gradients or wrong labels, and to choose a threshold
    for `clipped_grad`.

    The method "ghost" never computes the gradients of the examples. It uses one forward and one
    backward pass, as for the gradient of the batch. If data and a parameter are multiplied, as in
    `x @ w`, it keeps the inputs `x` and the cotangents of the outputs, which determine the norm. It
    supports matrix products, convolutions and embedding tables, including those inside `scan`,
    `jit` and `jax.checkpoint`. Parameters with other uses, such as biases and gains, are
    differentiated for all examples. This is correct for all operations, but requires memory if
    these parameters are large. `explain` lists these parameters.

    The norms are upper bounds on the norms of the exact products of the inputs and cotangents of
    backpropagation, because they include bounds on all rounding errors for any order of summation.
    Note that `jax.grad` rounds these products to the dtype of the layer. If float32 parameters are
    cast to bfloat16 in the loss, the norm of its gradient may be larger by 3e-4. The gradients that
    `clipped_grad` sums have the norms that are returned here. The bounds increase the norms by
    about 1e-6 if parameters are used at only one position, as in a perceptron on vectors. For many
    positions (tokens or pixels), the increase is 1e-4 (16 positions) to 4e-3 (4096 positions), and
    at most 1% if the positions do not cancel.

    By default, GPUs and TPUs round the factors of products (to TF32 or bfloat16). All products for
    norms and sums use the highest precision, unless their factors are in bfloat16, because their
    products are exact in float32. The products of the loss use the precision that the loss
    specifies. Therefore, the norms are those of the actual gradients of the loss.

    Sources: Goodfellow, 2015, arXiv 1510.01799; Li, Tramèr, Liang and Hashimoto, 2021, arXiv
    2110.05679 ("ghost clipping"); Bu, Wang, Zha and Karypis, 2022, arXiv 2210.00038.

    Args:
      loss_fn: The scalar loss of one example, `loss_fn(params, *example)`.
      argnums: The positions of the arguments to differentiate, as in `jax.grad`.
      batch_argnums: The positions of the arguments with a leading example axis, which can be
        pytrees of arrays or keys. Defaults to all arguments that are not in `argnums`.
      has_aux: If True, `loss_fn` returns `(loss, aux)`.
      microbatch_size: The number of examples in a microbatch. Defaults to all examples. However,
        the memory for norms with "ghost" should not exceed 256 MiB or twice the memory of the
        parameters, so the default is as many examples as fit into the larger of these.
      scope: The scope that defines the elements of an example that share a norm. Defaults to all
        elements. Groups must consist of whole leaves for "ghost".
      method: "ghost" (the default), or "vmap", which computes the gradients of the examples.
      specs: The specs of the parameters, as in `clipped_grad`.

    Returns:
      A function `(*args, **keywords) -> (norms, losses)`, or `(norms, losses, aux)`, of the
      arguments of `loss_fn`. The arguments in `batch_argnums` must have a leading example axis. The
      norms are float32 or wider, `[examples]`, or `[examples, groups]` for a scope with several
      groups, in the order of their names. For the scopes `axes` and `unit`, they are a dict of
      arrays. The norms of examples with non-finite gradients are NaN or infinite. If you use
      microbatches, call the function inside `jax.jit`.

    Raises:
      ValueError: If the microbatch size is less than 1, or if the method is unknown. The function
        raises it if the arguments do not share an example axis, if positions do not exist or are
        repeated, if the loss is not a scalar, or if the scope has several norms per leaf with
        "ghost". Inside `shard_map` and `pmap`, it raises the same errors as `clipped_grad`.
      TypeError: If the scope is not a scope, or if positions or sizes are not ints. The function
        raises it for a model of Flax NNX or Equinox that contains more than parameters
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
    method = check_choice(method, get_args(Method), "method")
    return GradNorms(loss_fn, *positions, has_aux, microbatch_size, scope, method, specs)


def _microbatch_norms(
    loss: ExampleLoss, measured: list[Any], grouping: Grouping, batch: tuple[Any, Array]
) -> tuple[ClippedSums, Array, PyTree]:
    """Computes the norms, the losses and aux of a microbatch from its gradients."""
    examples, is_padding = batch  # [size, ...], bool[size]
    grad_fn = jax.value_and_grad(loss, has_aux=True)
    results, leaves = jax.vmap(grad_fn, in_axes=(None, 0))(measured, examples)
    norms = compute_example_norms(leaves, is_padding, grouping=grouping)  # f32[size, ...]
    return ClippedSums(*RunningSums.empty(), norms), *results


def explain(
    loss_fn: Callable[..., Any],
    *args: Any,
    argnums: int | Sequence[int] = 0,
    batch_argnums: int | Sequence[int] | None = None,
    has_aux: bool = False,
    **keywords: Any,
) -> str:
    """Describes the computation of the norms of all parameters with the method "ghost".

    Args:
      loss_fn: The loss of one example.
      args: The arguments of the loss. The arguments in `batch_argnums` must have a leading example
        axis. You can use a `jax.ShapeDtypeStruct` instead of an array, because nothing is computed.
      argnums: The positions of the arguments to differentiate.
      batch_argnums: The positions of the arguments with a leading example axis. Defaults to all
        arguments that are not in `argnums`.
      has_aux: If True, `loss_fn` returns `(loss, aux)`.
      keywords: Keyword arguments of `loss_fn`.

    Returns:
      A table with a row per parameter. Its columns are the shape, the method for the norms (with a
      reason if gradients are computed), the number of positions at which an example uses the
      parameter, and the memory that an example requires in addition to backpropagation.

    Raises:
      ValueError: As in `grad_norms`.
      TypeError: As in `grad_norms`.

    Example:
      >>> import jax.numpy as jnp
      >>> from optaxclip import per_example
      >>> def loss_fn(params, x):
      ...     return jnp.sum(jnp.tanh(x @ params["w"] + params["b"]))
      >>> params = {"w": jnp.zeros((30, 20)), "b": jnp.zeros(20)}
      >>> print(per_example.explain(loss_fn, params, jnp.ones((8, 30))))
      parameter  shape     norms from                                          positions  memory
      b          (20,)     gradients of examples, because it is used by 'add'          -    80 B
      w          (30, 20)  norms of inputs and output cotangents                       1     0 B
    """
    has_aux = check_bool(has_aux, "has_aux")
    roles = LossArguments.split(args, *check_argnums(argnums, batch_argnums))
    loss = ExampleLoss.create(loss_fn, has_aux, roles, keywords)
    measured = loss.params.inexact_leaves()
    plan = GhostNormPlan.create(*loss.program(measured), len(measured))
    return _format_plan(plan, loss.params.names())


_DESCRIPTIONS = {
    "vectors": "norms of inputs and output cotangents",
    "gram": "Gram matrices of inputs and output cotangents",
    "direct": "gradients of examples, cheaper than Gram matrices",
    "chunks": "gradients of a few examples at a time",
    "rows": "sums of the cotangents of equal rows",
    "tied": "Gram matrices and sums of the cotangents of equal rows",
}


def _format_plan(plan: GhostNormPlan, names: list[str]) -> str:
    """Returns a table with one row per term of a parameter."""
    table = [["parameter", "shape", "norms from", "positions", "memory"]]
    itemsize = np.dtype(np.float32).itemsize
    for i, (name, aval) in enumerate(zip(names, plan.types, strict=True)):
        start = [name, str(aval.shape)]
        if i in plan.materialized:
            reason = f"gradients of examples, because it {plan.materialized[i]}"
            table.append([*start, reason, "-", _format_bytes(aval.size * aval.dtype.itemsize)])
        elif not plan.parts[i]:
            table.append([*start, "is not used: norm 0", "-", "0 B"])
        for term in plan.parts[i]:
            memory = _format_bytes(term.bytes_of(False, itemsize))
            positions = str(term.sizes.positions)
            table.append([*start, _DESCRIPTIONS[term.method], positions, memory])
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    # Text is aligned to the left, and the numbers in the last two columns to the right.
    align = [str.ljust] * 3 + [str.rjust] * 2
    return "\n".join(
        "  ".join(fn(cell, n) for fn, cell, n in zip(align, row, widths, strict=True))
        for row in table
    )


def _format_bytes(number: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if number < 1024:
            return f"{number:.4g} {unit}"
        number /= 1024
    return f"{number:.4g} GiB"

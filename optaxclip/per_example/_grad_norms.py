"""Computes the norms of per-example gradients, and explains how they are computed."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, get_args

import jax
import numpy as np
from jax import Array

import optaxclip._backend.meshes as meshes
import optaxclip.per_example._example_loss as example_loss
import optaxclip.scopes as scopes
from optaxclip._base.trees import Grouping
from optaxclip._base.types import PyTree
from optaxclip._base.validation import check_bool, check_choice, check_int, validate_call
from optaxclip._engine.plan import resolve_scope
from optaxclip._loss_arguments import LossArguments, check_argnums
from optaxclip.per_example._batched_clip import ClippedSums, compute_example_norms
from optaxclip.per_example._clip_sum import padding_flags
from optaxclip.per_example._clipped_grad import Method
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
        loss = example_loss.ExampleLoss(self.loss_fn, self.has_aux, roles, keywords)
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
        zeros = meshes.pvary_like(batch, ClippedSums.of_norms())
        if example_loss.mixes_examples(program.jaxpr):
            step = functools.partial(example_loss.retry_separately, step, zeros)
        sums, losses, aux = example_loss.scan_microbatches(step, batch, loss.examples, size, zeros)
        return (sums.norms, losses, aux) if self.has_aux else (sums.norms, losses)


@validate_call(
    replacements={"num_microbatches": "microbatch_size, the number of examples in a microbatch"}
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
    """Returns a function that computes the gradient norms and losses of all examples.

    Use it to find examples with large gradients or wrong labels, or to choose a threshold for
    `clipped_grad`.

    The method "ghost" requires only one forward and one backward pass over the batch. If data and a
    parameter are multiplied, as in `x @ w`, the norm is computed from the inputs `x` and the
    cotangents of the outputs. This works for matrix products, convolutions, and embedding tables,
    including inside `scan`, `jit`, and `jax.checkpoint`. For parameters with other uses, such as
    biases, per-example gradients are computed. `explain` lists these parameters.

    The norms of "ghost" are upper bounds because they include bounds on all rounding errors. They
    are about 1e-6 too large if parameters are used at a single position, and between 1e-4 and 4e-3
    for 16 to 4096 positions (tokens or pixels). Unless positions cancel, they are at most 1% too
    large. Note that `jax.grad` rounds gradients to the dtype of the layer. If the loss casts
    float32 parameters to bfloat16, the norm of its gradient may be larger by 3e-4. Products for
    norms use the highest precision, even on GPUs and TPUs.

    Sources: Goodfellow, 2015, arXiv 1510.01799; Li, Tramèr, Liang, and Hashimoto, 2021, arXiv
    2110.05679 ("ghost clipping"); Bu, Wang, Zha, and Karypis, 2022, arXiv 2210.00038.

    Args:
      loss_fn: The scalar loss of one example, `loss_fn(params, *example)`.
      argnums: The positions of the arguments to differentiate, as in `jax.grad`.
      batch_argnums: The positions of the arguments with a leading example axis, which can be
        pytrees of arrays or PRNG keys. Defaults to all arguments except `argnums`.
      has_aux: If True, `loss_fn` returns `(loss, aux)`.
      microbatch_size: The number of examples in a microbatch. Defaults to all examples for "vmap".
        For "ghost", the default limits the additional memory to 256 MiB or twice the memory of the
        parameters, whichever is larger.
      scope: The elements of an example that share a norm, as in `clip_sum`. Defaults to all. For
        "ghost", groups must consist of whole leaves.
      method: "ghost" (the default), or "vmap", which computes per-example gradients.
      specs: The specs of the parameters, as in `clipped_grad`.

    Returns:
      A function `(*args, **keywords) -> (norms, losses)`, or `(norms, losses, aux)`, of the
      arguments of `loss_fn`. The norms are float32 or wider, `[examples]`, or `[examples, groups]`
      in the order of the group names. For the scopes `axes` and `unit`, they are a dict of arrays.
      Norms of non-finite gradients are NaN or infinite. If you use microbatches, call the function
      inside `jax.jit`.

    Raises:
      ValueError: If an argument is out of range. Also raised by the returned function as in
        `clipped_grad`, or if the scope has several norms per leaf and the method is "ghost".
      TypeError: If an argument has the wrong type. Also raised by the returned function as in
        `clipped_grad`.

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
    loss: example_loss.ExampleLoss, params: list[Any], grouping: Grouping, batch: tuple[Any, Array]
) -> example_loss.StepResult:
    """Computes the norms, the losses, and aux of a microbatch from its gradients."""
    examples, is_padding = batch  # [size, ...], bool[size]
    grad_fn = jax.value_and_grad(loss, has_aux=True)
    results, leaves = jax.vmap(grad_fn, in_axes=(None, 0))(params, examples)
    norms = compute_example_norms(leaves, is_padding, grouping=grouping)  # f32[size, ...]
    return ClippedSums.of_norms(norms), *results


def explain(
    loss_fn: Callable[..., Any],
    *args: Any,
    argnums: int | Sequence[int] = 0,
    batch_argnums: int | Sequence[int] | None = None,
    has_aux: bool = False,
    **keywords: Any,
) -> str:
    """Shows how the method "ghost" computes the norms of all parameters.

    Args:
      loss_fn: The loss of one example.
      args: The arguments of the loss. `jax.ShapeDtypeStruct`s can replace arrays.
      argnums: The positions of the arguments to differentiate.
      batch_argnums: The positions of the arguments with a leading example axis, as in `grad_norms`.
      has_aux: If True, `loss_fn` returns `(loss, aux)`.
      keywords: Keyword arguments of `loss_fn`.

    Returns:
      A table with one row per parameter, with the method (and a reason if gradients are computed),
      the number of positions at which an example uses the parameter, and the memory per example in
      addition to backpropagation.

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
    loss = example_loss.ExampleLoss(loss_fn, has_aux, roles, keywords)
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
    align = [str.ljust] * 3 + [str.rjust] * 2
    rows = (zip(align, row, widths, strict=True) for row in table)
    return "\n".join("  ".join(fn(cell, width) for fn, cell, width in row) for row in rows)


def _format_bytes(number: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if number < 1024:
            return f"{number:.4g} {unit}"
        number /= 1024
    return f"{number:.4g} GiB"

"""Computes, clips and sums the gradients of examples, one microbatch at a time."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from jax import Array

import optaxclip._backend.meshes as meshes
from optaxclip._base.trees import FlatTree, flatten
from optaxclip._base.types import ArrayLike, PyTree
from optaxclip._base.validation import check_bool, check_choice, check_int, validate_call
from optaxclip._loss_arguments import LossArguments, check_argnums, flatten_params
from optaxclip.per_example._batched_clip import ClippedSums
from optaxclip.per_example._clip_sum import (
    ExampleClip,
    ExampleThreshold,
    PerExampleResult,
    padding_flags,
    result_of,
    sensitivity_factor,
)
from optaxclip.per_example._example_loss import (
    ExampleLoss,
    RunningSums,
    scan_microbatches,
    with_retry,
)
from optaxclip.per_example._programs import mixes_examples
from optaxclip.per_example.ghost.clip import check_scope, compute_clipped_sums
from optaxclip.per_example.ghost.plan import GhostNormPlan
from optaxclip.responses import Response
from optaxclip.scopes import Scope

Method = Literal["vmap", "ghost"]


@dataclasses.dataclass(frozen=True, eq=False)
class ClippedGrad:
    """The function that `clipped_grad` returns, of whose arguments its fields are made.

    The method `sensitivity` tells how far one example can change the sum.
    """

    loss_fn: Callable[..., Any]
    clip: ExampleClip
    argnums: int | tuple[int, ...]
    batch_argnums: int | tuple[int, ...] | None
    has_aux: bool
    microbatch_size: int | None
    transform: Callable[[PyTree], PyTree] | None
    method: Method
    specs: PyTree = None

    def __call__(
        self, *args: Any, is_padding: ArrayLike | None = None, **keywords: Any
    ) -> PerExampleResult:
        """The sum of the clipped gradients, and what happened to the examples."""
        roles = LossArguments.split(args, self.argnums, self.batch_argnums)
        loss = ExampleLoss.create(self.loss_fn, self.has_aux, roles, keywords)
        batch = (roles.batch, padding_flags(is_padding, loss.examples))
        measured = loss.local_params(batch, self.specs)
        program, output = loss.program(measured)
        is_mixing = mixes_examples(program.jaxpr)
        one, size = self._get_clipped_tree(loss.params), self.microbatch_size
        grouping, thresholds, bound = self.clip.compute_thresholds(one)
        if self.method == "ghost":
            check_scope(grouping, one)
            plan = GhostNormPlan.create(program, output, len(measured))
            size = plan.microbatch_size(loss.examples) if size is None else size
            groups = (grouping, thresholds, self.clip.response)
            step = functools.partial(compute_clipped_sums, plan, loss, measured, *groups)
        else:
            step = functools.partial(_clip_microbatch, self, loss, measured, one, is_mixing)
        nothing = meshes.pvary_like(batch, RunningSums.zeros(one, grouping))
        if is_mixing:
            step = with_retry(step, nothing)
        sums, losses, aux = scan_microbatches(step, batch, loss.examples, size, nothing)
        result = result_of(sums, one.replace_with_float0().unflatten(sums.leaves))
        return result._replace(losses=losses, aux=aux, bound=bound)

    def sensitivity(self, relation: Any = "add_or_remove_one", params: PyTree = None) -> ArrayLike:
        """The largest L2 norm by which one example can change the sum: noise is scaled by it.

        Args:
          relation: how two neighbouring data sets differ. One of them lacks an example
            ("add_or_remove_one"), has a blank example in its place ("replace_special"), or has a
            different example in its place ("replace_one"), which doubles the change. A member of
            `dp_accounting.NeighboringRelation` will do too.
          params: the parameters; thresholds by name need them, to count the groups of each name.

        Raises:
          ValueError: for another relation, or for thresholds by name without `params`.
        """
        change = sensitivity_factor(relation)
        bound: Any = self.clip.threshold
        if isinstance(bound, Mapping):
            if params is None:
                raise ValueError(
                    "thresholds are given by the names of groups, and the sensitivity depends on how "
                    "many groups have each name: pass params="
                )
            bound = self.clip.compute_thresholds(self._get_clipped_tree(flatten_params(params)))[2]
        return change * bound

    def _get_clipped_tree(self, params: FlatTree) -> FlatTree:
        """The tree that is clipped for one example: like the parameters, or from `transform`."""
        if self.transform is None:
            return params
        zeros = [jnp.zeros_like(leaf) for leaf in params.inexact_leaves()]
        made = self.transform(_gradient(params, zeros))
        return flatten(made, "what pre_clipping_transform gives")


@validate_call(
    replacements={
        "num_microbatches": "microbatch_size=, how many examples are differentiated at once"
    }
)
def clipped_grad(
    loss_fn: Callable[..., Any],
    threshold: ExampleThreshold,
    *,
    argnums: int | Sequence[int] = 0,
    batch_argnums: int | Sequence[int] | None = None,
    has_aux: bool = False,
    microbatch_size: int | None = None,
    scope: Scope | None = None,
    response: str | Response = "clip",
    split: Literal["uniform", "size"] = "uniform",
    pre_clipping_transform: Callable[[PyTree], PyTree] | None = None,
    method: Method = "vmap",
    specs: PyTree = None,
) -> ClippedGrad:
    """Makes a function that returns the sum of the examples' clipped gradients.

    The guarantees are those of `clip_sum`, if the loss depends on the parameters and on one example
    alone. With BatchNorm, `pmean` or `psum` over a batch, or with other examples in a closure or in
    a keyword, one example changes what the others add, by any amount. The gradients of at most
    `microbatch_size` examples are in memory at the same time: microbatches follow one another in a
    `scan`, and the last one may be smaller. A microbatch takes its examples from all over the
    batch, so that each device has a part of it if the batch is sharded. Norms, losses and aux are
    in the order of the batch.

    Under `jit` the sum is over the whole batch, even if it is sharded, with all-reduces for each
    microbatch; on an explicit mesh, a microbatch is split over as many devices as divide it evenly.
    Inside `shard_map`, sums and counts are those of the shard, without communication: `psum` them
    afterwards, which takes one all-reduce for each dtype, however many microbatches there are. Each
    device must have all parameters there; parameters that are split are refused.

    Source: Abadi et al., 2016, arXiv 1607.00133.

    Args:
      loss_fn: the loss of one example, a scalar: `loss_fn(params, *example)`.
      threshold: the largest L2 norm of one example's contribution, as in `clip_sum`.
      argnums: which arguments to differentiate, as in `jax.grad`. The gradients of integer leaves
        are `float0` zeros.
      batch_argnums: which arguments, pytrees of arrays or of keys, have a leading axis of examples;
        if None, all that are not in `argnums`.
      has_aux: whether `loss_fn` returns `(loss, aux)`.
      microbatch_size: how many examples to differentiate at once; all of them if None.
      scope: which entries of an example share one norm; all of them if None.
      response: as in `clip_sum`.
      split: as in `clip_sum`.
      pre_clipping_transform: a function of one example's gradient to any tree, such as a
        preconditioner. Its result is clipped instead of the gradient: the bound, the groups
        and the sum are those of the result.
      method: "vmap" computes the gradient of each example. "ghost" computes norms and sum without
        these gradients, as `grad_norms` does, which is much faster if an example's gradient is
        larger than its activations. It has only norms of whole leaves, and no
        `pre_clipping_transform`. Its norms are upper bounds, so an example may be clipped somewhat
        below the threshold; if its tokens or pixels cancel to a thousandth, far below. With
        `microbatch_size=None` it chooses the size.
      specs: for `pmap` and `shard_map(check_vma=False)`, where types do not show how parameters are
        split: `PartitionSpec()` says that each device has all of them. Split ones are refused.

    Returns:
      A `ClippedGrad`: a function `(*args, is_padding=None, **keywords) -> PerExampleResult` of the
      arguments of `loss_fn`; those in `batch_argnums` have a leading axis of examples. `is_padding`
      is bool `[examples]`. Keywords are passed to `loss_fn`, the same for every example. The method
      `sensitivity` returns how far one example can change the sum. With microbatches, call the
      function inside of `jax.jit`: without it, the loop is compiled again at each call.

    Raises:
      ValueError: for a threshold that is negative, NaN or not a scalar, a microbatch size below 1, or
        an unknown name; when called, for arguments that do not share an axis of examples, positions
        that do not exist or come twice, a loss that is not a scalar, and inside `shard_map` and
        `pmap` for parameters that are split or may be, and a loss that sums over devices.
      TypeError: for a threshold that is not a number, a scope that is not a scope, and positions or
        sizes that are not ints; when called, for a model of Flax NNX or Equinox that holds more
        than its parameters (`docs/recipes/modules.md`).

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from optaxclip import per_example
      >>> def loss_fn(w, x, y):
      ...     return (jnp.dot(w, x) - y) ** 2
      >>> grad_fn = jax.jit(per_example.clipped_grad(loss_fn, 1.0, microbatch_size=2))
      >>> x, y = jnp.array([[3.0, 4.0], [0.1, 0.0], [0.0, 2.0]]), jnp.array([1.0, -1.0, 0.5])
      >>> result = grad_fn(jnp.zeros(2), x, y)
      >>> print(result.grads, result.norms, result.num_clipped)
      [-0.4 -1.8 ] [10.   0.2  2. ] 2
      >>> print(result.losses)
      [1.   1.   0.25]
      >>> print(per_example.clipped_grad(loss_fn, 1.0).sensitivity("replace_one"))
      2.0
    """
    clip = ExampleClip.create(threshold, scope, response, split)
    has_aux = check_bool(has_aux, "has_aux")
    if microbatch_size is not None:
        microbatch_size = check_int(microbatch_size, 1, "microbatch_size")
    roles = check_argnums(argnums, batch_argnums)
    if pre_clipping_transform is not None and not callable(pre_clipping_transform):
        raise TypeError(
            "pre_clipping_transform must be a function from the gradient of one example to the "
            f"tree that is clipped, got {pre_clipping_transform!r}"
        )
    method = check_method(method)
    if method == "ghost" and pre_clipping_transform is not None:
        raise ValueError(
            'method="ghost" computes no gradient of an example that pre_clipping_transform could '
            'change: use method="vmap"'
        )
    settings = (has_aux, microbatch_size, pre_clipping_transform, method, specs)
    return ClippedGrad(loss_fn, clip, *roles, *settings)


def check_method(method: str) -> Method:
    """`method`, checked to be "vmap" or "ghost"."""
    return check_choice(method, get_args(Method), "method")


def _clip_microbatch(
    grad_fn: ClippedGrad,
    loss: ExampleLoss,
    measured: list[Any],
    one: FlatTree,
    is_mixing: bool,
    batch: tuple[tuple[Any, ...], Array],
) -> tuple[ClippedSums, Array, PyTree]:
    """Gradients of a microbatch, clipped and summed."""
    examples, is_padding = batch

    def grad_of_example(measured: list[Any], example: tuple[Any, ...]) -> tuple[Any, list[Any]]:
        value, leaves = loss.value_and_grad(measured, example)
        if grad_fn.transform is not None:
            made = grad_fn.transform(_gradient(loss.params, leaves))
            is_finite = [jnp.all(jnp.isfinite(leaf)) for leaf in leaves]
            leaves = flatten(made, "what pre_clipping_transform gives").inexact_leaves()
            if is_mixing and is_padding.size > 1:
                # Otherwise a transform that replaces NaN would hide what came from other examples.
                is_known = functools.reduce(jnp.logical_and, is_finite, jnp.ones((), bool))
                leaves = [jnp.where(is_known, leaf, jnp.nan) for leaf in leaves]
        return value, leaves

    value, leaves = jax.vmap(grad_of_example, in_axes=(None, 0))(measured, examples)
    return grad_fn.clip.sums(leaves, one, is_padding), *loss.split(value)


def _gradient(params: FlatTree, leaves: list[Any]) -> PyTree:
    """The tree of a gradient, as `jax.grad` gives it."""
    return params.replace_with_float0().unflatten(leaves)

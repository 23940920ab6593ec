"""Computes, clips, and sums per-example gradients in microbatches."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from jax import Array

import optaxclip._backend.meshes as meshes
import optaxclip.per_example._example_loss as example_loss
from optaxclip._base.trees import FlatTree, flatten
from optaxclip._base.types import ArrayLike, PyTree
from optaxclip._base.validation import check_bool, check_choice, check_int, validate_call
from optaxclip._loss_arguments import LossArguments, check_argnums, flatten_params
from optaxclip.per_example._batched_clip import PerExampleResult, result_of
from optaxclip.per_example._clip_sum import ExampleClip, ExampleThreshold, padding_flags
from optaxclip.per_example._ghost_clip import check_scope, compute_clipped_sums
from optaxclip.per_example._ghost_plan import GhostNormPlan
from optaxclip.per_example._noise import sensitivity_factor
from optaxclip.responses import Response
from optaxclip.scopes import Scope

Method = Literal["vmap", "ghost"]


@dataclasses.dataclass(frozen=True, eq=False)
class ClippedGrad:
    """The function that `clipped_grad` returns. Its fields are the checked arguments."""

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
        """Returns the sum of the clipped gradients, along with norms and counts."""
        roles = LossArguments.split(args, self.argnums, self.batch_argnums)
        loss = example_loss.ExampleLoss(self.loss_fn, self.has_aux, roles, keywords)
        batch = (roles.batch, padding_flags(is_padding, loss.examples))  # [examples, ...]
        measured = loss.local_params(batch, self.specs)
        program, output = loss.program(measured)
        is_mixing = example_loss.mixes_examples(program.jaxpr)
        one, size = self._get_clipped_tree(loss.params), self.microbatch_size
        grouping, thresholds, bound = self.clip.compute_thresholds(one)
        if self.method == "ghost":
            check_scope(grouping, one)
            plan = GhostNormPlan.create(program, output, len(measured))
            size = plan.microbatch_size(loss.examples) if size is None else size
            groups = (grouping, thresholds, self.clip.response)
            step = functools.partial(compute_clipped_sums, plan, measured, *groups)
        else:
            step = functools.partial(_clip_microbatch, self, loss, measured, one, is_mixing)
        zeros = meshes.pvary_like(batch, example_loss.zero_sums(one, grouping))
        if is_mixing:
            step = functools.partial(example_loss.retry_separately, step, zeros)
        sums, losses, aux = example_loss.scan_microbatches(step, batch, loss.examples, size, zeros)
        result = result_of(sums, one.replace_with_float0().unflatten(sums.leaves))
        return result._replace(losses=losses, aux=aux, bound=bound)

    def sensitivity(self, relation: Any = "add_or_remove_one", params: PyTree = None) -> ArrayLike:
        """Returns the L2 sensitivity of the sum to one example, for scaling noise.

        Args:
          relation: The relation between neighboring data sets, as a name or a member of
            `dp_accounting.NeighboringRelation`. An example of one data set is missing from the
            other ("add_or_remove_one"), or is replaced by a blank example ("replace_special") or by
            a different example ("replace_one"), which doubles the sensitivity.
          params: The parameters. They are required if `threshold` is a dict, because several groups
            can share a name.

        Raises:
          ValueError: If the relation is unknown, or if `params` is missing.
        """
        change = sensitivity_factor(relation)
        bound: Any = self.clip.threshold
        if isinstance(bound, Mapping):
            if params is None:
                raise ValueError("params are required if threshold is a dict; pass the parameters")
            bound = self.clip.compute_thresholds(self._get_clipped_tree(flatten_params(params)))[2]
        return change * bound

    def _get_clipped_tree(self, params: FlatTree) -> FlatTree:
        """Returns the tree that is clipped for each example: the gradient or its transform."""
        if self.transform is None:
            return params
        zeros = [jnp.zeros_like(leaf) for leaf in params.inexact_leaves()]
        transformed = self.transform(params.replace_with_float0().unflatten(zeros))
        return flatten(transformed, _TRANSFORMED)


_TRANSFORMED = "the result of pre_clipping_transform"


@validate_call(
    replacements={"num_microbatches": "microbatch_size, the number of examples in a microbatch"}
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
    """Returns a function that computes the sum of clipped per-example gradients.

    It has the same guarantees as `clip_sum` if the loss depends only on the parameters and a single
    example. If the loss uses BatchNorm, `pmean`, or `psum` over a batch, or accesses examples
    through a closure or keyword argument, the effect of a single example on the sum is unbounded.

    At most `microbatch_size` per-example gradients are in memory at a time. Microbatches are
    processed in a `scan`, and the last one may be smaller. Their examples are spread over the
    batch, so each device has part of every microbatch. Norms, losses, and aux are in batch order.

    Under `jit`, the sum covers the whole batch even if it is sharded, which requires all-reduces in
    each microbatch. Inside `shard_map`, the results cover only the local shard. Apply `psum` to the
    sums and counts afterwards.

    Source: Abadi et al., 2016, arXiv 1607.00133.

    Args:
      loss_fn: The scalar loss of one example, `loss_fn(params, *example)`.
      threshold: The maximum L2 norm of an example's contribution, as in `clip_sum`.
      argnums: The positions of the arguments to differentiate, as in `jax.grad`. The gradients of
        integer leaves are `float0` zeros.
      batch_argnums: The positions of the arguments with a leading example axis. These arguments
        can be pytrees of arrays or keys. Defaults to all arguments except `argnums`.
      has_aux: If True, `loss_fn` returns `(loss, aux)`.
      microbatch_size: The number of examples in a microbatch. Defaults to all examples, or to an
        automatic size if `method` is "ghost".
      scope: The elements of a gradient that share a norm, as in `clip_sum`. Defaults to all.
      response: The response to a norm above its threshold, as in `clip_sum`.
      split: How to divide the threshold between the groups, as in `clip_sum`.
      pre_clipping_transform: A function that maps an example's gradient to any pytree, which is
        clipped and summed in its place. It requires `method="vmap"`.
      method: If "vmap" (the default), computes per-example gradients. If "ghost", computes the
        norms and the sum without these gradients, like `grad_norms`, which is much faster if an
        example's gradient is larger than its activations. It supports only scopes of whole leaves.
        Its norms are upper bounds, so examples may be clipped slightly below the threshold, or far
        below it if the contributions of their tokens or pixels cancel to about a thousandth.
      specs: The partition specs of the parameters, for `pmap` and `shard_map(check_vma=False)`.
        They must be `PartitionSpec()`, because sharded parameters are not supported.

    Returns:
      A `ClippedGrad`, a function with the arguments of `loss_fn` and an optional `is_padding`, bool
      `[examples]`, that returns a `PerExampleResult`. Keyword arguments are shared by all examples.
      If you use microbatches, call the function inside `jax.jit`. Otherwise, every call recompiles
      the loop.

    Raises:
      ValueError: If an argument is out of range. Also raised by the returned function if the
        arguments do not have the same number of examples, if `argnums` or `batch_argnums` is
        invalid, if the loss is not a scalar or sums over devices, or if parameters may be sharded.
      TypeError: If an argument has the wrong type. Also raised by the returned function if a Flax
        NNX or Equinox model contains other values than parameters (see `docs/recipes/modules.md`).

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
    """
    clip = ExampleClip.create(threshold, scope, response, split)
    has_aux = check_bool(has_aux, "has_aux")
    if microbatch_size is not None:
        microbatch_size = check_int(microbatch_size, 1, "microbatch_size")
    roles = check_argnums(argnums, batch_argnums)
    if pre_clipping_transform is not None and not callable(pre_clipping_transform):
        raise TypeError(
            f"pre_clipping_transform must be a function, got {pre_clipping_transform!r}"
        )
    method = check_choice(method, get_args(Method), "method")
    if method == "ghost" and pre_clipping_transform is not None:
        raise ValueError(
            'pre_clipping_transform must be None with method="ghost", got '
            f'{pre_clipping_transform!r}; use method="vmap"'
        )
    settings = (has_aux, microbatch_size, pre_clipping_transform, method, specs)
    return ClippedGrad(loss_fn, clip, *roles, *settings)


def _clip_microbatch(
    grad_fn: ClippedGrad,
    loss: example_loss.ExampleLoss,
    measured: list[Any],
    one: FlatTree,
    is_mixing: bool,
    batch: tuple[tuple[Any, ...], Array],
) -> example_loss.StepResult:
    """Computes the clipped sums, the losses, and aux of a microbatch from its gradients."""
    examples, is_padding = batch  # [size, ...], bool[size]

    def grad_of_example(measured: list[Any], example: tuple[Any, ...]) -> tuple[Any, list[Any]]:
        results, leaves = jax.value_and_grad(loss, has_aux=True)(measured, example)
        if grad_fn.transform is not None:
            # Transforms receive the tree that `jax.grad` would return.
            gradient = loss.params.replace_with_float0().unflatten(leaves)
            is_finite = [jnp.all(jnp.isfinite(leaf)) for leaf in leaves]
            leaves = flatten(grad_fn.transform(gradient), _TRANSFORMED).inexact_leaves()
            if is_mixing and is_padding.size > 1:
                # A transform could replace NaN, and thus hide that an example may have made all
                # gradients of the microbatch non-finite.
                is_known = functools.reduce(jnp.logical_and, is_finite, jnp.ones((), bool))
                leaves = [jnp.where(is_known, leaf, jnp.nan) for leaf in leaves]
        return results, leaves

    # [size], [size, ...]
    results, leaves = jax.vmap(grad_of_example, in_axes=(None, 0))(measured, examples)
    return grad_fn.clip.sums(leaves, one, is_padding), *results

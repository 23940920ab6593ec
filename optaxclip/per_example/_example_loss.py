"""A loss of one example, as a function of its measured parameters and of the example."""

import dataclasses
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

import optaxclip._backend.meshes as meshes
from optaxclip._backend.leaf_shardings import check_examples_unsharded
from optaxclip._backend.packing import arrange_by_layout
from optaxclip._base.numerics import static_size_or_none
from optaxclip._base.trees import FlatTree, Grouping, flatten
from optaxclip._base.types import NormTree, PyTree
from optaxclip._base.validation import warn
from optaxclip._loss_arguments import (
    LossArguments,
    MicrobatchSplit,
    concatenate_examples,
    flatten_params,
    get_batch_size,
    loss_and_aux,
    remainder,
    restore_batch_order,
)
from optaxclip.per_example._batched_clip import ClippedSums, sum_dtype
from optaxclip.per_example._programs import refuse_shared_bits


@dataclasses.dataclass(frozen=True, eq=False)
class ExampleLoss:
    """A user's loss of one example and the arguments of one call."""

    loss_fn: Callable[..., Any]
    has_aux: bool
    roles: LossArguments
    keywords: dict[str, Any]
    params: FlatTree

    @classmethod
    def create(
        cls,
        loss_fn: Callable[..., Any],
        has_aux: bool,
        roles: LossArguments,
        keywords: dict[str, Any],
    ) -> "ExampleLoss":
        """The loss with the arguments of a call."""
        return cls(loss_fn, has_aux, roles, keywords, flatten_params(roles.params))

    @property
    def examples(self) -> int:
        """The number of examples."""
        return get_batch_size(flatten(self.roles.batch, "the batch"), "the batch")

    def local_params(self, batch: PyTree, specs: PyTree) -> list[Any]:
        """The parameters, typed so that each device has the gradients of its own examples.

        Refused are parameters of which devices hold parts, or may hold them.
        """
        check_examples_unsharded(self.params, specs, of_examples=False, remedy=_REMEDY)
        return meshes.pvary_like(batch, self.params.inexact_leaves())

    def program(self, measured: list[Any]) -> tuple[Any, Any]:
        """The program of one example, of the parameters and the example, and its output's types.

        Refused are programs in which an example depends on others.
        """
        traced = []

        def trace(example: Any) -> None:
            traced.append(jax.make_jaxpr(self, return_shape=True)(measured, example))

        # Under `vmap`, so that the example has the type that it will have there.
        jax.eval_shape(jax.vmap(trace, axis_size=self.examples), self.roles.batch)
        program, output = traced[0]
        found = meshes.collective_primitives(program) if meshes.manual_axes() else frozenset[str]()
        if found:
            raise ValueError(
                f"loss_fn exchanges data between devices, by {', '.join(sorted(found))}, so that "
                "the gradient of one example depends on the examples of other devices, and the "
                "threshold of one example bounds nothing: a BatchNorm needs axis_name=None"
            )
        refuse_shared_bits(program.jaxpr, len(measured))
        return program, output

    def __call__(self, measured: list[Any], example: tuple[Any, ...]) -> Any:
        """Returns the loss of one example: a scalar, or with `has_aux` a pair."""
        args = self.roles.merge(self.params.unflatten(measured), example)
        value, aux = loss_and_aux(
            self.loss_fn, args, self.keywords, has_aux=self.has_aux, description=_LOSS_DESCRIPTION
        )
        _warn_of_batch_statistics(aux)
        return (value, aux) if self.has_aux else value

    def split(self, found: Any) -> tuple[Any, PyTree]:
        """The losses and the auxiliary outputs, from what the loss returned for all examples."""
        return found if self.has_aux else (found, None)

    def value_and_grad(
        self, measured: list[Any], example: tuple[Any, ...]
    ) -> tuple[Any, list[Any]]:
        """What the loss returns for one example, and its gradient."""
        return jax.value_and_grad(self, has_aux=self.has_aux)(measured, example)


_LOSS_DESCRIPTION = (
    "the loss of one example, with which it is called, without the axis of examples: sum over the "
    "other axes"
)


def _warn_of_batch_statistics(aux: PyTree) -> None:
    """Warns of running statistics that Flax or Haiku returns, as far as names show them."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(aux, is_leaf=_is_of_nnx):
        name = jax.tree_util.keystr(path)
        if _is_of_nnx(leaf) or re.search("batch_stats|batch_norm.*_ema", name):
            warn(
                f"loss_fn returns running statistics of a BatchNorm, {name}. In a batch of one "
                "example its output is its bias, whatever the example, so that the model learns a "
                "constant; and it may not see other examples. Take GroupNorm or LayerNorm, or "
                "keep the statistics fixed (use_running_average=True)"
            )
            return


def _is_of_nnx(x: Any) -> bool:
    # In NNX the class of a variable has the name, and not its path.
    return type(x).__name__ == "BatchStat"


_REMEDY = (
    "Per-example clips inside of shard_map and pmap need a copy of all parameters on each device; "
    "where types do not show it, say so by specs=PartitionSpec(). For parameters that are split, "
    "clip under jit on an explicit mesh (jax.make_mesh), where the norms are those of all devices"
)


class RunningSums(NamedTuple):
    """The fields of `ClippedSums` that are added up over microbatches: all but `norms`."""

    leaves: list[Array]
    num_clipped: NormTree
    num_unclipped: Array
    num_dropped: Array

    @classmethod
    def start(cls, sums: ClippedSums) -> "RunningSums":
        """The sums of one microbatch."""
        return cls(sums.leaves, sums.num_clipped, sums.num_unclipped, sums.num_dropped)

    @classmethod
    def empty(cls) -> "RunningSums":
        """The sums of a batch for which only the norms are wanted."""
        zero = jnp.zeros((), jnp.int32)
        return cls([], zero, zero, zero)

    @classmethod
    def zeros(cls, params: FlatTree, grouping: Grouping) -> "RunningSums":
        """Zeros; on an explicit mesh the leaves are split as the parameters are."""
        measured = [jnp.asarray(x) for x in params.inexact_leaves()]
        leaves = [jnp.zeros_like(x, sum_dtype(x.dtype)) for x in measured]
        zero = jnp.zeros((), jnp.int32)
        counts = [jnp.zeros(group.shape, jnp.int32) for group in grouping.groups]
        # Without groups, the norms in their layout are an empty vector of floats.
        counts = jax.tree.map(lambda x: x.astype(jnp.int32), arrange_by_layout(counts, grouping))
        return cls(leaves, counts, zero, zero)


Step = Callable[..., tuple[ClippedSums, Array, PyTree]]
"""From a microbatch to its sums, its losses and its auxiliary outputs."""


def scan_microbatches(
    step: Step,
    batch: PyTree,
    examples: int,
    size: int | None,
    zeros: RunningSums,
) -> tuple[ClippedSums, Array, PyTree]:
    """The sums over a batch `[examples, ...]`, and losses and aux in its order, by `step`.

    A microbatch has `size` examples, all if that is None; `zeros` are the sums before the first.
    """
    size = min(size or examples, examples)
    if size == examples:
        return step(batch)
    count, rest = divmod(examples, size)
    cut = MicrobatchSplit.split(batch, size, count)

    def body(running: RunningSums, i: Array) -> tuple[RunningSums, PyTree]:
        sums, *each = step(cut.microbatch(i))
        return jax.tree.map(jnp.add, running, RunningSums.start(sums)), (sums.norms, *each)

    running, stacked = lax.scan(body, zeros, jnp.arange(count))
    in_order = jax.tree.map(restore_batch_order, stacked)
    if rest:
        last = jax.tree.map(lambda x: remainder(jnp.asarray(x), rest), batch)
        sums, *each = step(last)
        running = jax.tree.map(jnp.add, running, RunningSums.start(sums))
        in_order = jax.tree.map(concatenate_examples, in_order, (sums.norms, *each))
    norms, losses, aux = in_order
    return ClippedSums(norms=norms, **running._asdict()), losses, aux


def with_retry(step: Step, zeros: RunningSums) -> Step:
    """`step`, which takes the examples one at a time if one is not finite, and if that helps.

    XLA (JAX 0.10.2) multiplies numbers of different examples by zeros in some convolutions, so that
    one example that is not finite would drop all. If it drops none but itself, the first results
    stay, bit for bit: the others must not be rounded differently because of it.
    """

    def run(batch: tuple[PyTree, Array]) -> tuple[ClippedSums, Array, PyTree]:
        examples, first = batch[1].size, step(batch)
        if static_size_or_none(examples) in (0, 1):
            return first
        are_finite = _are_finite(lax.stop_gradient(first[0].norms), examples)

        def one_at_a_time() -> tuple[ClippedSums, Array, PyTree]:
            alone = scan_microbatches(step, batch, examples, 1, zeros)
            alone = meshes.retyped_like(first, alone)
            helps = jnp.any(_are_finite(alone[0].norms, examples) & ~are_finite)
            chosen = jax.tree.map(lambda x, y: jnp.where(helps, x, y), alone, first)
            return meshes.pvary_like(batch, chosen)

        return lax.cond(
            _of_any(~jnp.all(are_finite)),
            one_at_a_time,
            lambda: meshes.pvary_like(batch, first),
        )

    return run


def _are_finite(norms: NormTree, examples: int) -> Array:
    """For each example, whether all its norms are finite; those of padding are 0."""
    flags = jnp.ones(examples, bool)
    for norm in jax.tree.leaves(norms):
        flags &= jnp.all(jnp.isfinite(norm), tuple(range(1, norm.ndim)))
    return flags


@jax.custom_batching.custom_vmap
def _of_any(flag: Array) -> Array:
    """The flag; under `vmap`, whether it is set anywhere.

    With a flag for each element of a `vmap`, `lax.cond` would always run both branches.
    """
    return flag


@_of_any.def_vmap
def _(size: int, is_batched: list[bool], flag: Array) -> tuple[Array, bool]:
    del size, is_batched
    return _of_any(jnp.any(flag, 0)), False

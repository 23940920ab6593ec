"""The loss of one example, its program, and the sums over the microbatches of a batch."""

import dataclasses
import functools
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

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

_HINT = (
    "pass specs=PartitionSpec() if the parameters are replicated but their types do not show it, "
    "or clip under jit on an explicit mesh (jax.make_mesh)"
)

_SCALAR_LOSS = "the loss of one example, which has no example axis"


@dataclasses.dataclass(frozen=True, eq=False)
class ExampleLoss:
    """The loss of one example, with the arguments of one call."""

    loss_fn: Callable[..., Any]
    has_aux: bool
    roles: LossArguments
    keywords: dict[str, Any]

    @functools.cached_property
    def params(self) -> FlatTree:
        """The flattened and checked parameters."""
        return flatten_params(self.roles.params)

    @property
    def examples(self) -> int:
        """The number of examples."""
        return get_batch_size(flatten(self.roles.batch, "the batch"), "the batch")

    def __call__(self, measured: list[Any], example: tuple[Any, ...]) -> tuple[Array, PyTree]:
        """Returns the loss of one example, `[]`, and aux, which may be None."""
        args = self.roles.merge(self.params.unflatten(measured), example)
        value, aux = loss_and_aux(
            self.loss_fn, args, self.keywords, has_aux=self.has_aux, description=_SCALAR_LOSS
        )
        _warn_of_batch_statistics(aux)
        return value, aux

    def local_params(self, batch: PyTree, specs: PyTree) -> list[Any]:
        """Checks that the parameters are unsharded, and returns them with the type of the batch."""
        check_examples_unsharded(self.params, specs, of_examples=False, remedy=_HINT)
        # Devices can then use the gradients of their own examples.
        return meshes.pvary_like(batch, self.params.inexact_leaves())

    def program(self, measured: list[Any]) -> tuple[Any, Any]:
        """Traces and checks the program of the parameters and one example, and its output types."""
        traced, trace = [], jax.make_jaxpr(self, return_shape=True)
        # `vmap` gives the example the type that it has in the actual call.
        append = jax.vmap(lambda x: traced.append(trace(measured, x)), axis_size=self.examples)
        jax.eval_shape(append, self.roles.batch)
        program, output = traced[0]
        collectives = meshes.manual_axes() and meshes.collective_primitives(program)
        if collectives:
            raise ValueError(
                "loss_fn must depend on a single example, but it communicates across devices with "
                f"{', '.join(sorted(collectives))}; set axis_name=None in BatchNorm layers"
            )
        # The inputs are the parameters, followed by the example.
        flags = [i >= len(measured) for i in range(len(program.jaxpr.invars))]
        _check_random_bits(program.jaxpr, flags)
        return program, output


def _warn_of_batch_statistics(aux: PyTree) -> None:
    """Warns if aux contains running statistics of Flax or Haiku, according to their names."""

    def is_nnx_statistic(x: Any) -> bool:
        # NNX uses the class of a variable for the name, instead of its path.
        return type(x).__name__ == "BatchStat"

    for path, leaf in jax.tree_util.tree_leaves_with_path(aux, is_leaf=is_nnx_statistic):
        name = jax.tree_util.keystr(path)
        if is_nnx_statistic(leaf) or re.search("batch_stats|batch_norm.*_ema", name):
            warn(
                f"loss_fn returns running statistics of a BatchNorm layer, {name}. For a single "
                "example, this layer outputs its bias, so the model would learn a constant. Use "
                "GroupNorm or LayerNorm, or freeze the statistics with use_running_average=True"
            )
            return


# Operations that may multiply elements of an example by zeros from the rest of the batch. XLA does
# so in convolutions (as of JAX 0.10.2), and a `custom_vjp` hides its backward pass.
_MIXING = frozenset({"conv_general_dilated", "custom_vjp_call"})
# The operations that only use the first key under `vmap`, by key type (as of JAX 0.10.2).
_RBG = {"key<rbg>": {"random_bits"}, "key<urbg>": {"random_bits", "random_split", "random_fold_in"}}


def mixes_examples(program: Any) -> bool:
    """Returns `True` if a non-finite example may affect the gradients of all examples."""
    # Products with zeros can do this because `0 * nan` is NaN.
    return any(
        eqn.primitive.name in _MIXING or any(map(mixes_examples, _inner_programs(eqn)))
        for eqn in program.eqns
    )


def _check_random_bits(program: Any, depends: Sequence[bool]) -> list[bool]:
    """Checks that random bits only depend on an example's own key, from flags of the inputs."""
    dependent = {v for v, flag in zip(program.invars, depends, strict=True) if flag}

    def read_flags(atoms: Sequence[Any]) -> list[bool]:
        # A literal has a value and cannot be hashed.
        return [not hasattr(atom, "val") and atom in dependent for atom in atoms]

    for eqn in program.eqns:
        flags = read_flags(eqn.invars)
        if not any(flags):
            continue
        name, key_dtype = eqn.primitive.name, str(eqn.invars[0].aval.dtype)
        if flags[0] and (name == "rng_bit_generator" or name in _RBG.get(key_dtype, ())):
            kinds = {"key<rbg>": "rbg", "key<urbg>": "unsafe_rbg"}
            kind = kinds.get(key_dtype, "lax.rng_bit_generator")
            raise ValueError(
                f"PRNG keys must generate independent bits per example under vmap, but {kind!r} "
                "derives all bits from the first key; use jax.random.key(seed, impl='threefry2x32')"
            )
        outputs = [True] * len(eqn.outvars)
        for inner in _inner_programs(eqn):
            outputs = _check_inner_random_bits(eqn, inner, flags)
        dependent.update(v for v, flag in zip(eqn.outvars, outputs, strict=True) if flag)
    return read_flags(program.outvars)


def _check_inner_random_bits(eqn: Any, inner: Any, flags: list[bool]) -> list[bool]:
    """Checks a program inside an equation, like `_check_random_bits`."""
    all_outputs = [True] * len(eqn.outvars)
    if eqn.primitive.name == "scan":
        first = eqn.params["num_consts"]
        end = first + eqn.params["num_carry"]
        # The flags of the carry are propagated until they do not change.
        while True:
            outputs = _check_random_bits(inner, flags)
            carry = [a or b for a, b in zip(flags[first:end], outputs, strict=False)]
            if carry == flags[first:end]:
                return outputs
            flags = [*flags[:first], *carry, *flags[end:]]
    if len(inner.invars) == len(flags):
        outputs = _check_random_bits(inner, flags)
        return outputs if len(outputs) == len(all_outputs) else all_outputs
    if len(inner.invars) + 1 == len(flags) and eqn.primitive.name == "cond":
        # The first operand of a `cond` is the index of the branch.
        _check_random_bits(inner, flags[1:])
    else:
        _check_random_bits(inner, [True] * len(inner.invars))
    return all_outputs


def _inner_programs(eqn: Any) -> Iterator[Any]:
    """Yields the programs inside an equation, such as the body of a loop, without constants."""
    values = jax.tree.leaves([*eqn.params.values()], is_leaf=lambda x: hasattr(x, "eqns"))
    yield from (getattr(x, "jaxpr", x) for x in values if hasattr(x, "eqns"))


def zero_sums(params: FlatTree, grouping: Grouping) -> ClippedSums:
    """Returns zeros, with leaves that are sharded like the parameters, without norms."""
    measured = map(jnp.asarray, params.inexact_leaves())
    leaves = [jnp.zeros_like(x, sum_dtype(x.dtype)) for x in measured]
    counts = [jnp.zeros(group.shape, jnp.int32) for group in grouping.groups]  # i32[*group]
    # Without groups, the norms are an empty vector of floats.
    counts = jax.tree.map(lambda x: x.astype(jnp.int32), arrange_by_layout(counts, grouping))
    return ClippedSums.of_norms()._replace(leaves=leaves, num_clipped=counts)


StepResult: TypeAlias = tuple[ClippedSums, Array, PyTree]  # Sums, losses, and aux.
Step: TypeAlias = Callable[..., StepResult]  # A function of a microbatch.


def scan_microbatches(
    step: Step, batch: PyTree, examples: int, size: int | None, zeros: ClippedSums
) -> StepResult:
    """Sums a batch `[examples, ...]`, and returns losses and aux in the order of the batch."""
    size = min(size or examples, examples)
    if size == examples:
        return step(batch)

    def sum_and_stack(batch: PyTree) -> tuple[ClippedSums, PyTree]:
        sums, losses, aux = step(batch)
        return sums._replace(norms=None), (sums.norms, losses, aux)

    running, (norms, losses, aux) = scan_examples(sum_and_stack, batch, examples, size, zeros)
    return running._replace(norms=norms), losses, aux


def scan_examples(
    step: Callable[[PyTree], tuple[Any, PyTree]],
    batch: PyTree,
    examples: int,
    size: int,
    zeros: Any,
) -> tuple[Any, PyTree]:
    """Scans over microbatches, and returns the total of the sums, and results `[examples, ...]`."""
    count, rest = divmod(examples, size)
    split = MicrobatchSplit.split(batch, size, count)

    def body(running: Any, i: Array) -> tuple[Any, PyTree]:
        sums, results = step(split.microbatch(i))
        return jax.tree.map(jnp.add, running, sums), results

    running, stacked = lax.scan(body, zeros, jnp.arange(count))
    # [count, size, ...] -> [count * size, ...]
    ordered = jax.tree.map(restore_batch_order, stacked)
    if rest:
        last = jax.tree.map(functools.partial(remainder, rest=rest), batch)  # [rest, ...]
        sums, results = step(last)
        running = jax.tree.map(jnp.add, running, sums)
        # [count * size, ...], [rest, ...] -> [examples, ...]
        ordered = jax.tree.map(concatenate_examples, ordered, results)
    return running, ordered


def retry_separately(step: Step, zeros: ClippedSums, batch: tuple[PyTree, Array]) -> StepResult:
    """Runs a step, and processes examples separately if this makes more examples finite."""
    # XLA uses convolutions that multiply elements of an example by zeros from the rest of the batch
    # (as of JAX 0.10.2), so a single non-finite example could drop all examples. The first results
    # are used if only non-finite examples are dropped because separate examples may be rounded
    # differently.
    examples, together = batch[1].size, step(batch)
    if static_size_or_none(examples) in (0, 1):
        return together
    are_finite = _are_finite(lax.stop_gradient(together[0].norms), examples)  # bool[examples]

    def run_separately() -> StepResult:
        separate = scan_microbatches(step, batch, examples, 1, zeros)
        separate = meshes.retyped_like(together, separate)
        helps = jnp.any(_are_finite(separate[0].norms, examples) & ~are_finite)  # bool[]
        selected = jax.tree.map(functools.partial(jnp.where, helps), separate, together)
        return meshes.pvary_like(batch, selected)

    # The examples are only processed again if necessary because this takes much longer.
    needs_retry = _any_batched(~jnp.all(are_finite))
    return lax.cond(needs_retry, run_separately, lambda: meshes.pvary_like(batch, together))


def _are_finite(norms: NormTree, examples: int) -> Array:
    flags = jnp.ones(examples, bool)  # bool[examples]
    for norm in jax.tree.leaves(norms):
        # [examples, *group] -> [examples]
        flags &= jnp.all(jnp.isfinite(norm), tuple(range(1, norm.ndim)))
    return flags


@jax.custom_batching.custom_vmap
def _any_batched(flag: Array) -> Array:
    """Returns the flag. Under `vmap`, returns `True` if any flag is set."""
    # If its flag is batched, `lax.cond` runs both branches (as of JAX 0.10.2).
    return flag


@_any_batched.def_vmap
def _(size: int, is_batched: list[bool], flag: Array) -> tuple[Array, bool]:
    del size, is_batched
    return _any_batched(jnp.any(flag, 0)), False  # bool[size] -> bool[]

"""Per-example gradients, clipped and summed, a microbatch at a time."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import optaxclip._base.devices as collectives
from optaxclip._base.arguments import checked_int
from optaxclip._base.batches import number_of_examples
from optaxclip._base.roles import Roles, argument_numbers
from optaxclip._base.trees import FlatTree, flatten
from optaxclip._base.types import PyTree
from optaxclip.per_example.bounds import ExampleLimit
from optaxclip.per_example.lift import Sums
from optaxclip.per_example.microbatches import Totals, in_microbatches
from optaxclip.per_example.sums import (
    WHOLE_EXAMPLE,
    ExampleClip,
    PerExampleResult,
    padding_flags,
    result_of,
)
from optaxclip.responses import Response
from optaxclip.scopes import Scope


def clipped_grad(
    loss_fn: Callable[..., Any],
    limit: ExampleLimit,
    *,
    argnums: int | Sequence[int] = 0,
    batch_argnums: int | Sequence[int] | None = None,
    has_aux: bool = False,
    microbatch_size: int | None = None,
    scope: Scope = WHOLE_EXAMPLE,
    response: str | Response = "clip",
    split: Literal["uniform", "size"] = "uniform",
) -> Callable[..., PerExampleResult]:
    """A function that gives the sum of the examples' clipped gradients.

    The guarantees are those of `clip_sum`. Of no more than `microbatch_size` examples are the
    gradients alive at once: microbatches follow one another in a `scan`, and one that is smaller
    comes last. They take examples from all over the batch, so that of a batch sharded over devices
    each has its part in every microbatch; norms, losses and aux are in the order of the batch.

    Under `jit` a sharded batch is summed as a whole, with all-reduces for each microbatch; on an
    explicit mesh a microbatch is split over as many of the devices as divide it. Inside
    `shard_map` the sum and the counts are those of the shard, and no device waits for another:
    `psum` them, once, which takes one all-reduce for each dtype whatever the microbatches.

    Source: Abadi et al., 2016, arXiv 1607.00133.

    Args:
      loss_fn: the loss of one example, a scalar: `loss_fn(params, *example)`.
      limit: the largest L2 norm of one example's contribution, as in `clip_sum`.
      argnums: which arguments to differentiate, as in `jax.grad`. Their integer leaves get `float0`
        zeros.
      batch_argnums: which arguments have a leading axis of examples, pytrees of arrays or of keys;
        all that are not in `argnums` if None.
      has_aux: whether `loss_fn` returns `(loss, aux)`.
      microbatch_size: how many examples to differentiate at once; all of them if None.
      scope: which entries of an example share one norm.
      response: as in `clip_sum`.
      split: as in `clip_sum`.

    Returns:
      A function `(*args, is_padding=None) -> PerExampleResult` of the arguments of `loss_fn`, with
      a leading axis of examples where `batch_argnums` says so. `is_padding` is bool `[examples]`.

    Raises:
      ValueError: for a limit that is negative, NaN or not a scalar, a microbatch size below 1, or
        an unknown name; when called, for arguments that do not share an axis of examples, positions
        that do not exist or come twice, and a loss that is no scalar.
      TypeError: for a limit that is no number, and positions or sizes that are no ints.

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
    """
    clip = ExampleClip.checked(limit, scope, response, split)
    if microbatch_size is not None:
        microbatch_size = checked_int(microbatch_size, 1, "microbatch_size")
    argnums = argument_numbers(argnums, "argnums")
    known = None if batch_argnums is None else argument_numbers(batch_argnums, "batch_argnums")

    def clipped(*args: Any, is_padding: jax.typing.ArrayLike | None = None) -> PerExampleResult:
        roles = Roles.of(args, argnums, known)
        examples = number_of_examples(flatten(roles.batch, "the batch"), "the batch")
        flags = padding_flags(is_padding, examples)
        params = flatten(roles.params, "params")
        batch = (roles.batch, flags)
        picked = _varying_like(batch, params.picked())
        step = functools.partial(_step, loss_fn, clip, roles, params, picked, has_aux)
        nothing = _varying_like(batch, Totals.zeros(params, clip.limits(params)[0]))
        sums, losses, aux = in_microbatches(step, batch, examples, microbatch_size, nothing)
        grads = params._replace(leaves=[_float0(leaf) for leaf in params.leaves])
        result = result_of(sums, grads.rebuild(sums.leaves))
        return result._replace(losses=losses, aux=aux)

    return clipped


def _step(
    loss_fn: Callable[..., Any],
    clip: ExampleClip,
    roles: Roles,
    params: FlatTree,
    picked: list[Any],
    has_aux: bool,
    batch: tuple[tuple[Any, ...], Array],
) -> tuple[Sums, Array, PyTree]:
    """Gradients of a microbatch, clipped and summed."""
    examples, is_padding = batch

    def loss(picked: list[Any], example: tuple[Any, ...]) -> Any:
        found: Any = loss_fn(*roles.with_values(params.rebuild(picked), example))
        if has_aux and not (isinstance(found, tuple) and len(found) == 2):
            raise TypeError(f"with has_aux loss_fn must return (loss, aux), got {found!r:.80}")
        value: Any = found[0] if has_aux else found
        shape = jnp.shape(value)
        if shape != ():
            raise ValueError(
                f"loss_fn must return a scalar, the loss of one example, got shape {shape}. It is "
                "called for one example at a time, without the axis of examples: sum what is left"
            )
        return found

    per_example = jax.vmap(jax.value_and_grad(loss, has_aux=has_aux), in_axes=(None, 0))
    value, leaves = per_example(picked, examples)
    losses, aux = value if has_aux else (value, None)
    return clip.sums(leaves, params, is_padding), losses, aux


def _float0(leaf: Any) -> Any:
    return np.zeros(np.shape(leaf), jax.dtypes.float0)


def _varying_like(batch: PyTree, tree: PyTree) -> PyTree:
    """`tree`, varying over the devices as the batch does inside `shard_map`.

    There the gradient with respect to parameters that do not vary is summed over the devices, and
    with it examples would be mixed before they are clipped.
    """
    axes = frozenset[str]().union(*map(collectives.varying_axes, jax.tree.leaves(batch)))
    return jax.tree.map(lambda x: collectives.vary(jnp.asarray(x), axes), tree) if axes else tree

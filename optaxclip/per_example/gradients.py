"""Per-example gradients, clipped and summed, a microbatch at a time."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
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


@dataclasses.dataclass(frozen=True, eq=False)
class ClippedGrad:
    """What `clipped_grad` makes: a function, and how far one example can move its result.

    Attributes:
      loss_fn: the loss of one example.
      clip: how each example is clipped.
      argnums: what is differentiated.
      batch_argnums: what has an axis of examples.
      has_aux: whether the loss has an auxiliary output.
      microbatch_size: how many examples are differentiated at once.
      transform: what becomes of a gradient before it is clipped.
    """

    loss_fn: Callable[..., Any]
    clip: ExampleClip
    argnums: int | tuple[int, ...]
    batch_argnums: int | tuple[int, ...] | None
    has_aux: bool
    microbatch_size: int | None
    transform: Callable[[PyTree], PyTree] | None

    def __call__(
        self, *args: Any, is_padding: jax.typing.ArrayLike | None = None, **keywords: Any
    ) -> PerExampleResult:
        """The sum of the clipped gradients, and what became of the examples."""
        roles = Roles.of(args, self.argnums, self.batch_argnums)
        examples = number_of_examples(flatten(roles.batch, "the batch"), "the batch")
        flags = padding_flags(is_padding, examples)
        params = flatten(roles.params, "params")
        batch = (roles.batch, flags)
        picked = _varying_like(batch, params.picked())
        one = self._clipped_tree(params)
        step = functools.partial(_step, self, roles, params, picked, one, keywords)
        nothing = _varying_like(batch, Totals.zeros(one, self.clip.limits(one)[0]))
        sums, losses, aux = in_microbatches(step, batch, examples, self.microbatch_size, nothing)
        result = result_of(sums, one.without_gradients().rebuild(sums.leaves))
        return result._replace(losses=losses, aux=aux)

    def sensitivity(
        self, relation: Any = "add_or_remove_one", params: PyTree = None
    ) -> jax.typing.ArrayLike:
        """How far one example can move the sum, in the L2 norm; noise is in proportion to it.

        Args:
          relation: how data sets differ that count as neighbours: by an example that is there or
            not ("add_or_remove_one"), by one that is blank in its place ("replace_special"), or by
            another ("replace_one"), which moves the sum twice as far; or a member of
            `dp_accounting.NeighboringRelation`.
          params: what is differentiated, for limits by name: how many groups have each.

        Raises:
          ValueError: for another relation, or limits by name without `params`.
        """
        name = getattr(relation, "name", relation)
        name = name.lower() if isinstance(name, str) else name
        if name not in _TIMES:
            raise ValueError(f"relation must be one of {list(_TIMES)}, got {relation!r}")
        bound: Any = self.clip.limit
        if isinstance(bound, Mapping):
            if params is None:
                raise ValueError(
                    "limits are given by the names of groups, so the parameters must tell how many "
                    "groups there are of each name: pass params="
                )
            bound = self.clip.limits(self._clipped_tree(flatten(params, "params")))[2]
        return _TIMES[name] * bound

    def _clipped_tree(self, params: FlatTree) -> FlatTree:
        """What of one example is clipped: a tree like the parameters, or what is made of it."""
        if self.transform is None:
            return params
        zeros = [jnp.zeros_like(leaf) for leaf in params.picked()]
        made = self.transform(_gradient(params, zeros))
        return flatten(made, "what pre_clipping_transform gives")


_TIMES = {"add_or_remove_one": 1, "replace_special": 1, "replace_one": 2}


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
    pre_clipping_transform: Callable[[PyTree], PyTree] | None = None,
) -> ClippedGrad:
    """A function that gives the sum of the examples' clipped gradients.

    The guarantees are those of `clip_sum`. At most `microbatch_size` examples have their gradients
    in memory at the same time: microbatches follow one another in a `scan`, a smaller one last. A
    microbatch takes examples from all over the batch, so that each device has a part of it where
    the batch is sharded. Norms, losses and aux are in the order of the batch.

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
      batch_argnums: which arguments, pytrees of arrays or of keys, have a leading axis of examples;
        if None, all that are not in `argnums`.
      has_aux: whether `loss_fn` returns `(loss, aux)`.
      microbatch_size: how many examples to differentiate at once; all of them if None.
      scope: which entries of an example share one norm.
      response: as in `clip_sum`.
      split: as in `clip_sum`.
      pre_clipping_transform: a function of one example's gradient, from the tree of `argnums` to
        any other, such as a preconditioner. Its result is clipped: the bound, the groups and the
        sum are those of the result.

    Returns:
      A `ClippedGrad`: a function `(*args, is_padding=None, **keywords) -> PerExampleResult` of the
      arguments of `loss_fn`, with a leading axis of examples where `batch_argnums` says so.
      `is_padding` is bool `[examples]`. Keywords go to `loss_fn` as they are, the same for every
      example. Its method `sensitivity` tells how far one example can move the sum.

    Raises:
      ValueError: for a limit that is negative, NaN or not a scalar, a microbatch size below 1, or
        an unknown name; when called, for arguments that do not share an axis of examples, positions
        that do not exist or come twice, and a loss that is not a scalar.
      TypeError: for a limit that is not a number, and positions or sizes that are not ints.

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
    clip = ExampleClip.checked(limit, scope, response, split)
    if microbatch_size is not None:
        microbatch_size = checked_int(microbatch_size, 1, "microbatch_size")
    argnums = argument_numbers(argnums, "argnums")
    known = None if batch_argnums is None else argument_numbers(batch_argnums, "batch_argnums")
    if pre_clipping_transform is not None and not callable(pre_clipping_transform):
        raise TypeError(
            "pre_clipping_transform must be a function from the gradient of one example to what is "
            f"clipped, got {pre_clipping_transform!r}"
        )
    return ClippedGrad(
        loss_fn, clip, argnums, known, has_aux, microbatch_size, pre_clipping_transform
    )


def _step(
    how: ClippedGrad,
    roles: Roles,
    params: FlatTree,
    picked: list[Any],
    one: FlatTree,
    keywords: dict[str, Any],
    batch: tuple[tuple[Any, ...], Array],
) -> tuple[Sums, Array, PyTree]:
    """Gradients of a microbatch, clipped and summed."""
    examples, is_padding = batch

    def loss(picked: list[Any], example: tuple[Any, ...]) -> Any:
        args = roles.with_values(params.rebuild(picked), example)
        found: Any = how.loss_fn(*args, **keywords)
        if how.has_aux and not (isinstance(found, tuple) and len(found) == 2):
            raise TypeError(f"with has_aux loss_fn must return (loss, aux), got {found!r:.80}")
        value: Any = found[0] if how.has_aux else found
        shape = jnp.shape(value)
        if shape != ():
            raise ValueError(
                f"loss_fn must return a scalar, the loss of one example, got shape {shape}. It is "
                "called for one example at a time, without the axis of examples: sum what is left"
            )
        return found

    def of_example(picked: list[Any], example: tuple[Any, ...]) -> tuple[Any, list[Any]]:
        value, leaves = jax.value_and_grad(loss, has_aux=how.has_aux)(picked, example)
        if how.transform is not None:
            made = how.transform(_gradient(params, leaves))
            leaves = flatten(made, "what pre_clipping_transform gives").picked()
        return value, leaves

    value, leaves = jax.vmap(of_example, in_axes=(None, 0))(picked, examples)
    losses, aux = value if how.has_aux else (value, None)
    return how.clip.sums(leaves, one, is_padding), losses, aux


def _gradient(params: FlatTree, leaves: list[Any]) -> PyTree:
    """The tree of a gradient, as `jax.grad` gives it."""
    return params.without_gradients().rebuild(leaves)


def _varying_like(batch: PyTree, tree: PyTree) -> PyTree:
    """`tree`, varying over the devices as the batch does inside `shard_map`.

    There the gradient with respect to parameters that do not vary is summed over the devices, and
    with it examples would be mixed before they are clipped.
    """
    axes = frozenset[str]().union(*map(collectives.varying_axes, jax.tree.leaves(batch)))
    return jax.tree.map(lambda x: collectives.vary(jnp.asarray(x), axes), tree) if axes else tree

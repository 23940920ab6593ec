"""Tells which arguments of a loss are parameters, which are the batch, and which are neither."""

import functools
import operator
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from optaxclip._backend.global_view import constrain_out_sharding
from optaxclip._base.numerics import is_real
from optaxclip._base.trees import FlatTree, dtype_of, flatten, is_sparse, leaf_name
from optaxclip._base.types import PyTree
from optaxclip._base.validation import short_repr

_Numbers: TypeAlias = int | tuple[int, ...]


class LossArguments(NamedTuple):
    """The arguments of a loss, with the positions of its parameters and of its batch."""

    args: tuple[Any, ...]
    argnums: int | tuple[int, ...]
    batch_argnums: tuple[int, ...]

    @classmethod
    def split(
        cls,
        args: tuple[Any, ...],
        argnums: int | Sequence[int],
        batch_argnums: int | Sequence[int] | None,
    ) -> "LossArguments":
        """The roles of arguments; with `batch_argnums=None`, all but the parameters are batch."""
        count = len(args)
        is_one = isinstance(argnums, int)
        chosen = _positions((argnums,) if is_one else argnums, count, "argnums")
        rest = [i for i in range(count) if i not in chosen]
        named = (batch_argnums,) if isinstance(batch_argnums, int) else batch_argnums
        batch = _positions(rest if named is None else named, count, "batch_argnums")
        if set(batch) & set(chosen) or not batch:
            raise ValueError(
                f"batch_argnums must name arguments other than argnums {chosen}, at least one; got "
                f"{batch} of {count} arguments"
            )
        return cls(args, chosen[0] if is_one else chosen, batch)

    @property
    def params(self) -> PyTree:
        """The arguments that are differentiated: a tuple, or only one if `argnums` is an int."""
        if isinstance(self.argnums, int):
            return self.args[self.argnums]
        return tuple(self.args[i] for i in self.argnums)

    @property
    def batch(self) -> tuple[Any, ...]:
        """The arguments that have an axis of examples."""
        return tuple(self.args[i] for i in self.batch_argnums)

    def merge(self, params: PyTree, batch: tuple[Any, ...]) -> list[Any]:
        """All arguments, with the given parameters and batch in the places of the original ones."""
        args = list(self.args)
        if isinstance(self.argnums, int):
            args[self.argnums] = params
        else:
            for i, value in zip(self.argnums, params, strict=True):
                args[i] = value
        for i, value in zip(self.batch_argnums, batch, strict=True):
            args[i] = value
        return args


def _positions(numbers: Sequence[int], count: int, argument: str) -> tuple[int, ...]:
    positions = tuple(number % count for number in numbers if -count <= number < count)
    if len(set(positions)) < len(numbers):
        raise ValueError(
            f"{argument} {tuple(numbers)} must be positions among {count} arguments, each at most "
            "once"
        )
    return positions


def check_argnums(argnums: Any, batch_argnums: Any) -> tuple[_Numbers, _Numbers | None]:
    """The positions of the parameters and of the batch, which must have none in common."""
    params = normalize_argnums(argnums, "argnums")
    if batch_argnums is None:
        return params, None
    batch = normalize_argnums(batch_argnums, "batch_argnums")
    shared = {*np.atleast_1d(params).tolist()} & {*np.atleast_1d(batch).tolist()}
    if shared:
        raise ValueError(
            f"batch_argnums={batch} and argnums={params} both name the argument {min(shared)}, "
            "which is either differentiated or a batch: name the other arguments in batch_argnums"
        )
    return params, batch


def normalize_argnums(given: Any, argument: str) -> _Numbers:
    """Positions of arguments as Python ints, from ints of Python or NumPy."""
    try:
        if np.ndim(given) == 0:
            return operator.index(given)
        return tuple(operator.index(number) for number in given)
    except TypeError:
        raise TypeError(f"{argument} must be an int or several, got {given!r}") from None


def get_batch_size(flat: FlatTree, argument: str, remedy: str = "") -> int:
    """The size of the leading axis, the same for all leaves; else `remedy` ends the message."""
    sizes: dict[str, tuple[int, ...]] = {}
    for path, leaf in zip(flat.paths, flat.leaves, strict=True):
        if is_sparse(leaf):
            raise TypeError(f"{argument} must be dense; leaf '{leaf_name(path)}' is a BCOO")
        sizes[leaf_name(path)] = np.shape(leaf)
    if len({shape[:1] for shape in sizes.values()}) > 1 or () in sizes.values():
        raise ValueError(
            f"{argument} must have leaves [examples, ...] with the same number of examples; got "
            f"shapes {sizes}{remedy}"
        )
    return next(iter(sizes.values()))[0] if sizes else 0


class MicrobatchSplit(NamedTuple):
    """A batch cut into microbatches: microbatch `i` has the examples `i`, `i + number`, ...

    Each microbatch takes its `size` examples from all over the batch. So if the batch is split over
    devices, each device already holds its share, and nothing is gathered. The arrays are `[size,
    number, ...]`.
    """

    arrays: PyTree
    size: int
    num_microbatches: int

    @classmethod
    def split(cls, batch: PyTree, size: int, number: int) -> "MicrobatchSplit":
        """The first `size * number` examples of arrays `[examples, ...]`."""
        batch = jax.tree.map(jnp.asarray, batch)
        strided = jax.tree.map(functools.partial(_take_strided, size=size, number=number), batch)
        return cls(strided, size, number)

    def microbatch(self, i: Array) -> PyTree:
        """Microbatch `i`: arrays `[size, ...]`."""
        return jax.tree.map(
            lambda x: lax.dynamic_index_in_dim(x, i, axis=1, keepdims=False), self.arrays
        )


def remainder(x: Array, rest: int) -> Array:
    """The last `rest` examples of an array `[examples, ...]`."""

    def end(x: Array) -> Array:
        return x[x.shape[0] - rest :]

    return constrain_out_sharding(
        end, lambda split: (split.axes_dividing(rest), *split.spec[1:]), x
    )


def restore_batch_order(x: Array) -> Array:
    """The examples `[count * size, ...]` in the order of the batch, from `[count, size, ...]`."""

    def restore_order(x: Array) -> Array:
        # Not -1, which is undefined if the examples are empty arrays.
        return jnp.swapaxes(x, 0, 1).reshape(x.shape[0] * x.shape[1], *x.shape[2:])

    return constrain_out_sharding(restore_order, lambda split: split.spec[1:], x)


def concatenate_examples(x: Array, y: Array) -> Array:
    """The examples of `x`, then those of `y`."""

    def both(x: Array, y: Array) -> Array:
        return jnp.concatenate([x, y])

    examples = x.shape[0] + y.shape[0]
    return constrain_out_sharding(
        both, lambda split: (split.axes_dividing(examples), *split.spec[1:]), x, y
    )


def _take_strided(x: Array, *, size: int, number: int) -> Array:
    def take_strided(x: Array) -> Array:
        return x[: number * size].reshape(size, number, *x.shape[1:])

    return constrain_out_sharding(
        take_strided, lambda split: (split.axes_dividing(size), None, *split.spec[1:]), x
    )


def loss_and_aux(
    loss_fn: Callable[..., Any],
    args: list[Any],
    keywords: dict[str, Any],
    *,
    has_aux: bool,
    description: str,
) -> tuple[Array, PyTree]:
    """The loss, `[]`, which messages describe by `of`, and aux; None without `has_aux`."""
    found: Any = call_loss(loss_fn, args, keywords)
    if has_aux and not (isinstance(found, tuple) and len(found) == 2):
        raise TypeError(f"with has_aux loss_fn must return (loss, aux), got {found!r:.80}")
    value: Any = found[0] if has_aux else found
    if not is_real(value):
        hint = "; pass has_aux=True" if isinstance(value, tuple) else ""
        raise TypeError(f"loss_fn must return a real loss, got {value!r:.80}{hint}")
    if jnp.shape(value) != ():
        raise ValueError(
            f"loss_fn must return a scalar, {description}; got {describe_array(value)}"
        )
    if not jnp.issubdtype(jnp.result_type(value), jnp.floating):
        raise TypeError(f"loss_fn must return a real float, got {describe_array(value)}")
    return jnp.asarray(value), found[1] if has_aux else None


def describe_array(value: Any) -> str:
    """The shape and dtype of an array, for a message."""
    return f"shape {jnp.shape(value)} and dtype {jnp.result_type(value)}"


_NNX = """

  graph, params, rest = nnx.split(model, nnx.Param, ...)

  def loss_fn(params, rest, x, y):
      model = nnx.merge(graph, params, rest, copy=True)

with batch_argnums=(2, 3). For dropout also pass a key for each example, and in the loss call \
nnx.reseed(model, default=key); the loss may return new statistics as aux"""

_EQUINOX = """

  params, static = eqx.partition(model, eqx.is_inexact_array)

  def loss_fn(params, x, y):
      model = eqx.combine(params, static)"""


def flatten_params(params: PyTree) -> FlatTree:
    """The parameters of a loss, flattened.

    Refused are models that the framework's own `grad` differentiates in another way than
    `jax.grad`, which takes each array and each Python float for a parameter.
    """
    # A user who has a model of a framework has imported the framework.
    for found, remedy in ((_check_nnx(params), _NNX), (_check_equinox(params), _EQUINOX)):
        for what in found:
            raise TypeError(
                f"params must hold nothing but parameters, got {what}. Take the model apart and "
                f"pass its parameters:{remedy}"
            )
    return flatten(params, "params")


def call_loss(loss_fn: Any, args: list[Any], keywords: dict[str, Any]) -> Any:
    """What a loss returns; to errors of models that were not put together, the remedy is added."""
    try:
        return loss_fn(*args, **keywords)
    except Exception as error:
        if type(error).__name__ == "TraceContextError":
            error.add_note(
                "A model of Flax NNX that is changed inside of the loss has to be made there, of "
                f"arguments of the loss:{_NNX}"
            )
        elif "NoneType" in str(error) and _nodes(args, _framework_class("equinox", "Module")):
            error.add_note(
                f"A model of Equinox needs what is no array too, in the place of None:{_EQUINOX}"
            )
        raise


def _check_nnx(params: PyTree) -> Iterator[str]:
    """What is no parameter in modules of NNX, and in states that hold parameters too."""
    module, variable = (
        _framework_class("flax.nnx", "Module"),
        _framework_class("flax.nnx", "Variable"),
    )
    param = _framework_class("flax.nnx", "Param")
    for path, node in _nodes(params, module + _framework_class("flax.nnx", "State")):
        pairs = jax.tree_util.tree_leaves_with_path(node, is_leaf=lambda x: isinstance(x, variable))
        if not isinstance(node, module) and not any(isinstance(x, param) for _, x in pairs):
            continue
        seen = dict[int, str]()
        for place, x in pairs:
            name = leaf_name((*path, *place))
            if isinstance(x, param):
                if id(x) in seen:
                    yield (
                        f"an NNX module whose Param '{seen[id(x)]}' is also '{name}', which JAX "
                        "takes for two"
                    )
                seen[id(x)] = name
            elif isinstance(x, variable):
                yield f"the {type(x).__name__} '{name}' of NNX beside Params"
            elif _is_differentiated(x):
                yield f"the array '{name}' of NNX, which is no Param"


def _check_equinox(params: PyTree) -> Iterator[str]:
    """What is no array in modules of Equinox."""
    for path, node in _nodes(params, _framework_class("equinox", "Module")):
        for place, x in jax.tree_util.tree_leaves_with_path(node):
            if not hasattr(x, "dtype"):
                name = leaf_name((*path, *place))
                yield f"an Equinox module whose leaf '{name}' is {short_repr(x)}, and no array"


def _nodes(tree: PyTree, kinds: tuple[type, ...]) -> list[tuple[Any, Any]]:
    """The outermost nodes of these types, with their paths."""
    if not kinds:
        return []
    pairs = jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda x: isinstance(x, kinds))
    return [(path, x) for path, x in pairs if isinstance(x, kinds)]


def _framework_class(module: str, name: str) -> tuple[type, ...]:
    """A class of a framework; none if the framework is not imported."""
    kind = getattr(sys.modules.get(module), name, None)
    return (kind,) if isinstance(kind, type) else ()


def _is_differentiated(x: Any) -> bool:
    dtype = dtype_of(x)
    return dtype is None or jnp.issubdtype(dtype, jnp.inexact)

"""Helpers for loss functions: their arguments, microbatches, and results."""

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
    """The arguments of a loss, and the positions of its parameters and its batch."""

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
        """Checks the positions. `batch_argnums` defaults to all arguments except the parameters."""
        count = len(args)
        is_single = isinstance(argnums, int)
        params = _check_positions((argnums,) if is_single else argnums, count, "argnums")
        if batch_argnums is None:
            batch_argnums = [i for i in range(count) if i not in params]
        elif isinstance(batch_argnums, int):
            batch_argnums = (batch_argnums,)
        batch = _check_positions(batch_argnums, count, "batch_argnums")
        if set(batch) & set(params) or not batch:
            raise ValueError(
                f"batch_argnums must not be empty and must not overlap argnums={params}, got "
                f"{batch} (the number of arguments is {count})"
            )
        return cls(args, params[0] if is_single else params, batch)

    @property
    def params(self) -> PyTree:
        """The differentiated argument if `argnums` is an int, otherwise a tuple of arguments."""
        if isinstance(self.argnums, int):
            return self.args[self.argnums]
        return tuple(self.args[i] for i in self.argnums)

    @property
    def batch(self) -> tuple[Any, ...]:
        """The arguments with an example axis."""
        return tuple(self.args[i] for i in self.batch_argnums)

    def merge(self, params: PyTree, batch: tuple[Any, ...]) -> list[Any]:
        """Returns all arguments with the given parameters and batch."""
        positions, values = self.argnums, params
        if isinstance(positions, int):
            positions, values = (positions,), (params,)
        new = dict(zip((*positions, *self.batch_argnums), (*values, *batch), strict=True))
        return [new.get(i, arg) for i, arg in enumerate(self.args)]


def _check_positions(argnums: Sequence[int], count: int, argument: str) -> tuple[int, ...]:
    # Negative positions count from the end. Positions out of range are dropped.
    positions = tuple(number % count for number in argnums if -count <= number < count)
    if len(set(positions)) < len(argnums):
        raise ValueError(
            f"{argument} must be distinct positions between 0 and {count - 1}, got {tuple(argnums)}"
        )
    return positions


def check_argnums(argnums: Any, batch_argnums: Any) -> tuple[_Numbers, _Numbers | None]:
    """Checks that the positions of the parameters and the batch are ints and do not overlap."""
    params = _normalize_argnums(argnums, "argnums")
    if batch_argnums is None:
        return params, None
    batch = _normalize_argnums(batch_argnums, "batch_argnums")
    shared = {*np.atleast_1d(params).tolist()} & {*np.atleast_1d(batch).tolist()}
    if shared:
        raise ValueError(
            f"batch_argnums must not overlap argnums={params}, got {batch}; remove {min(shared)} "
            "from batch_argnums"
        )
    return params, batch


def _normalize_argnums(argnums: Any, argument: str) -> _Numbers:
    # `operator.index` rejects floats, which `int` would truncate.
    try:
        if np.ndim(argnums) == 0:
            return operator.index(argnums)
        return tuple(operator.index(number) for number in argnums)
    except TypeError:
        raise TypeError(
            f"{argument} must be an int or a sequence of ints, got {argnums!r}"
        ) from None


def get_batch_size(flat: FlatTree, argument: str, hint: str = "") -> int:
    """Returns the common size of the leading axes. Error messages end with `hint`."""
    sizes: dict[str, tuple[int, ...]] = {}
    for path, leaf in zip(flat.paths, flat.leaves, strict=True):
        name = leaf_name(path)
        if is_sparse(leaf):
            raise TypeError(
                f"leaf '{name}' of {argument} must be dense, not a BCOO array; pass leaf.todense()"
            )
        sizes[name] = np.shape(leaf)
    if len({shape[:1] for shape in sizes.values()}) > 1 or () in sizes.values():
        raise ValueError(
            f"all leaves of {argument} must have a leading example axis of the same size, "
            f"but their shapes are {sizes}{hint}"
        )
    return next(iter(sizes.values()))[0] if sizes else 0


class MicrobatchSplit(NamedTuple):
    """Microbatches as arrays `[size, number, ...]`.

    Microbatch `i` consists of the examples `i`, `i + number`, ... If the batch is sharded, devices
    already store their parts of such microbatches, so nothing is gathered.
    """

    arrays: PyTree
    size: int
    num_microbatches: int

    @classmethod
    def split(cls, batch: PyTree, size: int, number: int) -> "MicrobatchSplit":
        """Splits the first `size * number` examples of arrays `[examples, ...]`."""
        # [examples, ...] -> [size, number, ...] for all leaves
        strided = functools.partial(_split_strided, size=size, number=number)
        return cls(jax.tree.map(strided, jax.tree.map(jnp.asarray, batch)), size, number)

    def microbatch(self, i: Array) -> PyTree:
        """Returns microbatch `i`, arrays `[size, ...]`."""
        return jax.tree.map(  # [size, number, ...] -> [size, ...]
            lambda x: lax.dynamic_index_in_dim(x, i, axis=1, keepdims=False), self.arrays
        )


def _split_strided(x: Array, *, size: int, number: int) -> Array:
    return constrain_out_sharding(  # [examples, ...] -> [size, number, ...]
        lambda x: x[: number * size].reshape(size, number, *x.shape[1:]),
        lambda split: (split.axes_dividing(size), None, *split.spec[1:]),
        x,
    )


def remainder(x: Array, rest: int) -> Array:
    """Returns the last `rest` examples of an array `[examples, ...]`."""
    return constrain_out_sharding(  # [examples, ...] -> [rest, ...]
        lambda x: x[x.shape[0] - rest :],
        lambda split: (split.axes_dividing(rest), *split.spec[1:]),
        x,
    )


def restore_batch_order(x: Array) -> Array:
    """Restores the batch order of the results of microbatches, `[count, size, ...]`."""
    # The size is not -1, which is undefined if the examples are empty arrays.
    return constrain_out_sharding(  # [count, size, ...] -> [size * count, ...]
        lambda x: jnp.swapaxes(x, 0, 1).reshape(x.shape[0] * x.shape[1], *x.shape[2:]),
        lambda split: split.spec[1:],
        x,
    )


def concatenate_examples(x: Array, y: Array) -> Array:
    examples = x.shape[0] + y.shape[0]
    return constrain_out_sharding(  # [m, ...], [n, ...] -> [m + n, ...]
        lambda x, y: jnp.concatenate([x, y]),
        lambda split: (split.axes_dividing(examples), *split.spec[1:]),
        x,
        y,
    )


def loss_and_aux(
    loss_fn: Callable[..., Any],
    args: list[Any],
    keywords: dict[str, Any],
    *,
    has_aux: bool,
    description: str,
) -> tuple[Array, PyTree]:
    """Calls a loss and returns its value `[]` and its aux, or None if `has_aux` is False.

    `description` describes the loss in messages.
    """
    result = _call_loss(loss_fn, args, keywords)
    if has_aux and not (isinstance(result, tuple) and len(result) == 2):
        raise TypeError(f"loss_fn must return (loss, aux) if has_aux=True, not {result!r:.80}")
    value: Any = result[0] if has_aux else result
    if not is_real(value):
        hint = "; pass has_aux=True" if isinstance(value, tuple) else ""
        raise TypeError(f"loss_fn must return a real scalar, not {value!r:.80}{hint}")
    if jnp.shape(value) != ():
        raise ValueError(
            f"loss_fn must return a scalar ({description}), but returned {describe_array(value)}"
        )
    if not jnp.issubdtype(jnp.result_type(value), jnp.floating):
        raise TypeError(
            f"loss_fn must return a floating-point scalar, but returned {jnp.result_type(value)}"
        )
    return jnp.asarray(value), result[1] if has_aux else None  # []


def describe_array(value: Any) -> str:
    return f"an array of shape {jnp.shape(value)} and dtype {jnp.result_type(value)}"


_NNX = """

  graph, params, rest = nnx.split(model, nnx.Param, ...)

  def loss_fn(params, rest, x, y):
      model = nnx.merge(graph, params, rest, copy=True)

with batch_argnums=(2, 3). For dropout, also pass a key per example, and call \
nnx.reseed(model, default=key) in the loss; the loss may return new statistics as aux"""

_EQUINOX = """

  params, static = eqx.partition(model, eqx.is_inexact_array)

  def loss_fn(params, x, y):
      model = eqx.combine(params, static)"""


def _call_loss(loss_fn: Any, args: list[Any], keywords: dict[str, Any]) -> Any:
    """Calls a loss and adds a note to errors of models that must be created in the loss."""
    try:
        return loss_fn(*args, **keywords)
    except Exception as error:
        # The class is compared by name, because Flax may not be installed.
        if type(error).__name__ == "TraceContextError":
            error.add_note(
                f"Create Flax NNX models inside the loss if the loss changes them:{_NNX}"
            )
        elif "NoneType" in str(error) and _nodes(args, _framework_class("equinox", "Module")):
            error.add_note(
                f"Combine the Equinox model with its non-array leaves inside the loss:{_EQUINOX}"
            )
        raise


def flatten_params(params: PyTree) -> FlatTree:
    """Flattens parameters, and rejects models with other leaves that `jax.grad` would include."""
    # Models exist only if their framework is imported, so it is not imported here.
    for problems, hint in ((_check_nnx(params), _NNX), (_check_equinox(params), _EQUINOX)):
        for problem in problems:
            raise TypeError(
                f"params must contain only parameters, but has {problem}; split the model:{hint}"
            )
    return flatten(params, "params")


def _check_nnx(params: PyTree) -> Iterator[str]:
    """Describes leaves of NNX modules, and of states with parameters, that are not parameters."""
    module, variable, param = (
        _framework_class("flax.nnx", name) for name in ("Module", "Variable", "Param")
    )
    for path, node in _nodes(params, module + _framework_class("flax.nnx", "State")):
        pairs = jax.tree_util.tree_leaves_with_path(node, is_leaf=lambda x: isinstance(x, variable))
        if not isinstance(node, module) and not any(isinstance(x, param) for _, x in pairs):
            continue
        # NNX shares variables by identity, but pytrees have one leaf per name.
        seen = dict[int, str]()
        for node_path, x in pairs:
            name, dtype = leaf_name((*path, *node_path)), dtype_of(x)
            if isinstance(x, param):
                if id(x) in seen:
                    yield f"the shared NNX Param '{seen[id(x)]}', also at '{name}'"
                seen[id(x)] = name
            elif isinstance(x, variable):
                yield f"the NNX {type(x).__name__} '{name}' together with Params"
            elif dtype is None or jnp.issubdtype(dtype, jnp.inexact):
                yield f"the NNX array '{name}' instead of a Param"


def _check_equinox(params: PyTree) -> Iterator[str]:
    """Describes non-array leaves of Equinox modules."""
    for path, node in _nodes(params, _framework_class("equinox", "Module")):
        for node_path, x in jax.tree_util.tree_leaves_with_path(node):
            # `jax.grad` would differentiate Python floats, unlike `eqx.filter_grad`.
            if not hasattr(x, "dtype"):
                name = leaf_name((*path, *node_path))
                yield f"the non-array leaf '{name}' = {short_repr(x)} of an Equinox module"


def _nodes(tree: PyTree, kinds: tuple[type, ...]) -> list[tuple[Any, Any]]:
    """Returns the outermost nodes of these types and their paths."""
    if not kinds:
        return []
    pairs = jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda x: isinstance(x, kinds))
    return [(path, x) for path, x in pairs if isinstance(x, kinds)]


def _framework_class(module: str, name: str) -> tuple[type, ...]:
    """Returns a tuple of the class, which is empty if the framework is not imported."""
    kind = getattr(sys.modules.get(module), name, None)
    return (kind,) if isinstance(kind, type) else ()

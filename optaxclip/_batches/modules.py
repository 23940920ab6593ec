"""Models of Flax NNX and of Equinox among a loss's arguments: refused where they would go wrong."""

import sys
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from optaxclip._base.arguments import short_repr
from optaxclip._base.trees import FlatTree, dtype_of, flatten, leaf_name
from optaxclip._base.types import PyTree

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

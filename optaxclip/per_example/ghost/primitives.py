"""What this package knows of JAX's primitives: the names and parameters of equations (JAX 0.10).

No other file reads these. If a parameter of the loss meets an equation that this file does not
know, its gradient is materialized for each example, which is right for every equation.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.core import eval_jaxpr

from optaxclip._base.programs import is_literal, make_program

IDENTITY_PRIMITIVES = frozenset(
    {"convert_element_type", "copy", "copy_p", "sharding_constraint", "reshard", "mesh_cast"}
)
"""Primitives that leave entries where they are."""

RESHAPE_PRIMITIVES = IDENTITY_PRIMITIVES | {
    "transpose",
    "reshape",
    "squeeze",
    "expand_dims",
    "broadcast_in_dim",
    "rev",
}
RESHAPE_PRIMITIVES |= {"slice", "split"}
"""Primitives that only move entries of their operand, or leave some entries out."""

CALLS = frozenset({"jit", "pjit", "closed_call", "core_call"})
CHECKPOINTS = frozenset({"remat2", "checkpoint", "remat"})
SCAN, CONCATENATE, STOP_GRADIENT = "scan", "concatenate", "stop_gradient"
DOT_GENERAL, GATHER, CONVOLUTION = "dot_general", "gather", "conv_general_dilated"

KNOWN = RESHAPE_PRIMITIVES | CALLS | CHECKPOINTS
KNOWN |= {SCAN, CONCATENATE, STOP_GRADIENT, DOT_GENERAL, GATHER, CONVOLUTION}

_FLOATS = frozenset(map(jnp.dtype, ("float16", "bfloat16", "float32", "float64")))


def run(jaxpr: Any, consts: Sequence[Any], values: Sequence[Any]) -> list[Any]:
    """The outputs of a program."""
    return eval_jaxpr(jaxpr, consts, *values)


def apply(eqn: Any, values: Sequence[Any]) -> list[Any]:
    """The outputs of one equation, from a value for each operand."""
    known = {v: x for v, x in zip(eqn.invars, values, strict=True) if not is_literal(v)}
    return run(make_program([eqn], list(known), eqn.outvars), (), list(known.values()))


def move(eqn: Any, x: Array) -> list[Array]:
    """The outputs of an equation of `MOVES`, on any mesh.

    A program keeps the mesh on which it was traced, whose explicit axes may be automatic here.
    """
    params = {name: None if name == "sharding" else value for name, value in eqn.params.items()}
    found = eqn.primitive.bind(x, **params)
    return list(found) if eqn.primitive.multiple_results else [found]


def inner(eqn: Any) -> tuple[jex.Jaxpr, Sequence[Any]]:
    """The program inside of a call, a checkpoint or a scan, and its constants."""
    found = eqn.params["jaxpr"] if "jaxpr" in eqn.params else eqn.params["call_jaxpr"]
    return (found.jaxpr, found.consts) if isinstance(found, jex.ClosedJaxpr) else (found, ())


def name_of(eqn: Any) -> str:
    """The name of an equation's primitive."""
    return eqn.primitive.name


def is_real(atom: Any) -> bool:
    """Whether a variable holds real floating-point numbers of a common dtype."""
    return getattr(atom.aval, "dtype", None) in _FLOATS


def mesh_of(aval: Any) -> Any:
    """The mesh in a type, which also says which of its axes are automatic."""
    return getattr(getattr(aval, "sharding", None), "mesh", None)


def has_gradient(eqn: Any) -> bool:
    """Whether a derivative can pass through an equation."""
    dtypes = (getattr(v.aval, "dtype", None) for v in eqn.outvars)
    is_inexact = (dtype is None or jnp.issubdtype(dtype, jnp.inexact) for dtype in dtypes)
    return name_of(eqn) != STOP_GRADIENT and any(is_inexact)


def is_reshape_like(eqn: Any) -> bool:
    """Whether each output has only entries of the one operand, and none of them twice."""
    if (
        name_of(eqn) not in RESHAPE_PRIMITIVES
        or len(eqn.invars) != 1
        or not all(map(is_real, eqn.outvars))
    ):
        return False
    is_whole = sum(v.aval.size for v in eqn.outvars) == eqn.invars[0].aval.size
    return is_whole or name_of(eqn) == "slice"


def is_identity(eqn: Any) -> bool:
    """Whether all entries stay where they are."""
    return name_of(eqn) in IDENTITY_PRIMITIVES


def slice_intervals(eqn: Any, output: int) -> list[tuple[int, int]] | None:
    """For each axis of the operand, between which entries a slice lies; None for other moves."""
    shape = eqn.invars[0].aval.shape
    if name_of(eqn) == "slice":
        rows = zip(eqn.params["start_indices"], eqn.params["limit_indices"], strict=True)
        return [(int(start), int(end)) for start, end in rows]
    if name_of(eqn) == "split":
        sizes, axis = eqn.params["sizes"], eqn.params["axis"]
        start = int(sum(sizes[:output]))
        whole = [(0, size) for size in shape]
        return [*whole[:axis], (start, start + int(sizes[output])), *whole[axis + 1 :]]
    return None


def transpose_axis(eqn: Any, axis: int) -> int | None:
    """The place to which a transpose moves an axis; None for other moves."""
    is_transpose = name_of(eqn) == "transpose"
    return eqn.params["permutation"].index(axis) if is_transpose else None


def concatenate_offsets(eqn: Any) -> tuple[int, list[int]]:
    """The axis of a concatenation, and where its operands start along it."""
    axis = eqn.params["dimension"]
    sizes = [v.aval.shape[axis] for v in eqn.invars]
    return axis, [sum(sizes[:i]) for i in range(len(sizes))]


class Product(NamedTuple):
    """The axes of a `dot_general`: `data` meets `weights`, one of which is the parameter.

    Attributes:
      data_sums: the axes of the data that are summed over, in the order of `weight_sums`.
      weight_sums: the axes of the parameter that are summed over.
      data_batch: the batch axes of the data.
      weight_batch: the batch axes of the parameter.
    """

    data_sums: tuple[int, ...]
    weight_sums: tuple[int, ...]
    data_batch: tuple[int, ...]
    weight_batch: tuple[int, ...]


def product(eqn: Any, position: int) -> Product | None:
    """The axes of a matrix product with the parameter at `position`."""
    if name_of(eqn) != DOT_GENERAL or not all(map(is_real, (*eqn.invars, *eqn.outvars))):
        return None
    sums, batch = eqn.params["dimension_numbers"]
    (data_sums, weight_sums), (data_batch, weight_batch) = (
        pair if position else pair[::-1] for pair in (sums, batch)
    )
    return Product(*map(tuple, (data_sums, weight_sums, data_batch, weight_batch)))


def drops_outside(eqn: Any) -> bool | None:
    """For a gather of whole rows, whether rows out of range have no gradient; otherwise None.

    False means that the nearest row is taken instead. Rows are along the operand's first axis.
    """
    if name_of(eqn) != GATHER or not is_real(eqn.invars[0]):
        return None
    numbers, operand = eqn.params["dimension_numbers"], eqn.invars[0].aval
    ndim = eqn.outvars[0].aval.ndim
    last = tuple(range(ndim - (operand.ndim - 1), ndim))
    is_of_rows = (
        tuple(numbers.offset_dims) == last
        and tuple(numbers.collapsed_slice_dims) == (0,)
        and tuple(numbers.start_index_map) == (0,)
        and not numbers.operand_batching_dims
        and tuple(eqn.params["slice_sizes"]) == (1, *operand.shape[1:])
    )
    return eqn.params["mode"] != lax.GatherScatterMode.CLIP if is_of_rows else None


def is_convolution(eqn: Any, position: int) -> bool:
    """Whether a parameter is the kernel of a convolution with data."""
    is_of_kernel = name_of(eqn) == CONVOLUTION and position == 1
    return (
        is_of_kernel
        and eqn.params["batch_group_count"] == 1
        and all(map(is_real, (*eqn.invars, *eqn.outvars)))
    )


_OF_CONVOLUTIONS = (
    *("window_strides", "padding", "lhs_dilation", "rhs_dilation", "dimension_numbers"),
    "feature_group_count",
)


def convolve(eqn: Any, x: Array, kernel: Array, dtype: Any) -> Array:
    """The convolution of an equation, with full precision in `dtype`."""
    options = {name: eqn.params[name] for name in _OF_CONVOLUTIONS}
    return lax.conv_general_dilated(
        x.astype(dtype),
        kernel.astype(dtype),
        **options,
        precision=lax.Precision.HIGHEST,
        preferred_element_type=dtype,
    )


def one_pixel_patches(eqn: Any, x: Array) -> Array:
    """The input `[any, *input]` of a convolution, as windows of one pixel.

    They are `[any, n, *input positions, 1, channels]`.
    """
    batch, channels, *spatial = eqn.params["dimension_numbers"].lhs_spec
    x = jnp.transpose(x, (0, batch + 1, *(axis + 1 for axis in spatial), channels + 1))
    return jnp.expand_dims(x, -2)


def patches(eqn: Any, x: Array) -> Array:
    """For each output of a convolution, the `pixels` that it is computed from.

    They are `[any, n, *output positions, window, channels]`.
    """
    same, numbers = (0, 0, 0), eqn.params["dimension_numbers"]
    edges = zip(eqn.params["padding"], eqn.params["lhs_dilation"], strict=True)
    around = [(low, high, dilation - 1) for (low, high), dilation in edges]
    x = lax.pad(x, jnp.zeros((), x.dtype), [same, same, *around, same, same])
    sizes = [eqn.outvars[0].aval.shape[axis] for axis in numbers.out_spec[2:]]
    strides, dilations = eqn.params["window_strides"], eqn.params["rhs_dilation"]
    ends = [(size - 1) * stride + 1 for size, stride in zip(sizes, strides, strict=True)]
    seen = []
    for place in itertools.product(*map(range, window(eqn))):
        starts = [at * dilation for at, dilation in zip(place, dilations, strict=True)]
        thresholds = [start + end for start, end in zip(starts, ends, strict=True)]
        first, last = (0, 0, *starts, 0, 0), (*x.shape[:2], *thresholds, *x.shape[-2:])
        seen.append(lax.slice(x, first, last, (1, 1, *strides, 1, 1)))
    return jnp.concatenate(seen, -2)


def reshape_to_kernel(eqn: Any, x: Array) -> Array:
    """`[*any, *kernel]`, from `[*any, groups, window and channels, features of a group]`."""
    out_axis, in_axis, *spatial = eqn.params["dimension_numbers"].rhs_spec
    lead, (groups, _, features) = x.shape[:-3], x.shape[-3:]
    x = jnp.moveaxis(x.reshape(*lead, groups, *window(eqn), -1, features), len(lead), -2)
    x = x.reshape(*x.shape[:-2], groups * features)
    order = np.argsort([*spatial, in_axis, out_axis])
    return jnp.transpose(x, (*range(len(lead)), *(len(lead) + axis for axis in order)))


def outputs_of_convolution(eqn: Any, d: Array) -> Array:
    """`[any, n, *output positions, features]`, from `[any, *output]`."""
    batch, features, *spatial = eqn.params["dimension_numbers"].out_spec
    return jnp.transpose(d, (0, batch + 1, *(axis + 1 for axis in spatial), features + 1))


def window(eqn: Any) -> tuple[int, ...]:
    """The spatial sizes of a convolution's kernel."""
    shape = eqn.invars[1].aval.shape
    return tuple(shape[axis] for axis in eqn.params["dimension_numbers"].rhs_spec[2:])


def feature_groups(eqn: Any) -> int:
    """The number of groups of channels that a convolution keeps apart."""
    return eqn.params["feature_group_count"]


class Loop(NamedTuple):
    """A `scan`, whose operands are constants, then carried values, then sliced arrays."""

    num_consts: int
    num_carry: int
    length: int

    @classmethod
    def create(cls, eqn: Any) -> "Loop":
        """The `Loop` of an equation."""
        params = eqn.params
        if "num_consts" in params:
            return cls(params["num_consts"], params["num_carry"], params["length"])
        consts, carry, _ = params["ft_in"].unpack()  # from JAX 0.11 on
        return cls(len(consts), len(carry), params["length"])


def rebind_scan(eqn: Any, body: Callable[..., Any], carry: Any, sliced: Any) -> Any:
    """The `scan` of an equation, with another body."""
    options = {name: eqn.params[name] for name in ("length", "reverse", "unroll")}
    return lax.scan(body, carry, sliced, **options)


def rebind_checkpoint(eqn: Any, fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn` as a checkpoint, with the equation's rule about what to keep for the derivative."""
    options = {name: eqn.params[name] for name in ("prevent_cse", "policy")}
    return jax.checkpoint(fn, **options)


def layout_of_kernel(eqn: Any) -> Any:
    """What two uses of a kernel, or of a table, must share to be joined."""
    if name_of(eqn) == CONVOLUTION:
        return tuple(eqn.params["dimension_numbers"].rhs_spec), feature_groups(eqn)
    return ()

"""Names and parameters of JAX's primitives (as of JAX 0.10).

If an unsupported equation uses a parameter, its per-example gradients are computed instead.
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

# Primitives that do not move elements.
IDENTITY_PRIMITIVES = frozenset(
    {"convert_element_type", "copy", "copy_p", "sharding_constraint", "reshard", "mesh_cast"}
)
# Primitives that only move or remove elements of their operand.
RESHAPE_PRIMITIVES = IDENTITY_PRIMITIVES | {
    *("transpose", "reshape", "squeeze", "expand_dims", "broadcast_in_dim", "rev"),
    *("slice", "split"),
}
CALLS = frozenset({"jit", "pjit", "closed_call", "core_call"})
CHECKPOINTS = frozenset({"remat2", "checkpoint", "remat"})
SCAN, CONCATENATE, STOP_GRADIENT = "scan", "concatenate", "stop_gradient"
DOT_GENERAL, GATHER, CONVOLUTION = "dot_general", "gather", "conv_general_dilated"

KNOWN = RESHAPE_PRIMITIVES | CALLS | CHECKPOINTS
KNOWN |= {SCAN, CONCATENATE, STOP_GRADIENT, DOT_GENERAL, GATHER, CONVOLUTION}

_FLOATS = frozenset(map(jnp.dtype, ("float16", "bfloat16", "float32", "float64")))


def apply(eqn: Any, values: Sequence[Any]) -> list[Any]:
    """Returns the outputs of an equation for values of its operands."""
    known = {v: x for v, x in zip(eqn.invars, values, strict=True) if not is_literal(v)}
    return eval_jaxpr(make_program([eqn], list(known), eqn.outvars), (), *known.values())


def move(eqn: Any, x: Array) -> list[Array]:
    """Returns the outputs of an equation in `RESHAPE_PRIMITIVES`, on any mesh."""
    # The program's mesh may have explicit axes that are automatic here.
    params = {name: None if name == "sharding" else value for name, value in eqn.params.items()}
    outputs = eqn.primitive.bind(x, **params)
    return list(outputs) if eqn.primitive.multiple_results else [outputs]


def inner(eqn: Any) -> tuple[jex.Jaxpr, Sequence[Any]]:
    """Returns the program inside a call, a checkpoint, or a scan, and its constants."""
    jaxpr = eqn.params["jaxpr"] if "jaxpr" in eqn.params else eqn.params["call_jaxpr"]
    return (jaxpr.jaxpr, jaxpr.consts) if isinstance(jaxpr, jex.ClosedJaxpr) else (jaxpr, ())


def is_real(atom: Any) -> bool:
    """Returns `True` for real floating-point variables of a common dtype."""
    return getattr(atom.aval, "dtype", None) in _FLOATS


def mesh_of(aval: Any) -> Any:
    """Returns the mesh of a type, including the types of its axes."""
    return getattr(getattr(aval, "sharding", None), "mesh", None)


def has_gradient(eqn: Any) -> bool:
    """Returns `True` if an equation can have a derivative."""
    dtypes = (getattr(v.aval, "dtype", None) for v in eqn.outvars)
    is_inexact = (dtype is None or jnp.issubdtype(dtype, jnp.inexact) for dtype in dtypes)
    return eqn.primitive.name != STOP_GRADIENT and any(is_inexact)


def is_reshape_like(eqn: Any) -> bool:
    """Returns `True` if outputs only have elements of a single operand, without repetitions."""
    name, is_unary = eqn.primitive.name, len(eqn.invars) == 1
    if name not in RESHAPE_PRIMITIVES or not is_unary or not all(map(is_real, eqn.outvars)):
        return False
    return name == "slice" or sum(v.aval.size for v in eqn.outvars) == eqn.invars[0].aval.size


def slice_intervals(eqn: Any, output: int) -> list[tuple[int, int]] | None:
    """Returns the intervals of a slice along all axes of its operand, or None for other moves."""
    shape = eqn.invars[0].aval.shape
    if eqn.primitive.name == "slice":
        rows = zip(eqn.params["start_indices"], eqn.params["limit_indices"], strict=True)
        return [(int(start), int(end)) for start, end in rows]
    if eqn.primitive.name == "split":
        sizes, axis = eqn.params["sizes"], eqn.params["axis"]
        start = int(sum(sizes[:output]))
        whole = [(0, size) for size in shape]
        return [*whole[:axis], (start, start + int(sizes[output])), *whole[axis + 1 :]]
    return None


def permutation(eqn: Any) -> tuple[int, ...] | None:
    """Returns the order of the axes after a transpose, or None for other equations."""
    return tuple(eqn.params["permutation"]) if eqn.primitive.name == "transpose" else None


def concatenated_intervals(eqn: Any) -> tuple[int, list[tuple[int, int]]]:
    """Returns the axis of a concatenation, and the starts and sizes of its operands."""
    axis = eqn.params["dimension"]
    sizes = [v.aval.shape[axis] for v in eqn.invars]
    return axis, [(sum(sizes[:i]), size) for i, size in enumerate(sizes)]


class Product(NamedTuple):
    """The axes of a `dot_general` of data and weights, the operand with the parameter."""

    data_sums: tuple[int, ...]  # The contracted axes, in the same order for both operands.
    weight_sums: tuple[int, ...]
    data_batch: tuple[int, ...]
    weight_batch: tuple[int, ...]
    data_free: tuple[int, ...]
    weight_free: tuple[int, ...]


def product(eqn: Any, position: int) -> Product | None:
    """Returns the axes of a matrix product with the parameter at `position`, or None."""
    if eqn.primitive.name != DOT_GENERAL or not all(map(is_real, (*eqn.invars, *eqn.outvars))):
        return None
    sums, batch = eqn.params["dimension_numbers"]
    axes = []
    for i in (1 - position, position):  # Data can be the first or the second operand.
        used = (*sums[i], *batch[i])
        free = (axis for axis in range(eqn.invars[i].aval.ndim) if axis not in used)
        axes.append((tuple(sums[i]), tuple(batch[i]), tuple(free)))
    # ((sums, batch, free), (sums, batch, free)) -> (sums, sums, batch, batch, free, free)
    return Product(*itertools.chain.from_iterable(zip(*axes, strict=True)))


def drops_outside(eqn: Any) -> bool | None:
    """Returns `True` if a gather of rows ignores indices out of range, None for other equations."""
    if eqn.primitive.name != GATHER or not is_real(eqn.invars[0]):
        return None
    numbers, operand = eqn.params["dimension_numbers"], eqn.invars[0].aval
    ndim = eqn.outvars[0].aval.ndim
    last = tuple(range(ndim - (operand.ndim - 1), ndim))
    # The output is [*indices, *row], from an operand [rows, *row].
    is_row_gather = (
        tuple(numbers.offset_dims) == last
        and tuple(numbers.collapsed_slice_dims) == (0,)
        and tuple(numbers.start_index_map) == (0,)
        and not numbers.operand_batching_dims
        and tuple(eqn.params["slice_sizes"]) == (1, *operand.shape[1:])
    )
    return eqn.params["mode"] != lax.GatherScatterMode.CLIP if is_row_gather else None


def is_convolution(eqn: Any, position: int) -> bool:
    """Returns `True` if the operand at `position` is the kernel of a supported convolution."""
    return (
        eqn.primitive.name == CONVOLUTION
        and position == 1
        and eqn.params["batch_group_count"] == 1
        and all(map(is_real, (*eqn.invars, *eqn.outvars)))
    )


def convolve(eqn: Any, x: Array, kernel: Array, dtype: Any) -> Array:
    """Computes the convolution of an equation with the highest precision in `dtype`."""
    names = ("window_strides", "padding", "lhs_dilation", "rhs_dilation", "dimension_numbers")
    options = {name: eqn.params[name] for name in (*names, "feature_group_count")}
    return lax.conv_general_dilated(
        x.astype(dtype),
        kernel.astype(dtype),
        **options,
        precision=lax.Precision.HIGHEST,
        preferred_element_type=dtype,
    )


def move_channels_last(eqn: Any, x: Array, *, is_output: bool) -> Array:
    """Transposes inputs or outputs of a convolution to `[any, n, *positions, channels]`."""
    numbers = eqn.params["dimension_numbers"]
    batch, channels, *spatial = numbers.out_spec if is_output else numbers.lhs_spec
    return jnp.transpose(x, (0, batch + 1, *(axis + 1 for axis in spatial), channels + 1))


def patches(eqn: Any, x: Array) -> Array:
    """Extracts patches `[any, n, *output positions, window, channels]` for a convolution."""
    same, numbers = (0, 0, 0), eqn.params["dimension_numbers"]
    edges = zip(eqn.params["padding"], eqn.params["lhs_dilation"], strict=True)
    around = [(low, high, dilation - 1) for (low, high), dilation in edges]
    # [any, n, *padded positions, 1, channels]
    x = lax.pad(x, jnp.zeros((), x.dtype), [same, same, *around, same, same])
    sizes = [eqn.outvars[0].aval.shape[axis] for axis in numbers.out_spec[2:]]
    strides, dilations = eqn.params["window_strides"], eqn.params["rhs_dilation"]
    ends = [(size - 1) * stride + 1 for size, stride in zip(sizes, strides, strict=True)]
    pixels = []
    for offset in itertools.product(*map(range, window(eqn))):
        starts = [i * dilation for i, dilation in zip(offset, dilations, strict=True)]
        stops = [start + end for start, end in zip(starts, ends, strict=True)]
        first, last = (0, 0, *starts, 0, 0), (*x.shape[:2], *stops, *x.shape[-2:])
        # [any, n, *output positions, 1, channels]
        pixels.append(lax.slice(x, first, last, (1, 1, *strides, 1, 1)))
    return jnp.concatenate(pixels, -2)


def reshape_to_kernel(eqn: Any, x: Array) -> Array:
    """Reshapes `[*any, groups, window * channels, features of a group]` to `[*any, *kernel]`."""
    out_axis, in_axis, *spatial = eqn.params["dimension_numbers"].rhs_spec
    lead, (groups, _, features) = x.shape[:-3], x.shape[-3:]
    # [*any, groups, *window, channels, features] -> [*any, *window, channels, groups, features]
    x = jnp.moveaxis(x.reshape(*lead, groups, *window(eqn), -1, features), len(lead), -2)
    x = x.reshape(*x.shape[:-2], groups * features)  # [*any, *window, channels, features]
    order = np.argsort([*spatial, in_axis, out_axis])
    return jnp.transpose(x, (*range(len(lead)), *(len(lead) + axis for axis in order)))


def window(eqn: Any) -> tuple[int, ...]:
    """Returns the spatial sizes of the kernel of a convolution."""
    shape = eqn.invars[1].aval.shape
    return tuple(shape[axis] for axis in eqn.params["dimension_numbers"].rhs_spec[2:])


def feature_groups(eqn: Any) -> int:
    """Returns the number of separate channel groups of a convolution."""
    return eqn.params["feature_group_count"]


class Loop(NamedTuple):
    """A `scan`, with constants, carried values, and sliced arrays as operands."""

    num_consts: int
    num_carry: int
    length: int

    @classmethod
    def create(cls, eqn: Any) -> "Loop":
        """Returns the loop of an equation."""
        params = eqn.params
        if "num_consts" in params:
            return cls(params["num_consts"], params["num_carry"], params["length"])
        # The parameters changed in JAX 0.11.
        consts, carry, _ = params["ft_in"].unpack()
        return cls(len(consts), len(carry), params["length"])


def rebind_scan(eqn: Any, body: Callable[..., Any], carry: Any, sliced: Any) -> Any:
    """Runs the `scan` of an equation with a different body."""
    options = {name: eqn.params[name] for name in ("length", "reverse", "unroll")}
    return lax.scan(body, carry, sliced, **options)


def rebind_checkpoint(eqn: Any, fn: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a function in a checkpoint with the policy of an equation."""
    options = {name: eqn.params[name] for name in ("prevent_cse", "policy")}
    return jax.checkpoint(fn, **options)

"""Primitives that transform cotangents and reject `vmap`.

The identity with a transformed cotangent is a separate primitive, because no public function of JAX
can create it (as of JAX 0.10.2). `jax.custom_vjp` does not support forward mode. `jax.custom_jvp`
loses its rules inside loops. `jax.custom_derivatives.linear_call` does not support `vmap`, and
assumes that the function is linear, so derivatives of the cotangent would be wrong.

The forward-mode rule returns `x` unchanged, and only modifies tangents that reverse mode
transposes. Therefore, derivatives of a cotangent are derivatives of the function alone, as with
`jax.custom_vjp`, and forward-mode derivatives of a derivative are those of the identity.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core as jex
from jax import Array
from jax.core import Tracer
from jax.interpreters import ad, batching, mlir
from jax.sharding import AxisType

import optaxclip._backend.meshes as meshes

CotangentFn = Callable[..., Array]
"""A differentiable function `fn(cotangent, *operands) -> cotangent`."""


def transform_cotangent(x: Array, cotangent_fn: CotangentFn, *operands: Array) -> Array:
    """Returns `x`, and replaces its cotangent by `cotangent_fn(cotangent, *operands)`.

    In forward mode, this is the identity. Under `vmap`, `cotangent_fn` is called for individual
    examples, even if `x` is the same for all of them.
    """
    return _identity.bind(x, *operands, cotangent_fn=cotangent_fn, is_tangent=False)


_identity = jex.Primitive("clip_cotangent")
_identity.def_impl(lambda x, *_, **__: x)
_identity.def_abstract_eval(lambda x, *_, **__: x)
mlir.register_lowering(_identity, lambda _, x, *__, **___: [x])


def _jvp(
    primals: Sequence[Any], tangents: Sequence[Any], *, cotangent_fn: CotangentFn, is_tangent: bool
) -> tuple[Any, Any]:
    (x, *operands), dx = primals, tangents[0]
    if is_tangent or isinstance(dx, ad.Zero):
        return x, dx
    return x, _identity.bind(dx, *operands, cotangent_fn=cotangent_fn, is_tangent=True)


# Only the first operand has a cotangent.
ad.deflinear2(
    _identity,
    lambda cotangent, _, *operands, cotangent_fn, **__: [
        cotangent_fn(cotangent, *operands),
        *[None] * len(operands),
    ],
)
ad.primitive_jvps[_identity] = _jvp


@dataclasses.dataclass(frozen=True)
class _VmappedCotangentFn:
    """A `CotangentFn` under `vmap`, hashable as a parameter of the primitive."""

    cotangent_fn: CotangentFn
    axes: tuple[int | None, ...]
    axis_name: Any
    spmd_axis_name: Any

    def __call__(self, *args: Array) -> Array:
        mapped = jax.vmap(
            self.cotangent_fn,
            self.axes,
            self.axes[0],
            axis_name=self.axis_name,
            spmd_axis_name=self.spmd_axis_name,
        )
        return mapped(*args)


def _batching_rule(
    mapped: Any,
    args: Sequence[Any],
    axes: Sequence[int | None],
    *,
    cotangent_fn: CotangentFn,
    is_tangent: bool,
) -> tuple[Array, int]:
    (x, *operands), (axis, *other_axes) = args, axes
    if axis is None:
        # Otherwise, the cotangents of the examples would be summed first.
        mesh = meshes.current_mesh()
        if mesh is not None and AxisType.Explicit in mesh.axis_types and isinstance(x, Tracer):
            x = meshes.place_on_mesh(x, mesh)
        if mapped.explicit_mesh_axis and jax.typeof(x).sharding.mesh.empty:
            raise ValueError(
                "clip_cotangent: x must be on the explicit mesh used by vmap, but an array of "
                f"shape {x.shape} is not on any mesh; set the mesh with jax.set_mesh"
            )
        x, axis = batching.broadcast(x, mapped.size, 0, mapped.explicit_mesh_axis), 0
    vmapped = _VmappedCotangentFn(cotangent_fn, (axis, *other_axes), mapped.name, mapped.spmd_name)
    return _identity.bind(x, *operands, cotangent_fn=vmapped, is_tangent=is_tangent), axis


batching.fancy_primitive_batchers[_identity] = _batching_rule


def forbid_vmap(x: Array, function: str) -> Array:
    """Returns `x`, and rejects a later `vmap` if `x` varies over devices inside `shard_map`."""
    # Only a primitive detects a `vmap` before or after the derivative, or around a `jit` or `scan`.
    return _unmapped.bind(x, function=function) if meshes.varying_axes(x) else x


def _forbidden_batching_rule(args: Sequence[Any], axes: Sequence[int], *, function: str) -> Any:
    del axes
    raise ValueError(
        f"{function}: axis_name is required under vmap inside shard_map, because an array "
        f"varies over {sorted(meshes.varying_axes(args[0]))}; pass axis_name=() if devices have "
        "different examples"
    )


_unmapped = jex.Primitive("forbid_vmap")
_unmapped.def_impl(lambda x, **_: x)
_unmapped.def_abstract_eval(lambda x, **_: x)
mlir.register_lowering(_unmapped, lambda _, x, **__: [x])
ad.deflinear2(_unmapped, lambda cotangent, _, **__: [cotangent])
batching.primitive_batchers[_unmapped] = _forbidden_batching_rule

"""The identity whose cotangent goes through a function.

The identity is a primitive of its own, because no function of JAX 0.10.2 makes one:
`jax.custom_vjp` forbids forward mode; `jax.custom_derivatives.linear_call` takes the function for
linear, so that derivatives of the cotangent are wrong, and has no rule for `vmap`; and a
`jax.custom_jvp` loses its rules inside loops.

The rule for forward mode returns `x` itself, and changes tangents only for reverse mode, which
transposes them next. So derivatives of a cotangent are derivatives of the function alone, as with
`jax.custom_vjp`, and derivatives of a derivative in forward mode are those of the identity.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core as jex
from jax import Array
from jax.interpreters import ad, batching, mlir

import optaxclip._backend.meshes as meshes

CotangentFn = Callable[..., Array]
"""`back(cotangent, *operands) -> cotangent`, made of operations that JAX can differentiate."""


def transform_cotangent(x: Array, cotangent_fn: CotangentFn, *operands: Array) -> Array:
    """`x`, whose cotangent becomes `back(cotangent, *operands)`, of its shape and dtype.

    In forward mode it is the identity. Under `vmap`, `back` sees each example by itself, even if
    `x` is the same for all examples. The operands may be traced.
    """
    return _identity.bind(x, *operands, back=cotangent_fn, is_tangent=False)


_identity = jex.Primitive("clip_cotangent")
_identity.def_impl(lambda x, *_, **__: x)
_identity.def_abstract_eval(lambda x, *_, **__: x)
mlir.register_lowering(_identity, lambda _, x, *__, **___: [x])


def _jvp(
    primals: Sequence[Any], tangents: Sequence[Any], *, back: CotangentFn, is_tangent: bool
) -> tuple[Any, Any]:
    (x, *operands), dx = primals, tangents[0]
    if is_tangent or isinstance(dx, ad.Zero):
        return x, dx
    return x, _identity.bind(dx, *operands, back=back, is_tangent=True)


def _transpose_rule(
    cotangent: Any, x: Any, *operands: Any, back: CotangentFn, is_tangent: bool
) -> list[Any]:
    del x, is_tangent
    return [back(cotangent, *operands), *[None] * len(operands)]


ad.deflinear2(_identity, _transpose_rule)
ad.primitive_jvps[_identity] = _jvp


@dataclasses.dataclass(frozen=True)
class _VmappedCotangentFn:
    """`back` for each example of a `vmap`; `names` are those of its axis, as keywords."""

    back: CotangentFn
    axes: tuple[int | None, ...]
    names: tuple[tuple[str, Any], ...]

    def __call__(self, *args: Array) -> Array:
        mapped = jax.vmap(self.back, self.axes, self.axes[0], **dict(self.names))
        return mapped(*args)


def _batching_rule(
    mapped: Any,
    args: Sequence[Any],
    axes: Sequence[int | None],
    *,
    back: CotangentFn,
    is_tangent: bool,
) -> tuple[Array, int]:
    (x, *operands), (axis, *others) = args, axes
    if axis is None:
        # Broadcast, because otherwise only the sum of the examples' cotangents would come back.
        x = meshes.place_on_current_mesh(x)
        if mapped.explicit_mesh_axis and jax.typeof(x).sharding.mesh.empty:
            # The mesh is only in the types of arrays that are not operands here.
            raise ValueError(
                "clip_cotangent: under vmap over an axis of an explicit mesh, x must lie on that "
                f"mesh, got an unplaced array of shape {x.shape}; set the mesh: "
                "with jax.set_mesh(mesh)"
            )
        x, axis = batching.broadcast(x, mapped.size, 0, mapped.explicit_mesh_axis), 0
    names = (("axis_name", mapped.name), ("spmd_axis_name", mapped.spmd_name))
    of_each = _VmappedCotangentFn(back, (axis, *others), names)
    return _identity.bind(x, *operands, back=of_each, is_tangent=is_tangent), axis


batching.fancy_primitive_batchers[_identity] = _batching_rule


def forbid_vmap(x: Array, function: str) -> Array:
    """`x`, inside `shard_map` refused under `vmap` if types show that it differs over devices.

    `jax.vmap` can come before the derivative or after it, and around a `jit` or a `scan` of it:
    only a primitive of its own learns of it each time.
    """
    return _unmapped.bind(x, function=function) if meshes.varying_axes(x) else x


def _forbidden_batching_rule(args: Sequence[Any], axes: Sequence[int], *, function: str) -> Any:
    del axes
    raise ValueError(
        f"{function} under vmap inside shard_map: types do not say whether the devices along "
        f"{sorted(meshes.varying_axes(args[0]))} have different examples, with a norm each, or "
        "parts of one example. Pass axis_name=() in the first case, else the names of the axes"
    )


_unmapped = jex.Primitive("forbid_vmap")
_unmapped.def_impl(lambda x, **_: x)
_unmapped.def_abstract_eval(lambda x, **_: x)
mlir.register_lowering(_unmapped, lambda _, x, **__: [x])
ad.deflinear2(_unmapped, lambda cotangent, _, **__: [cotangent])
batching.primitive_batchers[_unmapped] = _forbidden_batching_rule

"""The identity whose cotangent goes through a function.

It is a primitive of JAX, because no function of JAX's makes one (JAX 0.10.2): a `jax.custom_vjp`
forbids forward mode, and `jax.custom_derivatives.linear_call` takes the function for a linear one,
so that derivatives of the cotangent are wrong, and has no rule for `vmap`. A primitive keeps its
rules inside loops, where JAX loses those of a `jax.custom_jvp`.

The rule for forward mode returns `x` itself, and changes tangents only where these are transposed
next, as reverse mode does. So derivatives of a cotangent are those of the function alone, as with
`jax.custom_vjp`, and derivatives of a derivative in forward mode are those of the identity.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core as jex
from jax import Array
from jax.interpreters import ad, batching, mlir

Back = Callable[..., Array]
"""`back(cotangent, *operands) -> cotangent`, in operations that JAX can differentiate."""


def with_cotangent(x: Array, back: Back, *operands: Array) -> Array:
    """`x`, whose cotangent becomes `back(cotangent, *operands)`.

    In forward mode it is the identity. Under `vmap`, `back` sees each example by itself, also where
    `x` is the same for all.

    Args:
      x: an array of floating or complex entries.
      back: the function; it keeps shape and dtype.
      *operands: further arrays for it, which may be traced.
    """
    return _identity.bind(x, *operands, back=back, is_tangent=False)


_identity = jex.Primitive("clip_cotangent")
_identity.def_impl(lambda x, *_, **__: x)
_identity.def_abstract_eval(lambda x, *_, **__: x)
mlir.register_lowering(_identity, lambda _, x, *__, **___: [x])


def _jvp(
    primals: Sequence[Any], tangents: Sequence[Any], *, back: Back, is_tangent: bool
) -> tuple[Any, Any]:
    (x, *operands), dx = primals, tangents[0]
    if is_tangent or isinstance(dx, ad.Zero):
        return x, dx
    return x, _identity.bind(dx, *operands, back=back, is_tangent=True)


def _transposed(cotangent: Any, x: Any, *operands: Any, back: Back, is_tangent: bool) -> list[Any]:
    del x, is_tangent
    return [back(cotangent, *operands), *[None] * len(operands)]


ad.deflinear2(_identity, _transposed)
ad.primitive_jvps[_identity] = _jvp


@dataclasses.dataclass(frozen=True)
class _OfEach:
    """`back` for each example of a `vmap`.

    Attributes:
      back: the function.
      axes: the examples' axes, of the cotangent and of the operands.
      names: the names of the mapped axis, as keywords of `jax.vmap`.
    """

    back: Back
    axes: tuple[int | None, ...]
    names: tuple[tuple[str, Any], ...]

    def __call__(self, *args: Array) -> Array:
        mapped = jax.vmap(self.back, self.axes, self.axes[0], **dict(self.names))
        return mapped(*args)


def _batched(
    mapped: Any, args: Sequence[Any], axes: Sequence[int | None], *, back: Back, is_tangent: bool
) -> tuple[Array, int]:
    (x, *operands), (axis, *others) = args, axes
    if axis is None:
        # Else the sum of the examples' cotangents would come back, and not each of them.
        x, axis = batching.broadcast(x, mapped.size, 0, mapped.explicit_mesh_axis), 0
    names = (("axis_name", mapped.name), ("spmd_axis_name", mapped.spmd_name))
    of_each = _OfEach(back, (axis, *others), names)
    return _identity.bind(x, *operands, back=of_each, is_tangent=is_tangent), axis


batching.fancy_primitive_batchers[_identity] = _batched

"""The loss of one microbatch: its value, its weight and its gradient, over all devices."""

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer

import optaxclip._border.devices as devices
from optaxclip._base.numerics import accumulation_dtype, is_real, norm_dtype
from optaxclip._base.trees import FlatTree
from optaxclip._base.types import PyTree
from optaxclip._batches.losses import describe_array, loss_and_aux
from optaxclip._batches.roles import LossArguments
from optaxclip._border.devices import Axes
from optaxclip.accumulate.places import DataSharding


class MicrobatchGrad(NamedTuple):
    """The loss, weight and gradient of one microbatch, and what else the loss returned."""

    value: Array
    weight: Array
    leaves: list[Array]
    aux: PyTree


@dataclasses.dataclass(frozen=True, eq=False)
class MicrobatchLoss:
    """A user's loss and weight of a microbatch; None weighs by the number of examples.

    Losses and weights are added up in `dtype`.
    """

    fn: Callable[..., Any]
    weight: Callable[..., Any] | None
    has_aux: bool
    dtype: jnp.dtype
    places: DataSharding

    def use_wide_dtype(self, params: FlatTree) -> "MicrobatchLoss":
        """This loss, with losses and weights in the widest dtype of the sums."""
        dtypes = [x.dtype for x in params.inexact_leaves()]
        return dataclasses.replace(self, dtype=norm_dtype([self.dtype, *dtypes]))

    def accumulator_dtype(self, dtype: Any) -> jnp.dtype:
        """The dtype in which leaves of `dtype` are added up."""
        is_wide = jnp.dtype("float64") in (self.dtype, accumulation_dtype(dtype))
        names = ("complex64", "complex128")
        if not jnp.issubdtype(dtype, jnp.complexfloating):
            names = ("float32", "float64")
        return jnp.dtype(names[is_wide])

    def global_loss_and_grad(
        self,
        roles: LossArguments,
        params: FlatTree,
        size: int,
        measured: list[Array],
        microbatch: Any,
    ) -> MicrobatchGrad:
        """Loss, weight and gradient of a microbatch, of which one device has `size` examples."""
        weight = self._weight_of(microbatch, size)

        def share_of_loss(measured: list[Array]) -> Any:
            value, aux = self._value(roles.merge(params.unflatten(measured), microbatch))
            axes = self.places.axes_of(value, weight)
            value = value.astype(self.dtype)
            return value * (weight / self._total(weight, axes)) if axes else value, aux

        (value, aux), leaves = jax.value_and_grad(share_of_loss, has_aux=True)(measured)
        axes = self.places.axes_of(value, weight)
        leaves = self.places.psum_grads(leaves, params, axes)
        return MicrobatchGrad(self._total(value, axes), self._total(weight, axes), leaves, aux)

    def local_loss_and_grad(
        self,
        roles: LossArguments,
        params: FlatTree,
        size: int,
        measured: list[Array],
        microbatch: Any,
    ) -> MicrobatchGrad:
        """Loss, weight and gradient of this device's part of a microbatch alone."""
        weight = self._weight_of(microbatch, size)

        def loss(measured: list[Array]) -> Any:
            return self._value(roles.merge(params.unflatten(measured), microbatch))

        (value, aux), leaves = jax.value_and_grad(loss, has_aux=True)(measured)
        if devices.has_vma_tracking():
            # A loss that is equal on all devices counts with the sum of their weights.
            weight = self._total(weight, self.places.axes_of(weight) - self.places.axes_of(value))
        return MicrobatchGrad(value.astype(self.dtype), weight, leaves, aux)

    def _total(self, x: Any, axes: Axes) -> Any:
        """The sum over devices; a constant is multiplied by their number, without a collective."""
        if not isinstance(x, Tracer):
            return x * devices.axis_size(axes)
        return devices.psum(self.places.vary(x, axes), axes)

    def _value(self, args: list[Any]) -> tuple[Array, PyTree]:
        """The loss and aux, checked."""
        of = "the mean loss of a microbatch"
        return loss_and_aux(self.fn, args, {}, has_aux=self.has_aux, description=of)

    def _weight_of(self, microbatch: tuple[Any, ...], size: int) -> Any:
        """The weight, checked; a traced weight that is negative becomes NaN."""
        weight = size if self.weight is None else _call_weight_fn(self.weight, microbatch)
        if not is_real(weight):
            raise TypeError(f"weight must return a real number, got {weight!r:.80}")
        if jnp.shape(weight) != ():
            raise ValueError(
                f"weight must return a scalar, how much a microbatch counts, got "
                f"{describe_array(weight)}; sum it"
            )
        if isinstance(weight, Tracer):
            weight = weight.astype(self.dtype)
            return jnp.where(weight >= 0, weight, jnp.nan)
        if not weight > 0:
            raise ValueError(
                f"weight must return a number above 0, got {weight!r} for every microbatch"
            )
        return np.asarray(weight, self.dtype)


def _call_weight_fn(weight: Callable[..., Any], microbatch: tuple[Any, ...]) -> Any:
    """What a user's weight returns, which must take all batch arguments."""
    try:
        inspect.signature(weight).bind(*microbatch)
    except TypeError as error:
        raise TypeError(
            f"weight is called with what batch_argnums names, a part of {len(microbatch)} of the "
            f"loss's arguments, and must take all of it ({error}): for a mask and tokens, "
            "batch_argnums=(1, 2) and weight(tokens, mask)"
        ) from None
    except ValueError:  # some functions have no signature
        pass
    return weight(*microbatch)

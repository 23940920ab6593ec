"""The devices over which a microbatch's gradient has to be added up, and how that is done.

A device's result counts with the weight of its part of the microbatch. If JAX tracks which values
differ between devices (`check_vma=True`), their types tell over which axes to sum; otherwise the
user names these axes by `axis_name=`.
"""

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer

import optaxclip._backend.meshes as meshes
from optaxclip._backend.leaf_shardings import as_spec
from optaxclip._backend.meshes import Axes
from optaxclip._base.numerics import accumulation_dtype, is_real, norm_dtype
from optaxclip._base.trees import FlatTree, broadcast_prefix
from optaxclip._base.types import PyTree
from optaxclip._loss_arguments import LossArguments, describe_array, loss_and_aux


@dataclasses.dataclass(frozen=True, eq=False)
class DataSharding:
    """What the user says of devices: how the batch and the parameters are split."""

    axis_names: tuple[str, ...] | None
    specs: PyTree

    def check(self, name: str) -> None:
        """Checks that the axes over which a batch is split are known, and are axes."""
        meshes.check_axis_names_bound(self.axis_names or ())
        if meshes.manual_axes() and not meshes.has_vma_tracking() and self.axis_names is None:
            raise ValueError(
                f"{name}: inside pmap or shard_map(check_vma=False) JAX does not say over which of "
                f"{sorted(meshes.manual_axes())} the batch is split; pass axis_name= (an empty "
                "tuple if the batch is the same on all devices), and specs= for parameters that "
                "are split; or leave out check_vma=False"
            )

    @property
    def specs_of_gradients(self) -> PyTree:
        """How the sums of gradients are split, if their types do not say."""
        is_unknown = self.specs is None and meshes.manual_axes() and not meshes.has_vma_tracking()
        return jax.P() if is_unknown else self.specs

    def axes_of(self, *arrays: Any) -> Axes:
        """The axes over which some of these differ from device to device."""
        if meshes.has_vma_tracking():
            return meshes.tree_varying_axes(arrays)
        return Axes(self.axis_names or ())

    def vary(self, x: Array, axes: Axes) -> Array:
        """`x`, typed as differing from device to device if JAX tracks this in types."""
        return meshes.pvary(x, axes) if meshes.has_vma_tracking() else x

    def get_axes_to_psum(self, params: FlatTree, axes: Axes) -> list[Axes]:
        """For each measured leaf, the axes over which its gradient must still be summed.

        Axes that split the leaf are left out: what gathers the leaf sums its gradient over them.
        """
        if meshes.has_vma_tracking():
            return [axes - meshes.varying_axes(x) for x in params.inexact_leaves()]
        if self.specs is None:
            return [axes] * len(params.inexact_indices)
        given = broadcast_prefix(self.specs, params, "specs")
        return [axes - meshes.axes_of(as_spec(spec)) for spec in given]

    def get_deferred_psum_axes(self, params: FlatTree, batch: PyTree) -> Axes:
        """The axes over which gradients can be added up once, after the last microbatch.

        There are none if a leaf is split over one of the batch's axes, because what gathers that
        leaf in each microbatch also sums its gradient.
        """
        axes = self.axes_of(*jax.tree.leaves(batch))
        can_wait = all(over == axes for over in self.get_axes_to_psum(params, axes))
        return axes if can_wait else Axes()

    def psum_grads(self, leaves: list[Array], params: FlatTree, axes: Axes) -> list[Array]:
        """The gradients, summed over devices unless JAX has done so."""
        if meshes.has_vma_tracking() or not axes:
            return leaves
        pairs = zip(leaves, self.get_axes_to_psum(params, axes), strict=True)
        return [meshes.psum(x, over) for x, over in pairs]


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
        if meshes.has_vma_tracking():
            # A loss that is equal on all devices counts with the sum of their weights.
            weight = self._total(weight, self.places.axes_of(weight) - self.places.axes_of(value))
        return MicrobatchGrad(value.astype(self.dtype), weight, leaves, aux)

    def _total(self, x: Any, axes: Axes) -> Any:
        """The sum over devices; a constant is multiplied by their number, without a collective."""
        if not isinstance(x, Tracer):
            return x * meshes.axis_size(axes)
        return meshes.psum(self.places.vary(x, axes), axes)

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

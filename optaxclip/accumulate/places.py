"""The devices over which a microbatch's gradient has to be added up, and how that is done.

A device's result counts with the weight of its part of the microbatch. If JAX tracks which values
differ between devices (`check_vma=True`), their types tell over which axes to sum; otherwise the
user names these axes by `axis_name=`.
"""

import dataclasses
from typing import Any

import jax
from jax import Array

import optaxclip._border.devices as devices
from optaxclip._base.trees import FlatTree, broadcast_prefix
from optaxclip._base.types import PyTree
from optaxclip._border.devices import Axes
from optaxclip._border.placement import as_spec


@dataclasses.dataclass(frozen=True, eq=False)
class DataSharding:
    """What the user says of devices: how the batch and the parameters are split."""

    axis_names: tuple[str, ...] | None
    specs: PyTree

    def check(self, name: str) -> None:
        """Checks that the axes over which a batch is split are known, and are axes."""
        devices.check_axis_names_bound(self.axis_names or ())
        if devices.manual_axes() and not devices.has_vma_tracking() and self.axis_names is None:
            raise ValueError(
                f"{name}: inside pmap or shard_map(check_vma=False) JAX does not say over which of "
                f"{sorted(devices.manual_axes())} the batch is split; pass axis_name= (an empty "
                "tuple if the batch is the same on all devices), and specs= for parameters that "
                "are split; or leave out check_vma=False"
            )

    @property
    def specs_of_gradients(self) -> PyTree:
        """How the sums of gradients are split, if their types do not say."""
        is_unknown = self.specs is None and devices.manual_axes() and not devices.has_vma_tracking()
        return jax.P() if is_unknown else self.specs

    def axes_of(self, *arrays: Any) -> Axes:
        """The axes over which some of these differ from device to device."""
        if devices.has_vma_tracking():
            return devices.tree_varying_axes(arrays)
        return Axes(self.axis_names or ())

    def vary(self, x: Array, axes: Axes) -> Array:
        """`x`, typed as differing from device to device if JAX tracks this in types."""
        return devices.pvary(x, axes) if devices.has_vma_tracking() else x

    def get_axes_to_psum(self, params: FlatTree, axes: Axes) -> list[Axes]:
        """For each measured leaf, the axes over which its gradient must still be summed.

        Axes that split the leaf are left out: what gathers the leaf sums its gradient over them.
        """
        if devices.has_vma_tracking():
            return [axes - devices.varying_axes(x) for x in params.inexact_leaves()]
        if self.specs is None:
            return [axes] * len(params.inexact_indices)
        given = broadcast_prefix(self.specs, params, "specs")
        return [axes - devices.axes_of(as_spec(spec)) for spec in given]

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
        if devices.has_vma_tracking() or not axes:
            return leaves
        pairs = zip(leaves, self.get_axes_to_psum(params, axes), strict=True)
        return [devices.psum(x, over) for x, over in pairs]

"""Training steps of shapes, compiled for devices that are only described."""

import dataclasses
import functools
import math
import os
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType, Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from benchmarks.accelerators.counting import Counts, count
from benchmarks.accelerators.devices import devices
from benchmarks.accelerators.methods import Step

AXIS, DEVICES = "fsdp", 8
ONE, SHARD_MAP = "one", "shard_map"
KINDS = {"auto": AxisType.Auto, "explicit": AxisType.Explicit, SHARD_MAP: AxisType.Auto}


@dataclasses.dataclass
class Compiled:
    """A step, measured; seconds are the processor's."""

    counts: Counts
    temporary: int
    trace: float
    compile: float
    gradients: float
    text: str


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a step runs: the device's name; on one of them, or the kind of mesh over eight."""

    device: str
    kind: str = ONE

    @functools.cached_property
    def everywhere(self) -> SingleDeviceSharding | NamedSharding:
        """The sharding of what every device has."""
        if self.kind == ONE:
            return SingleDeviceSharding(devices(self.device, 1)[0])
        mesh = Mesh(devices(self.device, DEVICES), (AXIS,), axis_types=(KINDS[self.kind],))
        return NamedSharding(mesh, P())

    def sharding(self, shape: tuple[int, ...]) -> SingleDeviceSharding | NamedSharding:
        """As in FSDP: of a matrix the longest axis that divides."""
        everywhere = self.everywhere
        if len(shape) < 2 or not isinstance(everywhere, NamedSharding):
            return everywhere
        axes = (axis for axis, size in enumerate(shape) if size % DEVICES == 0)
        axis = max(axes, key=lambda axis: shape[axis])
        return everywhere.update(spec=P(*([None] * axis), AXIS))

    def shardings(self, shapes: Any) -> Any:
        """Where each leaf lies."""
        return jax.tree.map(self.sharding, shapes, is_leaf=lambda x: isinstance(x, tuple))


def compiled(tx: Step, shapes: Any, dtype: Any, place: Place) -> Compiled:
    """The step of an optimizer, traced and compiled from empty caches."""
    params = jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, dtype, sharding=place.sharding(shape)),
        shapes,
        is_leaf=lambda x: isinstance(x, tuple),
    )
    state = _state(tx, params, place.everywhere)

    def step(params: Any, state: Any, grads: Any) -> tuple[Any, Any]:
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    if place.kind == SHARD_MAP:
        specs = jax.tree.map(lambda x: x.sharding.spec, (params, state))
        mesh = place.everywhere.mesh
        step = jax.shard_map(step, mesh=mesh, in_specs=(*specs, specs[0]), out_specs=specs)
    return timed(step, (params, state, params), _bytes_of_device(params))


def timed(
    step: Callable[..., Any],
    arguments: Any,
    gradients: float,
    donated: tuple[int, ...] = (0, 1),
    *,
    in_loop: bool = False,
    turns: int = 1,
    cheapest_branches: bool = False,
) -> Compiled:
    """Any program."""
    jax.clear_caches()
    begin = _processor_seconds()
    lowered = jax.jit(step, donate_argnums=donated).trace(*arguments).lower()
    middle = _processor_seconds()
    program = lowered.compile()
    end = _processor_seconds()
    text = program.as_text()
    temporary = program.memory_analysis().temp_size_in_bytes
    counts = count(text, in_loop, turns, cheapest_branches)
    return Compiled(counts, temporary, middle - begin, end - middle, gradients, text)


def _processor_seconds() -> float:
    """Of all threads, and of the assembler, which is a process of its own."""
    return sum(os.times()[:4])


def _bytes_of_device(tree: Any) -> float:
    return sum(
        math.prod(x.sharding.shard_shape(x.shape)) * jnp.dtype(x.dtype).itemsize
        for x in jax.tree.leaves(tree)
    )


def _state(tx: Step, params: Any, everywhere: Any) -> Any:
    """The optimizer's state: trees like the parameters lie as they do, the rest everywhere."""
    structure = jax.tree.structure(params)

    def is_like(x: Any) -> bool:
        return jax.tree.structure(x) == structure

    def placed(x: Any) -> Any:
        if is_like(x):
            return jax.tree.map(lambda y, param: _at(y, param.sharding), x, params)
        return _at(x, everywhere)

    return jax.tree.map(placed, jax.eval_shape(tx.init, params), is_leaf=is_like)


def _at(x: Any, sharding: Any) -> Any:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding, weak_type=x.weak_type)

"""Training steps of shapes, compiled for devices that are only described."""

import dataclasses
import math
import time
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
# A name, and whether the clip is told how the leaves lie.
MESHES = {"auto": AxisType.Auto, "explicit": AxisType.Explicit, "shard_map": AxisType.Auto}


@dataclasses.dataclass
class Compiled:
    """A step, measured."""

    counts: Counts
    temporary: int
    trace: float
    compile: float
    gradients: float
    text: str


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a step runs: the device's name, and the mesh, None for one device."""

    device: str
    mesh: str | None = None

    def shardings(self, shapes: Any) -> Any:
        """Where each leaf lies."""
        if self.mesh is None:
            single = SingleDeviceSharding(devices(self.device, 1)[0])
            return _map_shapes(lambda _: single, shapes)
        mesh = self._mesh()
        return _map_shapes(lambda shape: NamedSharding(mesh, _spec(shape)), shapes)

    def _mesh(self) -> Mesh:
        return Mesh(devices(self.device, DEVICES), (AXIS,), axis_types=(MESHES[self.mesh],))

    def everywhere(self) -> Any:
        """The sharding of what every device has."""
        if self.mesh is None:
            return SingleDeviceSharding(devices(self.device, 1)[0])
        return NamedSharding(self._mesh(), P())


def _spec(shape: tuple[int, ...]) -> P:
    """As FSDP: of a matrix the longest axis that divides."""
    if len(shape) < 2:
        return P()
    axis = max(range(len(shape)), key=lambda i: (shape[i] % DEVICES == 0, shape[i]))
    if shape[axis] % DEVICES:
        return P()
    return P(*(AXIS if i == axis else None for i in range(axis + 1)))


def compiled(tx: Step, shapes: Any, dtype: Any, place: Place) -> Compiled:
    """The step of an optimizer, traced and compiled from empty caches."""
    shardings = place.shardings(shapes)
    params = _map_shapes(
        lambda shape, sharding: jax.ShapeDtypeStruct(shape, dtype, sharding=sharding),
        shapes,
        shardings,
    )
    state = _state(tx, params, shardings, place.everywhere())

    def step(params: Any, state: Any, grads: Any) -> tuple[Any, Any]:
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    if place.mesh == "shard_map":
        mesh = place.everywhere().mesh
        specs = [jax.tree.map(lambda x: x.sharding.spec, tree) for tree in (params, state)]
        step = jax.shard_map(step, mesh=mesh, in_specs=(*specs, specs[0]), out_specs=tuple(specs))
    return _timed(step, (0, 1), (params, state, params), num_bytes(params, place))


def _timed(step: Callable[..., Any], donated: Any, arguments: Any, gradients: float) -> Compiled:
    jax.clear_caches()
    begin = time.perf_counter()
    traced = jax.jit(step, donate_argnums=donated).trace(*arguments)
    lowered = traced.lower()
    middle = time.perf_counter()
    program = lowered.compile()
    end = time.perf_counter()
    text = program.as_text()
    temporary = program.memory_analysis().temp_size_in_bytes
    return Compiled(count(text), temporary, middle - begin, end - middle, gradients, text)


def num_bytes(tree: Any, place: Place) -> float:
    """What a device has of a tree."""
    return sum(
        math.prod(x.sharding.shard_shape(x.shape)) * jnp.dtype(x.dtype).itemsize
        for x in jax.tree.leaves(tree)
    )


def _state(tx: Step, params: Any, shardings: Any, everywhere: Any) -> Any:
    """The optimizer's state: trees like the parameters lie as they do, the rest everywhere."""
    structure = jax.tree.structure(params)

    def is_like(x: Any) -> bool:
        return jax.tree.structure(x) == structure and len(jax.tree.leaves(x)) > 1

    def placed(x: Any) -> Any:
        if is_like(x):
            return jax.tree.map(_at, x, shardings)
        return _at(x, everywhere)

    return jax.tree.map(placed, jax.eval_shape(tx.init, params), is_leaf=is_like)


def _at(x: Any, sharding: Any) -> Any:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding, weak_type=x.weak_type)


def _map_shapes(function: Callable[..., Any], shapes: Any, *rest: Any) -> Any:
    return jax.tree.map(function, shapes, *rest, is_leaf=lambda x: isinstance(x, tuple))

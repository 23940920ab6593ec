"""Compiles training steps for described devices, from shapes."""

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
from benchmarks.accelerators.devices import get_devices
from benchmarks.accelerators.methods import Step

AXIS, DEVICES = "fsdp", 8
ONE, SHARD_MAP = "one", "shard_map"
KINDS = {"auto": AxisType.Auto, "explicit": AxisType.Explicit, SHARD_MAP: AxisType.Auto}


@dataclasses.dataclass
class Compiled:
    """The measurements of a compiled program, with times in CPU seconds."""

    counts: Counts
    temporary: int
    trace: float
    compile: float
    gradients: float
    text: str


@dataclasses.dataclass(frozen=True)
class Placement:
    """The device of a step, and `ONE` or the kind of a mesh of eight devices."""

    device: str
    kind: str = ONE

    @functools.cached_property
    def replicated(self) -> SingleDeviceSharding | NamedSharding:
        """Returns the sharding of replicated arrays."""
        if self.kind == ONE:
            return SingleDeviceSharding(get_devices(self.device, 1)[0])
        mesh = Mesh(get_devices(self.device, DEVICES), (AXIS,), axis_types=(KINDS[self.kind],))
        return NamedSharding(mesh, P())

    def get_sharding(self, shape: tuple[int, ...]) -> SingleDeviceSharding | NamedSharding:
        """Shards the longest divisible axis of matrices, as in FSDP."""
        replicated = self.replicated
        if len(shape) < 2 or not isinstance(replicated, NamedSharding):
            return replicated
        axes = (axis for axis, size in enumerate(shape) if size % DEVICES == 0)
        axis = max(axes, key=lambda axis: shape[axis])
        return replicated.update(spec=P(*([None] * axis), AXIS))

    def get_shardings(self, shapes: Any) -> Any:
        """Returns the shardings of all leaves."""
        return jax.tree.map(self.get_sharding, shapes, is_leaf=lambda x: isinstance(x, tuple))


def compile_step(tx: Step, shapes: Any, dtype: Any, placement: Placement) -> Compiled:
    """Traces and compiles a step of an optimizer with empty caches."""
    params = jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, dtype, sharding=placement.get_sharding(shape)),
        shapes,
        is_leaf=lambda x: isinstance(x, tuple),
    )
    state = _shard_state(tx, params, placement.replicated)

    def step(params: Any, state: Any, grads: Any) -> tuple[Any, Any]:
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    if placement.kind == SHARD_MAP:
        specs = jax.tree.map(lambda x: x.sharding.spec, (params, state))
        mesh = placement.replicated.mesh
        step = jax.shard_map(step, mesh=mesh, in_specs=(*specs, specs[0]), out_specs=specs)
    return compile_program(step, (params, state, params), _count_device_bytes(params))


def compile_program(
    step: Callable[..., Any],
    arguments: Any,
    gradients: float,
    donate_argnums: tuple[int, ...] = (0, 1),
    *,
    in_loop: bool = False,
    trip_count: int = 1,
    cheapest_branches: bool = False,
) -> Compiled:
    """Compiles a program and measures it; see `count` for the last three options."""
    jax.clear_caches()
    begin = _measure_cpu_time()
    lowered = jax.jit(step, donate_argnums=donate_argnums).trace(*arguments).lower()
    middle = _measure_cpu_time()
    program = lowered.compile()
    end = _measure_cpu_time()
    text = program.as_text()
    temporary = program.memory_analysis().temp_size_in_bytes
    counts = count(text, in_loop, trip_count, cheapest_branches)
    return Compiled(counts, temporary, middle - begin, end - middle, gradients, text)


def _measure_cpu_time() -> float:
    """Returns the CPU seconds of all threads and of child processes, such as the assembler."""
    return sum(os.times()[:4])


def _count_device_bytes(tree: Any) -> float:
    return sum(
        math.prod(x.sharding.shard_shape(x.shape)) * jnp.dtype(x.dtype).itemsize
        for x in jax.tree.leaves(tree)
    )


def _shard_state(tx: Step, params: Any, replicated: Any) -> Any:
    """Shards parts of the state like the parameters if they have their structure."""
    structure = jax.tree.structure(params)

    def has_param_structure(x: Any) -> bool:
        return jax.tree.structure(x) == structure

    def add_sharding(x: Any) -> Any:
        if has_param_structure(x):
            return jax.tree.map(lambda y, param: _describe_array(y, param.sharding), x, params)
        return _describe_array(x, replicated)

    return jax.tree.map(add_sharding, jax.eval_shape(tx.init, params), is_leaf=has_param_structure)


def _describe_array(x: Any, sharding: Any) -> Any:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding, weak_type=x.weak_type)

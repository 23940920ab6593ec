"""Collectives of one clip by global norm at 256 and 4096 devices, beside Optax's: a table.

XLA's TPU compiler needs no TPU: `jax.experimental.topologies` describes the devices, the gradient
is a tree of shapes, and nothing runs. The shapes are those of Llama 3 405B, 1137 leaves in float32,
split 16 times by tensor parallelism and over the other devices as in FSDP.

  pip install "jax[tpu]"   # for the compiler, on Linux x86-64
  python benchmarks/collectives.py
"""

import math
import os
import re
from collections.abc import Iterator

# There is no TPU to ask for its place among others.
os.environ |= {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-256",
    "TPU_WORKER_HOSTNAMES": "localhost",
}

import jax
import jax.numpy as jnp
import optax
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import optaxclip

TOPOLOGIES = {256: "v5e:16x16", 4096: "v5p:16x16x16"}
TENSOR_PARALLEL = 16
LAYERS, WIDTH, KEYS, HIDDEN, TOKENS = 126, 16384, 1024, 53248, 128256
BLOCK = {
    "query": ((WIDTH, WIDTH), P("fsdp", "tensor")),
    "key": ((WIDTH, KEYS), P("fsdp", "tensor")),
    "value": ((WIDTH, KEYS), P("fsdp", "tensor")),
    "out": ((WIDTH, WIDTH), P("tensor", "fsdp")),
    "gate": ((WIDTH, HIDDEN), P("fsdp", "tensor")),
    "up": ((WIDTH, HIDDEN), P("fsdp", "tensor")),
    "down": ((HIDDEN, WIDTH), P("tensor", "fsdp")),
    "norm_before": ((WIDTH,), P()),
    "norm_after": ((WIDTH,), P()),
}
MODEL = {
    "embedding": ((TOKENS, WIDTH), P("tensor", "fsdp")),
    "blocks": [BLOCK] * LAYERS,
    "norm": ((WIDTH,), P()),
    "head": ((WIDTH, TOKENS), P("fsdp", "tensor")),
}
COLLECTIVES = "all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter"
BYTES = {"f32": 4, "bf16": 2, "u32": 4, "pred": 1}


def gradient(mesh: Mesh) -> dict:
    """The gradient's shapes and where they lie."""

    def leaf(described):
        shape, spec = described
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec))

    return jax.tree.map(leaf, MODEL, is_leaf=lambda x: isinstance(x, tuple))


def per_step(module: str) -> Iterator[tuple[str, int]]:
    """The name and the bytes of each collective of a step.

    Those in a branch for norms that left the range do not count: ordinary steps do not take it.
    """
    entry = module[module.index("\nENTRY ") :]
    for types, name in re.findall(rf"= (.*?) ({COLLECTIVES})(?:-start)?\(", entry):
        arrays = re.findall(r"(\w+)\[([\d,]*)\]", types)
        sizes = (
            BYTES[kind] * math.prod(map(int, filter(None, shape.split(","))))
            for kind, shape in arrays
        )
        yield name, sum(sizes)


def row(name: str, num_devices: int, tx: optax.GradientTransformation, grads: dict) -> str:
    """A row of the table."""
    state = jax.eval_shape(tx.init, grads)
    update = jax.jit(tx.update, donate_argnums=0)
    module = update.lower(grads, state).compile().as_text()
    found = list(per_step(module))
    kinds = {kind: sum(kind == other for other, _ in found) for kind, _ in found}
    said = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
    return f"| {num_devices} | {name} | {said} | {sum(size for _, size in found):,} |"


def main() -> None:
    """Prints the table."""
    print("| devices | clip | collectives of a step | bytes of a device |\n|---|---|---|---|")
    for num_devices, name in TOPOLOGIES.items():
        shape = (num_devices // TENSOR_PARALLEL, TENSOR_PARALLEL)
        topology = topologies.get_topology_desc(name, "tpu")
        devices = topologies.make_mesh(topology, shape, ("fsdp", "tensor")).devices
        mesh = Mesh(devices, ("fsdp", "tensor"), axis_types=(AxisType.Auto,) * 2)
        grads = gradient(mesh)
        specs = jax.tree.map(lambda x: x.sharding, grads)
        rows = {
            "Optax": optax.clip_by_global_norm(1.0),
            "optaxclip": optaxclip.clip_by_global_norm(1.0),
            "optaxclip, `specs=`": optaxclip.clip_by_global_norm(1.0, specs=specs),
        }
        for name, tx in rows.items():
            print(row(name, num_devices, tx, grads), flush=True)


if __name__ == "__main__":
    main()

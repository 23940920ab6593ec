"""Describes GPUs and TPUs for ahead-of-time compilation without devices."""

import functools
import os

# The TPU compiler queries its host, which is not a TPU host here.
os.environ |= {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
}
# Hide messages of the compilers, for example about missing drivers.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import jax
from jax.experimental import topologies

import optaxclip._backend.kernels as kernels

# The package would query the local GPUs instead of the GPUs below.
kernels.has_fast_float64 = lambda: True
# JAX must not look for a GPU or TPU. JAX_PLATFORMS would have no effect if JAX was imported before.
jax.config.update("jax_platforms", "cpu")

_GPU = """
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: {shared} threads_per_core_limit: 2048 core_count: {cores}
  fpus_per_core: {fpus} block_dim_limit_x: 2147483647 block_dim_limit_y: 65535
  block_dim_limit_z: 65535 memory_bandwidth: {bandwidth} l2_cache_size: {cache}
  clock_rate_ghz: {clock} device_memory_size: {memory} shared_memory_per_block_optin: {optin}
  cuda_compute_capability {{ major: {major} minor: 0 }}
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 8 }}
device_description_str: "{name}"
"""
GPUS = {
    "h100": {
        "name": "NVIDIA H100 80GB HBM3",
        "major": 9,
        "cores": 132,
        "fpus": 128,
        "clock": 1.98,
        "bandwidth": 3352320000000,
        "cache": 52428800,
        "memory": 84978434048,
        "shared": 233472,
        "optin": 232448,
    },
    "a100": {
        "name": "NVIDIA A100-SXM4-80GB",
        "major": 8,
        "cores": 108,
        "fpus": 64,
        "clock": 1.41,
        "bandwidth": 2039000000000,
        "cache": 41943040,
        "memory": 84987740160,
        "shared": 167936,
        "optin": 166912,
    },
}
TPUS = {1: "2x2", 8: "2x4"}


@functools.cache
def get_devices(name: str, number: int) -> list[jax.Device]:
    """Describes `number` GPUs (`h100`, `a100`) or TPUs, such as `v5e` or `v6e`.

    Raises:
      RuntimeError: If the compiler is not installed.
    """
    if name in GPUS:
        config = _GPU.format(**GPUS[name])
        grid = f"1x1x{number}"
        topology = topologies.get_topology_desc(name, "cuda", target_config=config, topology=grid)
    else:
        topology = topologies.get_topology_desc(f"{name}:{TPUS[number]}", "tpu")
    return list(topology.devices)[:number]


def is_gpu(name: str) -> bool:
    """Returns `True` for GPUs, whose kernels are launched separately."""
    return name in GPUS

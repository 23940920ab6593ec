"""Builds the gradients of the benchmarks, and the baselines."""

import importlib
import math
import os
from collections.abc import Callable
from functools import cache, partial
from importlib.util import find_spec
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from optaxclip._base.types import PyTree

TOKENS, POSITIONS = 8192, 1024
NORM = 10.0
# In-place clipping multiplies its threshold by this factor, so that all calls clip.
THRESHOLD_DECAY = 0.999


def build_transformer(layers: int, width: int) -> PyTree:
    """Returns the shapes of a transformer, with 50 million elements in 76 leaves for 6 and 768."""
    vector, layer = (width,), {}
    for name, (n, m) in {"qkv": (1, 3), "out": (1, 1), "up": (1, 4), "down": (4, 1)}.items():
        layer[name] = {"kernel": (n * width, m * width), "bias": (m * width,)}
    for name in ("norm_1", "norm_2"):
        layer[name] = {"scale": vector, "bias": vector}
    return {
        "tokens": (TOKENS, width),
        "positions": (POSITIONS, width),
        "layers": [layer] * layers,
        "norm": {"scale": vector, "bias": vector},
    }


def build_leaves(count: int, num_elements: int) -> PyTree:
    """Returns the shapes of leaves with equal sizes."""
    return [(num_elements,)] * count


def fill_tree(shapes: PyTree, dtype: jax.typing.DTypeLike) -> PyTree:
    """Fills a tree with normal numbers of norm `NORM`, whose squares are normal in all dtypes."""
    fill = _build_filler(shapes, dtype)
    # `fill` returns the same array for equal shapes, but calls may donate the leaves.
    return jax.tree.map(lambda shape: jnp.array(fill(shape)), shapes, is_leaf=_is_shape)


def count_elements(shapes: PyTree) -> int:
    """Returns the number of elements of all leaves."""
    return sum(map(math.prod, _list_shapes(shapes)))


def count_bytes(tree: PyTree) -> int:
    """Returns the number of bytes of all leaves."""
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


def get_free_bytes() -> float:
    """Returns the free memory of the first device, or infinity if it is unknown."""
    stats = jax.devices()[0].memory_stats()
    if stats and "bytes_threshold" in stats:
        return stats["bytes_threshold"] - stats["bytes_in_use"]
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError):
        return float("inf")


def read_grads(carry: Array, grads: PyTree) -> Array:
    """Sums all elements in one pass."""
    sums = [jnp.sum(leaf, dtype=jnp.float32) for leaf in jax.tree.leaves(grads)]
    return carry + sum(sums)


def scale_grads(carry: tuple[PyTree, Array]) -> tuple[PyTree, Array]:
    """Scales in place by a factor that is unknown at compile time."""
    grads, factor = carry
    return jax.tree.map(lambda leaf: leaf * factor.astype(leaf.dtype), grads), factor


def build_torch_clip(shapes: PyTree, dtype: jax.typing.DTypeLike) -> Callable[[], object] | None:
    """Returns in-place clipping by PyTorch with the same values on the device of JAX.

    Returns None if PyTorch is not installed, cannot use the device, or has too little memory.
    """
    if find_spec("torch") is None:
        return None
    # Otherwise its threads keep spinning and slow down the next measurement.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    torch: Any = importlib.import_module("torch")
    on_gpu = jax.default_backend() == "gpu"
    if on_gpu and not torch.cuda.is_available():
        return None
    size = count_elements(shapes) * jnp.dtype(dtype).itemsize
    if on_gpu and size > torch.cuda.mem_get_info()[0]:
        return None
    device = "cuda" if on_gpu else "cpu"
    fill, parameters = _build_filler(shapes, "float32"), []
    for shape in _list_shapes(shapes):
        grad = torch.tensor(fill(shape), dtype=getattr(torch, jnp.dtype(dtype).name), device=device)
        # Only the gradient is used, so the parameter needs no memory.
        parameters.append(torch.empty((), dtype=grad.dtype, device=device).expand(shape))
        parameters[-1].grad = grad
    threshold = NORM / 2

    def call() -> None:
        nonlocal threshold
        threshold *= THRESHOLD_DECAY
        torch.nn.utils.clip_grad_norm_(parameters, threshold, foreach=True)
        if on_gpu:
            torch.cuda.synchronize()

    return call


def _build_filler(
    shapes: PyTree, dtype: jax.typing.DTypeLike
) -> Callable[[tuple[int, ...]], np.ndarray]:
    """Returns a function that fills leaves of a tree with these shapes."""
    block = (
        np.random.default_rng(0).standard_normal(1 << 16) * NORM / np.sqrt(count_elements(shapes))
    )
    return cache(partial(np.resize, block.astype(dtype)))


def _list_shapes(shapes: PyTree) -> list[tuple[int, ...]]:
    return jax.tree.leaves(shapes, is_leaf=_is_shape)


def _is_shape(x: Any) -> bool:
    return isinstance(x, tuple)

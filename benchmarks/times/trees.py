"""The gradients of the benchmarks, and what they are compared with."""

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
# Of the threshold from one call of an in-place clip to the next, so that every call acts.
FALL = 0.999


def transformer(layers: int, width: int) -> PyTree:
    """The shapes of a transformer's leaves: for 6 and 768, 50 million entries in 76 of them."""
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


def leaves(count: int, entries: int) -> PyTree:
    """The shapes of leaves of equally many entries."""
    return [(entries,)] * count


def filled(shapes: PyTree, dtype: jax.typing.DTypeLike) -> PyTree:
    """A tree of normal entries with the norm `NORM`, so that no format loses its squares."""
    fill = _filling(shapes, dtype)
    # Copied, as equal leaves have the same array here, and calls may change them.
    return jax.tree.map(lambda shape: jnp.array(fill(shape)), shapes, is_leaf=_is_shape)


def num_entries(shapes: PyTree) -> int:
    """Of all leaves of such shapes."""
    return sum(map(math.prod, _listed(shapes)))


def num_bytes(tree: PyTree) -> int:
    """How much memory the leaves take."""
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


def free_bytes() -> float:
    """What JAX's first device has left; without end where the system does not tell."""
    stats = jax.devices()[0].memory_stats()
    if stats and "bytes_threshold" in stats:
        return stats["bytes_threshold"] - stats["bytes_in_use"]
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError):
        return float("inf")


def read(carry: Array, grads: PyTree) -> Array:
    """One read pass: the plain sum of all entries."""
    sums = [jnp.sum(leaf, dtype=jnp.float32) for leaf in jax.tree.leaves(grads)]
    return carry + sum(sums)


def scale(carry: tuple[PyTree, Array]) -> tuple[PyTree, Array]:
    """A scaling in place, by a number that the compiler does not know."""
    grads, factor = carry
    return jax.tree.map(lambda leaf: leaf * factor.astype(leaf.dtype), grads), factor


def torch_clip(shapes: PyTree, dtype: jax.typing.DTypeLike) -> Callable[[], object] | None:
    """PyTorch's clip in place on equal gradients, or None without PyTorch.

    On the device that JAX uses, if PyTorch can use it too and there is memory left.
    """
    if find_spec("torch") is None:
        return None
    # Else its threads go on spinning for a while, at the cost of whoever comes next.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    torch: Any = importlib.import_module("torch")
    on_gpu = jax.default_backend() == "gpu"
    if on_gpu and not torch.cuda.is_available():
        return None
    size = num_entries(shapes) * jnp.dtype(dtype).itemsize
    if on_gpu and size > torch.cuda.mem_get_info()[0]:
        return None
    device = "cuda" if on_gpu else "cpu"
    fill, parameters = _filling(shapes, "float32"), []
    for shape in _listed(shapes):
        grad = torch.tensor(fill(shape), dtype=getattr(torch, jnp.dtype(dtype).name), device=device)
        # Only its gradient is touched.
        parameters.append(torch.empty((), dtype=grad.dtype, device=device).expand(shape))
        parameters[-1].grad = grad
    threshold = NORM / 2

    def call() -> None:
        nonlocal threshold
        threshold *= FALL
        torch.nn.utils.clip_grad_norm_(parameters, threshold, foreach=True)
        if on_gpu:
            torch.cuda.synchronize()

    return call


def _filling(
    shapes: PyTree, dtype: jax.typing.DTypeLike
) -> Callable[[tuple[int, ...]], np.ndarray]:
    """Gives the entries of a leaf of a tree of such shapes."""
    block = np.random.default_rng(0).standard_normal(1 << 16) * NORM / np.sqrt(num_entries(shapes))
    return cache(partial(np.resize, block.astype(dtype)))


def _listed(shapes: PyTree) -> list[tuple[int, ...]]:
    return jax.tree.leaves(shapes, is_leaf=_is_shape)


def _is_shape(x: Any) -> bool:
    return isinstance(x, tuple)

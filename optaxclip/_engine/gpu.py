"""All that is there for XLA on GPUs alone, with what it buys.

XLA runs one variadic reduction of a whole leaf as one kernel. But of one over some axes it stores
the summands, three plain sums over columns do not fit into one kernel, and of a leaf that is split
over devices in a way that only the compiler knows a partitioner gathers the parts. One sum in
float64 has the range of all three. As compiled for an H100 (a transformer of 4 layers of 2048) AGC
takes 2.03 reads with it and 4.05 with three sums; on an automatic mesh of eight, global norm adds
69 kernels (Optax 62), and with three sums about 100 more.

It costs arithmetic in float64, which the GPUs of data centres have, but for the B300, and which on
others can take longer than the read.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from optaxclip._engine.scales import Totals, entries, scales
from optaxclip.norms import Norm


def from_float64(leaf: Any, *, axes: tuple[int, ...], norm: Norm, dtype: jnp.dtype) -> Totals:
    """The totals of a leaf at all scales in float32, from one sum in float64."""
    with jax.enable_x64(True):
        if leaf.dtype == jnp.float32:
            # `abs` changes no power. Without, XLA stores more of what it computes the leaf from
            # (H100, 256 per-example gradients at once: 31.8 reads and writes in the place of 29.6).
            x = jnp.abs(entries(leaf, dtype)).astype(jnp.float64)
        else:
            x = entries(leaf, jnp.dtype(jnp.float64))
        total = lax.reduce_sum(norm.map(x), axes)
        found = [total * by**norm.degree for by in scales(norm, dtype)]
        return tuple(x.astype(dtype) for x in found)

"""Clipping of singular values beside Muon's steps, timed: `python benchmarks/spectral.py`.

One matrix, float32, in turns, the median of the rounds. Muon is `optax.contrib.scale_by_muon` with
its 5 iterations and its momentum, the decomposition is `jax.numpy.linalg.svd`.
"""

import argparse
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax

import optaxclip

SHAPES = [(512, 512), (512, 2048)]


def by_decomposition(x):
    """The soft clip by its definition."""
    u, s, v = jnp.linalg.svd(x, full_matrices=False)
    return (u * (s / jnp.sqrt(1 + s**2))) @ v


def updates_of(tx):
    """A function of a matrix alone."""
    return lambda x: tx.update(x, tx.init(x))[0]


WAYS = {
    "Muon": updates_of(optax.contrib.scale_by_muon()),
    "soft": updates_of(optaxclip.clip_by_spectral_norm(1.0)),
    "soft, 5 iterations": updates_of(optaxclip.clip_by_spectral_norm(1.0, iterations=5)),
    "hard": updates_of(optaxclip.clip_by_spectral_norm(1.0, "hard")),
    "decomposition": by_decomposition,
}


def seconds(fn, x):
    """Of one call."""
    begin = time.perf_counter()
    jax.block_until_ready(fn(x))
    return time.perf_counter() - begin


def main():
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    print(f"JAX {jax.__version__} on {jax.devices()[0].platform}, Optax {optax.__version__}")
    print(f"{'matrix':<14}{'way':<22}{'seconds':>10}{'of Muon':>10}")
    for shape in SHAPES:
        x = jnp.asarray(np.random.default_rng(0).normal(size=shape), jnp.float32) / 20
        compiled = {name: jax.jit(way).lower(x).compile() for name, way in WAYS.items()}
        for fn in compiled.values():
            seconds(fn, x)
        times = {name: [] for name in WAYS}
        for _ in range(rounds):
            for name, fn in compiled.items():
                times[name].append(seconds(fn, x))
        for name, own in times.items():
            ratio = statistics.median(a / b for a, b in zip(own, times["Muon"], strict=True))
            print(f"{shape!s:<14}{name:<22}{statistics.median(own):>10.3f}{ratio:>10.2f}")


if __name__ == "__main__":
    main()

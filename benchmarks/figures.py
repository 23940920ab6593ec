"""Compares the accuracy of clipping by the global norm with Optax.

  python benchmarks/figures.py

The reference is NumPy in float64. Optax runs both in eager mode and compiled, because XLA may keep
intermediate results of compiled programs in a higher precision.
"""

import functools
import platform

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

import optaxclip

VARIANTS = {
    "optaxclip": optaxclip.clip_by_global_norm,
    "strict=True": functools.partial(optaxclip.clip_by_global_norm, strict=True),
    "Optax, jit": optax.clip_by_global_norm,
    "Optax, eager": optax.clip_by_global_norm,
}
BF16, F16, F32 = jnp.bfloat16, np.float16, np.float32


def clip(variant, tree, threshold):
    """Returns the clipped tree and the norm that the library computes."""

    def run(tree, threshold):
        tx = VARIANTS[variant](threshold)
        clipped, state = tx.update(tree, tx.init(tree))
        is_ours = hasattr(state, "info")
        return clipped, state.info.norm if is_ours else optax.tree.norm(tree)

    return (run if variant == "Optax, eager" else jax.jit(run))(tree, threshold)


def compute_norm(tree):
    """Computes the L2 norm of all leaves in float64."""
    return np.sqrt(sum(np.sum(np.square(np.asarray(leaf, np.float64))) for leaf in tree))


def print_row(name, figures):
    """Prints a row of the table with one figure per variant."""
    print(f"{name:<50}" + "".join(f"{figure:>18}" for figure in figures), flush=True)


def format_briefly(x):
    """Formats numbers briefly."""
    numbers = [f"{float(number):.4g}" for number in np.asarray(x, np.float64)]
    if len(numbers) > 2 and len(set(numbers)) == 1:
        return f"{numbers[0]} x {len(numbers)}"
    return " ".join(numbers)


def print_large_trees():
    """Prints the error of the norm and the norm of the result for large trees."""
    rng = np.random.default_rng(0)
    for name, dtype, count, size in (
        ("bfloat16, 1000 leaves of 1000", BF16, 1000, 1000),
        ("float16, 150 leaves of 10,000", F16, 150, 10_000),
        ("float32, 10 million elements", F32, 1, 10_000_000),
    ):
        tree = [jnp.asarray(rng.standard_normal(size).astype(dtype)) for _ in range(count)]
        exact = compute_norm(tree)
        results = [clip(v, tree, 1.0) for v in VARIANTS]
        print_row(f"{name}: error of the norm", [f"{float(n) / exact - 1:.1e}" for _, n in results])
        print_row(
            f"{name}: result, threshold 1", [f"{compute_norm(tree):.7g}" for tree, _ in results]
        )


def print_random_trees(dtype, decades, count=1000):
    """Prints how many random trees exceed their threshold, and the largest elementwise error."""
    rng = np.random.default_rng(0)
    scale = 10 ** rng.uniform(*decades, count)
    tree = [
        jnp.asarray((scale.reshape(-1, *[1] * len(shape)) * entries).astype(dtype))
        for shape in ((20,), (7, 3), ())
        for entries in [rng.standard_normal((count, *shape))]
    ]

    def compute_norms(stacked):
        flat = [np.asarray(x, np.float64).reshape(count, -1) for x in stacked]
        return np.linalg.norm(np.hstack(flat), axis=1)

    # Thresholds have the precision of the leaves.
    fraction = rng.uniform(0.1, 0.9, count)
    thresholds = (compute_norms(tree) * fraction).astype(dtype)

    factors = thresholds.astype(np.float64) / compute_norms(tree)

    def measure_excess_and_error(variant):
        def clip_tree(tree_and_threshold):
            tx = VARIANTS[variant](tree_and_threshold[1])
            return tx.update(tree_and_threshold[0], tx.init(tree_and_threshold[0]))[0]

        clip_all = functools.partial(lax.map, clip_tree)
        if variant == "Optax, eager":
            trees = ([x[i] for x in tree] for i in range(count))
            results = [clip_tree(pair) for pair in zip(trees, jnp.asarray(thresholds), strict=True)]
            clipped = [np.stack(leaves) for leaves in zip(*results, strict=True)]
        else:
            clipped = jax.jit(clip_all)((tree, jnp.asarray(thresholds)))
        excess = compute_norms(clipped) / thresholds.astype(np.float64) - 1
        exact = [np.asarray(x, np.float64).T * factors for x in tree]
        pairs = zip(clipped, exact, strict=True)
        errors = [np.max(np.abs(np.asarray(x, np.float64).T / y - 1)) for x, y in pairs]
        return f"{np.sum(excess > 0)} (by {max(0, np.max(excess)):.1e})", f"{max(errors):.1e}"

    excesses, errors = zip(*map(measure_excess_and_error, VARIANTS), strict=True)
    name = np.dtype(dtype).name
    print_row(f"{name}: of 1000 trees above the threshold", excesses)
    print_row(f"{name}: largest elementwise error", errors)


def print_edge_cases():
    """Prints the results for small trees at the limits of the dtypes."""
    for name, dtype, entries, threshold in (
        ("float16 300 x 4, threshold 1", F16, [300] * 4, 1.0),
        ("float16 300 x 4, threshold 1000", F16, [300] * 4, 1000.0),
        ("float16 60000 x 4, threshold 60000", F16, [60000] * 4, 60000.0),
        ("float16 1e-4 x 4, threshold 1e-5", F16, [1e-4] * 4, 1e-5),
        ("bfloat16 1e20 x 4, threshold 1", BF16, [1e20] * 4, 1.0),
        ("float32 1e20 x 4, threshold 1", F32, [1e20] * 4, 1.0),
        ("float32 1e-25 x 4, threshold 1e-26", F32, [1e-25] * 4, 1e-26),
        ("float32 3 4, threshold 5", F32, [3, 4], 5.0),
        ("float32 0 0, threshold 0", F32, [0, 0], 0.0),
        ("float32 3 4, threshold -1 (traced)", F32, [3, 4], -1.0),
        ("float32 inf 1, threshold 1", F32, [np.inf, 1], 1.0),
        ("float32 nan 1, threshold 1", F32, [np.nan, 1], 1.0),
    ):
        tree = [jnp.asarray(np.array(entries, np.float64).astype(dtype))]
        print_row(name, [format_briefly(clip(v, tree, threshold)[0][0]) for v in VARIANTS])


def print_derivatives():
    """Prints derivatives of the clipped gradients with respect to the gradients."""
    for name, entries in (("zeros", [0.0, 0.0]), ("norm == threshold", [0.6, 0.8])):

        def differentiate(variant, entries=entries):
            return jax.grad(lambda x: clip(variant, [x], 1.0)[0][0].sum())(jnp.asarray(entries))

        print_row(
            f"derivative at {name}, threshold 1",
            [format_briefly(differentiate(v)) for v in VARIANTS],
        )


def print_clipping_twice(count=1000):
    """Prints the number of trees that change if they are clipped twice."""
    rng = np.random.default_rng(0)
    trees = jnp.asarray(rng.standard_normal((count, 50)).astype(F32))

    def count_changed(variant):
        def is_changed(x):
            clipped = clip(variant, [x], 1.0)[0]
            return jnp.any(clip(variant, clipped, 1.0)[0][0] != clipped[0])

        if variant == "Optax, eager":
            return sum(bool(is_changed(x)) for x in trees)
        return int(jax.jit(lambda trees: lax.map(is_changed, trees))(trees).sum())

    print_row("float32: of 1000 trees changed by clipping twice", map(count_changed, VARIANTS))


def main():
    """Prints the table."""
    print(f"JAX {jax.__version__} on {jax.devices()[0].platform} ({platform.machine()}), ", end="")
    print(f"Optax {optax.__version__}, optaxclip {optaxclip.__version__}")
    print(f"{'clip_by_global_norm':<50}" + "".join(f"{variant:>18}" for variant in VARIANTS))
    print_large_trees()
    print_random_trees(F32, (-10, 10))
    print_random_trees(BF16, (-10, 10))
    print_random_trees(F16, (-1, 1.5))
    print_clipping_twice()
    print_edge_cases()
    print_derivatives()


if __name__ == "__main__":
    main()

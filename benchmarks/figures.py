"""Prints what clipping by global norm gives, ours beside Optax's: `python benchmarks/figures.py`.

The truth is NumPy in float64. Optax runs both in eager mode and compiled, where XLA may keep
intermediate results in more digits than their dtype has.
"""

import functools
import platform

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

import optaxclip

MAKERS = {
    "optaxclip": optaxclip.clip_by_global_norm,
    "strict=True": functools.partial(optaxclip.clip_by_global_norm, strict=True),
    "Optax, jit": optax.clip_by_global_norm,
    "Optax, eager": optax.clip_by_global_norm,
}
BF16, F16, F32 = jnp.bfloat16, np.float16, np.float32


def clip(way, tree, threshold):
    """The clipped tree and the norm as each library measures it."""

    def run(tree, threshold):
        tx = MAKERS[way](threshold)
        clipped, state = tx.update(tree, tx.init(tree))
        is_ours = hasattr(state, "info")
        return clipped, state.info.norm if is_ours else optax.tree.norm(tree)

    return (run if way == "Optax, eager" else jax.jit(run))(tree, threshold)


def true_norm(tree):
    """The L2 norm of all leaves in float64."""
    return np.sqrt(sum(np.sum(np.square(np.asarray(leaf, np.float64))) for leaf in tree))


def row(name, figures):
    """Prints one line of the table, with one figure for each way."""
    print(f"{name:<50}" + "".join(f"{figure:>18}" for figure in figures), flush=True)


def brief(x):
    """Numbers as short text."""
    numbers = [f"{float(number):.4g}" for number in np.asarray(x, np.float64)]
    if len(numbers) > 2 and len(set(numbers)) == 1:
        return f"{numbers[0]} x {len(numbers)}"
    return " ".join(numbers)


def norms_and_results():
    """Large trees: how far off the norm is, and the norm of the result."""
    rng = np.random.default_rng(0)
    for name, dtype, count, size in (
        ("bfloat16, 1000 leaves of 1000", BF16, 1000, 1000),
        ("float16, 150 leaves of 10,000", F16, 150, 10_000),
        ("float32, 10 million entries", F32, 1, 10_000_000),
    ):
        tree = [jnp.asarray(rng.standard_normal(size).astype(dtype)) for _ in range(count)]
        true = true_norm(tree)
        results = [clip(way, tree, 1.0) for way in MAKERS]
        row(f"{name}: error of the norm", [f"{float(n) / true - 1:.1e}" for _, n in results])
        row(f"{name}: result, threshold 1", [f"{true_norm(tree):.7g}" for tree, _ in results])


def many_trees(dtype, decades, count=1000):
    """Of 1000 random trees, how many are above their threshold, and the worst error of an entry."""
    rng = np.random.default_rng(0)
    scale = 10 ** rng.uniform(*decades, count)
    tree = [
        jnp.asarray((scale.reshape(-1, *[1] * len(shape)) * entries).astype(dtype))
        for shape in ((20,), (7, 3), ())
        for entries in [rng.standard_normal((count, *shape))]
    ]

    def norms(stacked):
        flat = [np.asarray(x, np.float64).reshape(count, -1) for x in stacked]
        return np.linalg.norm(np.hstack(flat), axis=1)

    # Thresholds with as many digits as the leaves have.
    share = rng.uniform(0.1, 0.9, count)
    thresholds = (norms(tree) * share).astype(dtype)

    factors = thresholds.astype(np.float64) / norms(tree)

    def excess_and_error(way):
        def one(tree_and_threshold):
            tx = MAKERS[way](tree_and_threshold[1])
            return tx.update(tree_and_threshold[0], tx.init(tree_and_threshold[0]))[0]

        clip_all = functools.partial(lax.map, one)
        if way == "Optax, eager":
            trees = ([x[i] for x in tree] for i in range(count))
            results = [one(pair) for pair in zip(trees, jnp.asarray(thresholds), strict=True)]
            clipped = [np.stack(leaves) for leaves in zip(*results, strict=True)]
        else:
            clipped = jax.jit(clip_all)((tree, jnp.asarray(thresholds)))
        over = norms(clipped) / thresholds.astype(np.float64) - 1
        exact = [np.asarray(x, np.float64).T * factors for x in tree]
        pairs = zip(clipped, exact, strict=True)
        errors = [np.max(np.abs(np.asarray(x, np.float64).T / y - 1)) for x, y in pairs]
        return f"{np.sum(over > 0)} (by {max(0, np.max(over)):.1e})", f"{max(errors):.1e}"

    above, errors = zip(*map(excess_and_error, MAKERS), strict=True)
    name = np.dtype(dtype).name
    row(f"{name}: of 1000 trees above the threshold", above)
    row(f"{name}: worst error of an entry in them", errors)


def single_trees():
    """Small trees at the ends of the number formats."""
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
        row(name, [brief(clip(way, tree, threshold)[0][0]) for way in MAKERS])


def meta_gradients():
    """Derivatives through the clip, with respect to the gradients."""
    for name, entries in (("zeros", [0.0, 0.0]), ("norm == threshold", [0.6, 0.8])):

        def derivative(way, entries=entries):
            return jax.grad(lambda x: clip(way, [x], 1.0)[0][0].sum())(jnp.asarray(entries))

        row(f"derivative at {name}, threshold 1", [brief(derivative(way)) for way in MAKERS])


def clipping_twice(count=1000):
    """Of how many trees clipping again changes the result."""
    rng = np.random.default_rng(0)
    trees = jnp.asarray(rng.standard_normal((count, 50)).astype(F32))

    def figure(way):
        def one(x):
            once = clip(way, [x], 1.0)[0]
            return jnp.any(clip(way, once, 1.0)[0][0] != once[0])

        if way == "Optax, eager":
            return sum(bool(one(x)) for x in trees)
        return int(jax.jit(lambda trees: lax.map(one, trees))(trees).sum())

    row("float32: of 1000 trees changed by clipping twice", map(figure, MAKERS))


def main():
    """Prints the table."""
    print(f"JAX {jax.__version__} on {jax.devices()[0].platform} ({platform.machine()}), ", end="")
    print(f"Optax {optax.__version__}, optaxclip {optaxclip.__version__}")
    print(f"{'clip_by_global_norm':<50}" + "".join(f"{way:>18}" for way in MAKERS))
    norms_and_results()
    many_trees(F32, (-10, 10))
    many_trees(BF16, (-10, 10))
    many_trees(F16, (-1, 1.5))
    clipping_twice()
    single_trees()
    meta_gradients()


if __name__ == "__main__":
    main()

"""Per-example gradients, clipped and summed: ours beside Optax's and jax-privacy's.

`python benchmarks/per_example.py` prints, for one model and batch and each microbatch size, the
memory that XLA sets aside and the time of a call as a ratio of medians. The ways take turns, in
another order each round: what the machine does besides falls on all of them, and so does what a way
finds in the caches. jax-privacy is left out if not installed.
"""

import argparse
import functools
import importlib.util
import platform
import random
import statistics
import time

import jax
import jax.numpy as jnp
import optax

from optaxclip import per_example

BATCH, LIMIT = 256, 1.0


def make_task(widths, dtype):
    """A network, its loss for one example, and a batch."""
    keys = jax.random.split(jax.random.key(0), len(widths) + 1)
    params = [
        {
            "w": (jax.random.normal(key, (n, m)) / n**0.5).astype(dtype),
            "b": jnp.zeros(m, dtype),
        }
        for key, n, m in zip(keys, widths[:-1], widths[1:], strict=False)
    ]

    def loss_fn(params, x, y):
        for layer in params[:-1]:
            x = jax.nn.relu(x @ layer["w"] + layer["b"])
        logits = x @ params[-1]["w"] + params[-1]["b"]
        return -jax.nn.log_softmax(logits.astype(jnp.float32))[y]

    x = jax.random.normal(keys[-2], (BATCH, widths[0])).astype(dtype)
    y = jax.random.randint(keys[-1], (BATCH,), 0, widths[-1])
    return loss_fn, params, (x, y)


def with_optax(loss_fn):
    """`vmap(grad)`, then Optax's function."""

    def run(params, x, y):
        grads = jax.vmap(jax.grad(loss_fn), (None, 0, 0))(params, x, y)
        return optax.per_example_global_norm_clip(grads, LIMIT)[0]

    return run


def with_ours(loss_fn, size):
    """Our `clipped_grad`."""
    clipped = per_example.clipped_grad(loss_fn, LIMIT, microbatch_size=size)
    return lambda *args: clipped(*args).grads


def with_jax_privacy(loss_fn, size):
    """jax-privacy's, which takes examples as batches of one and drops NaN likewise."""
    from jax_privacy import clipping

    return clipping.clipped_grad(
        loss_fn,
        l2_clip_norm=LIMIT,
        batch_argnums=(1, 2),
        keep_batch_dim=False,
        microbatch_size=None if size == BATCH else size,
        dtype=jnp.float32,  # as ours
    )


def ways(loss_fn, sizes):
    """All that is compared, by name."""
    found = {"Optax, vmap(grad)": with_optax(loss_fn)}
    has_jax_privacy = importlib.util.find_spec("jax_privacy")
    for size in sizes:
        found[f"optaxclip, {size}"] = with_ours(loss_fn, size)
        if has_jax_privacy:
            found[f"jax-privacy, {size}"] = with_jax_privacy(loss_fn, size)
    return found


def seconds(compiled, args):
    """The time of one call."""
    start = time.perf_counter()
    jax.block_until_ready(compiled(*args))
    return time.perf_counter() - start


def table(widths, dtype, sizes, rounds):
    """Prints one line for each way."""
    loss_fn, params, batch = make_task(widths, dtype)
    entries = sum(leaf.size for leaf in jax.tree.leaves(params))
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    print(
        f"\n{jnp.dtype(dtype).name}, {entries:,} parameters ({size / 2**20:.1f} MiB), batch {BATCH}"
    )
    compiled = {
        name: jax.jit(run).lower(params, *batch).compile()
        for name, run in ways(loss_fn, sizes).items()
    }
    times, order = {name: [] for name in compiled}, list(compiled)
    shuffled = random.Random(0)
    for _ in range(rounds):
        for name in order:
            times[name].append(seconds(compiled[name], (params, *batch)))
        shuffled.shuffle(order)
    base = statistics.median(times["Optax, vmap(grad)"][1:])
    print(f"{'way, microbatch':<24}{'memory, MiB':>14}{'ms':>10}{'time / Optax':>14}")
    for name, run in compiled.items():
        memory = run.memory_analysis().temp_size_in_bytes / 2**20
        median = statistics.median(times[name][1:])
        print(f"{name:<24}{memory:>14.1f}{median * 1e3:>10.1f}{median / base:>14.2f}", flush=True)


def main():
    """Prints the tables."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--microbatches", type=int, nargs="+", default=[1, 8, 32, 256])
    args = parser.parse_args()
    print(f"JAX {jax.__version__} on {jax.devices()[0].device_kind} ({platform.machine()})", end="")
    print(f", Optax {optax.__version__}; limit {LIMIT}, {args.rounds - 1} rounds")
    run = functools.partial(table, sizes=args.microbatches, rounds=args.rounds)
    run((784, 256, 256, 10), jnp.float32)
    run((784, 256, 256, 10), jnp.bfloat16)


if __name__ == "__main__":
    main()

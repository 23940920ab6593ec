"""Compiles a program per task and optimizer, with methods, faults and learning rates as inputs."""

import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array, lax

import optaxclip
from benchmarks.research.recommended.tasks import Task
from benchmarks.research.study.optimizers import DECAY, DIRECTIONS

NONE, ONE, NORMALIZE = "none", "clip_by_global_norm(1.0)", "normalize_by_global_norm()"
CLIPS = {
    NONE: optax.identity(),
    ONE: optaxclip.clip_by_global_norm(1.0),
    "adagc()": optaxclip.adagc(),
    "zclip()": optaxclip.zclip(),
    NORMALIZE: optaxclip.normalize_by_global_norm(),
}
METHODS = tuple(CLIPS)
JUDGED = ("adamw", "muon", "lion")
OPTIMIZERS = (*JUDGED, "sgd")
GRID = {
    "adamw": 2.0 ** np.arange(-11, -1),
    "muon": 2.0 ** np.arange(-11, -1),
    "lion": 2.0 ** np.arange(-14, -4),
    "sgd": 4.0 ** np.arange(-8, 2),
}
"""The learning rates, from which one is chosen without clipping."""
KINDS: tuple[str, ...] = (
    "none",
    "spikes",
    "heavy tails",
    "bad stretch",
    "late increase",
    "zero head",
)
LONG = {"3,000 steps": "none", "3,000 steps, spikes": "spikes"}
LONG_TASKS = ("bandit", "hypernetwork", "deep linear")
REFERENCE = {"zero head": "zero head"} | dict.fromkeys(LONG, "3,000 steps")
"""The clean runs for comparison with faults. The default is "none"."""
STEPS, LONG_STEPS, SEEDS, FINDING, CHUNK = 300, 3000, 8, 1000, 10
"""`FINDING` is added to the seeds that choose learning rates. A call runs `CHUNK` cases."""
SPIKE_EVERY, SPIKE, STRETCH, STRETCH_FACTOR, INCREASE = 75, 100.0, 40, 10.0, 2.0


class Outcome(NamedTuple):
    """The held-out losses and the geometric mean of the gradients' norms, f32[seeds, cases]."""

    start: Any
    end: Any
    norm: Any


def choose_clip(method: Array) -> optax.GradientTransformation:
    """Returns the clipping stage with this position in `CLIPS`."""

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        pairs = [tx.update(updates, x, params) for tx, x in zip(CLIPS.values(), state, strict=True)]
        chosen = jax.tree.map(lambda *x: lax.select_n(method, *x), *(x for x, _ in pairs))
        return chosen, tuple(x for _, x in pairs)

    return optax.GradientTransformation(
        lambda params: tuple(tx.init(params) for tx in CLIPS.values()), update
    )


def compile_runs(task: Task, optimizer: str) -> Any:
    """Compiles a function of seeds, methods, kinds of faults, learning rates and steps."""

    def run(seed: Array, method: Array, kind: Array, rate: Array, steps: Array) -> Outcome:
        first, data, wrong = jax.random.split(jax.random.key(seed), 3)
        params = task.initial(first)
        head = jnp.where(kind == KINDS.index("zero head"), 0.0, params["head"])
        params = {**params, "head": head}
        tx = optaxclip.skip_nonfinite(
            optax.chain(
                choose_clip(method), DIRECTIONS[optimizer](), optax.add_decayed_weights(DECAY)
            )
        )

        def loss_fn(params: Any, batch: Any, factor: Array, tail_key: Array) -> Array:
            losses = task.losses(params, batch)
            tails = jnp.tan(jnp.pi / 2 * jax.random.uniform(tail_key, losses.shape))
            is_heavy = kind == KINDS.index("heavy tails")
            return jnp.mean(jnp.where(is_heavy, tails, factor) * losses)

        def step(number: Array, carry: Any) -> Any:
            params, state, total = carry
            batch_key, tail_key = jax.random.split(jax.random.fold_in(data, number))
            block, place = number // SPIKE_EVERY, number % SPIKE_EVERY
            margin = SPIKE_EVERY // 4
            spike = jax.random.randint(
                jax.random.fold_in(wrong, block), (), margin, SPIKE_EVERY - margin
            )
            is_spike = (kind == KINDS.index("spikes")) & (place == spike)
            since = number - steps // 2
            in_stretch = (kind == KINDS.index("bad stretch")) & (since >= 0) & (since < STRETCH)
            factor = jnp.where(is_spike, SPIKE, jnp.where(in_stretch, STRETCH_FACTOR, 1.0))
            batch = task.batch(batch_key, is_spike | in_stretch)
            grads = jax.grad(loss_fn)(params, batch, factor, tail_key)
            updates, state = tx.update(grads, state, params)
            share = jnp.minimum(
                1.0, jnp.minimum((number + 1) / 0.1, (steps - number) / 0.2) / steps
            )
            is_late = (kind == KINDS.index("late increase")) & (number >= 0.6 * steps)
            scale = -rate * share * jnp.where(is_late, INCREASE, 1.0)
            params = jax.tree.map(lambda x, u: x + scale * u, params, updates)
            return params, state, total + jnp.log(optax.global_norm(grads) + 1e-20)

        end, _, total = lax.fori_loop(0, steps, step, (params, tx.init(params), 0.0))
        return Outcome(task.held_out(params), task.held_out(end), jnp.exp(total / steps))

    # Batches depend on seeds only, so all cases of a seed share them.
    run_cases = jax.vmap(run, (None, 0, 0, 0, None))
    run_seeds = jax.vmap(run_cases, (0, None, None, None, None))
    whole, real = (jax.ShapeDtypeStruct((CHUNK,), x) for x in (jnp.int32, jnp.float32))
    seeds, steps = (jax.ShapeDtypeStruct(x, jnp.int32) for x in ((SEEDS,), ()))
    return jax.jit(run_seeds).lower(seeds, whole, whole, real, steps).compile()


def compute_gains(outcome: Outcome) -> np.ndarray:
    """Returns how much the losses fall; 0 for runs that end non-finite or above their start."""
    start, end = np.asarray(outcome.start, float), np.asarray(outcome.end, float)
    return np.where(end < start, start - end, 0.0)


def run_study(name: str, task: Task, optimizer: str, first: int) -> list[dict[str, Any]]:
    """Returns a row for every fault and method, with the seeds' gains in percent."""
    began = time.process_time()
    program = compile_runs(task, optimizer)
    compiled = time.process_time()
    seeds = np.arange(first, first + SEEDS, dtype=np.int32)
    zeros = np.zeros(CHUNK, np.int32)
    grid = GRID[optimizer].astype(np.float32)
    outcome = program(seeds + FINDING, zeros, zeros, grid, np.int32(STEPS))
    rate = grid[compute_gains(outcome).mean(0).argmax()]

    def learn(kinds: tuple[str, ...], steps: int) -> tuple[np.ndarray, np.ndarray]:
        cases = [(i, KINDS.index(kind)) for kind in kinds for i in range(len(METHODS))]
        found, norms = [], []
        for i in range(0, len(cases), CHUNK):
            method, kind = np.array(cases[i : i + CHUNK], np.int32).T
            outcome = program(seeds, method, kind, np.full(CHUNK, rate), np.int32(steps))
            found.append(compute_gains(outcome))
            norms.append(np.asarray(outcome.norm))
        shape = (SEEDS, len(kinds), len(METHODS))
        return np.concatenate(found, 1).reshape(shape), np.concatenate(norms, 1).reshape(shape)

    gained, norms = learn(KINDS, STEPS)
    names = list(KINDS)
    if name in LONG_TASKS:
        long_runs = learn(tuple(LONG.values()), LONG_STEPS)
        gained, norms = (np.concatenate(x, 1) for x in zip((gained, norms), long_runs, strict=True))
        names += LONG
    ran = time.process_time()
    print(
        f"{name}, {optimizer}: rate {rate:.3g}, {compiled - began:.0f} s to compile, "
        f"{ran - compiled:.0f} s to run",
        flush=True,
    )
    jax.clear_caches()
    rows = []
    for i, fault in enumerate(names):
        reference = gained[:, names.index(REFERENCE.get(fault, "none")), 0].mean()
        for j, method in enumerate(METHODS):
            shares = 100 * gained[:, i, j] / reference
            rows.append(
                {
                    "optimizer": optimizer,
                    "task": name,
                    "fault": fault,
                    "method": method,
                    "rate": f"{rate:.3g}",
                    "norm": f"{np.exp(np.log(norms[:, i, j]).mean()):.2g}",
                    "percent": " ".join(f"{x:.1f}" for x in shares),
                }
            )
    return rows

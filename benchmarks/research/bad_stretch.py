"""A stretch of bad data, and how soon a run's loss is back.

A small transformer learns text by Adam. In the middle of the run some batches in a row are bad:
characters drawn by chance, as of a broken file, or one good batch again and again. What guards the
run is one of: nothing, a clip, a reset of Adam's moments, a skip, a skip with a roll back. All
seeds and kinds of a guard are one compiled program, so the checkpoints of the roll back are part of
it; the page on recovery has the loop on the host.

  python -m benchmarks.research.bad_stretch           # ten minutes on two cores
  python -m benchmarks.research.bad_stretch --quick   # a minute, only a sign that it runs
"""

import argparse
import functools
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

import optaxclip
from benchmarks.research import text_model
from benchmarks.research.curves import last, steps_to_recover
from benchmarks.research.text_model import Size, Text
from benchmarks.times.timing import race, ratio
from optaxclip import monitor, thresholds

KINDS = ("none", "noise", "repeats")
"""Of bad data: none at all, characters drawn by chance, one batch again and again."""


class Effort(NamedTuple):
    """How much is run.

    Attributes:
      steps: of each run; a step that is left out or undone counts as one.
      bad: the first bad step, and the first good one after it.
      every: steps from one evaluation to the next.
      save_every: steps from one checkpoint to the next.
      roll_back_after: after how many skipped steps in a row a run goes back.
      past: batches that a run that went back leaves out, beside those that it has read.
      seeds: how many.
      rate: Adam's learning rate.
      size: the network's.
    """

    steps: int = 500
    bad: tuple[int, int] = (250, 300)
    every: int = 10
    save_every: int = 40
    roll_back_after: int = 10
    past: int = 50
    seeds: int = 5
    rate: float = 1e-2
    size: Size = Size(32, 2, 2, 32, 8, 64)


QUICK = Effort(40, (20, 24), 4, 10, seeds=2, size=Size(16, 2, 1, 16, 4, 8))
KEPT = 3
"""Checkpoints at a time."""
ROUNDS = 50


class Guard(NamedTuple):
    """What is around Adam.

    Attributes:
      make: gives the optimizer from Adam.
      rolls_back: whether the run goes back after some skipped steps in a row.
    """

    make: Callable[[optax.GradientTransformation], optax.GradientTransformation]
    rolls_back: bool = False


def _rule(**options: Any) -> optaxclip.Threshold:
    """Six standard deviations above the mean of the last 64 that were accepted."""
    return thresholds.window(6.0, 64, record="accepted", warmup_steps=32, **options)


def _skip(adam: optax.GradientTransformation) -> optax.GradientTransformation:
    return optaxclip.skip_above(adam, _rule(), loss_limit=_rule())


def _skip_for_good(adam: optax.GradientTransformation) -> optax.GradientTransformation:
    rule = _rule(patience=None)
    return optaxclip.skip_above(adam, rule, None, loss_limit=rule)


def _reset(adam: optax.GradientTransformation) -> optax.GradientTransformation:
    return optaxclip.reset_state(adam, when=_rule(), warmup=20)


GUARDS = {
    "nothing": Guard(lambda adam: adam),
    "clip": Guard(lambda adam: optax.chain(optaxclip.clip_by_global_norm(1.0), adam)),
    "reset": Guard(_reset),
    "skip": Guard(_skip),
    "skip for good": Guard(_skip_for_good),
    "skip and roll back": Guard(_skip, rolls_back=True),
}


class Run(NamedTuple):
    """Where a run stands.

    Attributes:
      params: the network's.
      state: the optimizer's.
      position: how many batches were read.
      saved: the last checkpoints of parameters and state, the newest first; each `[KEPT, ...]`.
      rolled_back: how often.
    """

    params: Any
    state: Any
    position: Array
    saved: Any
    rolled_back: Array


def trainer(guard: Guard, effort: Effort, text: Text) -> Callable[[Array, Array], Any]:
    """A compiled function of kinds and seeds, both `[runs]`.

    It gives held-out losses `[runs, evaluations]` and how often each run went back `[runs]`.
    """
    size = effort.size
    tx = optax.with_extra_args_support(guard.make(optax.adam(effort.rate)))
    loss_fn = functools.partial(text_model.loss_fn, size=size)

    def run(kind: Array, seed: Array) -> tuple[Array, Array]:
        first, data = jax.random.split(jax.random.key(seed))

        def batch(position: Array) -> Array:
            is_bad = (position >= effort.bad[0]) & (position < effort.bad[1])
            is_again = is_bad & (kind == KINDS.index("repeats"))
            key = jax.random.fold_in(data, jnp.where(is_again, effort.bad[0], position))
            text_of_batch = text_model.batch(text.train, key, size)
            noise = jax.random.randint(key, text_of_batch.shape, 0, text_model.MAX_SYMBOLS)
            return jnp.where(is_bad & (kind == KINDS.index("noise")), noise, text_of_batch)

        def step(at: Run, count: Array) -> tuple[Run, None]:
            loss, grads = jax.value_and_grad(loss_fn)(at.params, batch(at.position))
            updates, state = tx.update(grads, at.state, at.params, value=loss)
            params = optax.apply_updates(at.params, updates)
            at = at._replace(params=params, state=state, position=at.position + 1)
            return (_guarded(at, count, effort) if guard.rolls_back else at), None

        def between(at: Run, counts: Array) -> tuple[Run, Array]:
            at, _ = jax.lax.scan(step, at, counts)
            return at, loss_fn(at.params, text.held_out)

        params = text_model.initial(first, size)
        state, zero = tx.init(params), jnp.zeros((), jnp.int32)
        saved = jax.tree.map(lambda x: jnp.stack([x] * KEPT), (params, state))
        counts = jnp.arange(effort.steps).reshape(-1, effort.every)
        at, losses = jax.lax.scan(between, Run(params, state, zero, saved, zero), counts)
        return losses, at.rolled_back

    return jax.jit(lambda kinds, seeds: jax.lax.map(lambda each: run(*each), (kinds, seeds)))


def _guarded(at: Run, count: Array, effort: Effort) -> Run:
    """The same, or the last checkpoint, which is then used up; batches that were read stay so."""
    skipped = at.state.consecutive
    back = skipped >= effort.roll_back_after
    saves = (count % effort.save_every == effort.save_every - 1) & (skipped == 0)
    now, newest = (at.params, at.state), jax.tree.map(lambda x: x[0], at.saved)
    params, state = jax.tree.map(functools.partial(jnp.where, back), newest, now)

    def kept(x: Array, new: Array) -> Array:
        older = jnp.concatenate([x[1:], x[-1:]])
        newer = jnp.concatenate([new[None], x[:-1]])
        return jnp.where(back, older, jnp.where(saves, newer, x))

    saved = jax.tree.map(kept, at.saved, now)
    position = at.position + jnp.where(back, effort.past, 0)
    return Run(params, state, position, saved, at.rolled_back + back)


def compare(
    effort: Effort, guards: Mapping[str, Guard] = GUARDS
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Of each guard held-out losses [kinds, seeds, evaluations] and roll backs [kinds, seeds]."""
    text, found = text_model.read(effort.size), {}
    kinds, seeds = np.divmod(np.arange(len(KINDS) * effort.seeds), effort.seeds)
    for name, guard in guards.items():
        begin = time.perf_counter()
        results = trainer(guard, effort, text)(jnp.asarray(kinds), jnp.asarray(seeds))
        shape = (len(KINDS), effort.seeds)
        losses, rolled_back = (np.asarray(x).reshape(*shape, *x.shape[1:]) for x in results)
        found[name] = losses, rolled_back
        print(f"{name}: {time.perf_counter() - begin:.0f} s", flush=True)
    return found


def seconds(effort: Effort, text: Text) -> dict[str, np.ndarray]:
    """The processor's times of one step, round by round; with a roll back of the verdict too."""
    calls = {
        name: functools.partial(*_one_step(guard, effort, text)) for name, guard in GUARDS.items()
    }
    return race(calls, ROUNDS, time.process_time)


def _one_step(guard: Guard, effort: Effort, text: Text) -> tuple[Any, ...]:
    tx, size = optax.with_extra_args_support(guard.make(optax.adam(effort.rate))), effort.size
    params = text_model.initial(jax.random.key(0), size)
    tokens = text_model.batch(text.train, jax.random.key(0), size)

    def step(params: Any, state: Any, tokens: Array) -> Any:
        loss, grads = jax.value_and_grad(text_model.loss_fn)(params, tokens, size)
        updates, state = tx.update(grads, state, params, value=loss)
        return optax.apply_updates(params, updates), state

    def call(*args: Any) -> object:
        _, state = jax.block_until_ready(compiled(*args))
        return monitor.verdict(state) if guard.rolls_back else None

    compiled = jax.jit(step).lower(params, tx.init(params), tokens).compile()
    return call, params, tx.init(params), tokens


def _shown(steps: np.ndarray) -> str:
    numbers = (np.median(steps), steps.min(), steps.max())
    middle, low, high = ("never" if x == np.inf else f"{x:g}" for x in numbers)
    return f"{middle} ({low} to {high})"


def main(arguments: list[str] | None = None) -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a tiny network, a few steps")
    effort = QUICK if parser.parse_args(arguments).quick else Effort()
    found, times = compare(effort), seconds(effort, text_model.read(effort.size))
    clean = last(found["nothing"][0][0])
    columns = [f"{kind}: {what}" for kind in KINDS[1:] for what in ("steps", "end", "roll backs")]
    print("\n| |", " | ".join(columns), "| nothing wrong: end | step |")
    print("|---" * (len(columns) + 3) + "|")
    for name, (losses, rolled_back) in found.items():
        cells = []
        for kind in range(1, len(KINDS)):
            end = last(losses[kind]) - clean
            steps = steps_to_recover(losses[kind], effort.bad[0], effort.every)
            cells += [_shown(steps), f"{end.mean():+.3f}"]
            cells += [f"{rolled_back[kind].mean():g}"]
        end, of_plain = last(losses[0]) - clean, ratio(times[name], times["nothing"])
        spread = f"{end.mean():+.3f} ± {end.std(ddof=1):.3f}"
        print(f"| {name} |", " | ".join([*cells, spread]), f"| {of_plain.median:.2f} |")
    print(f"\nwithout bad data the loss ends at {clean.mean():.3f} ± {clean.std(ddof=1):.3f}")
    print(f"a step with nothing takes {np.median(times['nothing']) * 1e3:.1f} ms")


if __name__ == "__main__":
    main()

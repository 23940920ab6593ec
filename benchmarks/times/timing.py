"""Times of functions that take turns, and the figures made of them."""

import math
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

# Shorter calls are timed several at once, in seconds.
SHORTEST = 5e-3

Way = Callable[[], object]
Times = dict[str, np.ndarray]


class Spread(NamedTuple):
    """The median of what the rounds gave one by one, with its quartiles."""

    median: float
    low: float
    high: float

    def times(self, factor: float) -> "Spread":
        """The same in another unit."""
        return Spread(*(factor * x for x in self))


class Turn:
    """A compiled function that goes on from what is in a memory, and changes it in place.

    Several that share a memory take turns on the same arrays: none needs a copy of its own.

    Args:
      step: `changed, *read -> changed`, which is compiled with `changed`, a tuple, donated.
      memory: arrays by name.
      changes: the names of those that are changed.
      reads: the names of those that are only read.

    Attributes:
      temporary_bytes: what it takes beside arguments and results, None where that is not known.
    """

    def __init__(
        self,
        step: Callable[..., tuple[Any, ...]],
        memory: dict[str, Any],
        changes: tuple[str, ...],
        reads: tuple[str, ...] = (),
    ):
        self._memory, self._changes, self._reads = memory, changes, reads
        self._run = jax.jit(step, donate_argnums=0).lower(*self._arguments()).compile()
        found = self._run.memory_analysis()
        self.temporary_bytes: int | None = None if found is None else found.temp_size_in_bytes

    def __call__(self) -> None:
        """One call, waited for."""
        results = jax.block_until_ready(self._run(*self._arguments()))
        self._memory.update(zip(self._changes, results, strict=True))

    def _arguments(self) -> tuple[Any, ...]:
        changed = tuple(self._memory[name] for name in self._changes)
        return changed, *(self._memory[name] for name in self._reads)


class Program(Turn):
    """A compiled function that is called on its own last result, in a memory of its own.

    Args:
      step: `carry, *shared -> carry`, which is compiled with the carry donated.
      carry: what it begins with; copied.
      *shared: arrays that all calls read.
    """

    def __init__(self, step: Callable[..., Any], carry: Any, *shared: Any):
        reads = tuple(map(str, range(len(shared))))
        memory = {"carry": jax.tree.map(jnp.copy, carry), **dict(zip(reads, shared, strict=True))}
        super().__init__(lambda x, *shared: (step(*x, *shared),), memory, ("carry",), reads)

    @property
    def carry(self) -> Any:
        """What the last call gave."""
        return self._memory["carry"]


def race(
    ways: Mapping[str, Way], rounds: int, clock: Callable[[], float] = time.perf_counter
) -> Times:
    """Times of a call in seconds, round by round.

    The ways take turns, in another order each round, so that the machine's moods meet all. With
    `time.process_time` for a clock they are the processor's, of all threads together, which other
    work on the machine changes little.
    """
    calls = {name: _calls_at_once(way) for name, way in ways.items()}
    times: dict[str, list[float]] = {name: [] for name in ways}
    rng = np.random.default_rng(0)
    for _ in range(rounds):
        for name in rng.permutation(list(ways)):
            times[name].append(_seconds(ways[name], calls[name], clock))
    return {name: np.array(x) for name, x in times.items()}


def usual_clock() -> Callable[[], float]:
    """That of the processor's time on a CPU; a processor only waits for other devices."""
    return time.process_time if jax.default_backend() == "cpu" else time.perf_counter


def _calls_at_once(way: Way) -> int:
    way()
    return max(1, math.ceil(SHORTEST / _seconds(way, 1, time.perf_counter)))


def _seconds(way: Way, calls: int, clock: Callable[[], float]) -> float:
    start = clock()
    for _ in range(calls):
        way()
    return (clock() - start) / calls


def phases(
    steps: Mapping[str, Callable[..., Any]], args: Sequence[Any], repetitions: int
) -> dict[str, Times]:
    """For each phase of compilation the seconds that the ways take, in turns.

    Args:
      steps: functions of the same arguments.
      args: the arguments.
      repetitions: how often each is compiled.
    """
    taken: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    rng = np.random.default_rng(0)
    for _ in range(repetitions):
        for way in rng.permutation(list(steps)):
            for phase, seconds in _cold_phases(steps[way], args).items():
                taken[phase][way].append(seconds)
    return {
        phase: {way: np.array(seconds) for way, seconds in by_way.items()}
        for phase, by_way in taken.items()
    }


def _cold_phases(step: Callable[..., Any], args: Sequence[Any]) -> dict[str, float]:
    """Seconds to trace, lower and compile, from empty caches."""
    jax.clear_caches()
    ticks = [time.perf_counter()]
    traced = jax.jit(step).trace(*args)
    ticks.append(time.perf_counter())
    lowered = traced.lower()
    ticks.append(time.perf_counter())
    lowered.compile()
    ticks.append(time.perf_counter())
    return dict(zip(("trace", "lower", "compile"), np.diff(ticks).tolist(), strict=True))


def spread(samples: np.ndarray) -> Spread:
    """The median and the quartiles."""
    low, median, high = np.quantile(samples, (0.25, 0.5, 0.75))
    return Spread(float(median), float(low), float(high))


def ratio(x: np.ndarray, y: np.ndarray) -> Spread | None:
    """The spread of the rounds' ratios, which a round that is slow as a whole does not move.

    None where `y`, a difference of times, is lost in noise: where a quarter of the rounds gave
    nothing or less.
    """
    if spread(y).low <= 0:
        return None
    return spread(x[y > 0] / y[y > 0])

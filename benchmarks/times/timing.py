"""Measures functions one after another in rounds, and summarizes their times."""

import math
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

# Calls that take fewer seconds are timed in groups.
SHORTEST = 5e-3

Call = Callable[[], object]
Times = dict[str, np.ndarray]


class Spread(NamedTuple):
    """The median and the quartiles over rounds."""

    median: float
    low: float
    high: float

    def scale(self, factor: float) -> "Spread":
        """Converts the unit."""
        return Spread(*(factor * x for x in self))


class InPlaceProgram:
    """A compiled function that updates arrays in a dictionary in place.

    Functions with the same dictionary share its arrays.

    Args:
      step: `changed, *read -> changed`, which donates the tuple `changed`.
      memory: The arrays by name.
      changes: The names of updated arrays.
      reads: The names of arrays that are only read.

    Attributes:
      temporary_bytes: The temporary memory of the program, or None if unknown.
    """

    def __init__(
        self,
        step: Callable[..., tuple[Any, ...]],
        memory: dict[str, Any],
        changes: tuple[str, ...],
        reads: tuple[str, ...] = (),
    ):
        self._memory, self._changes, self._reads = memory, changes, reads
        self._run = jax.jit(step, donate_argnums=0).lower(*self._get_arguments()).compile()
        found = self._run.memory_analysis()
        self.temporary_bytes: int | None = None if found is None else found.temp_size_in_bytes

    def __call__(self) -> None:
        """Calls the function and waits for its results."""
        results = jax.block_until_ready(self._run(*self._get_arguments()))
        self._memory.update(zip(self._changes, results, strict=True))

    def _get_arguments(self) -> tuple[Any, ...]:
        changed = tuple(self._memory[name] for name in self._changes)
        return changed, *(self._memory[name] for name in self._reads)


class Program(InPlaceProgram):
    """A compiled function that is called on its last result.

    Args:
      step: `carry, *shared -> carry`, which donates the carry.
      carry: The initial carry, which is copied.
      *shared: Arrays that all calls read.
    """

    def __init__(self, step: Callable[..., Any], carry: Any, *shared: Any):
        reads = tuple(map(str, range(len(shared))))
        memory = {"carry": jax.tree.map(jnp.copy, carry), **dict(zip(reads, shared, strict=True))}
        super().__init__(lambda x, *shared: (step(*x, *shared),), memory, ("carry",), reads)

    @property
    def carry(self) -> Any:
        """Returns the last result."""
        return self._memory["carry"]


def time_calls(
    variants: Mapping[str, Call], rounds: int, clock: Callable[[], float] = time.perf_counter
) -> Times:
    """Measures the seconds of calls in every round.

    The calls run in a random order in every round, so that slow periods of the machine affect all
    of them. Use `time.process_time` as clock to measure CPU time of all threads, which other work
    hardly affects.
    """
    calls = {name: _choose_num_calls(variant) for name, variant in variants.items()}
    times: dict[str, list[float]] = {name: [] for name in variants}
    rng = np.random.default_rng(0)
    for _ in range(rounds):
        for name in rng.permutation(list(variants)):
            times[name].append(_measure_call(variants[name], calls[name], clock))
    return {name: np.array(x) for name, x in times.items()}


def choose_clock() -> Callable[[], float]:
    """Returns the CPU clock on CPUs, and the wall clock on accelerators."""
    return time.process_time if jax.default_backend() == "cpu" else time.perf_counter


def _choose_num_calls(variant: Call) -> int:
    variant()
    return max(1, math.ceil(SHORTEST / _measure_call(variant, 1, time.perf_counter)))


def _measure_call(variant: Call, calls: int, clock: Callable[[], float]) -> float:
    start = clock()
    for _ in range(calls):
        variant()
    return (clock() - start) / calls


def measure_phases(
    steps: Mapping[str, Callable[..., Any]], args: Sequence[Any], repetitions: int
) -> dict[str, Times]:
    """Measures the seconds of the compilation phases of functions with the same arguments."""
    seconds_by_phase: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    rng = np.random.default_rng(0)
    for _ in range(repetitions):
        for variant in rng.permutation(list(steps)):
            for phase, seconds in _measure_cold_phases(steps[variant], args).items():
                seconds_by_phase[phase][variant].append(seconds)
    return {
        phase: {variant: np.array(seconds) for variant, seconds in seconds_by_variant.items()}
        for phase, seconds_by_variant in seconds_by_phase.items()
    }


def _measure_cold_phases(step: Callable[..., Any], args: Sequence[Any]) -> dict[str, float]:
    """Measures the seconds to trace, lower and compile with empty caches."""
    jax.clear_caches()
    ticks = [time.perf_counter()]
    traced = jax.jit(step).trace(*args)
    ticks.append(time.perf_counter())
    lowered = traced.lower()
    ticks.append(time.perf_counter())
    lowered.compile()
    ticks.append(time.perf_counter())
    return dict(zip(("trace", "lower", "compile"), np.diff(ticks).tolist(), strict=True))


def summarize(samples: np.ndarray) -> Spread:
    """Computes the median and the quartiles."""
    low, median, high = np.quantile(samples, (0.25, 0.5, 0.75))
    return Spread(float(median), float(low), float(high))


def compute_ratio(x: np.ndarray, y: np.ndarray) -> Spread | None:
    """Summarizes the ratios within rounds, which slow rounds do not affect.

    Returns None if at least a quarter of `y`, a difference of times, is not positive.
    """
    if summarize(y).low <= 0:
        return None
    return summarize(x[y > 0] / y[y > 0])

"""Measures how often `suggest` is wrong, as tables in Markdown.

The rules were tuned with other seeds, on `NOISES` but not on `FRESH`.

  python -m benchmarks.suggesting                # synthetic norms, about a minute
  python -m benchmarks.suggesting --logs FOLDER  # the CSV files of a folder too
"""

import argparse
import math
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np
from scipy.signal import lfilter

from optaxclip import tuning

Rng, Floats = np.random.Generator, np.ndarray
Draw = Callable[[Rng, int], Floats]
"""Draws logarithms of norms without a trend, float64[n]."""

FIRST_SEED = 90_000
SPIKE = 10.0
"""Planted spikes are this many times the level, and at least 8 standard deviations above it."""


def autoregressive(coefficient: float, std: float) -> Draw:
    """Draws norms that are correlated with those before them."""

    def draw(rng: Rng, n: int) -> Floats:
        new = std * math.sqrt(1 - coefficient**2) * rng.normal(size=n + 200)
        return lfilter([1], [1, -coefficient], new)[200:]

    return draw


NOISES: dict[str, Draw] = {
    "lognormal, sd 0.1": lambda rng, n: 0.1 * rng.normal(size=n),
    "lognormal, sd 0.3": lambda rng, n: 0.3 * rng.normal(size=n),
    "lognormal, sd 0.6": lambda rng, n: 0.6 * rng.normal(size=n),
    "gamma, shape 3": lambda rng, n: np.log(rng.gamma(3, size=n)),
    "gamma, shape 10": lambda rng, n: np.log(rng.gamma(10, size=n)),
    "log Gumbel, scale 0.2": lambda rng, n: rng.gumbel(scale=0.2, size=n),
    "log Laplace, scale 0.2": lambda rng, n: rng.laplace(scale=0.2, size=n),
    "log Student 4, scale 0.15": lambda rng, n: 0.15 * rng.standard_t(4, n),
    "chi, 5 degrees": lambda rng, n: 0.5 * np.log(rng.chisquare(5, n)),
    "autoregressive 0.5, sd 0.3": autoregressive(0.5, 0.3),
    "autoregressive 0.5, sd 0.7": autoregressive(0.5, 0.7),
    "autoregressive 0.8, sd 0.3": autoregressive(0.8, 0.3),
}

FRESH: dict[str, Draw] = {
    "log logistic, scale 0.15": lambda rng, n: rng.logistic(scale=0.15, size=n),
    "Weibull, shape 1.5": lambda rng, n: np.log(rng.weibull(1.5, n)),
    "uniform from 0.2 to 1": lambda rng, n: np.log(rng.uniform(0.2, 1, n)),
    "two kinds of batches": lambda rng, n: 0.15 * rng.normal(size=n) + 0.8 * (rng.random(n) < 0.3),
    "autoregressive 0.65, sd 0.2": autoregressive(0.65, 0.2),
}


def jumps(*at: tuple[float, float]) -> Callable[[Floats], Floats]:
    """Multiplies the level by factors at places."""
    return lambda t: sum(np.where(t > place, math.log(factor), 0.0) for place, factor in at)


MOVES: dict[str, tuple[str, Callable[[Floats], Floats]]] = {
    "falls steadily to 1/4": ("drifting", lambda t: -math.log(4) * t),
    "falls steadily to 1/10": ("drifting", lambda t: -math.log(10) * t),
    "falls as 1/t": ("drifting", lambda t: -np.log(t + 0.1)),
    "rises 3 times": ("drifting", lambda t: math.log(3) * t),
    "waves, 3 times": ("drifting", lambda t: 0.5 * math.log(3) * np.sin(4 * np.pi * t)),
    "jumps to 3 times": ("stepped", jumps((0.6, 3))),
    "jumps to 0.4": ("stepped", jumps((0.4, 0.4))),
    "jumps to 1/8": ("drifting", jumps((0.5, 0.125))),
}


def suggest(norms: Floats) -> tuning.Suggestion:
    """Suggests without warnings."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return tuning.suggest(norms)


def stationary_errors(draw: Draw, n: int, seeds: Iterable[int]) -> Floats:
    """Measures errors for norms without a trend.

    Returns:
      float64[4]: the fractions of runs that are called moving, of runs for which anything other
      than a constant is recommended, of ordinary norms that are marked, and of spikes in a
      hundredth of the norms that are missed.
    """
    errors = []
    for seed in seeds:
        rng = np.random.default_rng(seed)
        logs = draw(rng, n)
        found = suggest(np.exp(logs))
        planted = rng.choice(np.arange(n // 10, n), max(n // 100, 1), replace=False)
        logs[planted] = np.median(logs) + max(math.log(SPIKE), 8 * logs.std())
        spoiled = suggest(np.exp(logs))
        errors.append(
            (
                found.regime != "stationary",
                found.recommendation != "constant",
                found.is_spike.mean(),
                1 - spoiled.is_spike[planted].mean(),
            )
        )
    return np.mean(errors, axis=0)


def moving_hits(move: str, n: int, seeds: Iterable[int]) -> Floats:
    """Returns the fractions of runs whose level is seen to move, and with the right regime."""
    regime, path = MOVES[move]
    hits = []
    for seed in seeds:
        rng = np.random.default_rng(seed)
        logs = path((np.arange(n) + 0.5) / n) + 0.2 * rng.normal(size=n)
        found = suggest(np.exp(logs)).regime
        hits.append((found != "stationary", found == regime))
    return np.mean(hits, axis=0)


def claims(seeds: Iterable[int]) -> Iterator[tuple[str, float]]:
    """Yields statements about recommendations, and the fractions of runs that contradict them."""
    n, wrong = 300, {}

    def check(claim: str, is_right: bool) -> None:
        wrong.setdefault(claim, []).append(not is_right)

    for seed in seeds:
        rng = np.random.default_rng(seed)
        t = (np.arange(n) + 0.5) / n
        noise = np.exp(rng.uniform(0.05, 0.5) * rng.normal(size=n))
        lost = noise * np.where(t < 0.5, 1, np.where(t < 0.6, rng.uniform(6, 1e3), 1e-3))
        check("explodes and collapses: none", suggest(lost).recommendation == "none")
        clipped = np.minimum(noise, np.quantile(noise, rng.uniform(0.1, 0.8)))
        clipped *= 1 + 1e-5 * rng.normal(size=n)
        check("already clipped: none", suggest(clipped).recommendation == "none")
        fall = noise * np.exp(-rng.uniform(1.5, 3) * t)
        found = suggest(fall)
        check("slow fall: warm-up of at most a tenth", found.warmup_steps <= n // 10)
        check("falls 4.5 to 20 times: drifting", found.regime == "drifting")
        quick = suggest(noise * (1 + 20 * np.exp(-t * 80)))
        check("steep fall: warm-up of 5 to 30 norms", 5 <= quick.warmup_steps <= 30)
        short = noise[:30]
        check(
            "30 norms: at most 1.6 times the largest", suggest(short).threshold <= 1.6 * short.max()
        )
        base, same = suggest(noise), suggest(1e3 * noise)
        is_same = math.isclose(same.threshold, 1e3 * base.threshold, rel_tol=0.01)
        check("scaled norms: the same", is_same and same.recommendation == base.recommendation)
        rounded = suggest(noise.round(2))
        is_same = abs(math.log(rounded.threshold / base.threshold)) < 0.1
        check("rounded norms: the same within 10%", is_same)
        t = np.arange(600) / 600
        path = -rng.uniform(1.5, 3) * t * (seed % 2)
        many = np.exp(path + rng.uniform(0.05, 0.5) * rng.normal(size=600))
        parts = (many, many[::2], many[1::2], many[::10])
        answers = {suggest(part).recommendation for part in parts}
        check("even, odd and every tenth norm: the same recommendation", len(answers) == 1)
    yield from ((claim, float(np.mean(found))) for claim, found in wrong.items())


def print_synthetic(runs: int) -> None:
    """Prints the tables for synthetic norms."""
    seeds = range(FIRST_SEED, FIRST_SEED + runs)
    lengths = (60, 200, 1000)
    cells = " | ".join(f"{n} norms" for n in lengths)
    print(f"Stationary norms, {runs} runs each: % called moving, % without a constant threshold, ")
    print("% of ordinary norms marked as spikes, % of large spikes missed.\n")
    print(f"| noise | {cells} |\n|---|{'---|' * 3}")
    for name, draw in (NOISES | FRESH).items():
        rows = [100 * stationary_errors(draw, n, seeds) for n in lengths]
        text = (
            f"{moving:.0f}, {other:.0f}, {marked:.2f}, {missed:.0f}"
            for moving, other, marked, missed in rows
        )
        print(f"| {name} | {' | '.join(text)} |", flush=True)
    print(f"\nLevels that move, lognormal noise of sd 0.2, {runs} runs each: % seen to move, ")
    print(f"% with the right regime.\n\n| level | regime | {cells} |\n|---|---|{'---|' * 3}")
    for name, (regime, _) in MOVES.items():
        rows = [100 * moving_hits(name, n, seeds) for n in lengths]
        text = (f"{seen:.0f}, {right:.0f}" for seen, right in rows)
        print(f"| {name} | {regime} | {' | '.join(text)} |", flush=True)
    print(f"\nRecommendations, {runs} runs of 300 (parts: 600) norms: % of runs that contradict.\n")
    print("| norms and answer | % wrong |\n|---|---|")
    for claim, wrong in claims(seeds):
        print(f"| {claim} | {100 * wrong:.1f} |")


def print_logs(folder: Path) -> None:
    """Prints the answers for the logs of a folder, and for parts of each log."""
    agreements = []
    print(
        "\n| log | norms | recommendation | threshold | regime | warm-up | spikes | parts agree |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for path in sorted(folder.glob("*.csv")):
        norms = tuning.read_log(path)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            found = tuning.suggest(norms)
            parts = [norms.iloc[s] for s in (np.s_[::2], np.s_[1::2], np.s_[::10])]
            parts = [part for part in parts if np.sum(part > 0) >= 10]
            same = [tuning.suggest(p).recommendation == found.recommendation for p in parts]
        agreements += same
        print(
            f"| {path.stem} | {len(norms)} | {found.recommendation} | {found.threshold:.4g} | "
            f"{found.regime} | {found.warmup_steps} | {len(found.spikes)} | "
            f"{sum(same)} of {len(same)} |"
        )
    print(
        f"\nEven, odd and every tenth norm: {sum(agreements)} of {len(agreements)} agree with all."
    )


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=100, help="of each kind")
    parser.add_argument("--logs", type=Path, metavar="FOLDER", help="CSV files with norms")
    args = parser.parse_args()
    print_synthetic(args.runs)
    if args.logs:
        print_logs(args.logs)


if __name__ == "__main__":
    main()

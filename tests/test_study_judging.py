"""Guards are judged as was written down: runs made up, of which each fails for one reason."""

import itertools

import numpy as np
import pytest

from benchmarks.research.study import judging, runs
from benchmarks.research.study.comparing import Study
from benchmarks.research.study.plan import RATES

PAIRS = (("gru", "adamw"), ("gru", "sgd"), ("vit", "sgd"))
WRONG = {
    "none": {},
    "constant (best)": {"calm": -0.05},
    "good": {"calm": -0.009, "jump": -0.019, "past": -0.5},
    "dear": {"calm": -0.011},
    "weak": {"jump": -0.021},
    "lost": {"nan": np.nan},
    "weak once": {"jump": -0.06},
}
"""By how much of what is learned a method ends worse, at a rate or with a fault."""


def run(pair, method, rate, fault, seed):
    worse = WRONG[method].get(rate if fault == "none" else fault, 0.0)
    if method == "weak once" and pair != PAIRS[0]:
        worse = 0.0
    at_rate = {"calm": 0.0, "edge": 0.1, "past": 0.5}[rate] if fault == "none" else 0.0
    luck = np.random.default_rng((PAIRS.index(pair), seed)).normal(0.0, 0.1)
    end = 1.0 + luck + at_rate - 2.0 * worse
    held_out = [3.0 + luck, *[None if np.isnan(end) else float(end)] * 4]
    return {
        **dict(zip(("task", "optimizer"), pair, strict=True)),
        "method": method,
        "rate": rate,
        "fault": fault,
        "seed": seed,
        "held_out": held_out,
        "learning_rate": 1.0,
        "limit": None,
        "clipped": 0.5,
        "onset": None,
        "every": 1,
        "seconds": 1.0,
    }


@pytest.fixture(scope="module")
def study():
    cases = [(rate, "none") for rate in RATES]
    cases += [("calm", case.fault) for case in judging.FAULTS]
    every = itertools.product(PAIRS, WRONG, cases, range(4))
    return Study.of(
        runs.cells([run(pair, method, *case, seed) for pair, method, case, seed in every])
    )


@pytest.mark.parametrize(
    ("method", "holds"),
    [("good", True), ("dear", False), ("weak", False), ("lost", False), ("weak once", False)],
)
def test_each_reason_is_enough(study, method, holds):
    assert judging.holds(study, method) == holds
    of_sgd = [pair for pair in study.pairs if pair.optimizer == "sgd"]
    assert judging.judged(study, of_sgd, method).holds == (holds or method == "weak once")


def test_figures_are_shares_of_what_is_learned(study):
    found = judging.judged(study, study.pairs, "good")
    # The best constant is behind where nothing goes wrong, which is no matter.
    assert found.price.mean == pytest.approx(0.009)
    assert found.beside["jump"].mean == pytest.approx(-0.019)
    assert found.beside["spike"].mean == pytest.approx(0.0, abs=1e-9)
    assert found.past.mean == pytest.approx(-0.5)
    assert judging.judged(study, study.pairs, "lost").lost["nan"] == 1.0


def test_the_table_has_a_row_for_each_optimizer_and_all(study):
    rows = [row.split(" | ") for row in judging.table(study, ["good", "weak once"])]
    assert [(row[0].strip("| "), row[1], row[-1].strip("| ")) for row in rows[2:]] == [
        *[("good", of, "yes") for of in ("adamw", "sgd", "all")],
        *[("weak once", "adamw", "no"), ("weak once", "sgd", "yes"), ("weak once", "all", "yes")],
    ]

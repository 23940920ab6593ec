"""Guards are judged as was written down: runs made up, of which each fails for one reason."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from matplotlib.colors import to_hex

from benchmarks.research.study import guards, judging, pictures, runs
from benchmarks.research.study.comparing import HARMS, HELPS, Study
from benchmarks.research.study.plan import RATES

PAIRS = (("gru", "adamw"), ("gru", "sgd"), ("vit", "sgd"))
WRONG = {
    "none": {},
    "constant (best)": {"calm": -0.05},
    "good": {"calm": -0.009, "jump": -0.019, "past": -0.5},
    "dear": {"calm": -0.011},
    "weak": {"jump": -0.021},
    "lost": {"nan": np.nan},
    "weak once": {"jump": -0.05},
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
    assert found.gain.mean == pytest.approx(-0.009)
    assert found.beside["jump"].mean == pytest.approx(-0.019)
    assert found.beside["spike"].mean == pytest.approx(0.0, abs=1e-9)
    assert found.past.mean == pytest.approx(-0.5)
    assert judging.judged(study, study.pairs, "lost").lost == 1.0


def test_there_is_a_row_for_each_optimizer_and_all(study):
    rows = [*judging.rows(study, "two tasks")]
    found = {(row["method"], row["optimizer"]): row for row in rows}
    assert len(found) == len(rows) == 3 * len(WRONG)
    assert [found["weak once", of]["holds"] for of in ("adamw", "sgd", "all")] == [
        False,
        True,
        True,
    ]
    assert found["good", "all"]["nothing wrong"] == "-0.9"
    assert found["lost", "sgd"]["lost to NaN"] == "100"
    assert len(judging.table(rows).splitlines()) == 2 + len(rows)


def test_limits_never_rise_or_rise_slowly():
    norms = jnp.exp(jax.random.normal(jax.random.key(0), (200,))) * jnp.linspace(1.0, 50.0, 200)

    @jax.jit
    def limits():
        rules = guards.never_rises(50.0), guards.rises_slowly(lambda _: 1.0, 75.0)

        def step(states, norm):
            rows = [
                rule.update(norm, state, None) for rule, state in zip(rules, states, strict=True)
            ]
            return [state for _, state in rows], [found.trigger for found, _ in rows]

        return jax.lax.scan(step, [rule.init(norms[0]) for rule in rules], norms)[1]

    fixed, slow = map(np.asarray, limits())
    assert np.isinf(fixed[0])  # there is no norm before the first
    assert np.all(fixed[2:] <= np.maximum.accumulate(fixed[1:])[:-1] * (1 + 1e-6))
    steps = np.arange(2, 201)
    assert np.all(slow[1:] <= slow[:-1] * (1 + 1 / steps) * (1 + 1e-6))
    assert slow[-1] > 3 * slow[20]


@pytest.mark.slow
def test_files_and_picture(study, tmp_path, monkeypatch):
    monkeypatch.setattr(judging, "load", lambda path: study)
    judging.main(["guard.jsonl", "--docs", str(tmp_path)])
    data = (tmp_path / "guard.csv").read_text().splitlines()
    assert len(data) == 1 + 3 * len(WRONG)
    assert (tmp_path / "guard.png").stat().st_size > 10_000
    tiles = judging.picture(study, ["good", "weak"]).axes[0].patches
    blue, orange = (pictures.LOOK[verdict][0] for verdict in (HELPS, HARMS))
    colors = [to_hex(tile.get_facecolor()) for tile in tiles]
    assert colors == [to_hex(x) for x in [blue] * 5 + [blue, blue, blue, orange, blue]]

"""Guards are judged as was written down: runs made up, of which each fails for one reason."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from matplotlib.colors import to_hex

from benchmarks.research.study import guarding, guards, judging, pictures
from benchmarks.research.study.comparing import HARMS, HELPS
from benchmarks.research.study.unseen import ADAPTIVE
from optaxclip import clip_by, scopes

WRONG = {
    "none": {},
    "constant (best)": {"none": -0.05, "late rate": -0.05},
    "good": {"none": -0.009, "zero start": -0.009, "jump": -0.019},
    "dear": {"none": -0.011},
    "starved": {"zero start": -0.011},
    "weak": {"jump": -0.021},
    "lost": {"nan": -1.0},
    "weak once": {"jump": -0.05},
}
"""By how much of what is learned a method ends worse, in a case, or in a problem of one case."""
FAILS_WITH_ONE = ("weak once", "lion")


def run(problem, optimizer, method, case, seed):
    worse = WRONG[method].get(problem if problem in WRONG["starved"] else case, 0.0)
    if method == FAILS_WITH_ONE[0] and optimizer != FAILS_WITH_ONE[1]:
        worse = 0.0
    luck = np.random.default_rng((len(problem), seed)).normal(0.0, 0.1)
    return {
        "problem": problem,
        "optimizer": optimizer,
        "method": method,
        "case": case,
        "seed": seed,
        "start": 3.0 + luck,
        "end": 1.0 + luck - 2.0 * worse,
        "lost": worse == -1.0,
        "clipped": 0.5,
    }


@pytest.fixture(scope="module")
def runs():
    problems = guarding.PROBLEMS.items()
    cases = [(name, case) for name, problem in problems for case in problem.cases]
    every = itertools.product(cases, ADAPTIVE, WRONG, range(4))
    return judging.cells(run(name, of, method, case, i) for (name, case), of, method, i in every)


@pytest.mark.parametrize("method", list(WRONG)[2:])
def test_each_reason_is_enough(runs, method):
    is_kept = method in ("good", FAILS_WITH_ONE[0])
    assert judging.holds(runs, method) == (method == "good")
    assert judging.judged(runs, "adamw", method).holds == is_kept


def test_figures_are_shares_of_what_is_learned(runs):
    shares = judging.judged(runs, "muon", "good").shares
    found = {of.title: x.mean for of, x in zip(judging.COLUMNS, shares, strict=True)}
    # The best constant is behind where nothing goes wrong, which is no matter.
    usual = dict.fromkeys(("nothing wrong", "zero start", "small weights", "3000 steps"), -0.009)
    expected = dict.fromkeys(found, 0.0) | usual | {"jump of scale": -0.019}
    assert found == pytest.approx(expected, abs=1e-9)


def test_there_is_a_row_for_each_optimizer_and_method(runs):
    rows = [*judging.rows(runs)]
    found = {(row["optimizer"], row["method"]): row for row in rows}
    assert len(found) == len(rows) == len(ADAPTIVE) * len(WRONG)
    held = [found[of, FAILS_WITH_ONE[0]]["holds"] for of in ADAPTIVE]
    assert held == [str(of != FAILS_WITH_ONE[1]) for of in ADAPTIVE]
    assert found["muon", "good"]["nothing wrong"] == "-0.9"
    assert found["muon", "lost"]["lost to NaN"] == "100"
    assert len(judging.table(rows).splitlines()) == 2 + len(rows)


def test_a_limit_is_a_share_of_an_average_that_a_spike_hardly_lifts():
    rule = guards.share_of_average(0.5)

    @jax.jit
    def limits(norms):
        def step(state, norm):
            found, state = rule.update(norm, state, None)
            return state, found.trigger

        return jax.lax.scan(step, rule.init(norms[0]), norms)[1]

    norms = jnp.ones(400).at[300].set(1e6)
    found = np.asarray(limits(norms))
    np.testing.assert_allclose(found[1:301], 0.5, rtol=1e-5)
    assert found[301] == pytest.approx(0.5 * 1.03, rel=0.01)
    rising = np.asarray(limits(jnp.where(jnp.arange(400) < 200, 1e-3, 1.0)))
    assert rising[-1] == pytest.approx(0.5 * 0.6, rel=0.5)


def test_the_rule_of_a_run_is_data():
    leaves = {"a": jnp.array([3.0]), "b": jnp.array([4.0])}

    @jax.jit
    @jax.vmap
    def clipped(limit):
        tx = clip_by(scopes.leaf(), guards.chosen(limit))
        start = leaves, tx.init(leaves)
        return jax.lax.fori_loop(0, 3, lambda _, x: tx.update(leaves, x[1]), start)[0]

    limits = [guards.NO_CLIP, 1.0, *map(guards.number, guards.RULES)]
    found = np.concatenate([x.reshape(-1, 1) for x in clipped(jnp.array(limits)).values()], 1)
    np.testing.assert_allclose(found[:2], [[3, 4], [0.6, 0.8]], rtol=1e-6)
    by_name = dict(zip(guards.RULES, found[2:], strict=True))
    np.testing.assert_allclose(by_name["half the average"], [1.5, 2.0], rtol=1e-6)
    np.testing.assert_allclose(by_name["a quarter of it"], [0.75, 1.0], rtol=1e-6)


@pytest.mark.slow
def test_files_and_picture(runs, tmp_path, monkeypatch):
    monkeypatch.setattr(judging, "cells", lambda lines: runs)
    monkeypatch.setattr(judging, "read", lambda path: ())
    judging.main(["guard.jsonl", "--docs", str(tmp_path)])
    data = (tmp_path / "guard.csv").read_text().splitlines()
    assert len(data) == 1 + len(ADAPTIVE) * len(WRONG)
    assert (tmp_path / "guard.png").stat().st_size > 10_000
    met, missed = (to_hex(pictures.LOOK[x][0]) for x in (pictures.MET, pictures.MISSED))
    assert missed not in {to_hex(pictures.LOOK[x][0]) for x in (HELPS, HARMS)}
    count, row = len(judging.COLUMNS), list(WRONG).index("dear")
    figure = judging.picture(runs)
    assert [text.get_text() for text in figure.legends[0].get_texts()] == [
        pictures.MET,
        pictures.MISSED,
    ]
    tiles = figure.axes[0].patches[row * count : (row + 1) * count]
    colors = [to_hex(tile.get_facecolor()) for tile in tiles]
    assert colors[0] == missed
    assert set(colors[7:]) == {met}


@pytest.mark.slow
def test_the_runs_of_a_problem(monkeypatch):
    monkeypatch.setattr(guarding, "SEEDS", 1)
    problem = guarding.Problem("gru", 20, ("none", "times 100", "nan"))
    monkeypatch.setitem(guarding.PROBLEMS, "gru", problem)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        rows = list(guarding.rows("gru", "lion"))
    found = {(row["method"], row["case"]): row for row in rows}
    assert len(found) == len(rows) == 3 * (3 + len(guards.RULES))
    assert len({row["start"] for row in rows}) == 1
    best = [found["constant (best)", case]["limit"] for case in ("none", "times 100")]
    assert best[1] == pytest.approx(100 * best[0])
    assert found["none", "none"]["clipped"] == 0
    assert all(found[name, "times 100"]["clipped"] > 0 for name in guards.RULES)
    assert not any(row["lost"] for row in rows)

"""What the study makes of its runs: statistics that are known, and verdicts on runs made up."""

import importlib
import itertools
import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from benchmarks.study import comparing, inference, methods, rows, runs, summary
from benchmarks.study.comparing import HARMS, HELPS, UNCLEAR, Study
from benchmarks.study.runs import Pair

DOCS = Path(__file__).parents[1] / "docs"
SEEDS, LOST, EVALUATIONS, EVERY = 12, 8, 21, 10
PAIRS = (Pair("text", "adamw"), Pair("digits", "sgd"), Pair("private", "adamw"))
CASES = {case.name: case for case in comparing.CASES}
FAULTS = [case for case in comparing.CASES if case.name != "best"]
WORTH = {"none": 0.0, "constant (best)": 0.02, "helper": 0.1, "harmer": -0.1, "idle": 0.0}
"""How much less of the gain of 2 each method ends with."""


def run(pair, method, case, seed):
    """One whose loss falls from 3 to 1, all of it at once, to where the method lets it."""
    number = PAIRS.index(pair), list(WORTH).index(method), FAULTS.index(case), seed
    noise = np.random.default_rng(number).normal(0.0, 0.01)
    luck = np.random.default_rng(number[::3]).normal(0.0, 0.1)
    unit = 10.0 if pair.task == "digits" else 1.0
    worth = 0.0 if case.name == "calm" else WORTH[method]
    held_out = np.full(EVALUATIONS, 1.0 + luck + noise - 2.0 * worth)
    held_out[0] = 3.0
    onset = None if case.fault in ("none", "tails") else 60 + seed
    if onset is not None and method != "helper":
        held_out[onset // EVERY + 1 : onset // EVERY + 4] += 1.0
    losses = [float(x) for x in unit * held_out]
    if case.name == "past" and method in ("none", "harmer") and seed < LOST:
        losses[-1] = None
    return {
        "task": pair.task,
        "optimizer": pair.optimizer,
        "method": method,
        "rate": case.rate or "edge",
        "learning_rate": 0.01,
        "fault": case.fault,
        "seed": seed,
        "limit": 0.25 if method == "constant (best)" else None,
        "held_out": losses,
        "clipped": 0.25 * (method == "helper"),
        "onset": onset,
        "every": EVERY,
        "seconds": 2.0 if method == "harmer" else 1.0,
    }


ALL = [
    run(pair, method, case, seed)
    for pair in PAIRS
    for method, case, seed in itertools.product(WORTH, FAULTS, range(SEEDS))
]


@pytest.fixture(scope="module")
def found():
    return summary.summarize(Study.of(runs.cells(ALL)))


def test_intervals_have_the_mean_in_them_as_often_as_they_say():
    values = np.random.default_rng(3).normal(1.0, 2.0, (400, 12))
    intervals = [inference.interval(row) for row in values]
    covered = np.mean([found.low <= 1.0 <= found.high for found in intervals])
    assert 0.92 <= covered <= 0.98  # plain percentiles: 0.91
    width = np.mean([found.high - found.low for found in intervals])
    of_student = 2 * stats.t.ppf(0.975, 11) * values.std(1, ddof=1).mean() / math.sqrt(12)
    assert width == pytest.approx(of_student, rel=0.05)


def test_intervals_of_equal_values_and_of_too_few():
    assert inference.interval(np.full(5, 2.5)) == (2.5, 2.5, 2.5)
    low_and_high = inference.interval(np.array([1.0, 2.0]))
    assert low_and_high.mean == 1.5
    with pytest.raises(ValueError, match="values must be at least two, got 1"):
        inference.interval(np.array([1.0]))


def test_sign_flips_by_hand_and_beside_scipy():
    # Of the eight sums +-1 +-2 +-3 two are as far from 0 as 6, four as far as 4.
    assert inference.sign_flip(np.array([1.0, 2.0, 3.0])) == 2 / 8
    assert inference.sign_flip(np.array([-1.0, 2.0, 3.0])) == 4 / 8
    assert inference.sign_flip(np.full(12, 0.1)) == 2 / 2**12
    assert inference.sign_flip(np.zeros(12)) == 1.0
    differences = np.random.default_rng(0).normal(0.5, 1.0, 10)
    same = stats.permutation_test(
        (differences,), np.mean, permutation_type="samples", n_resamples=2000
    )
    assert inference.sign_flip(differences) == pytest.approx(same.pvalue)
    with pytest.raises(ValueError, match="differences must be at most 20, got 21"):
        inference.sign_flip(np.ones(21))


def test_holm_by_hand():
    # In order 0.01, 0.02, 0.03, 0.04, times 4, 3, 2, 1, and none below the one before it.
    assert inference.holm([0.04, 0.01, 0.03, 0.02]) == pytest.approx([0.06, 0.04, 0.06, 0.06])
    assert inference.holm([0.6, 0.7]) == [1.0, 1.0]
    assert inference.holm([]) == []


def test_lost_runs_count_with_their_start():
    losses = [[3.0, 1.0, 1.0, 1.0], [3.0, 1.0, None, 1.0], [3.0, 2.0, 9.0, 1.0], [3.0, 1, 2, 3]]
    same = [{**ALL[0], "held_out": x, "seed": seed} for seed, x in enumerate(losses)]
    (cell,) = runs.cells(same).values()
    assert cell.is_lost.tolist() == [False, True, True, False]
    assert cell.end.tolist() == [1.0, 3.0, 3.0, 2.0]


def test_a_run_that_is_there_twice_is_an_error():
    with pytest.raises(ValueError, match=r"got two of .*seed 0"):
        runs.cells([ALL[0], ALL[0]])


def test_seeds_are_paired_and_pairs_have_one_unit(found):
    study = found.study
    assert study.gains[PAIRS[1]] == pytest.approx(10 * study.gains[PAIRS[0]], rel=0.1)
    differences = study.differences(PAIRS[1], "helper", "none", CASES["tails"])
    assert list(differences) == list(range(SEEDS))
    # What seeds have in common, ten times the rest, is gone.
    assert np.mean(list(differences.values())) == pytest.approx(0.1, abs=0.01)
    assert np.std(list(differences.values())) < 0.015


def test_verdicts_on_what_helps_harms_and_does_nothing(found):
    expected = {"constant (best)": HELPS, "helper": HELPS, "harmer": HARMS, "idle": UNCLEAR}
    for name in ("edge", "spike", "tails", "nan", "jump", "stretch"):
        assert {method: of.verdict for method, of in found.pooled[name].items()} == expected
        assert found.found(HELPS, CASES[name]) == ["helper", "constant (best)"]
        helper = found.pooled[name]["helper"]
        assert (helper.pairs, helper.seeds) == (2, SEEDS)
        assert helper.share.low < helper.share.mean < helper.share.high
        assert helper.share.mean == pytest.approx(0.1, abs=0.01)
        assert helper.chance == pytest.approx(4 * 2 / 2**SEEDS)
        beside_best = found.beside_best[name]
        assert beside_best["helper"].share.mean == pytest.approx(0.08, abs=0.01)
        assert beside_best["idle"].verdict == HARMS
    assert {of.verdict for of in found.pooled["calm"].values()} == {UNCLEAR}
    # At its best rate, the calm one, the one that harms does not.
    assert found.pooled["best"]["harmer"].verdict == UNCLEAR
    # Past the edge the idle one loses no runs.
    assert found.helps_nowhere() == ["harmer"]


def test_a_sure_but_tiny_difference_is_none_that_matters():
    tiny = comparing.Comparison(inference.Interval(0.004, 0.003, 0.005), 0.001, 2, SEEDS)
    assert tiny.verdict == UNCLEAR
    assert tiny._replace(share=inference.Interval(-0.006, -0.007, -0.005)).verdict == HARMS


def test_the_private_task_stands_apart_beside_the_best_constant(found):
    assert PAIRS[2] not in found.pairs
    of_private = found.single["tails"][PAIRS[2]]
    assert "constant (best)" not in of_private
    assert of_private["none"].verdict == HARMS
    assert found.pairs_with(HELPS, "helper", CASES["tails"]) == sorted(PAIRS[:2])


def test_the_best_rate_is_each_method_s_own(found):
    # Where the calm rate is worth 0 for all, the one that harms is best off.
    study = found.study
    assert study.cell(PAIRS[0], "harmer", CASES["best"]) == study.cell(
        PAIRS[0], "harmer", CASES["calm"]
    )
    edge, past = (study.cell(PAIRS[0], "helper", CASES[name]) for name in ("edge", "past"))
    best = study.cell(PAIRS[0], "helper", CASES["best"])
    assert best.end.mean() == min(edge.end.mean(), past.end.mean())
    short = [x for x in ALL if x["rate"] != "past"]
    assert Study.of(runs.cells(short)).cell(PAIRS[0], "helper", CASES["best"]) is None
    # Faults are run at one rate, whichever it is.
    calmer = [x if x["fault"] == "none" else {**x, "rate": "calm"} for x in ALL]
    of_fault = Study.of(runs.cells(calmer)).cell(PAIRS[0], "helper", CASES["spike"])
    np.testing.assert_array_equal(of_fault.end, study.cell(PAIRS[0], "helper", CASES["spike"]).end)


def test_methods_come_in_the_order_of_their_table():
    last = [{**x, "method": "ZClip"} for x in ALL[:SEEDS]]
    backwards = runs.cells([*ALL[::-1], *last])
    assert Study.of(backwards).methods[:3] == ("none", "constant (best)", "ZClip")
    assert Study.of(backwards).pairs == tuple(sorted(PAIRS))


def test_every_method_has_words():
    pytest.importorskip("matplotlib")
    texts = importlib.import_module("benchmarks.study.page").words()
    assert not [name for name in methods.METHODS if name not in texts]
    assert "](../optaxclip/methods/adaptive.py#optaxclip.zclip)" in texts["ZClip"]
    assert "](cost.md)" in texts["costs"]


def test_lines_beside_runs_and_cells_of_one_seed_are_left_out():
    others = [{"settings": {}, "versions": {}}, {"pair": ["text", "adamw"], "found": {}}]
    assert len(runs.cells([*others, *ALL[: SEEDS + 1]])) == 1


def test_what_is_not_known_is_left_out():
    uncounted = [{**x, "clipped": None, "onset": 10} for x in ALL if x["fault"] == "spike"]
    study = Study.of(runs.cells(uncounted))
    of_none = summary.summarize(study)
    assert of_none.clipped("helper", CASES["spike"]) is None
    assert of_none.recovery("helper", CASES["spike"]) is None  # two losses before it are too few


def test_shares_of_runs_and_steps(found):
    assert found.lost("none", CASES["past"]) == LOST / SEEDS
    assert found.lost("helper", CASES["past"]) == 0.0
    assert found.clipped("helper", CASES["edge"]) == 0.25
    assert found.seconds("harmer") == (2.0, 2.0, 2.0)
    assert found.recovery("none", CASES["tails"]) is None
    assert found.recovery("helper", CASES["spike"]) == (0.0, 0.0)
    # Three bad losses and three good ones take 60 steps from the evaluation before, after which the
    # seeds' spikes come by 0, 0, 1, 1, 2, 3, ... 9 steps.
    assert found.recovery("none", CASES["spike"]) == (60 - 3, 0.0)


def test_numbers_become_text():
    assert rows.share(inference.Interval(0.012, -0.0001, 0.5)) == "+1.2 (0.0 to +50.0)"
    assert rows.loss(inference.Interval(2.41234, 2.39, 2.43)) == "2.412 (2.390 to 2.430)"
    assert rows.loss(inference.Interval(-150.0, -180.0, -120.0)) == "-150 (-180 to -120)"
    assert [rows.percent(x) for x in (0.0, 0.001, 0.12, 0.999, 1.0, None)] == [
        *("0 %", "< 1 %", "12 %", "> 99 %", "100 %", rows.ABSENT)
    ]
    shown = (summary.Recovery(60.0, 0.0), summary.Recovery(math.inf, 0.75), None)
    assert [rows.steps(x) for x in shown] == ["60", "never (75 % never)", rows.ABSENT]


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """The folder with pages and pictures."""
    pytest.importorskip("matplotlib")
    folder = tmp_path_factory.mktemp("docs")
    lines = [{"settings": {}, "versions": {"jax": "0.99"}}, *ALL]
    (folder / "results.jsonl").write_text("\n".join(map(json.dumps, lines)))
    page = importlib.import_module("benchmarks.study.page")
    page.main([str(folder / "results.jsonl"), "--docs", str(folder)])
    return folder


def test_the_page_has_each_method_once_and_no_broken_links(written, monkeypatch):
    monkeypatch.syspath_prepend(DOCS)
    links = importlib.import_module("links")
    pages = {name: (written / name).read_text() for name in ("evidence.md", "evidence_tasks.md")}
    headings = re.findall(r"^### (.*)$", pages["evidence.md"], re.MULTILINE)
    assert len(set(headings)) == len(headings)
    assert [title for title in headings if title in WORTH] == list(WORTH)
    assert pages["evidence.md"].count("It helps nowhere in this study.") == 1
    anchors = {name: links.anchors(text) for name, text in pages.items()}
    assert {rows.anchor(method) for method in WORTH} <= anchors["evidence.md"]
    for name, text in pages.items():
        for link in filter(lambda link: not links.is_elsewhere(link), links.links(text)):
            path, _, anchor = link.partition("#")
            where = path or name
            is_new = (written / where).is_file()
            assert is_new or (DOCS / where).is_file(), link
            assert not anchor or where.endswith(".py") or anchor in anchors[where], link


def test_the_page_says_the_same_in_both_orders(written):
    text = (written / "evidence.md").read_text()
    figures = re.findall(r"^\| \[spikes\]\(#spikes\) (\|.*)$", text, re.MULTILINE)
    by_case = re.findall(r"^\| \[helper\]\(#helper\) (\|.*)$", text, re.MULTILINE)
    assert sum(any(row == other for other in by_case) for row in figures) == 1
    assert "1,440 runs of 200 steps, 12 seeds of each; jax 0.99." in text
    assert (written / "evidence_tasks.md").read_text().count("Limits: constant (best) 0.25.") == 3
    short = text.split("## In short")[1].split("\n## ")[0]
    assert "[helper](#helper) +" in short
    assert "**Helps nowhere in this study:** [harmer](#harmer)." in short


def test_pictures_are_made_and_legible(written):
    from benchmarks.study import pictures

    for name in pictures.NAMES:
        assert (written / name).stat().st_size > 5000
    assert 400 * pictures.LETTERS["font.size"] / 72 / pictures.WIDTH > 12  # of 400 pixels


def test_curves_are_lined_up_at_the_spike(found):
    pytest.importorskip("matplotlib")
    from benchmarks.study import pictures

    cell = found.study.cell(PAIRS[0], "none", CASES["spike"])
    losses = pictures.aligned(cell)
    assert np.all(losses[: pictures.BEFORE + 1] < 1.5)
    assert np.all(losses[pictures.BEFORE + 1 : pictures.BEFORE + 4] > 1.5)
    assert np.all(losses[pictures.BEFORE + 4 :] < 1.5)


def test_pictures_of_short_and_of_lost_runs(tmp_path):
    pytest.importorskip("matplotlib")
    from benchmarks.study import pictures

    early = [{**x, "onset": 10} for x in ALL if x["fault"] == "spike" or x["fault"] == "none"]
    for x in early:
        x["held_out"] = [*x["held_out"][:4], *([None] if x["method"] == "none" else [1.0])]
    pictures.draw(summary.summarize(Study.of(runs.cells(early))), tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == set(pictures.NAMES)


def test_the_verdicts_are_printed(tmp_path, capsys):
    (tmp_path / "results.jsonl").write_text("\n".join(map(json.dumps, ALL)) + "\n")
    summary.main([str(tmp_path / "results.jsonl")])
    text = capsys.readouterr().out
    assert "heavy tails\n  helps: helper (+1" in text
    assert text.endswith("helps nowhere: harmer\n")

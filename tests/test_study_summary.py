"""What the study makes of its runs: statistics that are known, and verdicts on runs made up."""

import csv
import importlib
import itertools
import json
import math
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from benchmarks.research.study import comparing, figures, inference, methods, rows, runs, summary
from benchmarks.research.study.comparing import HARMS, HELPS, UNCLEAR, Study
from benchmarks.research.study.runs import Pair

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
        "threshold": 0.25 if method == "constant (best)" else None,
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
    return summary.summarize(Study.from_cells(runs.group_cells(ALL)))


def test_interval_covers_mean_at_nominal_rate():
    values = np.random.default_rng(3).normal(1.0, 2.0, (400, 12))
    intervals = [inference.compute_interval(row) for row in values]
    covered = np.mean([found.low <= 1.0 <= found.high for found in intervals])
    assert 0.92 <= covered <= 0.98  # plain percentiles: 0.91
    width = np.mean([found.high - found.low for found in intervals])
    of_student = 2 * stats.t.ppf(0.975, 11) * values.std(1, ddof=1).mean() / math.sqrt(12)
    assert width == pytest.approx(of_student, rel=0.05)


def test_interval_accepts_equal_values_and_rejects_single_value():
    assert inference.compute_interval(np.full(5, 2.5)) == (2.5, 2.5, 2.5)
    low_and_high = inference.compute_interval(np.array([1.0, 2.0]))
    assert low_and_high.mean == 1.5
    with pytest.raises(ValueError, match="values must be at least two, got 1"):
        inference.compute_interval(np.array([1.0]))


def test_sign_flip_matches_manual_counts_and_scipy():
    # Of the eight sums +-1 +-2 +-3 two are as far from 0 as 6, four as far as 4.
    assert inference.run_sign_test(np.array([1.0, 2.0, 3.0])) == 2 / 8
    assert inference.run_sign_test(np.array([-1.0, 2.0, 3.0])) == 4 / 8
    assert inference.run_sign_test(np.full(12, 0.1)) == 2 / 2**12
    assert inference.run_sign_test(np.zeros(12)) == 1.0
    differences = np.random.default_rng(0).normal(0.5, 1.0, 10)
    same = stats.permutation_test(
        (differences,), np.mean, permutation_type="samples", n_resamples=2000
    )
    assert inference.run_sign_test(differences) == pytest.approx(same.pvalue)
    with pytest.raises(ValueError, match="differences must be at most 20, got 21"):
        inference.run_sign_test(np.ones(21))


def test_holm_matches_manual_correction():
    # In order 0.01, 0.02, 0.03, 0.04, times 4, 3, 2, 1, and none below the one before it.
    assert inference.correct_chances([0.04, 0.01, 0.03, 0.02]) == pytest.approx(
        [0.06, 0.04, 0.06, 0.06]
    )
    assert inference.correct_chances([0.6, 0.7]) == [1.0, 1.0]
    assert inference.correct_chances([]) == []


def test_lost_runs_count_with_initial_loss():
    losses = [[3.0, 1.0, 1.0, 1.0], [3.0, 1.0, None, 1.0], [3.0, 2.0, 9.0, 1.0], [3.0, 1, 2, 3]]
    same = [{**ALL[0], "held_out": x, "seed": seed} for seed, x in enumerate(losses)]
    (cell,) = runs.group_cells(same).values()
    assert cell.is_lost.tolist() == [False, True, True, False]
    assert cell.end.tolist() == [1.0, 3.0, 3.0, 2.0]


def test_duplicate_runs_raise():
    with pytest.raises(ValueError, match=r"got two of .*seed 0"):
        runs.group_cells([ALL[0], ALL[0]])


def test_study_differences_pair_seeds(found):
    study = found.study
    assert study.gains[PAIRS[1]] == pytest.approx(10 * study.gains[PAIRS[0]], rel=0.1)
    differences = study.compute_differences(PAIRS[1], "helper", "none", CASES["tails"])
    assert list(differences) == list(range(SEEDS))
    # What seeds have in common, ten times the rest, is gone.
    assert np.mean(list(differences.values())) == pytest.approx(0.1, abs=0.01)
    assert np.std(list(differences.values())) < 0.015


def test_study_verdicts_separate_helpful_and_harmful_methods(found):
    expected = {"constant (best)": HELPS, "helper": HELPS, "harmer": HARMS, "idle": UNCLEAR}
    for name in ("edge", "spike", "tails", "nan", "jump", "stretch"):
        assert {method: of.verdict for method, of in found.pooled[name].items()} == expected
        assert found.list_methods(HELPS, CASES[name]) == ["helper", "constant (best)"]
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
    assert found.list_unhelpful() == ["harmer"]


def test_tiny_differences_count_as_unclear():
    tiny = comparing.Comparison(inference.Interval(0.004, 0.003, 0.005), 0.001, 2, SEEDS)
    assert tiny.verdict == UNCLEAR
    assert tiny._replace(share=inference.Interval(-0.006, -0.007, -0.005)).verdict == HARMS


def test_private_task_compares_separately_with_best_constant(found):
    assert PAIRS[2] not in found.pairs
    of_private = found.single["tails"][PAIRS[2]]
    assert "constant (best)" not in of_private
    assert of_private["none"].verdict == HARMS
    assert found.list_pairs(HELPS, "helper", CASES["tails"]) == sorted(PAIRS[:2])


def test_best_case_uses_best_rate_per_method(found):
    # Where the calm rate is worth 0 for all, the one that harms is best off.
    study = found.study
    assert study.get_cell(PAIRS[0], "harmer", CASES["best"]) == study.get_cell(
        PAIRS[0], "harmer", CASES["calm"]
    )
    edge, past = (study.get_cell(PAIRS[0], "helper", CASES[name]) for name in ("edge", "past"))
    best = study.get_cell(PAIRS[0], "helper", CASES["best"])
    assert best.end.mean() == min(edge.end.mean(), past.end.mean())
    short = [x for x in ALL if x["rate"] != "past"]
    assert (
        Study.from_cells(runs.group_cells(short)).get_cell(PAIRS[0], "helper", CASES["best"])
        is None
    )
    # Faults are run at one rate, whichever it is.
    calmer = [x if x["fault"] == "none" else {**x, "rate": "calm"} for x in ALL]
    of_fault = Study.from_cells(runs.group_cells(calmer)).get_cell(
        PAIRS[0], "helper", CASES["spike"]
    )
    np.testing.assert_array_equal(
        of_fault.end, study.get_cell(PAIRS[0], "helper", CASES["spike"]).end
    )


def test_cells_ignore_settings_and_single_seed_cells():
    others = [{"settings": {}, "versions": {}}, {"pair": ["text", "adamw"], "found": {}}]
    assert len(runs.group_cells([*others, *ALL[: SEEDS + 1]])) == 1


def test_summary_omits_unknown_values():
    uncounted = [{**x, "clipped": None, "onset": 10} for x in ALL if x["fault"] == "spike"]
    study = Study.from_cells(runs.group_cells(uncounted))
    of_none = summary.summarize(study)
    assert of_none.compute_clipped("helper", CASES["spike"]) is None
    assert (
        of_none.compute_recovery("helper", CASES["spike"]) is None
    )  # two losses before it are too few


def test_summary_reports_lost_clipped_and_recovery_fractions(found):
    assert found.compute_lost("none", CASES["past"]) == LOST / SEEDS
    assert found.compute_lost("helper", CASES["past"]) == 0.0
    assert found.compute_clipped("helper", CASES["edge"]) == 0.25
    assert found.compute_times("harmer") == (2.0, 2.0, 2.0)
    assert found.compute_recovery("none", CASES["tails"]) is None
    assert found.compute_recovery("helper", CASES["spike"]) == (0.0, 0.0)
    # Three bad losses and three good ones take 60 steps from the evaluation before, after which the
    # seeds' spikes come by 0, 0, 1, 1, 2, 3, ... 9 steps.
    assert found.compute_recovery("none", CASES["spike"]) == (60 - 3, 0.0)


def test_summary_rows_format_numbers_as_text():
    share = comparing.Comparison(inference.Interval(0.012, -0.0001, 0.5), 0.01, 2, SEEDS)
    assert [*rows.format_share("gain", share).values()] == ["+1.2", "0.0", "+50.0"]
    assert rows.format_share("gain", None) == {}
    loss = rows.format_loss(inference.Interval(2.41234, 2.39, 2.43))
    assert loss == {"loss": "2.412", "loss_low": "2.390", "loss_high": "2.430"}
    loss = rows.format_loss(inference.Interval(-150.0, -180.0, -120.0))
    assert [*loss.values()] == ["-150", "-180", "-120"]
    parts = (0.0, 0.001, 0.12, 0.999, 1.0, None)
    assert [rows.format_percent(x) for x in parts] == ["0", "< 1", "12", "> 99", "100", ""]
    shown = (summary.Recovery(60.0, 0.0), summary.Recovery(math.inf, 0.75), None)
    assert [[*rows.format_recovery(x).values()] for x in shown] == [["60", ""], ["never", "75"], []]


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """The folder with the page, the data and the pictures."""
    pytest.importorskip("matplotlib")
    folder = tmp_path_factory.mktemp("docs")
    lines = [{"settings": {}, "versions": {"jax": "0.99"}}, *ALL]
    (folder / "results.jsonl").write_text("\n".join(map(json.dumps, lines)))
    for name in ("evidence.md", "evidence_figures.md"):
        shutil.copy(DOCS / name, folder)
    page = importlib.import_module("benchmarks.research.study.page")
    page.main([str(folder / "results.jsonl"), "--docs", str(folder)])
    return folder


def test_evidence_csv_contains_summary(written, found):
    data = figures.read(written / "evidence.csv")
    (row,) = [
        x
        for x in data
        if (x["tasks"], x["fault"], x["method"]) == (figures.TOGETHER, "spikes", "helper")
    ]
    share = found.pooled["spike"]["helper"].share
    assert float(row["gain"]) == pytest.approx(100 * share.mean, abs=0.05)
    assert float(row["gain_low"]) < float(row["gain"]) < float(row["gain_high"])
    assert (row["verdict"], row["beside_best_verdict"]) == ("helps", "better")
    assert [row[name] for name in ("helps", "harms", "pairs", "lost")] == ["2", "0", "2", "0"]
    assert (row["back"], row["never_back"], row["clipped"]) == ("0", "", "25")
    alone = {x["method"]: x for x in data if (x["tasks"], x["fault"]) == ("text, adamw", "spikes")}
    assert (alone["constant (best)"]["threshold"], alone["helper"]["rate"]) == ("0.25", "0.01")
    times = {x["method"]: x["time"] for x in data if x["time"]}
    assert times == {"constant (best)": "1.00", "helper": "1.00", "harmer": "2.00", "idle": "1.00"}


def test_evidence_page_contains_figures_of_runs(written):
    text = (written / "evidence.md").read_text()
    assert "1,440 runs of 200 steps, 12 seeds of each; jax 0.99." in text
    assert re.search(
        r"^\| \[spikes\].* \| helper \+9\.., `clip_by_global_norm` .* \| harmer -10",
        text,
        re.MULTILINE,
    )
    assert re.search(r"^\| \[digits, sgd\].* \| 30 \| 0\.01, ", text, re.MULTILINE)
    assert "**Clean runs.**" in text  # what is written by hand stays


def test_figures_page_fills_tables_by_heading(written):
    data = figures.read(written / "evidence.csv")
    page = figures.add_tables(
        "# Figures\n\n## Results by fault\n\n### Spikes\n\nText.\n\n### helper\n", data
    )
    by_fault, by_method = page.split("### helper")
    assert "Text.\n\n|  | gain, % |" in by_fault
    (row,) = re.findall(r"^\| \[helper\]\(#helper\) (\|.*)$", by_fault, re.MULTILINE)
    assert f"| [spikes](#spikes) {row}" in by_method
    losses = figures.add_tables("### text, adamw\n", data)
    assert re.search(r"^\| harmer .*\d −", losses, re.MULTILINE)
    costs = figures.add_tables("## Overhead by method\n", data)
    assert "| [harmer](#harmer) | 2.00 (2.00 to 2.00) | 0 % |" in costs


DATA = figures.read(DOCS / "evidence.csv")


def test_evidence_page_matches_evidence_csv():
    pytest.importorskip("matplotlib")
    page = importlib.import_module("benchmarks.research.study.page")
    text = (DOCS / "evidence.md").read_text("utf-8")
    assert page.fill_marks(text, page.format_tables(DATA)) == text
    by_hand = page.fill_marks(text, dict.fromkeys(page.format_tables(DATA), ""))
    # The next test has the tables of this section.
    before, _, section = by_hand.partition("## Recommended default\n")
    by_hand = before + section.partition("\n## ")[2]
    assert by_hand.count("\n| ") == 0


def test_recommended_tables_equal_judged_rows():
    judging = importlib.import_module("benchmarks.research.recommended.judging")
    data = (DOCS / "../benchmarks/measured/recommended.csv").read_text("utf-8")
    made = judging.format_report(list(csv.DictReader(data.splitlines())))
    text = (DOCS / "evidence.md").read_text("utf-8")
    shown = text.partition("## Recommended default\n")[2].partition("\n## ")[0]
    lines = [line for line in shown.splitlines() if line.startswith(("| no clip", "| `"))]
    assert len(lines) == 5 + 4
    assert [line for line in lines if line not in made] == []


def test_figures_page_lists_methods_faults_and_tasks():
    text = (DOCS / "evidence_figures.md").read_text("utf-8")
    headings = [x.lower() for x in re.findall(r"^### (.*)$", text, re.MULTILINE)]
    pooled = [row for row in DATA if row["tasks"] == figures.TOGETHER]
    named = [*figures.list_values(pooled, "method"), *figures.list_values(pooled, "fault")]
    named += [name for name in figures.list_values(DATA, "tasks") if not name.startswith("all")]
    claims_of = [claim.question.lower() for claim in figures.CLAIMS]
    assert {*headings} - {*claims_of} - {"agc: large batches"} == {
        figures.get_label(name).lower() for name in named
    } - {figures.ANY}
    assert not [x for x in methods.METHODS if figures.get_label(x).lower() not in headings]
    sections = figures.add_tables(text, DATA).split("\n### ")[1:]
    assert not [part.splitlines()[0] for part in sections if "\n|" not in part]


def test_study_pictures_exist_and_stay_legible(written):
    from benchmarks.research.study import pictures

    for name in pictures.NAMES:
        assert (written / name).stat().st_size > 5000
    assert 400 * pictures.LETTERS["font.size"] / 72 / pictures.WIDTH > 12  # of 400 pixels

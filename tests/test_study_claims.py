"""What the study says of four papers' claims, on runs made up."""

import json

import pytest

from benchmarks.research.study import claims, figures, results, rows, runs
from benchmarks.research.study.comparing import Study
from benchmarks.research.study.summary import summarize

EVALUATIONS, SEEDS = 5, 3


def made(build_optimizer, method, rate, fault, loss):
    return [
        {
            "task": "text",
            "optimizer": build_optimizer,
            "method": method,
            "rate": rate,
            "learning_rate": 0.1,
            "fault": fault,
            "seed": seed,
            "threshold": None,
            "held_out": [3.0] + [None if loss is None else loss + 0.01 * seed] * (EVALUATIONS - 1),
            "clipped": 0.0,
            "onset": None,
            "every": 10,
            "seconds": 1.0,
        }
        for seed in range(SEEDS)
    ]


def of_batch(size, clip, losses):
    return [
        {"batch": size, "clip": clip, "learning_rate": rate, "seed": seed}
        | {"held_out": [2.3] + [loss] * (EVALUATIONS - 1)}
        for rate, loss in losses.items()
        for seed in range(SEEDS)
    ]


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    lines = []
    for build_optimizer in ("adamw", "sgd"):
        for rate in ("calm", "edge", "past"):
            is_past = rate == "past"
            lines += made(build_optimizer, "none", rate, "none", None if is_past else 1.0)
            lines += made(build_optimizer, "constant (best)", rate, "none", 2.0 if is_past else 1.0)
            lines += made(build_optimizer, "ZClip (paper)", rate, "none", 1.5 if is_past else 1.0)
            lines += made(build_optimizer, "AutoClip", rate, "none", 0.8)
        lines += made(build_optimizer, "none", "edge", "spike", 2.0)
        lines += made(build_optimizer, "constant (best)", "edge", "spike", 1.0)
        lines += made(
            build_optimizer, "SPAM", "edge", "spike", 1.5 if build_optimizer == "adamw" else 0.5
        )
    lines += of_batch(16, "none", {0.1: 0.5, 0.2: 0.3, 0.4: None})
    lines += of_batch(128, "AGC", {0.1: 0.5, 0.2: 0.3, 0.4: 0.4})
    path = tmp_path_factory.mktemp("claims") / "study.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    study = Study.from_cells(runs.group_cells(results.read(path)))
    found = [*rows.format_summary(summarize(study)), *claims.format_claims(study, path)]
    headings = [claim.question for claim in figures.CLAIMS] + ["AGC: large batches"]
    page = "".join(f"### {heading}\n\n" for heading in headings)
    figures.write(path.with_suffix(".csv"), found)
    parts = figures.add_tables(page, figures.read(path.with_suffix(".csv"))).split("### ")[1:]
    return {part.partition(":")[0]: part for part in parts}


def row(table, name):
    (line,) = (line for line in table.splitlines() if f"| {name} |" in line)
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_claims_compare_autoclip_with_no_clipping_on_adamw(tables):
    # The gain is 1.99, of which 0.2 less is a tenth.
    assert row(tables["AutoClip"], "`autoclip`") == [
        *("`autoclip`", "0.810", "0 %", "+10.1 (+10.1 to +10.1)")
    ]
    assert "sgd" not in tables["AutoClip"]


def test_claims_compare_zclip_at_high_learning_rates(tables):
    assert row(tables["ZClip"], "none")[1:4] == ["3.000", "3.000", "100 %"]
    found = row(tables["ZClip"], "`zclip` (paper)")
    assert found == ["`zclip` (paper)", "1.510", "1.510", "0 %", "+25.1 (+25.1 to +25.1)"]


def test_claims_compare_spam_on_adamw_spikes(tables):
    assert row(tables["SPAM"], "SPAM")[1:] == ["1.510", "0 %", "-25.1 (-25.1 to -25.1)"]


def test_claims_compare_agc_across_batch_sizes(tables):
    assert row(tables["AGC"], "none") == ["16", "none", "0.2", "0.300", "0.2"]
    assert row(tables["AGC"], "`adaptive_grad_clip`") == [
        "128",
        "`adaptive_grad_clip`",
        "0.2",
        "0.300",
        "0.4",
    ]

"""What the study says of four papers' claims, on runs made up."""

import json

import pytest

from benchmarks.study import claims, results, runs
from benchmarks.study.comparing import Study

EVALUATIONS, SEEDS = 5, 3


def made(optimizer, method, rate, fault, loss):
    return [
        {
            "task": "text",
            "optimizer": optimizer,
            "method": method,
            "rate": rate,
            "learning_rate": 0.1,
            "fault": fault,
            "seed": seed,
            "limit": None,
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
    for optimizer in ("adamw", "sgd"):
        for rate in ("calm", "edge", "past"):
            is_past = rate == "past"
            lines += made(optimizer, "none", rate, "none", None if is_past else 1.0)
            lines += made(optimizer, "constant (best)", rate, "none", 2.0 if is_past else 1.0)
            lines += made(optimizer, "ZClip (paper)", rate, "none", 1.5 if is_past else 1.0)
            lines += made(optimizer, "AutoClip", rate, "none", 0.8)
        lines += made(optimizer, "constant (best)", "edge", "spike", 1.0)
        lines += made(optimizer, "SPAM", "edge", "spike", 1.5 if optimizer == "adamw" else 0.5)
    lines += of_batch(16, "none", {0.1: 0.5, 0.2: 0.3, 0.4: None})
    lines += of_batch(128, "AGC", {0.1: 0.5, 0.2: 0.3, 0.4: 0.4})
    path = tmp_path_factory.mktemp("claims") / "study.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return claims.tables(Study.of(runs.cells(results.read(path))), path)


def row(table, name):
    (line,) = (line for line in table.splitlines() if f"| {name} |" in line)
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_every_question_has_a_table(tables):
    assert tables.keys() == claims.QUESTIONS.keys()


def test_percentiles_stand_beside_nothing_on_adamw(tables):
    # The gain is 1.99, of which 0.2 less is a tenth.
    assert row(tables["AutoClip"], "AutoClip") == [
        "AutoClip",
        "0.81",
        "0 %",
        "+10.1 (+10.1 to +10.1)",
    ]
    assert "sgd" not in tables["AutoClip"]


def test_rates_that_are_too_high(tables):
    assert row(tables["ZClip"], "none")[1:4] == ["3", "3", "100 %"]
    found = row(tables["ZClip"], "ZClip (paper)")
    assert found == ["ZClip (paper)", "1.51", "1.51", "0 %", "+25.1 (+25.1 to +25.1)"]


def test_spikes_are_those_of_adamw(tables):
    assert row(tables["SPAM"], "SPAM")[1:] == [
        "1.51",
        "0 %",
        "-25.1 (-25.1 to -25.1)",
    ]


def test_batches(tables):
    assert row(tables["AGC"], "none") == ["16", "none", "0.2", "0.300 (0.300 to 0.300)", "0.2"]
    assert row(tables["AGC"], "AGC") == ["128", "AGC", "0.2", "0.300 (0.300 to 0.300)", "0.4"]

"""Checks that all workloads of the benchmark command run and report consistent results."""

import contextlib
import csv
import dataclasses
import json
import math

import jax
import numpy as np
import pytest

from benchmarks.every_method import build_method_steps, build_methods
from benchmarks.times import __main__ as bench
from benchmarks.times import methods
from benchmarks.times.effort import Effort
from benchmarks.times.large import measure_large_steps
from benchmarks.times.report import COLUMNS, Row, Section, get_load_average
from benchmarks.times.timing import (
    InPlaceProgram,
    Program,
    Spread,
    compute_ratio,
    summarize,
    time_calls,
)
from benchmarks.times.trees import NORM, build_leaves, build_transformer, fill_tree, read_grads

TINY = Effort(
    rounds=2,
    repetitions=1,
    dtypes=("float32",),
    num_elements=1000,
    accumulated=(1, 2),
    layers=0,
    width=2,
    narrow=2,
    leaf_counts=(3,),
    eager_leaves=3,
    small_leaf=10,
    totals=(10,),
    splits=(1,),
    models=((0, 2),),
    network=(2, 2),
    seeds=2,
    scanned=2,
)


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """Runs the command with tiny gradients and returns its report."""
    path = tmp_path_factory.mktemp("bench") / "figures.json"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench, "QUICK", TINY)
        patch.setattr("benchmarks.times.timing.SHORTEST", 0.0)
        # Optax's optimizers mix dtypes.
        with jax.numpy_dtype_promotion("standard"):
            assert bench.main(["--quick", "--large", "--json", str(path)]) == 0
    return json.loads(path.read_text(encoding="utf-8"))


@pytest.mark.slow
def test_report_contains_all_workloads(report):
    assert [section["name"] for section in report["sections"]] == [*bench.WORKLOADS, *bench.LARGE]
    for section in report["sections"]:
        variants = {row["way"] for row in section["rows"]}
        assert {"optaxclip", "Optax"} <= variants


@pytest.mark.slow
def test_report_contains_finite_positive_times(report):
    for section in report["sections"]:
        for row in section["rows"]:
            figures = {name: row[name] for name in row.keys() - {"case", "way"}}
            assert set(figures) <= set(COLUMNS)
            assert all(0 < row["ms"][key] < math.inf for key in ("median", "low", "high"))
            for figure in figures.values():
                numbers = figure.values() if isinstance(figure, dict) else [figure]
                assert all(math.isfinite(number) for number in numbers if number is not None)


@pytest.mark.slow
def test_report_contains_documented_cases(report):
    cases = {
        section["name"]: {row["case"] for row in section["rows"]} for section in report["sections"]
    }
    assert {f"3 leaves, {phase}" for phase in ("trace", "lower", "compile", "run")} == cases[
        "leaves"
    ]
    assert len(cases["steps"]) == 4
    assert len(cases["clip"]) == 2
    large = {"18,436 elements, float32", "3 leaves of 10, float32"}
    assert cases["large clips"] == cases["large steps"] == large


def select_methods(monkeypatch, names):
    """Restricts the benchmark to a few methods."""

    def build_some(*args):
        return {name: pair for name, pair in build_method_steps(*args).items() if name in names}

    monkeypatch.setattr(methods, "build_method_steps", build_some)


def measure_methods(path, monkeypatch, *options, dtypes=("float32",)):
    """Returns the rows of the command, and the reported cases."""
    reported = []
    monkeypatch.setattr(bench, "QUICK", dataclasses.replace(TINY, dtypes=dtypes))
    monkeypatch.setattr(bench, "_show_progress", lambda: contextlib.nullcontext(reported.append))
    monkeypatch.setattr("benchmarks.times.timing.SHORTEST", 0.0)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        assert bench.main(["--methods", "--quick", "--out", str(path), *options]) == 0
    return list(csv.DictReader(path.read_text().splitlines())), reported


def test_methods_benchmark_times_methods_once(tmp_path, monkeypatch, capsys):
    path = tmp_path / "rows.csv"
    select_methods(monkeypatch, {"zclip", "skip_nonfinite"})
    assert measure_methods(path, monkeypatch, "--minutes", "0") == ([], [])
    assert "Missing (run the command again): 6 figures" in capsys.readouterr().out
    rows, reported = measure_methods(path, monkeypatch)
    trees = ["18,436 elements", "2 networks, 2 steps", "3 leaves of 10"]
    pairs = [f"{tree}, float32: {name}" for tree in trees for name in ("zclip", "skip_nonfinite")]
    assert reported == pairs
    for row in rows:
        assert float(row["low"]) <= float(row["adds, ms"]) <= float(row["high"])
        assert 0 < float(row["step, ms"]) < math.inf
    theirs = {row["method"]: (row["Optax's"], bool(row["Optax's adds, ms"])) for row in rows}
    assert theirs == {
        "skip_nonfinite": ("apply_if_finite", True),
        "zclip": ("clip_by_global_norm", True),
    }
    assert measure_methods(path, monkeypatch) == (rows, [])
    lines = capsys.readouterr().out.splitlines()
    assert "18,436 elements, float32" in lines[0]
    assert lines[-1].startswith("| skip_nonfinite |")


@pytest.mark.slow
def test_methods_benchmark_times_all_methods(tmp_path, monkeypatch, capsys):
    rows, _ = measure_methods(tmp_path / "rows.csv", monkeypatch, dtypes=("float32", "bfloat16"))
    names = {*build_methods(), "clip_by_spectral_norm"}
    assert {row["method"] for row in rows} == names
    assert len(rows) == 6 * len(names)
    assert "Missing" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--json"], "expected one argument"),
        (["--json", "no/such/folder/x.json"], "cannot write no/such/folder/x.json: No such file"),
        (["--json", "."], "cannot write .: Is a directory"),
        (["--fast"], "unrecognized arguments: --fast"),
    ],
)
def test_benchmark_command_rejects_invalid_options(options, message, capsys):
    with pytest.raises(SystemExit) as stop:
        bench.main(options)
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert message in error


def test_time_calls_alternates_between_implementations():
    calls = []
    variants = {name: lambda name=name: calls.append(name) for name in "abc"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("benchmarks.times.timing.SHORTEST", 0.0)
        times = time_calls(variants, 4)
    rounds = np.reshape(calls[-12:], (4, 3))
    assert all(sorted(names) == ["a", "b", "c"] for names in rounds)
    assert len({tuple(names) for names in rounds}) > 1
    assert {len(samples) for samples in times.values()} == {4}


def test_compute_ratio_compares_times_of_same_round():
    x, y = np.array([2.0, 4.0, 9.0]), np.array([1.0, 4.0, 3.0])
    assert compute_ratio(x, y) == Spread(2.0, 1.5, 2.5)
    assert compute_ratio(x, -y) is None


def test_median_lies_between_quartiles():
    for x, y in np.random.default_rng(0).lognormal(size=(100, 2, 5)):
        for found in (summarize(x - y), compute_ratio(x, y), compute_ratio(x - y, y)):
            assert found.low <= found.median <= found.high


def test_program_continues_from_last_result():
    grads = fill_tree(build_leaves(3, 4), np.float32)
    reading = Program(read_grads, np.float32(0), grads)
    reading()
    reading()
    total = sum(float(leaf.sum()) for leaf in grads)
    assert float(reading.carry) == pytest.approx(2 * total)


def test_programs_with_shared_memory_continue_previous_results():
    memory = {"x": np.ones(3, np.float32), "one": np.float32(1), "sum": np.float32(0)}
    double = InPlaceProgram(lambda carry: (2 * carry[0], carry[1]), memory, ("x", "one"))
    total = InPlaceProgram(lambda carry, x: (carry[0] + x.sum(),), memory, ("sum",), ("x",))
    for variant in (double, total, double, total):
        variant()
    assert float(memory["sum"]) == 3 * (2 + 4)


@pytest.mark.parametrize(
    ("backend", "options", "is_large"),
    [("cpu", [], False), ("cpu", ["--large"], True), ("gpu", [], True), ("tpu", [], True)],
)
def test_large_workloads_run_on_accelerators_or_request(backend, options, is_large, monkeypatch):
    measured = []
    monkeypatch.setattr(bench, "measure", lambda workloads, effort, log: measured.append(workloads))
    monkeypatch.setattr("jax.default_backend", lambda: backend)
    assert bench.main(options) == 0
    assert (bench.LARGE.keys() <= measured[0].keys()) == is_large


def test_large_steps_skip_workloads_beyond_memory(monkeypatch):
    monkeypatch.setattr("benchmarks.times.large.get_free_bytes", lambda: 1000.0)
    rows = measure_large_steps(dataclasses.replace(TINY, leaf_counts=(30,)), print)
    assert {row.variant for row in rows} == {"left out: too large for the free memory"}
    assert not any(row.figures for row in rows)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_fill_tree_gradients_have_documented_norm(dtype):
    squares = [
        np.square(np.asarray(leaf, np.float64)) for leaf in fill_tree(build_leaves(9, 10**4), dtype)
    ]
    assert np.sqrt(np.sum(squares)) == pytest.approx(NORM, rel=1e-2)


def test_transformer_workload_has_expected_shapes():
    shapes = fill_tree(build_transformer(6, 8), np.float32)
    assert len(shapes["layers"]) == 6
    assert shapes["layers"][0]["up"]["kernel"].shape == (8, 32)


def test_section_formats_markdown_table():
    rows = [Row("a case", "ours", {"ms": Spread(1.234, 1.0, 2.0), "extra_memory": None})]
    lines = Section("x", "A title", rows, load=0.5).to_markdown().splitlines()
    assert lines[0] == "### A title"
    assert lines[2].split("|")[3].strip() == "ms"
    assert "| 1.23 (1 to 2) |" in lines[4]
    assert len({len(line) for line in lines[2:]}) == 1


def test_section_reports_loaded_machine(monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    rows = [Row("a case", "ours", {"ms": Spread(1.234, 1.0, 2.0)})]
    for load, said in [(4.0, False), (4.1, True), (None, False)]:
        section = Section("x", "A title", rows, load)
        assert ("LOADED" in section.to_markdown().splitlines()[2]) == said
        assert section.to_json()["load"] == load
    monkeypatch.setattr("os.getloadavg", lambda: (5.25, 1.0, 1.0), raising=False)
    assert "5.2 on 4 cores" in Section("x", "A title", rows, get_load_average()).to_markdown()

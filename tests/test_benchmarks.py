"""Checks that benchmarks for CPUs ignore accelerator plugins, and that rows are kept."""

import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import per_example
from benchmarks.example_models import build_mlp

ROOT = Path(__file__).parents[1]
MICROBATCHES = "vmap, microbatches"
OURS = {MICROBATCHES, "vmap", "ghost"}


def test_accelerator_benchmarks_run_on_cpu():
    """JAX with a CUDA plugin would look for a GPU and fail."""
    code = "import benchmarks.accelerators.__main__, jax; print(jax.config.jax_platforms)"
    environment = {key: x for key, x in os.environ.items() if key != "JAX_PLATFORMS"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout == "cpu\n"


@pytest.mark.parametrize("ours", [{MICROBATCHES}, pytest.param(OURS, marks=pytest.mark.slow)])
def test_per_example_benchmark_keeps_measured_rows(ours, tmp_path, monkeypatch, capsys):
    path = tmp_path / "rows.csv"
    options = ["--ours", "--models", "mlp", "--rounds", "2", "--microbatches", "4"]
    options += ["--out", str(path)]
    made = per_example.build_variants

    def build_variants(*args):
        return {
            variant: x
            for variant, x in made(*args).items()
            if variant in {per_example.PLAIN, *ours}
        }

    monkeypatch.setattr(per_example, "build_variants", build_variants)
    monkeypatch.setitem(per_example.MODELS, "mlp", lambda dtype: build_mlp(dtype, (4, 3), 8))
    monkeypatch.setattr("benchmarks.times.timing.SHORTEST", 0.0)
    per_example.main([*options, "--minutes", "0"])
    assert capsys.readouterr().out.endswith("(run the command again): mlp\n")
    per_example.main(options)
    printed = capsys.readouterr().out
    rows = {row["way"]: row for row in csv.DictReader(path.read_text().splitlines())}
    assert set(rows) == {per_example.PLAIN, *ours}
    assert rows[MICROBATCHES]["microbatches"] == "4"
    assert float(rows[per_example.PLAIN]["time"]) == 1.0
    assert all(float(row["time"]) > 0 for row in rows.values())
    monkeypatch.setattr(per_example, "measure", lambda *_: pytest.fail("measured again"))
    per_example.main(options)
    assert capsys.readouterr().out == printed

"""The README's code runs as written."""

import importlib
import inspect
import re
from pathlib import Path

import jax
import pytest
import shown_code

README = Path(__file__).parents[1] / "README.md"
BLOCKS = shown_code.blocks("README.md")


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.strip().splitlines()[-1][:40])
def test_readme_code_runs(block):
    shown_code.run(block, "README.md")


@pytest.mark.parametrize("first", ["", "optaxclip.monitor.record(1000), "])
def test_quick_start_reports_norm_and_factor(first):
    assert "optaxclip.monitor.record(1000)` first in the chain. After" in README.read_text("utf-8")
    block = BLOCKS[0].replace("optax.chain(", f"optax.chain({first}")
    shown = shown_code.run(block, "README.md")
    if first:
        (norm,) = shown["optaxclip"].monitor.history(shown["state"])
        assert norm == 5.0
    scalars = shown["scalars"]
    assert scalars["clip_by_global_norm/norm"] == 5.0
    assert scalars["clip_by_global_norm/factor"] == pytest.approx(0.2)


def test_readme_contains_code():
    assert BLOCKS


def test_commands_create_virtual_environment():
    """Debian's Python refuses to install packages elsewhere; `.ci/run` runs the first command."""
    (text,) = re.findall(r"```sh\n(.*?)```", README.read_text("utf-8"), re.DOTALL)
    commands = [line for line in text.splitlines() if not line.startswith("#")]
    assert len(commands) == 2
    begin = "python3 -m venv .venv && . .venv/bin/activate && pip install "
    assert all(command.startswith(begin) for command in commands)
    assert commands[0].endswith(" && python examples/demo.py")


@pytest.mark.parametrize("page", ["README.md", "docs/index.md", "docs/which.md"])
def test_demo_runs_recommended_line(page):
    demo = importlib.import_module("examples.demo")
    line = inspect.getsource(demo.recommended).rpartition("return ")[2]
    blocks = ["".join(block.split()) for block in shown_code.blocks(page)]
    assert sum(f"tx={''.join(line.split())}" in block for block in blocks) == 1


def test_readme_has_at_most_120_lines():
    assert len(README.read_text("utf-8").splitlines()) <= 120


@pytest.mark.parametrize("path", re.findall(r"\]\((?!https)([^)]+)\)", README.read_text()))
def test_readme_links_exist(path):
    assert (README.parent / path.partition("#")[0]).is_file()


def test_figure_text_stays_legible_on_phones(monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.syspath_prepend(README.parent / "docs")
    pictures = importlib.import_module("pictures")
    inches = pictures.LETTERS["font.size"] / 72
    assert 350 * inches / pictures.WIDTH > 10  # of 350 pixels


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:there are only .* norms", "ignore:ordinary norms reach")
def test_pictures_script_draws_all_figures(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    docs = README.parent / "docs"
    monkeypatch.syspath_prepend(docs)
    pictures = importlib.import_module("pictures")
    smaller = {"DOCS": tmp_path, "STEPS": 20, "SWEEP_STEPS": 10, "THRESHOLDS": [1.0, 3.0]}
    for name, value in smaller.items():
        monkeypatch.setattr(pictures, name, value)
    for name, value in {"LENGTH": 20, "BATCH": 2, "HELD_OUT_WINDOWS": 2}.items():
        monkeypatch.setattr(pictures.demo, name, value)
    few = ("no clipping", "clip_by_global_norm")
    methods = {name: pictures.demo.METHODS[name] for name in few}
    monkeypatch.setattr(pictures.demo, "METHODS", methods)
    monkeypatch.setattr(pictures, "THRESHOLDS", [1.0, 3.0])
    # With a reader's settings: Optax's Adam needs them.
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        pictures.main()
    of_study = importlib.import_module("benchmarks.research.study.pictures")  # made with its page
    closed = {"batch.png", "example.png", "recovery.png", "guard.png"}  # of programs that left
    drawn = {path.name for path in docs.glob("*.png")} - set(of_study.NAMES) - closed
    assert {path.name for path in tmp_path.iterdir()} == drawn

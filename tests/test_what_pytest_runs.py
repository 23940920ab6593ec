"""`pytest` collects without errors wherever it is told to, and says what it leaves out."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from methods_table import METHODS

TESTS = Path(__file__).parent
SETTINGS = """
[pytest]
testpaths = tests
pythonpath = tests
addopts = -m "not slow" -p no:cacheprovider
markers =
    slow
    by_day
"""
FILES = {
    "pytest.ini": SETTINGS,
    "tests/test_a.py": """
import pytest

@pytest.mark.parametrize("case", range(10))
def test_quick(case): pass

@pytest.mark.slow
@pytest.mark.parametrize("case", range(3))
def test_slow(case): pass

@pytest.mark.by_day(2)
@pytest.mark.parametrize("case", range(5))
def test_some(case): pass
""",
}


@pytest.mark.parametrize(
    ("arguments", "left_out"),
    [
        pytest.param(["-n1"], 6, marks=pytest.mark.slow),
        (["tests/test_a.py"], 6),
        pytest.param(["-k", "test_quick"], 0, marks=pytest.mark.slow),
        pytest.param(["-m", ""], 0, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_pytest_reports_number_of_deselected_cases(arguments, left_out, tmp_path):
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    shutil.copy(TESTS / "conftest.py", tmp_path / "tests")
    command = [sys.executable, "-m", "pytest", *arguments]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert f"{18 - left_out} passed" in done.stdout or "-k" in arguments
    said = f"that were left out: {left_out}. To run all: pytest -m ''"
    assert (said in done.stdout) == ("left out" in done.stdout) == bool(left_out)


def test_pytest_collects_no_scripts_or_hooks():
    """`pytest .` would import them, and fail where the packages of an extra are missing."""
    absent = ("griffe", "jax_privacy", "mkdocs")
    arguments = ["--collect-only", "-q", "-n0", ".", "--ignore=tests", "--ignore=optaxclip"]
    code = f"import pytest, sys; sys.modules |= dict.fromkeys({absent}); pytest.main({arguments})"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=TESTS.parent, capture_output=True, text=True, check=True)
    assert "no tests collected" in done.stdout
    assert "error" not in done.stdout.lower()


@pytest.mark.slow
def test_gpu_marker_covers_contract_and_promises():
    """`test_public_parts.py` says that the contract has all transformations."""
    contract, *others = (
        *("engine/test_contract.py", "engine/test_promises.py", "engine/test_derivatives.py"),
        *("monitor/test_histogram.py", "per_example/ghost/test_ghost_bounds.py"),
    )
    options = ["--collect-only", "-q", "-n0", "-m", "gpu", contract, *others]
    command = [sys.executable, "-m", "pytest", *options]
    done = subprocess.run(command, cwd=TESTS, capture_output=True, text=True, check=True)
    of_each = re.findall(r"test_methods_clip_and_only_shrink\[(.*)\]", done.stdout)
    assert of_each == list(METHODS)
    assert all(f"{file}::" in done.stdout for file in others)

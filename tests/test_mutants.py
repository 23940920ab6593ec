"""Checks the mutation tool on a package with a missing test."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("coverage", reason="benchmarks/mutants needs it")

FOLDER = Path(__file__).parents[1] / "benchmarks" / "mutants"
CODE = '''\
import math

def far(x, *, least=1):
    """Whether it is at least 2."""
    if x < 0:
        raise ValueError(f"{x + 1} is below 0")
    return math.floor(x) > least

def nothing():
    return None
'''
TEST = """\
from optaxclip.tiny import far

def test_far():
    assert far(3.5) and not far(0.5)

def test_nothing():
    pass
"""
KILLED = {
    "if (x >= 0):",
    "if True:",
    "if x < 1:",
    "return (math.floor(x) <= least)",
    "return None",
}
SURVIVORS = {
    "def far(x, *, least=2):",
    "if (x <= 0):",
    "if False:",
    "pass",
    "return (math.ceil(x)) > least",
    "return (math.floor(x) >= least)",
    "return (x) > least",
}


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("git"), reason="the tool lists files with git")
def test_mutants_tool_finds_untested_line(tmp_path):
    files = {"optaxclip/tiny.py": CODE, "tests/test_tiny.py": TEST, "optaxclip/__init__.py": ""}
    for path, text in files.items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(text)
    shutil.copytree(FOLDER, tmp_path / "benchmarks" / "mutants")
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    command = [sys.executable, "-m", "benchmarks.mutants", "optaxclip/tiny.py"]
    found = subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True)
    each, at_the_end = found.stdout.split("undetected mutants:")
    outcomes = {
        mutant.splitlines()[-1][5:].strip(): mutant.split()[1].strip(",")
        for mutant in each.split("\n\n")[:-1]
    }
    expected = dict.fromkeys(KILLED, "killed") | dict.fromkeys(SURVIVORS, "survived")
    assert outcomes == expected | {"pass": "unreached"}
    assert {line[5:].strip() for line in at_the_end.splitlines() if "    +" in line} == SURVIVORS
    assert "tests/test_tiny.py::test_far: optaxclip/tiny.py:6: ValueError" in each
    assert (tmp_path / "optaxclip/tiny.py").read_text() == CODE

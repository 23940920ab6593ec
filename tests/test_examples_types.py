"""What README, site and docstrings show passes Pyright, as it stands in a reader's editor."""

import doctest
import importlib
import json
import pkgutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import shown_code

import optaxclip

ROOT = Path(__file__).parents[1]
COMMANDS = "optaxclip.commands"


def modules():
    names = [info.name for info in pkgutil.walk_packages(optaxclip.__path__, "optaxclip.")]
    public = [name for name in names if "._" not in name and not name.startswith(COMMANDS)]
    return [optaxclip, *map(importlib.import_module, public)]


def examples():
    """The code of the pages' blocks, and of each docstring with an example."""
    found = {}
    for page in (ROOT / "README.md", *ROOT.glob("docs/**/*.md")):
        for i, block in enumerate(shown_code.blocks(page)):
            found[f"page_{page.stem}_{i}"] = block
    finder = doctest.DocTestFinder(exclude_empty=True)
    for module in modules():
        for test in finder.find(module, module.__name__, module=module):
            # The names that a module's own examples take for granted are its public ones.
            prelude = f"from {module.__name__} import *  # pyright: ignore\n"
            source = "".join(example.source for example in test.examples)
            found["of_" + test.name.replace(".", "_")] = prelude + source
    return found


# Nearly all of its time goes into the types of JAX and Flax, however few the examples.
@pytest.mark.slow
def test_examples_pass_pyright(tmp_path):
    if find_spec("pyright") is None:
        pytest.skip("Pyright is not installed")
    for name, source in examples().items():
        (tmp_path / f"{name}.py").write_text(source, "utf-8")
    options = {"extraPaths": [str(ROOT)], "pythonVersion": "3.11", "typeCheckingMode": "standard"}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(options), "utf-8")
    command = [sys.executable, "-m", "pyright", "--pythonpath", sys.executable, "--outputjson"]
    done = subprocess.run([*command, "-p", tmp_path], capture_output=True, text=True, check=False)
    report = json.loads(done.stdout)
    assert report["summary"]["filesAnalyzed"] > 50
    errors = [
        f"{Path(found['file']).name}:{found['range']['start']['line']}: {found['message']}"
        for found in report["generalDiagnostics"]
        if found.get("rule") != "reportMissingImports"  # not every machine has Keras
    ]
    assert not errors, "\n".join(errors)

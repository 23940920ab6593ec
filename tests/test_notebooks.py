"""The notebooks run from top to bottom, and are stored with their outputs."""

import os
from pathlib import Path

import jax
import pytest

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
for package in ("ipykernel", "flax", "sklearn"):
    pytest.importorskip(package)
pyplot = pytest.importorskip("matplotlib.pyplot")

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def read(path):
    return nbformat.read(path, as_version=4)


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


@each_notebook
def test_stored_with_outputs(path):
    notebook = read(path)
    nbformat.validate(notebook)
    cells = code_cells(notebook)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell.outputs]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert not any(output.output_type == "error" for output in outputs)
    assert not any(output.get("name") == "stderr" for output in outputs)
    stored = path.read_text(encoding="utf-8")
    assert not any(place in stored for place in ("/tmp", "/home", "/usr", "/root"))


@pytest.fixture
def as_a_reader(monkeypatch):
    """A reader's settings, and figures that wait to be drawn."""
    monkeypatch.setattr(pyplot, "show", lambda: None)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield
    pyplot.close("all")


@pytest.mark.usefixtures("as_a_reader")
def test_the_first_runs_shortened(capsys):
    """All of them run whole below, as they stand."""
    cells = code_cells(read(ROOT / "notebooks" / "quickstart.ipynb"))
    code = "\n".join(cell.source for cell in cells)
    assert "steps=300" in code
    exec(compile(code.replace("steps=300", "steps=20"), "quickstart", "exec"), {})
    assert pyplot.get_fignums()
    assert not capsys.readouterr().err


# Opening its sockets, the kernel's client warns of what this test does not choose.
@pytest.mark.slow
@pytest.mark.filterwarnings("default")
@each_notebook
def test_runs(path, tmp_path, monkeypatch):
    # The kernel is to import the package that is tested here.
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    notebook = read(path)
    resources = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, timeout=300, resources=resources).execute()
    for cell in code_cells(notebook):
        assert not any(output.get("name") == "stderr" for output in cell.outputs)

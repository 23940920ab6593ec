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
# What makes each of them short, and still a walk through nearly all of its code.
SHORTER = {
    "quickstart": [("steps=300", "steps=20")],
    "exploding_gradients": [
        ("= 40, 32, 1500", "= 8, 4, 100"),
        ("321", "11"),
        ('    "value 0.1": optaxclip.clip(0.1),\n', ""),
        ('    "norm 0.5 (leaf)": optaxclip.clip_by_norm(0.5),\n', ""),
    ],
    "choosing_a_limit": [("= 64, 100, 8, 300", "= 64, 100, 1, 100"), ("1000.0, 12)", "1000.0, 3)")],
    "adaptive_clipping": [
        ("STEPS = 600", "STEPS = 60"),
        ("(STEPS) < 300", "(STEPS) < 30"),
        ("[250:300]", "[25:30]"),
    ],
    "private_training": [
        ("= 256, 352, 150", "= 16, 32, 3"),
        ("0.0, 0.5, 1.0, 2.0, 4.0, 8.0", "0.0, 0.5, 1.0"),
        ('    "limit 0.5": 0.5,\n', ""),
    ],
    "sharded_training": [("= 0.5, 60", "= 0.5, 3")],
    "attention_logits": [
        ("STEPS, RATE, TAU = 400", "STEPS, RATE, TAU = 100"),
        ("32, 4, 16, 12, 32", "8, 2, 4, 3, 4"),
    ],
    "spikes": [
        ("= 400, 200, 100, 0.01", "= 60, 20, 10, 0.01"),
        (
            "in methods.items()}",
            'in methods.items() if name in ("no clip", "skip on norm or loss")}',
        ),
    ],
}
each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def read(path):
    return nbformat.read(path, as_version=4)


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def test_all_are_there():
    assert {path.stem for path in NOTEBOOKS} == set(SHORTER)


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
@each_notebook
def test_runs_shortened(path, capsys):
    code = "\n".join(cell.source for cell in code_cells(read(path)))
    for whole, short in SHORTER[path.stem]:
        assert whole in code
        code = code.replace(whole, short)
    exec(compile(code, path.name, "exec"), {})
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

"""The notebooks run from top to bottom, and are stored with their outputs."""

import importlib
import os
import re
from pathlib import Path

import jax
import numpy as np
import pytest
from cases import slow_unless

nbformat = pytest.importorskip("nbformat")
pyplot = pytest.importorskip("matplotlib.pyplot")

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
FIRST = ROOT / "notebooks" / "quickstart.ipynb"
# Their steps, and fewer: the outputs that are stored show that they ran whole.
STEPS = {
    "adaptive_clipping": ("STEPS = 600", "STEPS = 360"),
    "attention_logits": ("STEPS, RATE, TAU = 400", "STEPS, RATE, TAU = 40"),
    "choosing_a_limit": ("STEPS = 64, 100, 8, 300", "STEPS = 64, 100, 8, 150"),
    "exploding_gradients": ("STEPS, RATE = 40, 32, 1500", "STEPS, RATE = 40, 32, 100"),
    "private_training": ("STEPS = 256, 352, 150", "STEPS = 256, 352, 15"),
    "quickstart": ("steps=300", "steps=20"),
    "sharded_training": ("STEPS = 0.5, 60", "STEPS = 0.5, 6"),
    "spikes": ("STEPS, AT, LONG, RATE = 400, 200, 100", "STEPS, AT, LONG, RATE = 60, 30, 15"),
}


def read(path):
    return nbformat.read(path, as_version=4)


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_contain_valid_outputs(path):
    notebook = read(path)
    nbformat.validate(notebook)
    assert 'pip install ".[notebooks]"' in notebook.cells[0].source
    cells = code_cells(notebook)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell.outputs]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert not any(output.output_type == "error" for output in outputs)
    assert not any(output.get("name") == "stderr" for output in outputs)
    stored = path.read_text(encoding="utf-8")
    assert not any(place in stored for place in ("/tmp", "/home", "/usr", "/root", " at 0x"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_share_plot_style(path):
    """With the colours of `optaxclip.plots`, and room for what stands around the axes."""
    code = "\n".join(cell.source for cell in code_cells(read(path)))
    assert "plt.show(" not in code
    assert '"tab:' not in code
    assert code.count("plt.subplots(") == code.count('layout="constrained"')


def shortened(path):
    """The notebook of fewer steps."""
    notebook = read(path)
    whole, short = STEPS[path.stem]
    (cell,) = (cell for cell in code_cells(notebook) if whole in cell.source)
    cell.source = cell.source.replace(whole, short)
    return notebook


@pytest.fixture
def as_a_reader(monkeypatch, tmp_path):
    """A reader's settings, a folder of its own, and figures that wait to be drawn."""
    for package in ("flax", "sklearn"):
        pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(pyplot, "show", lambda: None)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield
    pyplot.close("all")


# In this process, which has imported all that eight kernels would import anew.
@pytest.mark.usefixtures("as_a_reader")
@pytest.mark.parametrize(
    "path", slow_unless(lambda path: path == FIRST, NOTEBOOKS), ids=lambda path: path.stem
)
def test_notebooks_run_with_fewer_steps(path, capsys):
    code = "\n".join(cell.source for cell in code_cells(shortened(path)))
    exec(compile(code, path.stem, "exec"), {})
    assert pyplot.get_fignums()
    for number in pyplot.get_fignums():
        pyplot.figure(number).canvas.draw()
    assert not capsys.readouterr().err


NUMBER = re.compile(r"[-+]?(?:\d[\d,]*\.?\d*|\.\d+)(?:e[-+]?\d+)?")


def printed(cell):
    """What a cell printed, without its numbers, and the numbers."""
    text = "".join(x.text for x in cell.outputs if x.output_type == "stream")
    numbers = [float(x.replace(",", "")) for x in NUMBER.findall(text)]
    return NUMBER.sub("#", re.sub(r" +|-{2,}", " ", text)), np.array(numbers)


@pytest.mark.parametrize(
    "path", slow_unless(lambda path: path == FIRST, NOTEBOOKS), ids=lambda path: path.stem
)
def test_notebooks_reproduce_stored_output(path, monkeypatch, tmp_path):
    """In a kernel, compiled as a reader's: another way of rounding leads a long run elsewhere."""
    for package in ("flax", "sklearn", "ipykernel", "nbclient"):
        pytest.importorskip(package)
    for name in [name for name in os.environ if name.startswith(("JAX_", "XLA_"))]:
        monkeypatch.delenv(name)
    stored, today = read(path), read(path)
    resources = {"metadata": {"path": str(tmp_path)}}
    importlib.import_module("nbclient").NotebookClient(today, resources=resources).execute()
    compared = 0
    for before, cell in zip(code_cells(stored), code_cells(today), strict=True):
        (text, numbers), (wanted, expected) = printed(cell), printed(before)
        assert text == wanted
        np.testing.assert_allclose(numbers, expected, rtol=0.05, atol=1e-6)
        compared += numbers.size
    assert compared

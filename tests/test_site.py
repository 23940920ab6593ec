"""The site: its code runs, it has every public name, its menu every page."""

import ast
import importlib
import importlib.util
import inspect
import operator
import re
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
import shown_code
from cases import slow_unless
from public_names import public

import optaxclip

ROOT = Path(__file__).parents[1]
PAGES = {
    path.relative_to(ROOT).as_posix(): path.read_text("utf-8")
    for path in sorted((ROOT / "docs").rglob("*.md"))
}
ELSEWHERE = {"docs/muon.md", "docs/recovery.md"}
ELSEWHERE |= {"docs/recipes/modules.md", "docs/recipes/skipped.md"}
"""What `test_muon.py`, `test_recovery.py`, `test_modules.py`, `test_kept_where_skipped.py` run."""
HERE = [page for page in PAGES if page not in ELSEWHERE]
ALL_BLOCKS = [(page, block) for page in HERE for block in shown_code.blocks(page)]
# Keras asks for its backend once in a process; `wandb` starts a server for its own.
ALONE = {
    name: next(block for _, block in ALL_BLOCKS if f", {name}" in block)
    for name in ("keras", "wandb")
}
BLOCKS = [(page, block) for page, block in ALL_BLOCKS if block not in ALONE.values()]
REFERENCE = re.findall(r"^- \[`optaxclip\.(\S+)`\]", "\n".join(PAGES.values()), re.MULTILINE)
MENU = (ROOT / "mkdocs.yml").read_text("utf-8").split("\nnav:\n")[1]


def packages_of(block):
    """The packages that a block imports."""
    nodes = list(ast.walk(ast.parse(block)))
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module for node in nodes if isinstance(node, ast.ImportFrom)}
    return {name.split(".")[0] for name in names}


def skip_without_packages(block):
    """Skips the test if a package that the block imports is not installed."""
    if missing := {name for name in packages_of(block) if not importlib.util.find_spec(name)}:
        pytest.skip(f"not installed: {', '.join(sorted(missing))}")


@pytest.mark.by_day(3)
@pytest.mark.parametrize(
    ("page", "block"),
    slow_unless(lambda page, block: "/recipes/" not in page, BLOCKS),
    ids=lambda text: text.strip().splitlines()[-1][:40],
)
def test_site_code_runs(page, block):
    skip_without_packages(block)
    found = shown_code.run(block, page)
    if "losses" in found:
        assert found["losses"][-1] < found["losses"][0] / 2
    if "record" in found:
        record = {name.split("/")[-1]: value for name, value in found["record"].items()}
        assert (record["norm"], record["threshold"]) == (5.0, 1.0)
        assert record["factor"] == pytest.approx(0.2)
    if "norm" in found:
        assert float(found["norm"]) == 5.0
    if "restored" in found:
        jax.tree.map(np.testing.assert_array_equal, found["restored"], found["state"])
    if "record_of_each" in found:
        assert found["record_of_each"].norm.shape == (4,)
    if "step_taken" in found:
        np.testing.assert_allclose(found["step_taken"], [-0.5, -0.25], rtol=1e-6)
    if "scaled_loss" in block:
        log = found["log"]
        assert log["scale_loss/num_skipped"] > 0
        assert log["scale_loss/loss_scale"] == 2.0 ** (17 - log["scale_loss/num_skipped"])
    if "suggestion" in found:
        assert found["suggestion"].threshold > np.median(found["norms"])
    if "epsilon" in found:
        assert 5.0 < found["epsilon"] < 10.0
    if "split" in found:
        assert found["params"].sharding.is_equivalent_to(found["split"], 1)
    if "norm_over_all" in found:
        entries = sum(leaf.size for leaf in found["grads"].values())
        np.testing.assert_allclose(found["norm_over_all"], entries**0.5, 1e-6)
    if "last_factor" in found:
        assert found["last_factor"] == pytest.approx(0.4)
    if "unit_norms" in found:
        np.testing.assert_allclose(found["unit_norms"], found["unit_thresholds"], 1e-6)
    if "status" in found:
        assert found["status"] == "skipped"
    if "bad" in found:
        assert found["bad"] == ("b",)
        assert not any(update.any() for update in found["updates"].values())


@pytest.mark.slow
@pytest.mark.parametrize("name", ALONE)
def test_keras_and_wandb_code_runs_in_subprocess(name):
    skip_without_packages(ALONE[name])
    code = f"{ALONE[name]}\nassert losses[-1] < losses[0] / 2\n"
    if name == "wandb":
        code += "assert logged['clip_by_global_norm/threshold'] == 1.0\n"
        # The summary has no last step before the run ends. Three entries alike share a bin.
        code += "shown = dict(logged['histogram/w'])\n"
        code += "low, high = shown['bins']\n"
        code += "assert list(shown['values']) == [3] and high == low + 1 <= 1, shown\n"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


# What these packages are called where they are installed.
CALLED = {
    "dp_accounting": "dp-accounting",
    "haiku": "dm-haiku",
    "hydra": "hydra-core",
    "orbax": "orbax-checkpoint",
    "yaml": "pyyaml",
}
NEEDED = {"jax", "numpy", "optax", "optaxclip", *sys.stdlib_module_names}


@pytest.mark.parametrize("page", PAGES)
def test_pages_list_required_packages(page):
    used = {name for block in shown_code.blocks(page) for name in packages_of(block)} - NEEDED
    said = set(" ".join(re.findall(r"`pip install ([^`]*)`", PAGES[page])).split())
    assert {CALLED.get(name, name) for name in used} <= said


def test_site_code_fits_page_width():
    """At 1280 pixels there is room for 85 letters."""
    shown = {
        page: "\n".join(shown_code.blocks(page) + shown_code.blocks(page, "text"))
        for page in ("README.md", *PAGES)
    }
    long = [(page, x) for page, code in shown.items() for x in code.splitlines() if len(x) > 85]
    assert not long


def test_site_contains_code():
    assert len(BLOCKS) >= 25


def test_reference_documents_all_public_names():
    documented = {id(operator.attrgetter(name)(optaxclip)) for name in REFERENCE}
    names = public()
    assert len(names) > 100
    assert not [name for name, value in names.items() if id(value) not in documented]


def test_method_tables_list_all_methods():
    pages = "\n".join(PAGES[f"docs/api/{name}.md"] for name in ("transformations", "per_example"))
    tables = "\n".join(re.findall(r"^\|[^\n]*one norm per.*?\n\n", pages, re.DOTALL | re.MULTILINE))
    named = set(re.findall(r"`(\w+)`", "".join(re.findall(r"^\| .*? \|", tables, re.MULTILINE))))
    methods = {name for name, value in public().items() if inspect.isfunction(value)}
    missing = {name for name in methods if "." not in name} - named
    assert missing == {"clip_by", "clip_tree"}  # which make all of them


def test_readme_table_lists_eight_methods():
    text = (ROOT / "README.md").read_text("utf-8")
    (table,) = re.findall(r"^\| method \| purpose \|\n.*?\n\n", text, re.DOTALL | re.MULTILINE)
    named = re.findall(r"^\| `([\w.]+)` \|", table, re.MULTILINE)
    assert len(named) == 8
    assert set(named) <= set(public())


def test_reference_documents_names_once():
    assert len(set(REFERENCE)) == len(REFERENCE)


def test_pages_cite_no_line_numbers():
    """They move with every commit there: the name of the function stays."""
    found = {
        page: re.findall(r"\.(?:py|ya?ml):\d+|\bline \d+", text) for page, text in PAGES.items()
    }
    assert not {page: places for page, places in found.items() if places}


def test_menu_lists_all_pages_and_notebooks():
    pages = [page.removeprefix("docs/") for page in PAGES]
    notebooks = [f"notebooks/{path.name}" for path in ROOT.glob("notebooks/*.ipynb")]
    missing = {page for page in (*pages, *notebooks) if f": {page}\n" not in MENU}
    assert missing == {"evidence_figures.md"}  # which the page on evidence links


def test_menu_titles_stay_unique():
    titles = re.findall(r"^ *- (.+?):", MENU, re.MULTILINE)
    assert len(titles) > 30
    assert len(set(titles)) == len(titles)


@pytest.fixture
def docstrings(monkeypatch):
    pytest.importorskip("griffe", reason="of the extra docs, which CI installs")
    monkeypatch.syspath_prepend(ROOT / "docs")
    return importlib.import_module("docstrings")


def test_docstrings_convert_to_markdown(docstrings):
    text = (
        "Title of `optaxclip.clip` (`docs/faq.md`).\n\n"
        "As in::\n\n  a = 1\n\n  b = 2\n\nText.\n\n  x | y\n  --|--\n  1 | 2\n\n"
        "Source: arXiv\n2502.11034.\n\n"
        "Args:\n  x: what\n    it is.\n\nExample:\n  >>> 1\n  1\n\n  >>> 2\n  2"
    )
    assert docstrings.as_markdown(text) == (
        'Title of <autoref identifier="optaxclip.clip" optional>`optaxclip.clip`</autoref>'
        " ([FAQ](../faq.md))."
        "\n\nExamples:\n  >>> 1\n  1\n\n  >>> 2\n  2\n"
        "\n\nAs in:\n\n```text\na = 1\n\nb = 2\n```\n\nText.\n\n"
        "```text\nx | y\n--|--\n1 | 2\n```\n\n"
        "Source: [arXiv 2502.11034](https://arxiv.org/abs/2502.11034).\n\n"
        "Args:\n  x: what\n    it is.\n"
    )


def test_reference_lists_shared_options_once(docstrings):
    import griffe

    extensions = griffe.load_extensions(docstrings.Docstrings)
    package = griffe.load("optaxclip", extensions=extensions)
    text = package["transforms.norm_clips.clip_by_norm"].docstring.value
    assert "**options: `norm='l2'`, `nonfinite='nan'`, `strict=False`" in text
    assert "optaxclip.NormOptions" in text
    assert "checkify" not in text  # what they mean stands on a page of its own
    # What all of a kind say is added by decorators.
    assert text.count("Returns:") == text.count("Raises:") == 1
    assert "A `ThresholdRule`" in package["thresholds._averages.zscore"].docstring.value


def test_reference_shows_default_values(docstrings):
    from griffe import load_extensions, temporary_visited_package

    files = {"a.py": "SIZE = 3", "b.py": "from p.a import SIZE\ndef f(x=SIZE, y=None): ..."}
    extensions = load_extensions(docstrings.Docstrings)
    with temporary_visited_package("p", files, extensions=extensions) as package:
        defaults = [str(parameter.default) for parameter in package["b.f"].parameters]
    assert defaults == ["3", "None"]

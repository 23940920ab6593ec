"""Tables of the site say what they are, so that its styles can lay them out for narrow windows."""

import importlib
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[1] / "docs"
LONG = "a text of several words, which fills a column that is as wide as a phone, and more"


@pytest.fixture
def responsive(monkeypatch):
    monkeypatch.syspath_prepend(DOCS)
    return importlib.import_module("tables").responsive


def test_responsive_tables_label_text_cells(responsive):
    head = "<tr><th>what</th><th>a &amp; b</th></tr>"
    page = f"<p>x</p><table>{head}<tr><td>1</td><td>{LONG}</td></tr></table>"
    assert responsive(page) == (
        f"<p>x</p><table data-cards>{head}"
        f'<tr><td data-title="what">1</td><td data-title="a &amp; b">{LONG}</td></tr></table>'
    )


def test_responsive_tables_mark_figures_and_skip_others(responsive):
    figures = "<table><tr><th>ms</th></tr><tr><td><code>1.00</code> / 2.00</td></tr></table>"
    assert responsive(figures) == figures.replace("<table>", "<table data-figures>")
    between = figures.replace("1.00", LONG[:50])
    assert responsive(between) == between


def test_annotations_link_types_of_reference(monkeypatch):
    monkeypatch.syspath_prepend(DOCS)
    linked = importlib.import_module("annotations").linked
    ours = '<span title="optaxclip._base.types.PyTree">PyTree</span>'
    jax = '<span title="jax.Array">Array</span>'
    plain = '<span title="str">str</span>'
    assert linked(f"{ours} {jax} {plain}", "../types/", ["PyTree"]) == (
        '<a href="../types/#pytree" title="optaxclip._base.types.PyTree">PyTree</a>'
        ' <a href="https://docs.jax.dev/en/latest/_autosummary/jax.Array.html" title="jax.Array">'
        f"Array</a> {plain}"
    )


def test_styles_define_cards_and_figures():
    styles = (DOCS / "extra.css").read_text("utf-8")
    assert "table[data-cards]" in styles
    assert "table[data-figures]" in styles

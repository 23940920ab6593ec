"""What the site says of its methods rests on something measured, or says that it does not."""

import re
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"


def rows():
    """Returns the cells of the tables of methods in "Choosing a method"."""
    text = (DOCS / "which.md").read_text("utf-8")
    head = re.escape("| method | use for | notes and evidence |\n|---|---|---|\n")
    tables = re.findall(rf"{head}((?:\|.*\n)+)", text)
    lines = "".join(tables).splitlines()
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def test_method_table_rows_link_evidence():
    table = rows()
    assert len(table) > 20
    for method, _, text in table:
        assert re.search(r"\]\([\w/]+\.md", text) or text.endswith("Not in the study."), method


def test_method_table_links_study():
    anchors = {
        anchor
        for _, _, text in rows()
        for anchor in re.findall(r"evidence_figures\.md#([\w-]+)", text)
    }
    assert {
        "zclip",
        "adagc",
        "adaptive_grad_clip",
        "skip_above",
        "clip_by_global_norm-best",
    } <= anchors

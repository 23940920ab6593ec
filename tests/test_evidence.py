"""What the site says of its methods rests on something measured, or says that it does not."""

import re
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"


def rows():
    """The cells of the tables of methods in "Choosing a method"."""
    lines = (DOCS / "which.md").read_text("utf-8").splitlines()
    table, inside = [], False
    for line in lines:
        inside = line.startswith("|") and (inside or line == "| method | use for | notes and evidence |")
        if inside and line.startswith("| ["):
            table.append([cell.strip() for cell in line.strip("|").split(" | ")])
    return table


def test_every_row_of_which_method_has_evidence_or_says_that_there_is_none():
    table = rows()
    assert len(table) > 20
    for method, _, text in table:
        assert re.search(r"\]\([\w/]+\.md", text) or text.endswith("Not in the study."), method


def test_the_study_is_linked():
    anchors = {
        anchor
        for _, _, text in rows()
        for anchor in re.findall(r"evidence_figures\.md#([\w-]+)", text)
    }
    assert {"zclip", "adagc", "agc", "skip-above", "constant-best"} <= anchors

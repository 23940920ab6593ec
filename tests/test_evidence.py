"""What the site says of its methods rests on something measured, or says that it does not."""

import re
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"


def rows():
    """The cells of the first table of "Which method?"."""
    lines = (DOCS / "which.md").read_text("utf-8").splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("| what you see"))
    table = []
    for line in lines[first:]:
        if not line.startswith("|"):
            break
        table.append([cell.strip() for cell in line.strip("|").split("|")])
    head, _, *body = table
    return head, body


def test_every_row_of_which_method_has_evidence_or_says_that_there_is_none():
    head, body = rows()
    assert head[-1] == "evidence"
    assert len(body) > 20
    for row in body:
        assert re.search(r"\]\([\w/]+\.md", row[-1]) or row[-1].startswith("none"), row[0]


def test_the_study_is_linked():
    linked = {
        anchor
        for row in rows()[1]
        for anchor in re.findall(r"evidence_figures\.md#([\w-]+)", row[-1])
    }
    assert {"zclip", "adagc", "agc", "skip-above", "constant-best"} <= linked

"""Every link of README, pages and notebooks leads somewhere, in the repository and on the site."""

import importlib
import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/**/*.md", "benchmarks/**/*.md"]


def text_of(path):
    text = path.read_text("utf-8")
    if path.suffix != ".ipynb":
        return text
    cells = (cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "markdown")
    return "\n\n".join("".join(cell["source"]) for cell in cells)


PAGES = {
    path.relative_to(ROOT).as_posix(): text_of(path)
    for pattern in (*FILES, "notebooks/*.ipynb")
    for path in sorted(ROOT.glob(pattern))
}


@pytest.fixture
def links(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs")
    return importlib.import_module("links")


@pytest.fixture
def inner(links):
    """Each page with each of its links that stays in the repository."""
    pairs = [(page, link) for page, text in PAGES.items() for link in links.links(text)]
    return [(page, link) for page, link in pairs if not links.is_elsewhere(link)]


def defines(path, name):
    """Whether a file defines a public name, or is the module of that name."""
    if path.with_suffix("").as_posix().removesuffix("/__init__").endswith(name.replace(".", "/")):
        return True
    last = name.rpartition(".")[2]
    definition = rf"^(def|class) {last}\b|^{last}\b.* = "
    return bool(re.search(definition, path.read_text("utf-8"), re.MULTILINE))


def test_links_lead_to_repository_files_and_headings(links, inner):
    assert len(inner) > 100
    broken = []
    for page, link in inner:
        path, anchor = links.of_repository(link, page)
        file = ROOT / path
        if file.suffix == ".py":
            found = file.is_file() and defines(file, anchor)
        else:
            found = file.is_file() and (not anchor or anchor in links.anchors(PAGES[path]))
        if not found:
            broken.append((page, link))
    assert not broken


def test_links_lead_to_site_pages_and_headings(links, inner):
    names, broken = links.places_of_names(), []
    pages = {links.site_path(page): text for page, text in PAGES.items() if links.site_path(page)}
    known = {page: links.anchors(text) for page, text in pages.items()}
    for name, page in names.items():
        known[page].add(name)
    for page, link in inner:
        if links.site_path(page):
            path, anchor = links.of_site(link, page, names) or ("", "")
            is_file = path.endswith((".png", ".csv"))
            is_file = is_file and any((folder / path).is_file() for folder in (ROOT, ROOT / "docs"))
            if not is_file and (path not in known or (anchor and anchor not in known[path])):
                broken.append((page, link))
    assert not broken


def test_reference_pages_contain_no_directives():
    stubs = re.findall(
        r"^(docs/api/.*): *(:::.*)$",
        "\n".join(f"{page}: {line}" for page, text in PAGES.items() for line in text.splitlines()),
        re.MULTILINE,
    )
    assert not stubs, "a link to the file of the name, as in the lines beside it"


def test_links_rewrite_repository_paths_for_site(links):
    text = "[a](../CONTRIBUTING.md#rules) [b](../optaxclip/ops.py#optaxclip.ops.clip_by_norm)"
    text += " [c](https://a.b) [d](which.md)\n```text\n[e](../CONTRIBUTING.md)\n```\n"
    assert links.rewritten(text, "docs/new.md") == (
        "[a](CONTRIBUTING.md#rules) [b](api/ops.md#optaxclip.ops.clip_by_norm)"
        " [c](https://a.b) [d](which.md)\n```text\n[e](../CONTRIBUTING.md)\n```\n"
    )
    assert links.rewritten("[a](docs/adding.md)", "CONTRIBUTING.md") == "[a](adding.md)"


def test_links_rewrite_reference_lines_to_directives(links):
    text = (
        "## Norms\n\n- [`optaxclip.norms`](../../optaxclip/norms.py#optaxclip.norms)\n"
        "- [`optaxclip.norms.lp`](../../optaxclip/norms.py#optaxclip.norms.lp)\n"
    )
    assert links.rewritten(text, "docs/api/engine.md") == (
        "## Norms {#optaxclip.norms}\n\n"
        f"::: optaxclip.norms\n{links.OF_MODULE}\n::: optaxclip.norms.lp\n\n"
    )


def test_links_find_broken_links_of_site(links, tmp_path):
    page = '<h1 id="top">a</h1><a href="#top">1</a><a href="#no">2</a><img src="no.png">'
    others = '<a href="there/">3</a><a href="there/#no">4</a><a href="https://a.b/#c">5</a>'
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "index.html").write_text("")
    (tmp_path / "index.html").write_text(page + others)
    broken = [f"index.html: {link}" for link in ("#no", "no.png", "there/#no")]
    assert links.broken_of_site(tmp_path) == broken

"""What the site shows from outside of `docs/`, and where its links lead."""

import html
import logging
import re
import sys
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from mkdocs.utils import get_relative_url

# MkDocs runs this file outside of any package.
sys.path += [str(Path(__file__).parent), str(Path(__file__).parents[1])]

import annotations
import links
import tables

from benchmarks.research.study import figures

WIDE = {
    "evidence_figures.md": ["navigation"],
}
"""What leaves its place to tables."""
# The search finds guides before the reference, and tables, lists and notebooks last. The first
# pattern that matches a page counts.
BOOSTS = {
    re.compile(r"numbers|privacy"): 16.0,
    re.compile(r"limit\.md|recipes/(logs|precision)"): 10.0,
    re.compile(r"layers|muon|where|coming|recipes/loops"): 8.0,
    re.compile(r"faq|which|recipes/|devices|recovery|batch|example"): 4.0,
    re.compile(
        r"evidence_figures|CHANGELOG|benchmarks/|trainers|upstream|notebooks/"
    ): 0.001,
}
HEADING = re.compile(r"^## (\w+)$", re.MULTILINE)
HREF = re.compile(r'(?<=<a href=")[^"]+')


@event_priority(100)  # before the plugin that makes pages of notebooks
def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages and notebooks under the names that they have in the repository."""
    notebooks = (
        path.relative_to(links.ROOT) for path in links.ROOT.glob("notebooks/*.ipynb")
    )
    for name in (*links.BESIDE, *sorted(path.as_posix() for path in notebooks)):
        files.append(
            File(name, str(links.ROOT), config.site_dir, config.use_directory_urls)
        )
    return files


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """The links of the repository become the site's; the page of figures gets its tables."""
    if page.file.src_uri == "evidence_figures.md":
        markdown = figures.add_tables(
            markdown, figures.read(links.ROOT / "docs" / "evidence.csv")
        )
    page.meta["hide"] = WIDE.get(page.file.src_uri, [])
    for pages, boost in BOOSTS.items():
        if pages.match(page.file.src_uri):
            page.meta["search"] = {"boost": boost}
            break
    return links.rewritten(markdown, _path(page))


def on_page_content(content: str, page: Page, files: Files, **_: object) -> str:
    """Tables for narrow windows too; of notebooks, which are not made of Markdown, the links."""
    if not page.file.src_uri.endswith(".ipynb"):
        return tables.responsive(content)

    def replaced(match: re.Match[str]) -> str:
        link = html.unescape(match[0])
        found = (
            None
            if links.is_elsewhere(link)
            else links.of_site(link, _path(page), {})
        )
        file = found and not found[1] and files.get_file_from_path(found[0])
        return file.url_relative_to(page.file) if file else match[0]

    return HREF.sub(replaced, content)


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Types as links, once those that have a place in the reference lead there."""
    if not page.file.src_uri.startswith("api/"):
        return output
    described = (Path(config.docs_dir) / "api" / "types.md").read_text("utf-8")
    there = get_relative_url("api/types/", page.url)
    return annotations.linked(output, there, HEADING.findall(described))


def on_post_build(config: MkDocsConfig) -> None:
    """Follows every link of the site; under `--strict` one that leads nowhere is an error."""
    for link in links.broken_of_site(Path(config.site_dir).resolve()):
        logging.getLogger("mkdocs.hooks.links").warning(
            "A link leads nowhere: %s", link
        )


def _path(page: Page) -> str:
    """That of the page's file in the repository."""
    return (
        Path(page.file.abs_src_path or "")
        .resolve()
        .relative_to(links.ROOT)
        .as_posix()
    )

"""What the site shows from outside of `docs/`: pages, notebooks, sections of the README."""

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
PAGES = (
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "benchmarks/README.md",
    "benchmarks/accelerators/README.md",
)


@event_priority(100)  # before the plugin that makes pages of notebooks
def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages and notebooks under the names that they have in the repository."""
    notebooks = (path.relative_to(ROOT).as_posix() for path in ROOT.glob("notebooks/*.ipynb"))
    for name in (*PAGES, *sorted(notebooks)):
        files.append(File(name, str(ROOT), config.site_dir, config.use_directory_urls))
    return files


def on_page_markdown(markdown: str, **_: object) -> str:
    """Puts the README's section in the place of `<!-- README: its title -->`."""
    return re.sub(r"<!-- README: (.+) -->", lambda found: section(found[1]), markdown)


def section(title: str) -> str:
    """The README's text under a heading, with links as they are from `docs/`.

    Raises:
      ValueError: if there is no such heading.
    """
    readme = (ROOT / "README.md").read_text("utf-8")
    found = re.search(
        rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", readme, re.MULTILINE | re.DOTALL
    )
    if not found:
        raise ValueError(f"README.md has no section {title!r}")
    return found[1].replace("](docs/", "](")

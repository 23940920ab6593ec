"""What the site shows from outside of `docs/`: pages and notebooks."""

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

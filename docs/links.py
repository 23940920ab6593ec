"""Links of the pages, which lead somewhere in the repository and on the site.

Pages are written for the repository: a link is the path of a file there, and what the reference
says of a name is a link to the file that defines it, `norm_clips.py#optaxclip.clip_by_norm`. On
the site the same link leads to the page made of the file, or to the name in the reference.
"""

import posixpath
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag

ROOT = Path(__file__).parents[1]
BESIDE = (
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "benchmarks/README.md",
    "benchmarks/accelerators/README.md",
    "benchmarks/accelerators/aims.csv",
    "benchmarks/measured/accelerators_counts.csv",
    "benchmarks/measured/accelerators_to_compile.csv",
    "benchmarks/measured/gpu_norms.csv",
    "benchmarks/measured/scale_cpu.csv",
    "benchmarks/research/README.md",
    "benchmarks/research/recommended.md",
)
"""Pages and data of the site that are not in `docs/`; notebooks are in the same places as here."""

TARGET = re.compile(r"(?<=\]\()[^)\s]+(?=\))")
FENCE = re.compile(r"(^ *```.*?^ *```$)", re.MULTILINE | re.DOTALL)
HEADING = re.compile(r"^#+ (.*?)\s*$", re.MULTILINE)
# A line of the reference: a name, and the file that defines it.
ITEM = re.compile(
    r"^- \[`(?P<name>optaxclip[\w.]*)`\]\((?:\.\./)+(?P<path>\S+\.py)#(?P=name)\)$",
    re.MULTILINE,
)
WITH_TITLE = re.compile(
    rf"(?:^(?P<title>#+ .*)\n\n)?{ITEM.pattern}\n?", re.MULTILINE
)
OF_MODULE = "    options: {members: false, show_root_heading: false, show_root_toc_entry: false}\n"


def of_repository(link: str, page: str) -> tuple[str, str]:
    """Path and anchor in the repository, of a link on a page that lies at the path `page`."""
    path, anchor = urldefrag(link)
    there = posixpath.join(posixpath.dirname(page), path) if path else page
    return posixpath.normpath(there), anchor


def is_elsewhere(link: str) -> bool:
    """Whether a link leads out of the repository."""
    return bool(re.match(r"[a-z]+:", link))


def site_path(path: str) -> str | None:
    """What the site calls a file of the repository; None if it has none of it."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return path if path in BESIDE or path.endswith(".ipynb") else None


def places_of_names() -> dict[str, str]:
    """The page of the reference, as the site calls it, for each name."""
    pages = sorted((ROOT / "docs" / "api").glob("*.md"))
    texts = {f"api/{page.name}": page.read_text("utf-8") for page in pages}
    return {
        name: page for page, text in texts.items() for name, _ in ITEM.findall(text)
    }


def of_site(link: str, page: str, names: dict[str, str]) -> tuple[str, str] | None:
    """Path and anchor on the site of the same link; None where the site has nothing of it."""
    path, anchor = of_repository(link, page)
    if path.endswith(".py"):
        return (names[anchor], anchor) if anchor in names else None
    there = site_path(path)
    return None if there is None else (there, anchor)


def rewritten(text: str, page: str) -> str:
    """A page's Markdown for the site: its links, and its part of the reference."""
    if page.startswith("docs/api/"):
        text = WITH_TITLE.sub(_reference, text)
    names, here = places_of_names(), site_path(page) or page

    def replaced(match: re.Match[str]) -> str:
        link = match[0]
        found = None if is_elsewhere(link) else of_site(link, page, names)
        if found is None:
            return link
        path, anchor = found
        relative = posixpath.relpath(path, posixpath.dirname(here) or ".")
        return ("" if path == here and anchor else relative) + (
            anchor and f"#{anchor}"
        )

    parts = FENCE.split(text)
    parts[::2] = [TARGET.sub(replaced, part) for part in parts[::2]]
    return "".join(parts)


def _reference(match: re.Match[str]) -> str:
    """What the site's reader of code understands, in the place of a line of the reference."""
    name, path, title = match["name"], match["path"], match["title"]
    if path.removesuffix(".py").removesuffix("/__init__").replace("/", ".") != name:
        return f"{title}\n\n::: {name}\n\n" if title else f"::: {name}\n\n"
    # Of a package the title is its heading, below which stands what the package is for.
    return f"{title} {{#{name}}}\n\n::: {name}\n{OF_MODULE}\n"


def links(text: str) -> Iterator[str]:
    """What the links of a Markdown page lead to, but for those in blocks of code."""
    for part in FENCE.split(text)[::2]:
        yield from TARGET.findall(part)


def anchors(text: str) -> set[str]:
    """Those of a Markdown page's headings, as hosts of repositories and our site make them."""
    titles = (
        title for part in FENCE.split(text)[::2] for title in HEADING.findall(part)
    )
    plain = (
        re.sub(r"\[([^]]*)\]\([^)]*\)|[`*]", r"\1", title).lower()
        for title in titles
    )
    return {re.sub(r"[^\w\- ]", "", title).replace(" ", "-") for title in plain}


class _Page(HTMLParser):
    """The links and anchors of a page of the site."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = {""}
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.anchors |= {found[key] or "" for key in ("id", "name") if key in found}
        if link := found.get({"a": "href", "img": "src"}.get(tag, "")):
            self.links.append(link)


def broken_of_site(folder: Path) -> list[str]:
    """The links of a built site that lead nowhere, each as `page: link`."""
    pages = {path: _Page(path.read_text("utf-8")) for path in folder.rglob("*.html")}
    broken = []
    for path, page in pages.items():
        for link in (
            link for link in page.links if not is_elsewhere(link) and link[0] != "/"
        ):
            place, anchor = urldefrag(link)
            target = (path.parent / unquote(place)).resolve() if place else path
            target = target / "index.html" if target.is_dir() else target
            known = pages[target].anchors if target in pages else {""}
            if not target.is_file() or unquote(anchor) not in known:
                broken.append(f"{path.relative_to(folder)}: {link}")
    return broken

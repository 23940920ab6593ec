"""What the site's reader of code makes of ours: docstrings in Markdown, and defaults."""

import importlib
import inspect
import re
import textwrap
from pathlib import Path
from typing import Any

import griffe

from optaxclip._base.validation import add_default_sections, parse_sections

ROOT = Path(__file__).parents[1]
OPTIONS = "\n  **options: "
SECTION = re.compile(r"^(Args|Attributes|Returns|Raises|Example):$", re.MULTILINE)
# What `::` leads in, and tables with their lines of dashes.
INDENTED = re.compile(r"(?::(:)\n\n|(?<=\n\n))((?:  .*\n)+(?:\n+(?:  .*\n)+)*)")

# A name in full is a link, where the reference has it, and so is a paper's number.
# Griffe may hand over a docstring twice.
NAME = re.compile(r"(?<!optional>)`(optaxclip(?:\.\w+)+)`")
# A page is named as in the repository. All docstrings are on pages of `api/`.
PAGE = re.compile(r"`(docs/([\w/]+)\.md)`")
PAPER = re.compile(r"(?<!\[)\barXiv[:\s]\s*(\d{4}\.\d{4,5})")
EXAMPLE = re.compile(r"^Example:\n((?:  .*\n|\n)+)", re.MULTILINE)


class Docstrings(griffe.Extension):
    """Puts the example behind the first sentence, and makes a block of code of what is indented."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrites the docstring of an object that was loaded."""
        if obj.docstring:
            text = obj.docstring.value
            is_public = obj.is_function and not obj.name.startswith("_")
            if is_public and obj.parent and obj.parent.is_module:
                _, found = parse_sections(inspect.getdoc(_live(obj)))
                shared = {x: found[x] for x in ("Returns", "Raises") if x in found}
                text = add_default_sections(text, shared)
            obj.docstring.value = as_markdown(text)

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Names the options, and shows the values of constants that are defaults."""
        modules: list[griffe.Object] = [pkg]
        while modules:
            members = [
                found
                for found in modules.pop().members.values()
                if not found.is_alias
            ]
            modules += [found for found in members if found.is_module]
            for function in members:
                if function.docstring and OPTIONS in function.docstring.value:
                    function.docstring.value = _named(function)
                for parameter in getattr(function, "parameters", ()):
                    if isinstance(parameter.default, griffe.ExprName):
                        path = parameter.default.canonical_path.removeprefix(
                            f"{pkg.name}."
                        )
                        if pkg[path].is_attribute:
                            parameter.default = str(pkg[path].value)


def _named(function: griffe.Function) -> str:
    """The docstring with the names and defaults of its options, which one page explains."""
    live = _live(function)
    own = {x.name for x in function.parameters}
    names = [
        f"`{name}={x.default!r}`"
        for name, x in inspect.signature(live).parameters.items()
        if name not in own
    ]
    text = function.docstring.value if function.docstring else ""
    return text.replace(OPTIONS, f"{OPTIONS}{', '.join(names)}: ")


def _live(function: griffe.Object) -> Any:
    """The function, imported: decorators add to its docstring what others of its kind say too."""
    return getattr(importlib.import_module(function.module.path), function.name)


def as_markdown(text: str) -> str:
    """A docstring with the example second, links, and fences where its text is indented."""
    text = NAME.sub(r'<autoref identifier="\1" optional>`\1`</autoref>', text) + "\n"
    text = PAPER.sub(r"[arXiv \1](https://arxiv.org/abs/\1)", text)
    text = PAGE.sub(_page_link, text)
    section = SECTION.search(text)
    begin = section.start() if section else len(text)
    head, rest = INDENTED.sub(_fenced, text[:begin]), text[begin:]
    example = EXAMPLE.search(rest)
    if example:
        first, blank, others = head.partition("\n\n")
        head = f"{first}\n\nExamples:\n{example[1].rstrip()}\n{blank}{others}"
        rest = rest.replace(example[0], "")
    return f"{head.rstrip()}\n\n{rest}".rstrip() + "\n"


def _page_link(match: re.Match[str]) -> str:
    """Returns a link to a page of the site, with the page's title."""
    title = (
        (ROOT / match[1]).read_text("utf-8").partition("\n")[0].removeprefix("# ")
    )
    return f"[{title}](../{match[2]}.md)"


def _fenced(block: re.Match[str]) -> str:
    lead = ":\n\n" if block[1] else ""
    return f"{lead}```text\n{textwrap.dedent(block[2])}```\n"

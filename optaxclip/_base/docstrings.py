"""What all functions of a kind say in their docstrings, written once."""

import inspect
import re
from collections.abc import Mapping

ORDER = ("Args", "Returns", "Raises", "Example")
_BEGIN = re.compile(rf"\n\n(?=(?:{'|'.join(ORDER)}):\n)")


def parse_sections(text: str | None) -> tuple[str, dict[str, str]]:
    """What stands in front of a docstring's sections, and these by their titles."""
    front, *found = _BEGIN.split(inspect.cleandoc(text or ""))
    return front, {section.partition(":")[0]: section for section in found}


def add_default_sections(text: str | None, sections: Mapping[str, str]) -> str:
    """A docstring with those of the sections that it lacks."""
    front, own = parse_sections(text)
    found = {**sections, **own}
    return "\n\n".join([front, *(found[title] for title in ORDER if title in found)])

"""Plain data, whatever it comes in."""

from collections.abc import Sequence
from typing import Any


def with_whole_keys(mapping: dict[Any, Any]) -> dict[Any, Any]:
    """The same, with ints for the keys that are whole numbers in text."""
    return {
        int(key) if isinstance(key, str) and key.isdecimal() else key: value
        for key, value in mapping.items()
    }


def plain(config: Any) -> Any:
    """The same in dicts and lists, whatever mappings and lists it comes in; tuples stay."""
    if hasattr(config, "keys") and hasattr(config, "__getitem__"):
        return {key: plain(config[key]) for key in config.keys()}  # noqa: SIM118
    if type(config) is tuple:
        return tuple(map(plain, config))
    if isinstance(config, Sequence) and not isinstance(config, (str, bytes, tuple)):
        return [plain(each) for each in config]
    return config


def says(value: Any, key: str) -> bool:
    """Whether a value is a mapping with text under a key."""
    return isinstance(value, dict) and isinstance(value.get(key), str)


def is_number(text: str) -> bool:
    """Whether a text is one that Python would read as a number."""
    try:
        float(text)
    except ValueError:
        return False
    return True

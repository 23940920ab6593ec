"""Plain data: turns mappings and lists of any type into dicts and lists."""

import math
from collections.abc import Sequence
from typing import Any


def with_integer_keys(mapping: dict[Any, Any]) -> dict[Any, Any]:
    """The mapping, with ints in place of the keys that are strings of digits."""
    return {
        int(key) if isinstance(key, str) and key.isdecimal() else key: value
        for key, value in mapping.items()
    }


def plain(config: Any) -> Any:
    """The data, with dicts for all mappings and lists for all sequences; tuples stay."""
    if hasattr(config, "keys") and hasattr(config, "__getitem__"):
        return {key: plain(config[key]) for key in config.keys()}  # noqa: SIM118
    if type(config) is tuple:
        return tuple(map(plain, config))
    if isinstance(config, Sequence) and not isinstance(config, (str, bytes, tuple)):
        return [plain(each) for each in config]
    return config


def says(value: Any, key: str) -> bool:
    """Whether a value is a dict with a string under this key."""
    return isinstance(value, dict) and isinstance(value.get(key), str)


def spelling(number: str) -> str:
    """The end of an error message: how YAML spells a number that Python reads from this string."""
    if math.isfinite(float(number)):
        return "YAML reads 1e-3, which has no point, as a string: write 1.0e-3"
    return "YAML reads inf and nan, which have no point, as strings: write .inf or .nan"


def is_number(text: str) -> bool:
    """Whether Python can read a string as a number."""
    try:
        float(text)
    except ValueError:
        return False
    return True

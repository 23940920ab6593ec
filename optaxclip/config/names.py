"""Public functions by name, and the types of their arguments, read from signatures."""

import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping
from types import ModuleType
from typing import Any, get_args, get_origin


def makers(
    module: ModuleType, returns: Callable[[Any], bool], prefix: str = ""
) -> dict[str, Callable[..., Any]]:
    """The public functions of a module, by name, whose return annotation `returns` accepts."""
    found = {}
    for name in dir(module):
        fn = getattr(module, name)
        if name.startswith(("_", "as_", "from_")):
            continue
        if not inspect.isfunction(inspect.unwrap(fn)):
            continue
        signature = inspect.signature(fn, eval_str=True)
        is_variadic = any(p.kind == p.VAR_POSITIONAL for p in signature.parameters.values())
        if returns(signature.return_annotation) and not is_variadic:
            found[prefix + name] = fn
    return found


def parts_of(annotation: Any) -> list[Any]:
    """An annotation, and all types within it: members of a union, elements of containers."""
    annotation = getattr(annotation, "__value__", annotation)  # what a named alias stands for
    if get_origin(annotation) is Callable:
        return [annotation]
    of_elements = get_args(annotation)[1 if get_origin(annotation) is Mapping else 0 :]
    return [annotation, *(part for each in of_elements for part in parts_of(each))]


def unknown(name: str, names: Iterable[str]) -> str:
    """The end of an error message: a name that does not exist, and the names that do."""
    names = sorted(names)
    near = [other for other in names if other.rpartition(".")[2] == name]
    close = difflib.get_close_matches(name, names, cutoff=0.5)
    near += [other for other in close if other not in near]
    rest = [other for other in names if other not in near]
    # Optax's more than a hundred names are not listed, because its documentation has them.
    is_theirs = name.startswith("optax.")
    listed = [other for other in rest if other.startswith("optax.") == is_theirs]
    others = "" if is_theirs or listed == rest else ", and those of Optax, such as 'optax.adamw'"
    return f"{name!r}; there are {near + listed}{others}"

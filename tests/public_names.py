"""What the package offers, found by its `__all__`: tables and pages are compared with it."""

import inspect

import optaxclip


def public():
    """The public functions, classes and constants by name, those of the namespaces too."""
    found = {}
    for name in (name for name in dir(optaxclip) if not name.startswith("_")):
        value = getattr(optaxclip, name)
        found |= members(name, value) if inspect.ismodule(value) else {name: value}
    return found


def members(name, module):
    """What a namespace offers: all of a package, of a file what it does not import."""
    whole = hasattr(module, "__path__")
    return {
        f"{name}.{key}": value
        for key, value in vars(module).items()
        if not key.startswith("_")
        and not inspect.ismodule(value)
        and (whole or getattr(value, "__module__", None) == module.__name__)
    }

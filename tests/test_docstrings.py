"""Public docstrings say what comes back, of which shape, and what is raised; `dir` shows them."""

import inspect
import re

import jax
import numpy as np
import pytest
from public_names import public

import optaxclip
from optaxclip._engine.options import document_options

NAMESPACES = ["accumulate", "ops", "thresholds", "responses", "monitor", "per_example", "tuning"]


def functions(module):
    """The public functions that a module offers, but for those that it only uses itself."""
    for name, value in vars(module).items():
        if not name.startswith("_") and inspect.isfunction(value):
            whose = "optaxclip" if hasattr(module, "__path__") else module.__name__
            if value.__module__.startswith(whose):
                yield f"{module.__name__}.{name}", value


PUBLIC = dict(functions(optaxclip))
for namespace in NAMESPACES:
    PUBLIC |= functions(getattr(optaxclip, namespace))
# It takes any pytree.
RAISES_NOTHING = {"optaxclip.monitor.read"}
# Their shapes are those of their arguments, as the module says.
del PUBLIC["optaxclip.responses.clip"], PUBLIC["optaxclip.responses.normalize"]
del PUBLIC["optaxclip.responses.smooth"], PUBLIC["optaxclip.responses.as_response"]
each_function = pytest.mark.parametrize("name", PUBLIC)


def section(name, title):
    text = inspect.getdoc(PUBLIC[name])
    found = re.search(rf"^{title}:\n((?:  .*\n|\n)+)", text + "\n\n", re.MULTILINE)
    return found and found[1]


@each_function
def test_docstrings_describe_return_values_and_shapes(name):
    returned = inspect.signature(PUBLIC[name]).return_annotation
    assert (returned is None) or section(name, "Returns")
    if returned in (jax.Array, "Array") or getattr(returned, "__origin__", None) is np.ndarray:
        assert re.search(r"\w\[.*\]", section(name, "Returns")), "which shape?"


@each_function
def test_docstrings_list_exceptions(name):
    if inspect.signature(PUBLIC[name]).parameters and name not in RAISES_NOTHING:
        assert re.search(r"^  \w+(Error|Warning): ", section(name, "Raises") or "", re.MULTILINE)


def test_dir_lists_public_names():
    assert len(PUBLIC) > 50
    shown = {name for name in dir(optaxclip) if not name.startswith("__")}
    namespaces = {*NAMESPACES, "norms", "plots", "scopes"}
    types = {
        "ClipByValueState",
        "ClipInfo",
        "ClipState",
        "Thresholds",
        "SkipState",
        "ThresholdRule",
    }
    types |= {"Heads", "LossScaleState", "StableAdamState"}
    types |= {"SecondMomentState"}
    types |= {f"{kind}Options" for kind in ("Clip", "Norm", "Rescale", "Sharding", "Transform")}
    assert shown == namespaces | types | {name.split(".")[1] for name in functions_of_the_top()}


def test_shared_options_appear_in_docstrings():
    """As on Python 3.13 and later."""

    def clip(threshold, **options):
        del threshold, options

    clip.__doc__ = (
        "Clips.\n\nArgs:\n  threshold: a number.\n  **options: all.\n\nReturns:\n  A tree."
    )
    before, after = document_options(optaxclip.ShardingOptions)(clip).__doc__.split("\n\nReturns:")
    assert re.findall(r"^  (\S+): ", before, re.MULTILINE) == [
        "threshold",
        "axis_name",
        "specs",
        "name",
    ]
    assert after == "\n  A tree."


def functions_of_the_top():
    return [name for name in PUBLIC if name.count(".") == 1]


def test_signatures_show_array_like():
    """And does not write out the union of all that JAX or NumPy takes for one."""
    signatures = {
        name: str(inspect.signature(value))
        for name, value in public().items()
        if inspect.isfunction(value)
    }
    assert sum("ArrayLike" in text for text in signatures.values()) > 50
    written_out = ("numpy.bool", "_SupportsArray")
    assert not [name for name, text in signatures.items() if any(x in text for x in written_out)]

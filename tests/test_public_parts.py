"""Each table of tests and pages has every public part of its kind: a new one cannot be left out.

What a table leaves out on purpose stands beside it, with the reason.
"""

import functools
import inspect
import re
import runpy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import methods_table
import parts_table
import pytest
import reference_rules
from public_names import public
from wrong_values import WRONG_VALUES

import optaxclip
from benchmarks import every_method
from optaxclip import monitor, norms, responses, scopes, thresholds
from optaxclip.monitor._record import STATISTICS

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "optaxclip"
FUNCTIONS = {name: value for name, value in public().items() if inspect.isfunction(value)}


def returning(namespace: str, kind: Any) -> set[str]:
    """The public functions of a namespace, or of the top level (""), that return this kind."""
    found = {}
    for name, function in FUNCTIONS.items():
        place, _, short = name.rpartition(".")
        if place == namespace and not short.startswith(("as_", "from_")):
            found[short] = inspect.signature(function, eval_str=True).return_annotation
    return {name for name, returned in found.items() if kind(returned)}


def is_transformation(returned: Any) -> bool:
    return "Transformation[" in str(returned)


# The names of each kind. `given` is for thresholds at hand, and `adaptive` makes rules.
KINDS = {
    "rule": returning("thresholds", lambda x: x is optaxclip.ThresholdRule) - {"fixed", "adaptive"},
    "norm": returning("norms", lambda x: x is norms.Norm)
    | {value.name for value in vars(norms).values() if isinstance(value, norms.Norm)},
    "response": returning("responses", lambda _: True),
    "scope": returning("scopes", lambda x: x == scopes.Scope),
    "transformation": returning("", is_transformation),
    "recorder": returning("monitor", is_transformation),
    "function of a tree": returning("ops", lambda _: True),
    "statistic": {*STATISTICS},
}
KINDS["rule that learns"] = KINDS["rule"] - {"constant", "schedule", "relative_to_params"}
KINDS["argument of a rule"] = {
    f"{rule}({argument})"
    for rule in KINDS["rule that learns"]
    for argument, x in inspect.signature(getattr(thresholds, rule)).parameters.items()
    if not isinstance(x.default, bool)  # whose tests are in tests/engine/test_flags.py
    and argument not in {*inspect.signature(thresholds.adaptive).parameters, "max_norm"}
}
KINDS["package"] = {
    *(f"{path.parent.name}/" for path in PACKAGE.glob("*/__init__.py")),
    *(path.name for path in PACKAGE.glob("*.py") if path.name != "__init__.py"),
}


class Table(NamedTuple):
    """What a table has of a kind, and what it may leave out, with the reasons."""

    kind: str
    names: Callable[[], Any]
    without: Mapping[str, str] = {}


@functools.cache
def loaded(path: str) -> dict[str, Any]:
    """What a test file defines."""
    return runpy.run_path(str(ROOT / "tests" / path))


def cases(path: str, test: str) -> Any:
    """The values of a test's only parameter."""
    (values,) = (x.args[1] for x in loaded(path)[test].pytestmark if x.name == "parametrize")
    return values


def made_by(*makers: Any) -> set[str]:
    return {getattr(make, "func", make).__name__ for make in makers}


def named_in(text: str, namespace: str = "") -> set[str]:
    """The names of a text: of a namespace, as strings or as code."""
    return {
        *re.findall(rf"\b{namespace or 'optaxclip'}\.(\w+)", text),
        *re.findall(r"[\"`\[ ](\w+)[\"`(\]]", text),
        *re.findall(r"^ *`?(\w+)[^|\n]*\|", text, re.MULTILINE),
    }


def in_code(text: str) -> list[str]:
    return re.findall(r"`([^`\n]+)`", text)


def page(path: str) -> str:
    return (ROOT / path).read_text("utf-8")


def the_map() -> str:
    """The table of packages."""
    return page("CONTRIBUTING.md").split("| package |")[1].split("\n\n")[0]


def row(path: str, begin: str) -> str:
    """A row of a page's table."""
    return next(line for line in page(path).splitlines() if line.startswith(begin))


def methods_made() -> set[str]:
    """The methods that the contract makes, in functions of its own too."""
    factories = [method.factory for method in methods_table.METHODS.values()]
    of_code = {name for f in factories for name in f.__code__.co_names}
    return of_code | {factory.__name__ for factory in factories}


CONTRACT = inspect.getsource(methods_table)
IN_CODE = "no name of its own: a function or value is passed"
OF_EXAMPLES = "takes gradients of examples: tests/per_example"
LABELS = "groups by labels, as `group` does"
MEMBERS = "needs leaves with an axis in common: tests/engine/test_members.py"

TABLES = {
    # Rules.
    "rules: thresholds' docstring": Table("rule", lambda: named_in(thresholds.__doc__)),
    "rules: parts_table": Table("rule", lambda: made_by(*parts_table.RULES.values())),
    "rules: errors for other rules' states": Table(
        "rule",
        lambda: loaded("engine/test_wrong_arguments.py")["RULES"],
        {"relative_to_params": "like a constant, it has no state"},
    ),
    "rules: without a threshold": Table(
        "rule",
        lambda: made_by(*loaded("engine/test_without_limit.py")["RULES"].values()),
        dict.fromkeys(("quantile", "mean_over_rms"), "has a threshold at each step"),
    ),
    "rules: references in NumPy": Table(
        "rule that learns",
        lambda: made_by(*(case.make for case in reference_rules.CASES.values())),
    ),
    "rules: what all must do": Table(
        "rule that learns",
        lambda: made_by(*reference_rules.RULES.values()),
        {"mean_over_rms": "takes no cap: its threshold is a factor to normalize by"},
    ),
    "rules: wrong values of each argument": Table(
        "argument of a rule",
        lambda: {f"{x.rpartition('.')[2]}({y})" for x in WRONG_VALUES for y in WRONG_VALUES[x]},
    ),
    "rules: numbers of any dtype": Table(
        "rule that learns",
        lambda: cases("thresholds/test_rules_numbers.py", "test_rule_arguments_accept_any_dtype"),
    ),
    "rules: norms beyond float32": Table(
        "rule that learns",
        lambda: cases(
            "thresholds/test_rules_wide.py",
            "test_where_all_norms_are_beyond_float32_only_a_threshold_of_the_users_clips",
        ),
        {"mean_over_rms": "normalizes: its threshold does not grow with the norms"},
    ),
    # Norms.
    "norms: docstring": Table("norm", lambda: named_in(norms.__doc__)),
    "norms: options' docstring": Table(
        "norm", lambda: named_in(optaxclip.NormOptions.__doc__), {"lp": IN_CODE}
    ),
    "norms: which.md": Table("norm", lambda: named_in(row("docs/which.md", "| norm"), "norms")),
    "norms: the contract": Table("norm", lambda: named_in(CONTRACT, "norms") | {"l2"}),
    "norms: by name": Table(
        "norm", lambda: cases("engine/test_norms.py", "test_as_norm_accepts_names"), {"lp": IN_CODE}
    ),
    "norms: promises": Table(
        "norm", lambda: {x.split("(")[0] for x in loaded("engine/test_promises.py")["NORMS"]}
    ),
    "norms: derivatives": Table(
        "norm", lambda: {x.split("(")[0] for x in loaded("engine/test_derivatives.py")["NORMS"]}
    ),
    # Responses.
    "responses: docstring": Table("response", lambda: named_in(responses.__doc__)),
    "responses: clip_by's docstring": Table(
        "response", lambda: named_in(optaxclip.clip_by.__doc__), {"clip_with_eps": IN_CODE}
    ),
    "responses: which.md": Table(
        "response", lambda: named_in(row("docs/which.md", "| response"), "responses")
    ),
    "responses: by name": Table(
        "response",
        lambda: cases(
            "engine/test_defaults.py", "test_without_a_threshold_every_response_lets_gradients_be"
        ),
        {"clip_with_eps": IN_CODE},
    ),
    "responses: the contract": Table(
        "response",
        lambda: named_in(CONTRACT, "responses"),
        {
            "normalize": "that of `normalize_by_global_norm`",
            "clip_with_eps": "that of `clip_by_global_norm(eps=)`",
        },
    ),
    "responses: without a threshold": Table(
        "response",
        lambda: {x.split("(")[0] for x in loaded("engine/test_without_limit.py")["RESPONSES"]},
    ),
    # Scopes.
    "scopes: docstring": Table("scope", lambda: named_in(scopes.__doc__)),
    "scopes: which.md": Table("scope", lambda: named_in(row("docs/which.md", "| scope"), "scopes")),
    "scopes: parts_table": Table("scope", lambda: parts_table.SCOPES, {"ensemble_member": MEMBERS}),
    "scopes: the contract": Table(
        "scope", lambda: named_in(CONTRACT, "scopes"), {"ensemble_member": MEMBERS}
    ),
    "scopes: promises": Table(
        "scope",
        lambda: loaded("engine/test_promises.py")["SCOPES"],
        {"ensemble_member": MEMBERS, "muon": LABELS},
    ),
    "scopes: derivatives": Table(
        "scope",
        lambda: loaded("engine/test_derivatives.py")["SCOPES"],
        {"ensemble_member": MEMBERS, "muon": LABELS},
    ),
    # Transformations. README's and the reference's tables are compared in `test_site.py`.
    "transformations: the contract": Table(
        "transformation", methods_made, {"per_example_clip_and_aggregate": OF_EXAMPLES}
    ),
    "transformations: which.md": Table(
        "transformation",
        lambda: named_in(page("docs/which.md")),
        {"per_example_clip_and_aggregate": "the page names the function for most uses"},
    ),
    "transformations: benchmarks": Table(
        "transformation", lambda: {*every_method.build_methods(), *every_method.NOT_CLIPS}
    ),
    # What records and reads.
    "recorders: parts_table": Table(
        "recorder",
        lambda: named_in(inspect.getsource(parts_table), "monitor"),
        {"noise_scale": "needs sums over microbatches: tests/monitor/test_noise_scale.py"},
    ),
    "statistics: docstring": Table("statistic", lambda: named_in(monitor.record.__doc__)),
    "statistics: benchmarks": Table(
        "statistic", lambda: {*every_method.OF_GRADIENTS, *every_method.OF_PARAMETERS}
    ),
    "statistics: over devices": Table(
        "statistic",
        lambda: loaded("devices/test_seeds.py")["STATISTICS"],
        {"ratio": "a quotient of two that are there"},
    ),
    # TensorFlow's functions.
    "functions of a tree: coming.md": Table(
        "function of a tree", lambda: named_in(page("docs/coming.md"), "ops")
    ),
    "functions of a tree: memories": Table(
        "function of a tree", lambda: named_in(page("tests/devices/test_memories.py"), "ops")
    ),
    "functions of a tree: devices": Table(
        "function of a tree",
        lambda: named_in(page("tests/devices/test_seeds.py"), "ops"),
        {"clip_by_value": "has no norm"},
    ),
    # All.
    "packages: CONTRIBUTING's map": Table("package", lambda: in_code(the_map())),
}


@pytest.mark.parametrize("name", TABLES)
def test_tables_cover_all_public_parts(name):
    kind, names, without = TABLES[name]
    assert KINDS[kind]
    missing = KINDS[kind] - {*names()}
    assert missing == {*without}, f"{name}: it lacks {sorted(missing - {*without})}"

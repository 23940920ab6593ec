"""The package's own rules: one direction of imports, small files, documented public names."""

import ast
import graphlib
import inspect
import pathlib
import subprocess
import sys

import pytest

import optaxclip

ROOT = pathlib.Path(optaxclip.__file__).parent
TESTS = pathlib.Path(__file__).parent

# From the lowest up: a room imports from itself and from those before it.
ROOMS = [
    ("_base",),
    ("norms", "scopes", "responses", "nonfinite", "thresholds"),
    ("_engine",),
    ("per_example",),
    ("methods",),
    ("ops",),
    ("monitor",),
    ("accumulate",),
    ("tuning",),
    ("plots",),
    ("config",),
    ("optaxclip",),
    ("commands",),
    ("__main__",),
]
FLOORS = {room: floor for floor, rooms in enumerate(ROOMS) for room in rooms}

PUBLIC = {
    "optaxclip": "clip clip_by_value clip_by_norm clip_by_global_norm clip_by_block_rms "
    "adaptive_grad_clip clip_by_group_norm normalize_by_global_norm normalize_by_norm_history "
    "autoclip zclip adagc "
    "clip_by_median_norm clip_by_quantile clip_by_ema_norm clip_by_window_norm "
    "clip_by_moving_max clip_by_second_moment clip_by_spectral_norm "
    "per_example_global_norm_clip per_example_layer_norm_clip per_example_clip_and_aggregate "
    "skip_nonfinite skip_above clip_by clip_tree scale_by_stable_adam "
    "clip_attention_logits from_config",
    "per_example": "clip_sum clipped_grad quantile_limit adjusted_noise_multiplier",
    "accumulate": "value_and_grad",
    "ops": "global_norm clip_by_value clip_by_norm clip_by_average_norm clip_by_global_norm",
    "scopes": "leaf axes unit group tree muon muon_labels",
    "tuning": "suggest sweep",
    "thresholds": "constant schedule relative_to_params percentile median zscore ema quantile "
    "mean_over_rms",
    "responses": "auto_s band clip_with_eps",
}
TYPES = {
    "ClipByValueState",
    "ClipInfo",
    "ClipState",
    "Heads",
    "Limits",
    "SecondMomentState",
    "SkipState",
    "StableAdamState",
    "Threshold",
}


def module_name(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__") or "optaxclip"


FILES = {module_name(path): path for path in sorted(ROOT.rglob("*.py"))}


def imported(path):
    """The modules of the package that a file imports, wherever in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative import"
            whole = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if inner(name) in FILES else node.module for name in whole]
        else:
            continue
        yield from (inner(name) for name in names if name.split(".")[0] == "optaxclip")


def inner(name):
    return name.removeprefix("optaxclip.")


def floor(name):
    return FLOORS[name.split(".")[0]]


def test_every_room_has_a_floor():
    assert {name.split(".")[0] for name in FILES} == set(FLOORS)


@pytest.mark.parametrize("name", FILES)
def test_imports_go_downwards(name):
    assert not {other for other in imported(FILES[name]) if floor(other) > floor(name)}


def test_imports_make_no_circle():
    graph = {name: set(imported(path)) - {name} for name, path in FILES.items()}
    assert len(list(graphlib.TopologicalSorter(graph).static_order())) == len(FILES)


def test_imports_are_seen():
    assert {"optaxclip", "plots", "commands.demo_task"} <= set(imported(FILES["commands.demo"]))
    assert "thresholds.fixed" in set(imported(FILES["_engine.clip"]))


@pytest.mark.parametrize(
    "path", [*FILES.values(), *sorted(TESTS.rglob("*.py"))], ids=lambda p: p.name
)
def test_files_are_small(path):
    number_of_lines = len(path.read_text().splitlines())
    assert number_of_lines <= 350


def test_no_two_test_files_have_one_name():
    # Pytest imports them by it.
    names = [path.name for path in TESTS.rglob("test_*.py")]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("name", FILES)
def test_no_private_modules_of_others(name):
    assert "._src" not in FILES[name].read_text()


def test_optional_packages_are_not_imported():
    names = {"flax", "matplotlib", "rich", "tensorflow", "torch", "orbax"}
    code = f"import sys, optaxclip; sys.exit(repr({names} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr.strip() == "set()"


@pytest.mark.parametrize(
    ("namespace", "name"),
    [(namespace, name) for namespace, names in PUBLIC.items() for name in names.split()],
)
def test_public_functions_are_documented_with_an_example(namespace, name):
    module = optaxclip if namespace == "optaxclip" else vars(optaxclip)[namespace]
    function = getattr(module, name)
    text = inspect.getdoc(function)
    assert ">>> " in text
    if inspect.signature(function).parameters:
        assert "Args:\n" in text
        documented = text.split("Args:\n")[1].split("\n\n")[0]
        for parameter in inspect.signature(function).parameters:
            assert f"  {parameter}: " in documented


def test_nothing_else_is_public():
    found = {
        name
        for name, value in vars(optaxclip).items()
        if not name.startswith("_") and not inspect.ismodule(value)
    }
    assert found == {*PUBLIC["optaxclip"].split()} | TYPES


@pytest.mark.parametrize(
    "namespace",
    [
        *("ops", "norms", "scopes", "thresholds", "responses"),
        *("accumulate", "monitor", "per_example", "plots", "tuning"),
    ],
)
def test_namespaces_come_with_the_package(namespace):
    assert inspect.ismodule(vars(optaxclip)[namespace])

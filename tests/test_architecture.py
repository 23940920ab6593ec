"""The package's own rules: one direction of imports, small files, documented public names."""

import ast
import graphlib
import inspect
import pathlib
import subprocess
import sys

from public_names import public

import optaxclip

ROOT = pathlib.Path(optaxclip.__file__).parent
TESTS = pathlib.Path(__file__).parent

# From the lowest up: a package imports from itself and from those before it.
PACKAGES = [
    ("_base",),
    ("norms", "responses", "nonfinite", "scopes"),
    ("_backend",),
    ("thresholds", "_loss_arguments"),
    ("_engine",),
    ("transforms", "per_example"),
    ("monitor", "ops"),
    ("accumulate", "tuning"),
    ("plots",),
    ("optaxclip",),
    ("__main__",),
]
FLOORS = {package: floor for floor, packages in enumerate(PACKAGES) for package in packages}


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


def test_packages_have_layers():
    assert {name.split(".")[0] for name in FILES} == set(FLOORS)


def test_imports_point_to_lower_layers():
    pairs = [(name, other) for name, path in FILES.items() for other in imported(path)]
    assert not [(name, other) for name, other in pairs if floor(other) > floor(name)]


def test_imports_contain_no_cycles():
    graph = {name: set(imported(path)) - {name} for name, path in FILES.items()}
    assert len(list(graphlib.TopologicalSorter(graph).static_order())) == len(FILES)


def test_import_finder_sees_known_imports():
    assert {"plots", "tuning"} <= set(imported(FILES["__main__"]))
    assert "thresholds._constant" in set(imported(FILES["_engine.clip"]))


def test_files_have_at_most_500_lines():
    paths = [*FILES.values(), *TESTS.rglob("*.py")]
    lines = {path.name: len(path.read_text().splitlines()) for path in paths}
    assert not {name: number for name, number in lines.items() if number > 500}


def test_test_file_names_stay_unique():
    # Pytest imports them by it.
    names = [path.name for path in TESTS.rglob("test_*.py")]
    assert len(set(names)) == len(names)


BACKEND_ONLY = {"reshard", "auto_axes", "place_on_mesh_of", "use_abstract_mesh"}
BACKEND_ONLY |= {"platform_dependent", "enable_x64"}
KNOWS_PRIMITIVES = "per_example._ghost_primitives"
"""It tells JAX's primitives by their names."""


def names_in(path):
    """What the code of a file names; words of its docstrings are no names."""
    for node in ast.walk(ast.parse(path.read_text())):
        yield from (x for x in vars(node).values() if isinstance(x, str) and x.isidentifier())


def test_the_backend_alone_handles_meshes_platforms_memories():
    inside = {name: set(names_in(path)) for name, path in FILES.items()}
    backend = {x for x in inside if x.startswith("_backend")}
    assert set().union(*(inside[x] for x in backend)) >= BACKEND_ONLY
    others = set(inside) - backend - {KNOWS_PRIMITIVES}
    assert not [(name, found) for name in others if (found := BACKEND_ONLY & inside[name])]


def test_class_names_stay_unique():
    names = [
        node.name
        for path in FILES.values()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
    ]
    assert not {name for name in names if names.count(name) > 1}


def test_package_uses_no_private_jax_modules():
    assert not [name for name, path in FILES.items() if "._src" in path.read_text()]


def test_only_allowed_modules_define_custom_derivatives():
    """Only the class that sees to it may name what JAX loses there."""
    jax_names = {"jax.custom_jvp", "jax.custom_vjp", "jax.custom_derivatives"}
    used = {
        (name, f"{node.value.id}.{node.attr}")
        for name, path in FILES.items()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
    }
    # The taps are differentiated inside of loops in `test_ghost_options.py`.
    allowed = {
        ("_base.derivatives", "jax.custom_jvp"),
        ("per_example._ghost_interpreter", "jax.custom_vjp"),
    }
    assert {(name, of_jax) for name, of_jax in used if of_jax in jax_names} == allowed


def test_optional_packages_load_lazily():
    packages = {"flax", "matplotlib", "rich", "tensorflow", "torch", "orbax"}
    names = packages | {"jax.experimental.sparse", "scipy.sparse"}
    code = f"import sys, optaxclip; sys.exit(repr({names} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr.strip() == "set()"


FUNCTIONS = {name: value for name, value in public().items() if inspect.isfunction(value)}
# Parts that other functions take or are made of; the examples of those show them.
WITHOUT_EXAMPLE = {
    *("norms.as_norm", "responses.as_response", "thresholds.adaptive", "thresholds.fixed"),
    *("responses.clip", "responses.normalize", "responses.smooth"),
}


def test_public_functions_document_arguments_and_examples():
    for name, function in FUNCTIONS.items():
        text = inspect.getdoc(function)
        assert (">>> " in text) == (name not in WITHOUT_EXAMPLE), name
        if inspect.signature(function).parameters and name not in WITHOUT_EXAMPLE:
            assert "Args:\n" in text, name
            documented = text.split("Args:\n")[1].split("\n\n")[0]
            for parameter in inspect.signature(function).parameters:
                assert f"  {parameter}: " in documented, name


def test_dunder_all_lists_public_names():
    found = {name for name in vars(optaxclip) if not name.startswith("_")}
    # Other packages are attributes once somebody, such as another test, has imported them.
    hidden = {"transforms", "nonfinite"}
    assert found - hidden == {*optaxclip.__all__} - {"__version__"}
    assert optaxclip.__all__ == sorted(set(optaxclip.__all__))


def test_namespaces_load_with_package():
    names = {"ops", "norms", "scopes", "thresholds", "responses"}
    names |= {"accumulate", "monitor", "per_example", "plots", "tuning"}
    assert all(inspect.ismodule(vars(optaxclip)[name]) for name in names)

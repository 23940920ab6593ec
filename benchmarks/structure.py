"""Measures the structure of the package: size, names, comments, and calls of a traced update.

python -m benchmarks.structure

Names and comments are counted in all files of `optaxclip/`. A starred call hides its arguments
behind `*` or `**`. For a traced update, only functions of this package count. Comprehensions are
excluded, because Python 3.12 inlines them. For 200 leaves, all calls of Python functions count.
"""

import argparse
import ast
import cProfile
import io
import sys
import tokenize
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax

import optaxclip
from optaxclip.norms import l2

PACKAGE = Path(optaxclip.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))
TEXTS = {path: path.read_text("utf-8") for path in FILES}
TREES = {path: ast.parse(text) for path, text in TEXTS.items()}
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


PREPOSITIONS = _words(
    "across after against among around as at before beside between by for from in into like of on "
    "onto over per to under until with within without"
)
IRREGULAR_PARTICIPLES = _words(
    "brought chosen drawn found given held kept known lost made said seen shown taken told written"
)
NOT_PARTICIPLES = _words("embed need seed speed")
VERBS = _words("""
accepts add align all_reduce allow annotate append apply are assert average bind box broadcast
build call cast check choose clamp clip collect combine compare compute concatenate constrain
convert copy count create decode deduplicate define delete derive describe differentiate dispatch
divide donate draw drop encode ensure estimate evaluate expand expect explain export fetch fill
filter finalize find finish fit flatten forbid force format gather get group handle has hash hide
import infer init inline insert install invert is iter iterate label learn lerp list load log loop
make map mark mask match materialize measure merge mix move multiply name needs negate normalize
order pack pad parse partition pick place plot pmax predict prepare prescale print process
propagate psum put pvary raise ramp read rebind recompute record reduce register remove rename
replace replicate require rescale reset resolve restore return reuse round run sample save scale
scan scatter select set shard should show skip slice sort split squeeze stack start step stop strip
suggest sum summarize supports sweep take test trace track train transform transpose try unbind
unbox unflatten ungroup uninstall unpack unshard unstack update use uses validate view visit vmap
walk warn wrap write zero
""")


def count_levels() -> int:
    """Returns the number of levels of packages, where a package imports from lower levels."""
    imports: dict[str, set[str]] = {}
    for path, tree in TREES.items():
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        unit = "optaxclip" if parts == ("__init__",) else parts[0]
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom):
                modules = [f"{node.module}.{alias.name}" for alias in node.names]
            elif isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            else:
                continue
            ours = {name.split(".")[1] for name in modules if name.startswith("optaxclip.")}
            units = {x for x in ours if (PACKAGE / x).exists() or (PACKAGE / f"{x}.py").exists()}
            imports.setdefault(unit, set()).update(units - {unit})

    def level(unit: str) -> int:
        return 1 + max(map(level, imports.get(unit, ())), default=0)

    return max(map(level, imports))


def name_statistics() -> str:
    """Returns the fractions of function names by the kind of their first word."""
    nodes = [x for tree in TREES.values() for x in ast.walk(tree) if isinstance(x, DEFINITIONS)]
    words = [x.name.strip("_").split("_") for x in nodes if not x.name.startswith("__")]
    first = [word[0] for word in words]
    regular = [x.endswith("ed") and x not in NOT_PARTICIPLES for x in first]
    counts = {
        "one word": sum(len(word) == 1 for word in words),
        "participle first": sum(regular) + sum(x in IRREGULAR_PARTICIPLES for x in first),
        "preposition first": sum(x in PREPOSITIONS for x in first),
        "verb first": sum(x in VERBS for x in first),
    }
    return ", ".join(f"{kind} {count / len(words):.1%}" for kind, count in counts.items())


def comment_ratio(path: Path) -> tuple[int, int]:
    """Returns the number of lines with comments and of lines with code, without docstrings."""
    lines = TEXTS[path].splitlines()
    code = {i for i, line in enumerate(lines, 1) if line.strip() and line.strip()[0] != "#"}
    for node in ast.walk(TREES[path]):
        is_owner = isinstance(node, (ast.Module, ast.ClassDef, *DEFINITIONS))
        if is_owner and ast.get_docstring(node) is not None:
            docstring = node.body[0]
            code -= set(range(docstring.lineno, (docstring.end_lineno or 0) + 1))
    tokens = tokenize.generate_tokens(io.StringIO(TEXTS[path]).readline)
    comments = {token.start[0] for token in tokens if token.type == tokenize.COMMENT}
    return len(comments), len(code)


def count_starred_calls(package: str) -> tuple[int, int]:
    """Returns the number of calls in a package that hide arguments, and of all calls."""
    nodes = [x for path in (PACKAGE / package).rglob("*.py") for x in ast.walk(TREES[path])]
    calls = [x for x in nodes if isinstance(x, ast.Call)]
    stars = [[isinstance(x, ast.Starred) for x in call.args] for call in calls]
    dicts = [[x.arg is None for x in call.keywords] for call in calls]
    return sum(any(x + y) for x, y in zip(stars, dicts, strict=True)), len(calls)


class CallCounter:
    """Counts calls of functions in the package, and their frames above the `map` of the norm."""

    def __init__(self) -> None:
        self.functions: list[tuple[str, str]] = []
        self.depth: int | None = None

    def __call__(self, frame: Any, event: str, _: Any) -> None:
        """Receives the events of `sys.setprofile`."""
        if event == "call" and frame.f_code is l2.map.__code__ and self.depth is None:
            above, self.depth = frame.f_back, 0
            while above is not None:
                self.depth += self._is_counted(above)
                above = above.f_back
        if event == "call" and self._is_counted(frame):
            self.functions.append((frame.f_code.co_filename, frame.f_code.co_qualname))

    @staticmethod
    def _is_counted(frame: Any) -> bool:
        code = frame.f_code
        is_inline = code.co_name.endswith(("comp>", "<genexpr>"))
        return code.co_filename.startswith(str(PACKAGE)) and not is_inline


def trace_update() -> CallCounter:
    """Traces an update of `clip_by_global_norm` on three leaves."""
    tx = optaxclip.clip_by_global_norm(1.0)
    grads = {"w": jnp.ones((3, 4)), "b": jnp.ones(4), "c": jnp.ones(2)}
    state = tx.init(grads)
    jax.clear_caches()
    counter = CallCounter()
    sys.setprofile(counter)
    try:
        jax.make_jaxpr(tx.update)(grads, state, grads)
    finally:
        sys.setprofile(None)
    return counter


def count_trace_calls(tx: optax.GradientTransformation) -> int:
    """Returns the number of Python calls while an update of 200 leaves is traced."""
    grads = {f"{i}": jnp.ones((64, 64) if i % 2 else 64) for i in range(200)}
    update, state = jax.jit(tx.update), tx.init(grads)
    update.lower(grads, state)  # Imports modules of JAX.
    jax.clear_caches()
    profile = cProfile.Profile()
    profile.runcall(update.trace, grads, state)
    return sum(entry.callcount for entry in profile.getstats())


def main() -> None:
    """Prints all figures."""
    argparse.ArgumentParser(description=main.__doc__).parse_args()
    functions = [x for tree in TREES.values() for x in ast.walk(tree) if isinstance(x, DEFINITIONS)]
    packages = sum(path.name == "__init__.py" for path in FILES)
    gerunds = sorted(path.stem for path in FILES if path.stem.endswith("ing"))
    comments, code = map(sum, zip(*map(comment_ratio, FILES), strict=True))
    starred, calls = map(sum, zip(*map(count_starred_calls, ("_engine", "_backend")), strict=True))
    lines = sum(len(text.splitlines()) for text in TEXTS.values())
    print(f"files: {len(FILES)}, lines: {lines:,}, functions: {len(functions):,}", end=", ")
    print(f"packages: {packages}, levels: {count_levels()}")
    print(f"function names: {name_statistics()}")
    print(f"modules in -ing: {len(gerunds)} {gerunds}")
    print(f"comment lines per 100 code lines: {100 * comments / code:.1f}")
    print(f"starred calls per 1,000 in _engine and _backend: {1000 * starred / calls:.0f}")
    counter = trace_update()
    files = len({file for file, _ in counter.functions})
    print(f"traced update on 3 leaves: {len(counter.functions)} calls in {files} files", end=", ")
    print(f"{counter.depth} frames above the first touch of a leaf")
    ours = count_trace_calls(optaxclip.clip_by_global_norm(1.0))
    theirs = count_trace_calls(optax.clip_by_global_norm(1.0))
    print(f"calls to trace 200 leaves: {ours:,}, {ours / theirs:.2f} times Optax's {theirs:,}")


if __name__ == "__main__":
    main()

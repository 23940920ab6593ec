"""How long the way through the library is: lines of its core, and calls of a traced update.

python -m benchmarks.structure

A reader who follows one update meets as many functions, files and frames as are counted here, on a
tree of two leaves. Only calls into the package count, not those into JAX; of a tree of 200 leaves
all calls of Python count, because they are what tracing takes time for. Words are looked for in
names and operators of the code, not in comments and docstrings. A call hides its arguments if one
of them is `*row` or `**how`.
"""

import argparse
import ast
import cProfile
import io
import pstats
import re
import sys
import tokenize
from pathlib import Path

import jax
import jax.numpy as jnp

import optaxclip
from optaxclip.norms import l2

PACKAGE = Path(optaxclip.__file__).parent
ROOMS = ("_engine", "_border", "_base")
OTHERS_BUSINESS = re.compile("mesh|platform|sparse|memor", re.IGNORECASE)
"""What a file of `_engine` should leave to `_border`."""


def lines(room: str) -> int:
    """The lines of a room's files, docstrings and comments included."""
    return sum(len(path.read_text("utf-8").splitlines()) for path in (PACKAGE / room).rglob("*.py"))


def words(path: Path) -> set[str]:
    """The names in a file's code that speak of what is the border's business."""
    tokens = tokenize.generate_tokens(io.StringIO(path.read_text("utf-8")).readline)
    names = {token.string for token in tokens if token.type == tokenize.NAME}
    return {name for name in names if OTHERS_BUSINESS.search(name)}


def hidden_calls(room: str) -> tuple[int, int]:
    """How many calls in a room hide their arguments, and how many calls there are."""
    trees = [ast.parse(path.read_text("utf-8")) for path in (PACKAGE / room).rglob("*.py")]
    calls = [x for tree in trees for x in ast.walk(tree) if isinstance(x, ast.Call)]
    stars = [any(isinstance(x, ast.Starred) for x in call.args) for call in calls]
    dicts = [any(x.arg is None for x in call.keywords) for call in calls]
    return sum(map(max, stars, dicts)), len(calls)


class Followed:
    """Counts calls into the package, and the frames of it above the first `map` of the norm."""

    def __init__(self) -> None:
        self.calls = 0
        self.functions: set[tuple[str, str]] = set()
        self.depth: int | None = None

    def __call__(self, frame, event, _) -> None:
        """What `sys.setprofile` calls."""
        if event != "call":
            return
        if frame.f_code is l2.map.__code__ and self.depth is None:
            self.depth = sum(own for own in map(_is_ours, _frames(frame)))
        if _is_ours(frame):
            self.calls += 1
            self.functions.add((frame.f_code.co_filename, frame.f_code.co_qualname))

    @property
    def files(self) -> int:
        """In how many files the functions are."""
        return len({file for file, _ in self.functions})


def _frames(frame):
    while frame is not None:
        yield frame
        frame = frame.f_back


def _is_ours(frame) -> bool:
    return frame.f_code.co_filename.startswith(str(PACKAGE))


def followed() -> Followed:
    """One traced update of `clip_by_global_norm`."""
    tx = optaxclip.clip_by_global_norm(1.0)
    grads = {"w": jnp.ones((3, 4)), "b": jnp.ones(4)}
    state = tx.init(grads)
    jax.clear_caches()
    counted = Followed()
    sys.setprofile(counted)
    try:
        jax.make_jaxpr(tx.update)(grads, state, grads)
    finally:
        sys.setprofile(None)
    return counted


def calls_of_trace() -> int:
    """How many calls of Python it takes to trace `clip_by_global_norm` on 200 leaves."""
    tx = optaxclip.clip_by_global_norm(1.0)
    grads = {f"{i}": jnp.ones((64, 64) if i % 2 else 64) for i in range(200)}
    update, state = jax.jit(tx.update), tx.init(grads)
    update.lower(grads, state)  # imports of JAX
    jax.clear_caches()
    profile = cProfile.Profile()
    profile.runcall(update.trace, grads, state)
    return pstats.Stats(profile).total_calls


def main() -> None:
    """Prints the counts."""
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    counts = {room: lines(room) for room in ROOMS if (PACKAGE / room).exists()}
    print("lines:", ", ".join(f"{room} {count}" for room, count in counts.items()))
    print(f"lines of these together: {sum(counts.values())}")
    hidden, calls = map(sum, zip(*map(hidden_calls, ("_engine", "_border")), strict=True))
    print(f"calls of _engine and _border: {calls}, of which {hidden} hide their arguments")
    way = followed()
    print(f"a traced update of clip_by_global_norm: {way.calls} calls of ours,", end=" ")
    print(f"{len(way.functions)} functions in {way.files} files;", end=" ")
    print(f"{way.depth} frames of ours to the norm's map")
    print(f"to trace it on 200 leaves: {calls_of_trace():,} calls of Python")
    for path in sorted((PACKAGE / "_engine").glob("*.py")):
        if found := words(path):
            print(f"_engine/{path.name}: {', '.join(sorted(found))}")


if __name__ == "__main__":
    main()

"""Which changes of the code does no test notice? A sample of mutants, and a table of survivors.

Each mutant is one small change: another operator, comparison or number, a condition that always
holds, an argument or a decorator left out. A test that fails kills it. What survives is a hole in
the tests, a change that matters to nobody (a message, speed), or code that is not needed.

  python -m benchmarks.mutants                         # files that differ from main
  python -m benchmarks.mutants optaxclip/norms.py --tests tests/engine
  python -m benchmarks.mutants optaxclip/_engine optaxclip/per_example --sample 200 --seed 1

The first run notes which lines each test runs, which takes about twice as long as the tests; it is
kept in `.mutants/` until the package or the test changes. Nothing in the checkout is edited. Needs
`pip install coverage`, and Linux or macOS.
"""

import argparse
import difflib
import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from pathlib import Path

from benchmarks.mutants.forks import PACKAGE, Run, run
from benchmarks.mutants.mutations import mutations

ROOT = Path(__file__).resolve().parents[2]
KEPT = ROOT / ".mutants"
KILLERS = 5
"""So many of the tests that killed a file's mutants so far are tried first."""


def arguments() -> argparse.Namespace:
    about = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.mutants", description=__doc__, formatter_class=about
    )
    parser.add_argument("files", nargs="*", help="files or folders of the package to change")
    parser.add_argument("--base", default="main", help="without files: those that differ from it")
    parser.add_argument(
        "--tests", nargs="+", default=["tests", PACKAGE], help="files or folders of tests (all)"
    )
    parser.add_argument("--sample", type=int, default=40, help="how many mutants (40)")
    parser.add_argument("--seed", type=int, default=0, help="of the sample (0)")
    parser.add_argument("--seconds", type=float, default=60, help="of tests for each mutant (60)")
    return parser.parse_args()


def git(*command: str) -> list[str]:
    found = subprocess.run(["git", *command], cwd=ROOT, check=True, capture_output=True, text=True)
    return found.stdout.splitlines()


def python_files(places: list[str]) -> list[str]:
    return [
        path
        for path in git("ls-files", "-co", "--exclude-standard", *places)
        if path.endswith(".py")
    ]


def has_tests(path: Path) -> bool:
    return path.name.startswith("test_") or (PACKAGE in path.parts and ">>>" in path.read_text())


def copied(folder: str) -> Path:
    """The checkout's files in a folder of their own."""
    tree = Path(folder, "tree").resolve()
    for path in git("ls-files", "-co", "--exclude-standard"):
        if (ROOT / path).is_file():
            (tree / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / path, tree / path)
    return tree


def put(path: Path, text: str, time: int) -> None:
    """Writes a file; Python tells what it compiled before by the time."""
    path.write_text(text)
    os.utime(path, (time, time))


def whole_runs(tree: Path, files: list[str]) -> dict[str, Run]:
    """A run of each file of tests, with what it reached; kept from one call to the next."""
    shared = [path for path in python_files([PACKAGE, "tests"]) if "/test_" not in path]
    state = hashlib.sha256(b"".join((tree / path).read_bytes() for path in shared))
    KEPT.mkdir(exist_ok=True)
    (KEPT / ".gitignore").write_text("*")
    runs = {}
    for number, path in enumerate(files):
        key = state.copy()
        key.update(path.encode() + (tree / path).read_bytes())
        kept = KEPT / f"{key.hexdigest()[:32]}.json"
        if not kept.exists():
            print(f"lines of {path} ({number + 1} of {len(files)})", file=sys.stderr, flush=True)
            found = run(tree, [path], seconds=1800, to_the_end=True)
            if found is None:
                print("  died, or took too long: left out", file=sys.stderr)
                continue
            kept.write_text(json.dumps(found._asdict()))
        runs[path] = Run(**json.loads(kept.read_text()))
    return runs


def reaching(runs: dict[str, Run], path: str, lines: tuple[int, int]) -> list[str]:
    """The tests that may notice a change of these lines: the quickest files first.

    First those that run them; after all of these the other tests of the same files, which may take
    from a cache what another test has computed.
    """
    by_file = []
    for found in runs.values():
        tests = [test for test in found.seconds if test not in found.failed]
        direct = {
            test
            for test in tests
            if any(
                lines[0] <= line <= lines[1] for line in found.reached.get(test, {}).get(path, ())
            )
        }
        if direct:
            seconds = sum(found.seconds[test] for test in direct)
            others = [test for test in tests if test not in direct]
            by_file.append((seconds, [test for test in tests if test in direct], others))
    by_file.sort()
    return [test for part in (1, 2) for row in by_file for test in row[part]]


def diff(path: str, before: str, after: str) -> str:
    pair = (text.splitlines() for text in (before, after))
    lines = list(difflib.unified_diff(*pair, n=0, lineterm=""))[2:]
    number = lines[0].split()[1].strip("-").split(",")[0]
    return "\n".join([f"{path}:{number}", *(f"    {line}" for line in lines[1:])])


def outcome(tree: Path, tests: list[str], seconds: float) -> tuple[str, str]:
    """In a word, and how."""
    if not tests:
        return "unreached", "no test runs it"
    files = list(dict.fromkeys(test.split("::")[0] for test in tests))
    found = run(tree, files, tests, seconds=seconds)
    if found is None:
        return "killed", "timed out or crashed"
    for test, message in found.failed.items():
        return "killed", f"{test}: {message}"
    return "survived", f"{len(found.seconds)} of {len(tests)} tests"


def main() -> None:
    options = arguments()
    if not options.files:
        options.files = git("diff", "--name-only", "--diff-filter=d", options.base, "--", PACKAGE)
    targets = python_files(options.files) if options.files else []
    sources = {path: (ROOT / path).read_text() for path in targets}
    every = [(path, each) for path, source in sources.items() for each in mutations(source)]
    if not every:
        sys.exit(f"no file of the package differs from {options.base}; name some")
    sample = random.Random(options.seed).sample(every, min(options.sample, len(every)))
    with tempfile.TemporaryDirectory() as folder:
        tree = copied(folder)
        files = [path for path in python_files(options.tests) if has_tests(tree / path)]
        runs = whole_runs(tree, files)
        counts, killers, survivors = Counter(), defaultdict(Counter), []
        for number, (path, mutation) in enumerate(sample):
            tests = reaching(runs, path, mutation.lines)
            first = [test for test, _ in killers[path].most_common() if test in tests][:KILLERS]
            tests = [*first, *(test for test in tests if test not in first)]
            mutant = mutation.applied(sources[path])
            begin = time.monotonic()
            put(tree / path, mutant, number + 1)
            what, how = outcome(tree, tests, options.seconds)
            put(tree / path, sources[path], 0)
            counts[what] += 1
            killers[path][how.split(": ")[0]] += what == "killed"
            shown = diff(path, sources[path], mutant)
            took = f"{time.monotonic() - begin:.0f} s"
            print(f"\n{number + 1}/{len(sample)} {what}, {took}, {how}\n{shown}", flush=True)
            if what != "killed":
                survivors.append(shown)
    print(f"\n{dict(counts)}; what no test noticed:", *survivors, sep="\n\n")


if __name__ == "__main__":
    main()

"""Runs the tests on a sample of mutants, and reports the mutants that no test detects.

A mutant is a small change, for example another operator or number, a constant condition, or a
missing argument or decorator. A failing test kills it. Surviving mutants indicate missing tests,
unnecessary code, or harmless changes (messages, speed).

  python -m benchmarks.mutants                         # files that differ from main
  python -m benchmarks.mutants optaxclip/norms.py --tests tests/engine
  python -m benchmarks.mutants optaxclip/_engine optaxclip/per_example --sample 200 --seed 1

The first run records the lines that tests run, which takes about twice as long as the tests. The
result is cached in `.mutants/` until the package or the test changes. The checkout is not changed.
Requires `pip install coverage`, and Linux or macOS.
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
from benchmarks.mutants.mutations import list_mutations

ROOT = Path(__file__).resolve().parents[2]
CACHE = ROOT / ".mutants"
KILLERS = 5
"""The number of tests that run first because they killed other mutants of the file."""


def parse_arguments() -> argparse.Namespace:
    about = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.mutants", description=__doc__, formatter_class=about
    )
    parser.add_argument("files", nargs="*", help="files or folders of the package to change")
    parser.add_argument("--base", default="main", help="default files: those that differ from it")
    parser.add_argument(
        "--tests",
        nargs="+",
        default=["tests", PACKAGE],
        help="files or folders of tests (default: all)",
    )
    parser.add_argument("--sample", type=int, default=40, help="number of mutants (40)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the sample (0)")
    parser.add_argument("--seconds", type=float, default=60, help="time limit per mutant (60)")
    return parser.parse_args()


def run_git(*command: str) -> list[str]:
    found = subprocess.run(["git", *command], cwd=ROOT, check=True, capture_output=True, text=True)
    return found.stdout.splitlines()


def list_python_files(paths: list[str]) -> list[str]:
    return [
        path
        for path in run_git("ls-files", "-co", "--exclude-standard", *paths)
        if path.endswith(".py")
    ]


def has_tests(path: Path) -> bool:
    return path.name.startswith("test_") or (PACKAGE in path.parts and ">>>" in path.read_text())


def copy_checkout(folder: str) -> Path:
    """Copies the files of the checkout to a folder."""
    tree = Path(folder, "tree").resolve()
    for path in run_git("ls-files", "-co", "--exclude-standard"):
        if (ROOT / path).is_file():
            (tree / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / path, tree / path)
    return tree


def write_file(path: Path, text: str, time: int) -> None:
    """Writes a file with a modification time, by which Python invalidates bytecode."""
    path.write_text(text)
    os.utime(path, (time, time))


def run_test_files(tree: Path, files: list[str]) -> dict[str, Run]:
    """Runs all test files and records the lines that they run, or loads cached results."""
    shared = [path for path in list_python_files([PACKAGE, "tests"]) if "/test_" not in path]
    state = hashlib.sha256(b"".join((tree / path).read_bytes() for path in shared))
    CACHE.mkdir(exist_ok=True)
    (CACHE / ".gitignore").write_text("*")
    runs = {}
    for number, path in enumerate(files):
        key = state.copy()
        key.update(path.encode() + (tree / path).read_bytes())
        cache = CACHE / f"{key.hexdigest()[:32]}.json"
        if not cache.exists():
            print(f"lines of {path} ({number + 1} of {len(files)})", file=sys.stderr, flush=True)
            found = run(tree, [path], seconds=1800, record_lines=True)
            if found is None:
                print("  crashed or timed out, skipped", file=sys.stderr)
                continue
            cache.write_text(json.dumps(found._asdict()))
        runs[path] = Run(**json.loads(cache.read_text()))
    return runs


def list_reaching_tests(runs: dict[str, Run], path: str, lines: tuple[int, int]) -> list[str]:
    """Returns the tests that may detect a change of the lines, with the fastest files first.

    The other tests of these files follow, because they may use cached results of the lines.
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


def format_diff(path: str, before: str, after: str) -> str:
    pair = (text.splitlines() for text in (before, after))
    lines = list(difflib.unified_diff(*pair, n=0, lineterm=""))[2:]
    number = lines[0].split()[1].strip("-").split(",")[0]
    return "\n".join([f"{path}:{number}", *(f"    {line}" for line in lines[1:])])


def run_mutant(tree: Path, tests: list[str], seconds: float) -> tuple[str, str]:
    """Returns the outcome for a mutant and its reason."""
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
    options = parse_arguments()
    if not options.files:
        options.files = run_git(
            "diff", "--name-only", "--diff-filter=d", options.base, "--", PACKAGE
        )
    targets = list_python_files(options.files) if options.files else []
    sources = {path: (ROOT / path).read_text() for path in targets}
    candidates = [
        (path, each) for path, source in sources.items() for each in list_mutations(source)
    ]
    if not candidates:
        sys.exit(f"no file of the package differs from {options.base}; name some")
    sample = random.Random(options.seed).sample(candidates, min(options.sample, len(candidates)))
    with tempfile.TemporaryDirectory() as folder:
        tree = copy_checkout(folder)
        files = [path for path in list_python_files(options.tests) if has_tests(tree / path)]
        runs = run_test_files(tree, files)
        counts, killers, survivors = Counter(), defaultdict(Counter), []
        for number, (path, mutation) in enumerate(sample):
            tests = list_reaching_tests(runs, path, mutation.lines)
            first = [test for test, _ in killers[path].most_common() if test in tests][:KILLERS]
            tests = [*first, *(test for test in tests if test not in first)]
            mutant = mutation.apply(sources[path])
            begin = time.monotonic()
            write_file(tree / path, mutant, number + 1)
            outcome, reason = run_mutant(tree, tests, options.seconds)
            write_file(tree / path, sources[path], 0)
            counts[outcome] += 1
            killers[path][reason.split(": ")[0]] += outcome == "killed"
            text = format_diff(path, sources[path], mutant)
            took = f"{time.monotonic() - begin:.0f} s"
            print(f"\n{number + 1}/{len(sample)} {outcome}, {took}, {reason}\n{text}", flush=True)
            if outcome != "killed":
                survivors.append(text)
    print(f"\n{dict(counts)}; undetected mutants:", *survivors, sep="\n\n")


if __name__ == "__main__":
    main()

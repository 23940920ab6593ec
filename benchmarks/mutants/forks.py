"""Tests in processes of their own: which of them fail, and which lines of the package each runs.

Importing JAX takes seconds, so it is imported once, here, and every run is a fork. That is safe as
long as nobody has asked for a device: only then does JAX start threads. So nothing in this process
may import the package or a test.
"""

import contextlib
import json
import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import coverage
import jax
import optax  # noqa: F401 (for the forks)
import pytest

PACKAGE = "optaxclip"


class Run(NamedTuple):
    """What became of some tests.

    Attributes:
      failed: the tests that failed, and the last line of each report.
      seconds: how long each took, of those that ran.
      reached: for each test, the lines of the package that it ran, by file.
    """

    failed: dict[str, str]
    seconds: dict[str, float]
    reached: dict[str, dict[str, list[int]]]


class _Plugin:
    """Which tests run, in which order, until when; and what becomes of them."""

    def __init__(
        self, tests: list[str] | None, until: float, recorder: coverage.Coverage | None
    ) -> None:
        self.tests, self.until, self.recorder = tests, until, recorder
        self.run = Run({}, {}, {})

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        if self.tests is not None:
            place = {test: i for i, test in enumerate(self.tests)}
            chosen = [item for item in items if item.nodeid in place]
            items[:] = sorted(chosen, key=lambda item: place[item.nodeid])

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        if self.recorder:
            # What an earlier test had traced would not be run again.
            jax.clear_caches()
            self.recorder.switch_context(item.nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._note(report)
        before = self.run.seconds.get(report.nodeid, 0)
        self.run.seconds[report.nodeid] = before + report.duration

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        if time.monotonic() > self.until:
            pytest.exit(f"out of time after {nodeid}", 0)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._note(report)

    def _note(self, report: Any) -> None:
        if report.failed and report.nodeid not in self.run.failed:
            lines = str(report.longrepr).strip().splitlines() or [""]
            self.run.failed[report.nodeid] = lines[-1]


def run(
    tree: Path,
    files: list[str],
    tests: list[str] | None = None,
    *,
    seconds: float,
    to_the_end: bool = False,
) -> Run | None:
    """Runs tests of a tree in a fork.

    Args:
      tree: the root of the copy.
      files: of tests, or of the package, whose docstrings have tests.
      tests: which of their tests, in order; all if None.
      seconds: after which no further test is begun; one that then takes as long again is killed.
      to_the_end: whether to go on after the first that fails, and record lines.

    Returns:
      What became of them, or None if the process died or was killed.
    """
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        child = os.fork()
        if child == 0:
            with contextlib.suppress(BaseException):
                _in_fork(tree, files, tests, seconds, to_the_end, report)
            os._exit(0)
        end = time.monotonic() + 2 * seconds + 60
        while os.waitpid(child, os.WNOHANG) == (0, 0):
            time.sleep(0.02)
            if time.monotonic() > end:
                os.killpg(child, signal.SIGKILL)
                end = float("inf")
        # Processes that a test started.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
        return Run(**json.loads(report.read_text())) if report.exists() else None


def _in_fork(
    tree: Path,
    files: list[str],
    tests: list[str] | None,
    seconds: float,
    to_the_end: bool,
    report: Path,
) -> None:
    os.setsid()
    os.chdir(tree)
    os.environ["PYTHONPATH"] = sys.path[0] = str(tree)
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # a second for each mutant
    with open(os.devnull, "w") as nothing:
        for stream in (1, 2):
            os.dup2(nothing.fileno(), stream)
    recorder = None
    if to_the_end:
        recorder = coverage.Coverage(data_file=None, include=[str(tree / PACKAGE / "*")])
        recorder.start()
    plugin = _Plugin(tests, time.monotonic() + seconds, recorder)
    options = ["-o", "addopts=", "--doctest-modules", "-p", "no:cacheprovider"]
    pytest.main([*files, *options, *([] if to_the_end else ["-x"])], [plugin])
    if recorder:
        recorder.stop()
        _add_lines(plugin.run, recorder.get_data(), tree)
    whole = report.with_suffix(".part")
    whole.write_text(json.dumps(plugin.run._asdict()))
    whole.rename(report)


def _add_lines(run: Run, data: coverage.CoverageData, tree: Path) -> None:
    for path in data.measured_files():
        name = str(Path(path).relative_to(tree))
        for line, contexts in data.contexts_by_lineno(path).items():
            for test in filter(None, contexts):
                run.reached.setdefault(test, {}).setdefault(name, []).append(line)

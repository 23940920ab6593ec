"""Runs tests in forks, and reports failures and the lines of the package that tests run.

Forks share the import of JAX, which takes seconds. This is safe as long as JAX has not started
threads for a device, so this process must not import the package or tests.
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
    """The results of tests.

    Attributes:
      failed: The failed tests with the last lines of their reports.
      seconds: The duration of the tests that ran.
      reached: The lines of the package that tests ran, by test and file.
    """

    failed: dict[str, str]
    seconds: dict[str, float]
    reached: dict[str, dict[str, list[int]]]


class _Plugin:
    """Selects and orders tests, stops after a time limit, and records results."""

    def __init__(
        self, tests: list[str] | None, deadline: float, recorder: coverage.Coverage | None
    ) -> None:
        self.tests, self.deadline, self.recorder = tests, deadline, recorder
        self.run = Run({}, {}, {})

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        if self.tests is not None:
            order = {test: i for i, test in enumerate(self.tests)}
            chosen = [item for item in items if item.nodeid in order]
            items[:] = sorted(chosen, key=lambda item: order[item.nodeid])

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        if self.recorder:
            # Otherwise functions that an earlier test traced would not run again.
            jax.clear_caches()
            self.recorder.switch_context(item.nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._record_failure(report)
        before = self.run.seconds.get(report.nodeid, 0)
        self.run.seconds[report.nodeid] = before + report.duration

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        if time.monotonic() > self.deadline:
            pytest.exit(f"out of time after {nodeid}", 0)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._record_failure(report)

    def _record_failure(self, report: Any) -> None:
        if report.failed and report.nodeid not in self.run.failed:
            lines = str(report.longrepr).strip().splitlines() or [""]
            self.run.failed[report.nodeid] = lines[-1]


def run(
    tree: Path,
    files: list[str],
    tests: list[str] | None = None,
    *,
    seconds: float,
    record_lines: bool = False,
) -> Run | None:
    """Runs tests of a tree in a fork.

    Args:
      tree: The root of the copy.
      files: Test files, or files of the package with doctests.
      tests: The ordered tests to run, or None for all.
      seconds: The time after which no test starts. The process is killed after twice the time.
      record_lines: Whether to continue after a failure, and record lines.

    Returns:
      The results, or None if the process crashed or was killed.
    """
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        child = os.fork()
        if child == 0:
            with contextlib.suppress(BaseException):
                _run_pytest(tree, files, tests, seconds, record_lines, report)
            os._exit(0)
        end = time.monotonic() + 2 * seconds + 60
        while os.waitpid(child, os.WNOHANG) == (0, 0):
            time.sleep(0.02)
            if time.monotonic() > end:
                os.killpg(child, signal.SIGKILL)
                end = float("inf")
        # Kill the processes that tests started.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
        return Run(**json.loads(report.read_text())) if report.exists() else None


def _run_pytest(
    tree: Path,
    files: list[str],
    tests: list[str] | None,
    seconds: float,
    record_lines: bool,
    report: Path,
) -> None:
    os.setsid()
    os.chdir(tree)
    os.environ["PYTHONPATH"] = sys.path[0] = str(tree)
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # Saves a second per mutant.
    with open(os.devnull, "w") as nothing:
        for stream in (1, 2):
            os.dup2(nothing.fileno(), stream)
    recorder = None
    if record_lines:
        recorder = coverage.Coverage(data_file=None, include=[str(tree / PACKAGE / "*")])
        recorder.start()
    plugin = _Plugin(tests, time.monotonic() + seconds, recorder)
    options = ["-o", "addopts=", "--doctest-modules", "-p", "no:cacheprovider"]
    pytest.main([*files, *options, *([] if record_lines else ["-x"])], [plugin])
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

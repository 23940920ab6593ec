"""Two processes that train together report what one process reports, and none waits for ever."""

import functools
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import jax
import numpy as np
import process_worker
import pytest
from process_worker import FAULTS, NUM_STEPS

WORKER = Path(__file__).with_name("process_worker.py")
BOUND = 100
"""Seconds after which a process is stopped, whatever it waits for."""
SPIKE, BAD = FAULTS
AT_BAD = np.arange(NUM_STEPS) == BAD


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def how_it_ended(code):
    if code is None:
        return f"was stopped after {BOUND} s"
    return f"died of {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"


def run_together(num_processes, options=None):
    """What each process printed.

    Args:
      num_processes: how many are started.
      options: for some of the processes, further arguments.

    Raises:
      RuntimeError: if one of them failed; it says how all ended, with their last lines.
    """
    deadline, port = time.monotonic() + BOUND, free_port()
    quick = {**os.environ, "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        logs = [Path(folder, str(number)) for number in range(num_processes)]
        processes = []
        try:
            for number, log in enumerate(logs):
                place = [f"--process={number}", f"--of={num_processes}", f"--port={port}"]
                command = [sys.executable, str(WORKER), *place, *(options or {}).get(number, [])]
                with log.with_suffix(".err").open("w") as errors, log.open("w") as output:
                    process = subprocess.Popen(command, stdout=output, stderr=errors, env=quick)
                    processes.append(process)
            while time.monotonic() < deadline and any(p.poll() is None for p in processes):
                time.sleep(0.05)
        finally:
            codes = [process.poll() for process in processes]
            for process in processes:
                process.kill()
                process.wait()
        if any(code != 0 for code in codes):
            raise RuntimeError(
                "\n".join(
                    f"process {number} {how_it_ended(code)}:\n{log.with_suffix('.err').read_text()}"
                    for number, (code, log) in enumerate(zip(codes, logs, strict=True))
                )
            )
        return [json.loads(log.read_text().splitlines()[-1]) for log in logs]


@functools.cache
def alone():
    """What this process gives, on as many devices."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        return process_worker.report()


together = functools.cache(functools.partial(run_together, 2))
each_way = pytest.mark.parametrize(
    "how", [pytest.param(how, marks=pytest.mark.slow) for how in ("jit", "shard_map")]
)


def over_steps(report, name):
    return np.array([step[name] for step in report])


@each_way
def test_losses_norms_and_thresholds_are_those_of_one_process(how):
    expected = alone()
    for report in together():
        assert report[how][0].keys() == expected[how][0].keys()
        for name in report[how][0].keys() - {"nan_here"}:
            np.testing.assert_allclose(
                over_steps(report[how], name),
                over_steps(expected[how], name),
                rtol=1e-4,
                atol=1e-6,
                err_msg=name,
            )


@each_way
def test_processes_report_bitwise_equal_replicated_values(how):
    first, second = ([{**step, "nan_here": 0} for step in report[how]] for report in together())
    np.testing.assert_equal(first, second)


@each_way
def test_clips_trigger_in_training_report(how):
    report = alone()
    by_zclip, by_norm = (
        over_steps(report[how], f"{name}/factor") for name in ("zclip", "clip_by_global_norm")
    )
    assert np.flatnonzero(by_zclip < 1).tolist() == [SPIKE]
    assert 0 < np.sum(by_norm < 1) < len(by_norm)


@each_way
def test_nan_in_single_process_skips_step_everywhere(how):
    first, second = (over_steps(report[how], "nan_here") > 0 for report in together())
    assert not any(first)
    np.testing.assert_array_equal(second, AT_BAD)
    for report in together():
        skipped = over_steps(report[how], "skip_nonfinite/num_skipped")
        np.testing.assert_array_equal(skipped, np.cumsum(AT_BAD))
        loss, scale = (over_steps(report[how], name) for name in ("loss", "scale"))
        np.testing.assert_array_equal(scale[BAD], scale[BAD - 1])
        assert loss[BAD + 1] == loss[BAD] < loss[0]


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_surviving_process_fails_after_peer_dies(victim):
    impatient = ["--patience=5"]
    with pytest.raises(RuntimeError) as caught:
        run_together(2, {victim: [*impatient, "--dies-at=2"], 1 - victim: impatient})
    message = str(caught.value)
    assert f"process {victim} died of SIGKILL" in message
    assert f"process {1 - victim} died of SIGABRT" in message
    assert "another task died" in message


@pytest.mark.slow
def test_process_fails_after_waiting_for_peer():
    with pytest.raises(RuntimeError, match=r"(?s)process 0 died of SIGABRT.*process 1 ended with"):
        run_together(2, {0: ["--patience=1"], 1: ["--unknown"]})


def test_hanging_process_gets_stopped(monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "BOUND", 1)
    with pytest.raises(RuntimeError, match=r"process 0 was stopped after 1 s"):
        run_together(1)

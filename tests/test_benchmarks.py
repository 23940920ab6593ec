"""The benchmarks that need no accelerator start where an accelerator's plugin is installed."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_benchmarks_for_accelerators_look_for_no_device():
    """JAX with a plugin for CUDA would look for a GPU, and fail where there is none."""
    code = "import benchmarks.accelerators.__main__, jax; print(jax.config.jax_platforms)"
    environment = {key: x for key, x in os.environ.items() if key != "JAX_PLATFORMS"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout == "cpu\n"

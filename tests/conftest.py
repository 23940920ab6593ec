"""Strict settings for every test: nothing in the library may rely on implicit promotion."""

import os

import jax
import pytest

# The older way to compile loops takes half the time. Tests of what rounding and memory come to ask
# for the default with `compiling.AS_USERS`.
os.environ["XLA_FLAGS"] = f"--xla_cpu_use_fusion_emitters=false {os.environ.get('XLA_FLAGS', '')}"
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


def pytest_sessionstart(session):
    """Says how long all tests take and how to run fewer; `-q` would hide pytest's own header."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None or session.config.args != session.config.getini("testpaths"):
        return
    if session.config.option.markexpr:
        reporter.write_line(
            "All but the slow tests, on 2 cores: about 5 minutes. All: pytest -m ''"
        )
    else:
        reporter.write_line("All tests, the slow ones too, on 2 cores: about 15 minutes.")
    reporter.write_line("A room only: pytest tests/methods (CONTRIBUTING.md has the map)")


@pytest.fixture(autouse=True, scope="module")
def _forget_what_was_compiled():
    """Else a process that runs many files ends with gigabytes of compiled code."""
    yield
    jax.clear_caches()


@pytest.fixture(scope="module")
def quick_compilation():
    """For tests of structure rather than of digits: XLA spends less on optimization."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture
def x64():
    """Runs a test with 64-bit types."""
    with jax.enable_x64(True):
        yield

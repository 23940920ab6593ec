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

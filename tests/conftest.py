"""Strict settings for every test: nothing in the library may rely on implicit promotion."""

import collections
import gc
import importlib.util
import os
import resource
import shutil
import sys
import zlib

import chex
import jax
import pytest

import optaxclip._backend.kernels as kernels

# Compiling is most of what tests do. In the older way to compile loops, in one thread, and with
# hardly any optimization it takes a quarter of the time. Tests of what rounding and memory come to
# ask for the default with `compiling.AS_USERS`, or for all that they run with `optimized`. With
# JAX_DISABLE_MOST_OPTIMIZATIONS=0, as every night, all is compiled as users compile it.
# On a GPU, where `pytest -m gpu` runs, programs are those of users, and processes share its memory.
# JAX_PLATFORMS=cpu keeps JAX on the CPU even if there is a GPU.
HAS_CUDA = any(map(importlib.util.find_spec, ("jax_cuda12_plugin", "jax_cuda13_plugin")))
ON_GPU = HAS_CUDA and os.environ.get("JAX_PLATFORMS") != "cpu"
FOR_GPU = {
    "jax_default_matmul_precision": "highest",  # else products of float32 have the 10 bits of TF32
}
"""What tests need on a GPU to have the digits that they ask for."""
if ON_GPU:
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    for name, value in FOR_GPU.items():
        jax.config.update(name, value)
QUICK = os.environ.get("JAX_DISABLE_MOST_OPTIMIZATIONS", "1") == "1" and not ON_GPU
if QUICK and jax.__version_info__ < (0, 11):  # later versions do not know these flags and stop
    FLAGS = "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
    os.environ["XLA_FLAGS"] = f"{FLAGS} {os.environ.get('XLA_FLAGS', '')}"
jax.config.update("jax_disable_most_optimizations", QUICK)
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


def pytest_configure(config):
    """What one test has compiled no other compiles again, nor does the next run.

    Each process has a folder of its own, because JAX 0.10.2 does not lock files. It fails to read
    programs for devices that are only described, as in the environment of `tests/accelerators`.
    """
    # With `-p no:cacheprovider` there is no folder.
    if hasattr(config, "cache") and not importlib.util.find_spec("libtpu"):
        process = os.environ.get("PYTEST_XDIST_WORKER", "alone")
        folder = config.cache.mkdir(f"jax-{process}")
        if sum(file.stat().st_size for file in folder.iterdir()) > CACHED:
            shutil.rmtree(folder)
        jax.config.update("jax_compilation_cache_dir", str(folder))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.05)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


LEFT_OUT = pytest.StashKey[int]()
"""How many cases the marker `slow` has deselected."""


def pytest_sessionstart(session):
    """Says how long all tests take and how to run fewer; `-q` would hide pytest's own header."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    places = [session.config.invocation_params.dir / path for path in session.config.args]
    takes_all = session.config.args == session.config.getini("testpaths")
    takes_all |= places == [session.config.rootpath]
    if reporter is None or not takes_all or session.config.option.keyword:
        return
    if session.config.option.markexpr:
        reporter.write_line(
            "All that is not slow: about 4 minutes on 2 idle cores. All: pytest -m ''"
        )
    else:
        reporter.write_line("All tests, the slow ones too, on 2 cores: 9 to 30 minutes.")
    reporter.write_line("One package only: pytest tests/methods (CONTRIBUTING.md has the map)")


# Where the files' own order would leave one process alone with a long file at the end.
LONGEST = (
    *("test_contract.py", "test_promises.py", "test_notebooks.py", "test_sharding.py"),
    *("test_seeds.py", "test_without_limit.py"),
    "test_tpu.py",
    *("test_per_example.py", "test_rules_locking.py", "test_per_example_gradients.py"),
    *("test_export.py", "test_wrapping.py", "test_norms.py", "test_derivatives.py"),
    *("test_tensorflow.py", "test_sweep.py", "test_per_example_explicit.py"),
    *("test_processes.py", "test_adaptive.py", "test_times.py", "test_readme.py"),
)


@pytest.hookimpl(tryfirst=True)  # before pytest leaves out what is slow
def pytest_collection_modifyitems(items):
    """What `by_day` makes slow, and the longest files first, so that all end together."""
    cases = collections.defaultdict(list)
    for item in items:
        if item.get_closest_marker("by_day") and not item.get_closest_marker("slow"):
            cases[item.path, item.originalname].append(item)
    for found in cases.values():
        number = found[0].get_closest_marker("by_day").args[0]
        for item in sorted(found, key=_by_chance)[number:]:
            item.add_marker(pytest.mark.slow)
    rank = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: rank.get(item.path.name, len(LONGEST)))


def _by_chance(item):
    """An order of cases that mixes their parameters, and stays when there are more of them."""
    return zlib.crc32(item.name.encode())


def pytest_deselected(items):
    """Counts what the marker leaves out, but not beside what was asked not to run by `-k`."""
    if not items:
        return
    config = items[0].config
    if not config.option.keyword and all(item.get_closest_marker("slow") for item in items):
        config.stash[LEFT_OUT] = config.stash.get(LEFT_OUT, 0) + len(items)


def pytest_sessionfinish(session):
    """A process of several tells the first one, which collects nothing itself."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left_out"] = session.config.stash.get(LEFT_OUT, 0)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    """Each process has collected, and left out, the same cases."""
    output = getattr(node, "workeroutput", {})  # a process that crashed has none
    node.config.stash[LEFT_OUT] = output.get("left_out", 0)


def pytest_terminal_summary(terminalreporter, config):
    """Says how many cases were left out, and how to run them."""
    if number := config.stash.get(LEFT_OUT, 0):
        terminalreporter.write_line(f"Cases that were left out: {number}. To run all: pytest -m ''")


def pytest_collection_finish():
    """What was imported stays: to look for garbage in it again and again takes 5 % of the time."""
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)


CACHED = 2**30
"""With more bytes on disk than these a process begins afresh."""

GIGABYTES = 2
"""From this much memory on a process forgets what it has compiled."""


@pytest.fixture(autouse=True, scope="module")
def _forget_what_was_compiled():
    """Not after each file: what is done outside of `jit` compiles the same everywhere."""
    yield
    unit = 2**10 if sys.platform == "darwin" else 1
    if resource.getrusage(resource.RUSAGE_SELF).ru_maxrss > GIGABYTES * unit * 2**20:
        jax.clear_caches()


@pytest.fixture(autouse=True)
def _count_traces_anew():
    """`chex.assert_max_traces` takes functions that are defined at one place for one function."""
    chex.clear_trace_counter()


@pytest.fixture(scope="module")
def optimized():
    """For tests of digits outside of a `jit` of their own: XLA optimizes as it does for users."""
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", QUICK)


@pytest.fixture
def x64():
    """Runs a test with 64-bit types."""
    with jax.enable_x64(True):
        yield


@pytest.fixture
def standard_promotion():
    """For what relies on implicit promotion of dtypes: Adam, schedules, `MultiSteps`."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture
def as_users(standard_promotion):
    """As users' programs run, which mix dtypes and ranks."""
    with jax.numpy_rank_promotion("allow"):
        yield


@pytest.fixture(params=["cpu", "cuda", "tpu"])
def platform(request, monkeypatch):
    """Whose branch is taken, wherever there are several."""

    def branch(*args, default=None, **branches):
        return branches.get(request.param, default)(*args)

    jax.clear_caches()
    monkeypatch.setattr(jax.lax, "platform_dependent", branch)
    monkeypatch.setattr(kernels, "has_fast_float64", lambda: request.param == "cuda")
    yield request.param
    jax.clear_caches()

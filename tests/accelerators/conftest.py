"""Skips the tests if XLA's compilers for GPUs and TPUs are not installed; see `.ci/run`."""

import functools
import os
import pathlib
from importlib.util import find_spec

import jax
import pytest

pytest.register_assert_rewrite("aims")

HERE = pathlib.Path(__file__).parent

MISSING = [name for name in ("jax_cuda12_plugin", "libtpu", "jax_privacy") if not find_spec(name)]


# Several processes may compile for TPUs at the same time, because none of them uses a device.
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")


def pytest_collection_modifyitems(items):
    """Skips all tests, or groups tests that share the compiled step without clipping.

    `--dist=loadgroup` runs a group in one process. The dtypes of a device are separate groups.
    """
    reason = f'not installed: {", ".join(MISSING)}; pip install ".[accelerators]"'
    for item in items:
        if HERE not in item.path.parents:
            continue
        if MISSING:
            item.add_marker(pytest.mark.skip(reason=reason))
        dtype = getattr(item, "callspec", None) and item.callspec.params.get("dtype")
        item.add_marker(pytest.mark.xdist_group(f"{item.path.stem}-{dtype or 'float32'}"))


@pytest.fixture(autouse=True)
def _as_users(optimized):
    """Allows the promotions that Optax's AdamW needs, and compiles programs like those of users."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@pytest.fixture(scope="session")
def measure_overhead():
    """Returns a function that measures what a variant adds to the step of a `Case`.

    With `whole=True`, it measures the whole step, so the step without clipping is not compiled.
    """
    from benchmarks.accelerators.cases import Case, compute_overhead

    compile_variant = functools.cache(Case.compile)

    def measure(variant, *fields, whole=False, **named):
        case = Case(*fields, **named).canonicalize(variant)
        whole |= case.is_per_example
        plain = None if whole else compile_variant(case.canonicalize("no clip"), "no clip")
        return compute_overhead(compile_variant(case, variant), plain)

    return measure


@pytest.fixture(scope="session")
def ours(measure_overhead):
    """Returns a function that measures what optaxclip adds."""
    from aims import OURS

    return functools.partial(measure_overhead, OURS)


@pytest.fixture(scope="session")
def both(ours, measure_overhead):
    """Returns a function that measures what optaxclip adds, and what Optax adds."""
    from aims import THEIRS

    return lambda *fields, **named: (
        ours(*fields, **named),
        measure_overhead(THEIRS, *fields, **named),
    )

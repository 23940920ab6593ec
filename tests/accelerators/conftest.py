"""Where XLA's compilers for GPUs and TPUs are absent, these tests are skipped: see `.ci/run`."""

import functools
import os
import pathlib
from importlib.util import find_spec

import jax
import pytest

pytest.register_assert_rewrite("aims")

HERE = pathlib.Path(__file__).parent

MISSING = [name for name in ("jax_cuda12_plugin", "libtpu", "jax_privacy") if not find_spec(name)]


# Two processes may compile for a TPU at once: neither has one.
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")


def pytest_collection_modifyitems(items):
    """Skips them all, with the reason; or says which compile the same steps without a clip.

    `--dist=loadgroup` runs these in one process, and a device's two dtypes in two.
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
    """Optax's AdamW needs what `tests/conftest.py` forbids, and programs are those of users."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@pytest.fixture(scope="session")
def added_by():
    """`added_by(way, device, ...)`: what a way to clip adds to the step of a `Case`.

    With `whole=True` it is all that the step does: to compare ways with each other, the step
    without a clip need not be compiled.
    """
    from benchmarks.accelerators.cases import Case, added

    compiled = functools.cache(Case.compile)

    def measure(way, *fields, whole=False, **named):
        case = Case(*fields, **named).of(way)
        whole |= case.is_of_examples
        plain = None if whole else compiled(case.of("no clip"), "no clip")
        return added(compiled(case, way), plain)

    return measure


@pytest.fixture(scope="session")
def ours(added_by):
    """`ours(device, ...)`: what optaxclip adds."""
    from aims import OURS

    return functools.partial(added_by, OURS)


@pytest.fixture(scope="session")
def both(ours, added_by):
    """`both(device, ...)`: what optaxclip adds, and what Optax does."""
    from aims import THEIRS

    return lambda *fields, **named: (ours(*fields, **named), added_by(THEIRS, *fields, **named))

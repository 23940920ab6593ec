"""Tests inside of other projects' trainers, which rely on implicit promotion, and warn."""

import importlib
import os
import pathlib
import warnings

import jax
import pytest

os.environ.setdefault("KERAS_BACKEND", "jax")
HERE = pathlib.Path(__file__).parent


def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.trainers)
            item.add_marker(pytest.mark.filterwarnings("ignore"))


@pytest.fixture(autouse=True, scope="module")
def _as_their_users():
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@pytest.fixture(scope="session")
def imported():
    """A function that imports a module, or skips the test with the reason why it cannot."""

    def module(name):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                return importlib.import_module(name)
            except Exception as error:
                pytest.skip(f"{name} does not import: {error!r}")

    return module

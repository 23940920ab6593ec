"""Optax's own clipping tests, which its wheel ships, on our functions: as they are."""

import importlib
import unittest

import jax
import pytest

import optaxclip

OURS = (
    "clip",
    "clip_by_block_rms",
    "clip_by_global_norm",
    "adaptive_grad_clip",
    "per_example_global_norm_clip",
    "per_example_layer_norm_clip",
)

suite = pytest.importorskip("optax.transforms._clipping_test")
NAMES = [name for name in dir(suite.ClippingTest) if name.startswith("test_")]


@pytest.fixture
def ours_for_theirs(monkeypatch):
    clipping = importlib.import_module("optax.transforms._clipping")
    for name in OURS:
        monkeypatch.setattr(clipping, name, getattr(optaxclip, name))


# The sums of examples stay below their limits, whatever is rounded, as privacy is computed from
# them: by 5e-7 here. The test wants 3e-8, which is less than one rounding of float32.
BELOW = pytest.mark.xfail(reason="each example stays below its limit, by 5e-7", strict=True)
CASES = [
    pytest.param(name, marks=BELOW if name == "test_per_example_layer_norm_clip" else ())
    for name in NAMES
]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.usefixtures("ours_for_theirs")
def test_passes_with_our_functions(name):
    # Their tests rely on implicit promotion.
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        result = unittest.TestResult()
        suite.ClippingTest(name).run(result)
    assert result.wasSuccessful(), (result.failures + result.errors)[0][1]


def test_the_suite_was_found():
    assert {"test_clip_by_block_rms", "test_clip_by_global_norm"} <= set(NAMES)

"""Optax's suites over tables of optimizers, with chains of ours for the optimizers: as they are."""

import functools
import inspect
import types
import unittest

import numpy as np
import optax
import optax_suites
import pytest
from methods_table import DISTINCT, METHODS
from optax_suites import NAMES, cases_of, chained, loaded, problems_of

import optaxclip

# What is only another argument of the same code, and all cases of the longer suites, at night.
NIGHTLY = (pytest.mark.slow, pytest.mark.trainers)
FEW = ("clip", "clip_by_global_norm", "adaptive_grad_clip", "autoclip", "skip_above", "unit_smooth")


def methods(quick):
    return [pytest.param(name, marks=() if name in quick else NIGHTLY) for name in NAMES]


@pytest.fixture(scope="module")
def sharding():
    tables = {"OPTIMIZERS": {name: chained(name)(1.0) for name in NAMES}}
    module = loaded("_src/sharding_test.py", **tables)
    module.jax = optax_suites.NewJax()
    return module.ShardingTest


@pytest.mark.parametrize("name", methods(set(DISTINCT) - {"clip_by_spectral_norm"}))
def test_sharding(sharding, name):
    """States are made from shapes alone, and keep their shardings on an explicit mesh."""
    cases = [case for case in cases_of(sharding) if case.endswith(f"_{name}")]
    assert len(cases) >= 3
    assert not problems_of(sharding, cases)


@pytest.fixture(scope="module")
def float64():
    tables = {"ALL_MODULES": [(name, METHODS[name].make, {}) for name in NAMES]}
    return loaded("_src/float64_test.py", **tables).Float64Test


@pytest.mark.parametrize("name", methods(FEW))
def test_float64(float64, name):
    """States and updates keep their dtypes beside 64-bit types."""
    assert not problems_of(float64, [f"test_mixed_dtype_input_outputs_{name}"])


def tables_of_one(name):
    return [{"opt_name": name, "opt_kwargs": {"learning_rate": 1e-2}}]


def suite_of(file, name):
    """Their tests of optimizers with one of ours; their wrappers get it before their `sgd`."""
    behind = optax_suites.Behind(optax, METHODS[name].make)
    if file == "contrib":
        tables = {"_MAIN_OPTIMIZERS_UNDER_TEST": tables_of_one(name), "_BASE_OPTIMIZERS": []}
        module = loaded("contrib/_common_test.py", **tables)
        module.alias = types.SimpleNamespace(**{name: chained(name), "sgd": behind.sgd})
        return module.ContribTest
    pytest.importorskip("sklearn")
    tables = {"_OPTIMIZERS_UNDER_TEST": tuple(tables_of_one(name))}
    module = loaded("_src/alias_test.py", **tables)
    module.alias = types.SimpleNamespace(**{name: chained(name)}, sgd=behind.sgd)
    return module.AliasTest


SHORT = ("accept_extra_args", "can_be_wrapped", "preserve_dtype", "shape_dtype", "accumulation")


@pytest.mark.parametrize(
    ("file", "name"),
    [
        pytest.param(file, name, marks=() if (file, name) == ("alias", "autoclip") else NIGHTLY)
        for file in ("contrib", "alias")
        for name in NAMES
    ],
)
def test_as_an_optimizer(file, name):
    """Extra arguments, hyperparameters, dtypes, accumulation, one compilation; in wrappers too."""
    suite = suite_of(file, name)
    cases = [case for case in cases_of(suite) if any(part in case for part in SHORT)]
    assert len(cases) >= 6
    assert not problems_of(suite, cases)


# Limits that vanish over so many steps, and bounds that turn the direction.
NOT_THERE = {"clip_scheduled", "clip_by_norm_scheduled", "clip_by_value"}


# Thirty thousand steps each.
@pytest.mark.slow
@pytest.mark.trainers
@pytest.mark.parametrize("name", [name for name in NAMES if name not in NOT_THERE])
def test_it_finds_the_minimum(name):
    suite = suite_of("contrib", name)
    own = [case for case in cases_of(suite, ["test_optimizers"]) if case[15:].isdecimal()][:4]
    assert not problems_of(suite, own)


# One looks at the place of a state that a stage in front has moved; in the other a clip would have
# to be told that all devices of `pmap` have the same.
NOT_OURS = {"test_masked_state_structure", "test_apply_if_finite_pmap"}


@pytest.mark.filterwarnings("ignore:updates. no leaf has floating-point entries")
@pytest.mark.parametrize(
    "file",
    [
        "schedules/_inject_test.py",
        "transforms/_combining_test.py",
        "transforms/_masking_test.py",
        "transforms/_conditionality_test.py",
    ],
)
def test_wrappers_of_optax_over_ours(file):
    """Their wrappers and their tests of them, with a clip of ours in each optimizer."""
    never = functools.partial(optaxclip.clip_by_global_norm, np.inf)
    module = loaded(file)
    if hasattr(module, "alias"):
        module.alias = optax_suites.Behind(module.alias, never)
    else:
        own = {"clip_by_global_norm": optaxclip.clip_by_global_norm}
        module.transforms = types.SimpleNamespace(**vars(module.transforms) | own)
    suites = [
        kind
        for kind in vars(module).values()
        if inspect.isclass(kind) and issubclass(kind, unittest.TestCase) and cases_of(kind)
    ]
    assert suites
    for suite in suites:
        assert not problems_of(suite, [case for case in cases_of(suite) if case not in NOT_OURS])

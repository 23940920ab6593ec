"""Optax's suites over tables of optimizers, with chains of ours for the optimizers: as they are."""

import types

import optax
import optax_suites
import pytest
from methods_table import METHODS
from optax_suites import IS_OLD, NAMES, always, cases_of, chained, loaded, plain, problems_of

# What is only another argument of the same code, and all cases of the longer suites, at night.
NIGHTLY = (pytest.mark.slow, pytest.mark.trainers)
FEW = ("clip", "clip_by_global_norm", "adaptive_grad_clip", "autoclip", "skip_above", "unit_smooth")


def methods(quick):
    return [pytest.param(name, marks=() if name in quick else NIGHTLY) for name in NAMES]


@pytest.fixture(scope="module")
def sharding():
    table = always({name: chained(name)(1.0) for name in NAMES})
    new_jax = always(optax_suites.NewJax())
    return loaded("_src/sharding_test.py", OPTIMIZERS=table, jax=new_jax).ShardingTest


@pytest.mark.slow
@pytest.mark.skipif(IS_OLD, reason="Optax 0.2.6 has no such tests")
@pytest.mark.parametrize("name", methods(FEW))
def test_methods_pass_optax_sharding_tests(sharding, name):
    """States are made from shapes alone, and keep their shardings on an explicit mesh."""
    cases = [case for case in cases_of(sharding) if case.endswith(f"_{name}")]
    assert len(cases) >= 3
    assert not problems_of(sharding, cases)


@pytest.fixture(scope="module")
def float64():
    table = always([(name, METHODS[name].make, {}) for name in NAMES])
    return loaded("_src/float64_test.py", ALL_MODULES=table).Float64Test


@pytest.mark.by_day(1)
@pytest.mark.parametrize("name", methods(FEW))
def test_methods_pass_optax_float64_tests(float64, name):
    """States and updates keep their dtypes beside 64-bit types."""
    cases = cases_of(float64)
    test = f"test_mixed_dtype_input_outputs_{name}"
    assert not problems_of(float64, [case for case in cases if plain(case) == test])


def suite_of(file, name):
    """Their tests of optimizers with one of ours; their wrappers get it before their `sgd`."""
    of_one = [{"opt_name": name, "opt_kwargs": {"learning_rate": 1e-2}}]
    sgd = optax_suites.in_front(optax.sgd, METHODS[name].make)
    alias = always(types.SimpleNamespace(**{name: chained(name)}, sgd=sgd))
    if file == "contrib":
        tables = {"_MAIN_OPTIMIZERS_UNDER_TEST": always(of_one), "_BASE_OPTIMIZERS": always([])}
        return loaded("contrib/_common_test.py", alias=alias, **tables).ContribTest
    pytest.importorskip("sklearn")
    table = always(tuple(of_one))
    return loaded("_src/alias_test.py", alias=alias, _OPTIMIZERS_UNDER_TEST=table).AliasTest


SHORT = ("accept_", "can_be_wrapped", "preserve_dtype", "shape_dtype", "accumulation")


@pytest.mark.parametrize(
    ("file", "name"),
    [
        pytest.param(file, name, marks=NIGHTLY[: 1 if name == "autoclip" else 2])
        for file in ("contrib", "alias")
        for name in NAMES
    ],
)
def test_methods_pass_optax_optimizer_tests(file, name):
    """Extra arguments, hyperparameters, dtypes, accumulation, one compilation; in wrappers too."""
    suite = suite_of(file, name)
    cases = [case for case in cases_of(suite) if any(part in case for part in SHORT)]
    assert len(cases) >= 6
    assert not problems_of(suite, cases)


# Thresholds that vanish over so many steps, and bounds that turn the direction.
NOT_THERE = {"clip_scheduled", "clip_by_norm_scheduled", "clip_by_value"}
# Of the first steps, whose norms are above its threshold, most are skipped: for these it takes
# longer.
TOO_FEW_STEPS = {("alias", "skip_above")}
MINIMA = [
    (file, name)
    for file in ("contrib", "alias")
    for name in NAMES
    if name not in NOT_THERE and (file, name) not in TOO_FEW_STEPS
]


def numbers_of(suite, test):
    """The numbers of the cases of a test that has no other name."""
    numbers = [name.removeprefix(test) for name in cases_of(suite, [test])]
    return sorted(int(number) for number in numbers if number.isdecimal())


# Thirty and ten thousand steps for each case.
@pytest.mark.slow
@pytest.mark.trainers
@pytest.mark.parametrize(("file", "name"), MINIMA)
def test_methods_reach_minimum_in_optax_tests(file, name):
    suite, method = suite_of(file, name), METHODS[name]
    test = {"contrib": "test_optimizers", "alias": "test_optimization"}[file]
    numbers = numbers_of(suite, test)
    assert len(numbers) == (16 if file == "contrib" else 4)
    # The first four are without a wrapper. With a constant threshold Mechanic, or a rate that falls
    # on plateaus, does not come so far, nor does it with Optax's clips of these thresholds.
    adapts = method.has_memory and method.keeps_small
    chosen = numbers if adapts else numbers[:4]
    assert not problems_of(suite, [f"{test}{number}" for number in chosen])

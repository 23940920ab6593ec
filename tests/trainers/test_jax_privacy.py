"""Beside jax_privacy: its functions, and its own tests of them, on ours."""

import functools
import importlib.util
import os
import pathlib
import types
import unittest

import as_jax_privacy
import jax
import jax.numpy as jnp
import numpy as np
import pytest

RNG = np.random.default_rng(0)
PARAMS = {"w": jnp.asarray(RNG.normal(size=(3, 2)), jnp.float32), "b": jnp.zeros(2)}
X, Y = (jnp.asarray(RNG.normal(size=(6, n)), jnp.float32) for n in (3, 2))


def loss_fn(params, x, y):
    return jnp.mean(jnp.sum((x @ params["w"] + params["b"] - y) ** 2, axis=-1))


def halved(grads):
    return jax.tree.map(lambda x: x / 2, grads)


METHODS = ["vmap", "ghost"]


def ours(method):
    """Our functions under their names, by one of our methods."""
    clipped_grad = functools.partial(as_jax_privacy.clipped_grad, method=method)
    return types.SimpleNamespace(**vars(as_jax_privacy) | {"clipped_grad": clipped_grad})


@pytest.mark.by_day(4)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"rescale_to_unit_norm": True, "normalize_by": 6.0},
        {"microbatch_size": 2, "return_values": True, "return_grad_norms": True},
        {"pre_clipping_transform": halved, "microbatch_size": 3},
        {"keep_batch_dim": False},
    ],
)
def test_sums_and_sensitivities_match_jax_privacy(imported, options, method):
    theirs = imported("jax_privacy.clipping")
    accounting = imported("dp_accounting")
    common = {"l2_clip_norm": 1.0, "batch_argnums": (1, 2), **options}
    fns = [module.clipped_grad(loss_fn, **common) for module in (theirs, ours(method))]
    is_padding = jnp.arange(6) == 2
    found = [fn(PARAMS, X, Y, is_padding_example=is_padding) for fn in fns]
    expected, own = (jax.tree.leaves(each) for each in found)
    assert len(expected) == len(own)
    if options.get("return_grad_norms"):
        # The norm and the value of padding, which count for nothing, are 0 and not given.
        expected[-1] = expected[-1].at[2].set(0)
    for x, y in zip(expected, own, strict=True):
        np.testing.assert_allclose(y, x, rtol=1e-5, atol=1e-6)
    for relation in accounting.NeighboringRelation:
        assert np.isclose(fns[1].sensitivity(relation), fns[0].sensitivity(relation))


# Their messages, and what has no counterpart.
NOT_OURS = {"test_validate_args_overlap", "test_validate_args_empty_batch"}
NOT_OURS |= {"test_validate_args_inconsistent_batch_size"}
FOLDER = os.environ.get("JAX_PRIVACY_TESTS")


def _suite(path, method):
    """The tests of a file of theirs, with our functions for `jax_privacy.clipping`."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name in ("clipping", "gradient_clipping"):
        if hasattr(module, name):
            setattr(module, name, ours(method))
    return unittest.defaultTestLoader.loadTestsFromModule(module)


def _cases(suite):
    for test in suite:
        yield from _cases(test) if isinstance(test, unittest.TestSuite) else [test]


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("file", ["gradient_clipping_test.py", "clipping_test.py"])
def test_clipped_grad_passes_jax_privacy_tests(imported, file, method):
    if not FOLDER:
        pytest.skip("JAX_PRIVACY_TESTS does not name the folder of its tests, at tag v2.0.0")
    imported("jax_privacy.clipping")
    result = unittest.TestResult()
    for case in _cases(_suite(pathlib.Path(FOLDER) / file, method)):
        if case.id().split(".")[-1] not in NOT_OURS:
            case.run(result)
    assert result.testsRun > 15
    problems = [f"{case.id()}\n{text}" for case, text in result.failures + result.errors]
    print(f"{file}: {result.testsRun} run, {len(problems)} failed")
    assert not problems, "\n".join(problems)

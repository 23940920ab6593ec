"""Norms and sums without the gradients of examples, over many models: those of the gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import slow_unless
from ghost_models import MODELS, QUICK

from optaxclip import per_example, scopes

SCOPES = {"tree": scopes.tree(), "leaf": scopes.leaf()}
EVERY = slow_unless(lambda name: name in QUICK, MODELS)
ABOVE = 1e-4
"""How far above the norm a norm may be: what bounds on all rounding add, for layers this small."""
BELOW = 1e-6
"""How far below the norm in float64 a norm may be, as the gradient itself is rounded in float32."""


def floats(tree):
    """The leaves that have gradients, in the order in which norms by leaf come."""
    pairs = jax.tree_util.tree_flatten_with_path(tree)[0]
    named = {jax.tree_util.keystr(path, simple=True, separator="/"): x for path, x in pairs}
    return [x for _, x in sorted(named.items()) if jnp.issubdtype(x.dtype, jnp.inexact)]


def norms_of(leaves):
    """The norms `[examples, leaves]` of gradients `[examples, ...]`, in float64."""
    wide = [np.asarray(x).astype(np.complex128 if np.iscomplexobj(x) else float) for x in leaves]
    squares = [np.square(np.abs(x)).reshape(len(x), -1).sum(1) for x in wide]
    return np.sqrt(np.stack(squares, 1))


@functools.cache
def gradients(name, *, wide=False):
    """The gradient of each example, a leaf after the other; in float64 if `wide`."""
    model = MODELS[name]()
    widened = _widened if wide else (lambda x: x)
    params, batch = jax.tree.map(widened, (model.params, model.batch))

    def loss(params, *example):
        found = model.loss(params, *example)
        return found[0] if model.has_aux else found

    grad = jax.grad(loss, allow_int=True)
    grads = jax.jit(jax.vmap(grad, (None, *[0] * len(batch))))(params, *batch)
    return [np.asarray(x).astype(_wide_dtype(x)) for x in floats(grads)]


def _wide_dtype(x):
    return np.complex128 if jnp.iscomplexobj(x) else np.float64


def _widened(x):
    return x.astype(_wide_dtype(x)) if jnp.issubdtype(x.dtype, jnp.inexact) else x


@functools.cache
def of_both(name):
    """For each scope, what comes of the model with a limit that clips half of the examples.

    The norms; the result of either method; and, of the ghost method, what each example adds.
    """
    model, found = MODELS[name](), {}
    norms = norms_of(gradients(name))
    limits = {
        "tree": float(np.median(np.linalg.norm(norms, axis=1))),
        "leaf": float(np.median(norms.max(1)) * norms.shape[1] ** 0.5),
    }

    def run(params, *batch):
        for scope, limit in limits.items():
            options = {"scope": SCOPES[scope], "has_aux": model.has_aux}
            norms, *_ = per_example.grad_norms(model.loss, **options)(params, *batch)
            by = {
                method: per_example.clipped_grad(model.loss, limit, method=method, **options)
                for method in ("ghost", "vmap")
            }
            padding = ~np.eye(len(jax.tree.leaves(batch)[0]), dtype=bool)
            alone = jax.lax.map(
                lambda flags, ghost=by["ghost"]: floats(
                    ghost(params, *batch, is_padding=flags).grads
                ),
                padding,
            )
            results = {method: by[method](params, *batch) for method in by}
            found[scope] = norms, results, alone
        return found

    return limits, jax.jit(run)(model.params, *model.batch)


@pytest.mark.by_day(1)
@pytest.mark.parametrize("name", EVERY)
def test_norms_are_those_of_the_gradients(name):
    digits = MODELS[name]().digits
    references = [gradients(name)]
    if MODELS[name]().has_float64:
        with jax.enable_x64(True):
            references.append(gradients(name, wide=True))
    _, found = of_both(name)
    for leaves in references:
        by_leaf = norms_of(leaves)
        expected = {"leaf": by_leaf, "tree": np.linalg.norm(by_leaf, axis=1)}
        for scope, norms in expected.items():
            # A leaf that has hardly any part in the norm has hardly any digits.
            least = 1e-6 * expected["tree"].reshape(-1, *[1] * (norms.ndim - 1))
            above = np.asarray(found[scope][0], float) - norms
            most = max(ABOVE, digits)
            assert np.all(above <= most * norms + least), (scope, np.max(above / norms))
            below = max(BELOW, digits if digits > 1e-5 else 0)
            assert np.all(above >= -below * norms - least), (scope, np.min(above / norms))


@pytest.mark.parametrize("name", EVERY)
def test_sums_are_those_of_the_clipped_gradients(name):
    model = MODELS[name]()
    limits, found = of_both(name)
    for scope, (_, results, _) in found.items():
        ghost, vmap = results["ghost"], results["vmap"]
        assert ghost.losses.shape == vmap.losses.shape
        np.testing.assert_allclose(ghost.losses, vmap.losses, rtol=1e-5, atol=1e-6)
        assert jax.tree.structure(ghost) == jax.tree.structure(vmap)
        for ours, theirs in zip(*map(jax.tree.leaves, (ghost.aux, vmap.aux)), strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)
        assert int(ghost.num_unclipped) == int(vmap.num_unclipped)
        assert int(ghost.num_dropped) == 0
        for ours, theirs in zip(*map(floats, (ghost.grads, vmap.grads)), strict=True):
            assert ours.dtype == theirs.dtype
            error = np.linalg.norm(np.ravel(ours - theirs))
            assert error <= max(ABOVE, model.digits) * limits[scope], scope


@pytest.mark.parametrize("name", EVERY)
def test_no_example_adds_more_than_the_limit_and_ordinary_ones_reach_it(name):
    model = MODELS[name]()
    limits, found = of_both(name)
    true = norms_of(gradients(name))
    for scope, (_, _, alone) in found.items():
        added, bound = norms_of(alone), limits[scope]
        if scope == "leaf":
            bound = bound / true.shape[1] ** 0.5
            unclipped = true
        else:
            added, unclipped = (np.linalg.norm(x, axis=1) for x in (added, true))
        assert np.all(added <= bound * (1 + 1e-15)), scope
        assert np.any(unclipped > bound), "a test that clips nothing"
        least = min(0.99, 1 - model.digits) * np.minimum(unclipped, bound)
        assert np.all(added >= least - 1e-6 * bound), (scope, np.min(added / least))


def test_there_are_enough_models():
    assert len(MODELS) >= 25
    assert len(QUICK) >= 6

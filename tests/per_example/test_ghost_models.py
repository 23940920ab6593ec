"""Norms and sums without the gradients of examples, over many models: those of the gradients."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import slow_unless
from ghost_models import MODELS, QUICK

from optaxclip import per_example, scopes

SCOPES = {"tree": scopes.tree(), "leaf": scopes.leaf()}
EVERY = slow_unless(lambda name, scope: QUICK.get(name) == scope, itertools.product(MODELS, SCOPES))
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
def norms_by_leaf(name):
    return norms_of(gradients(name))


@functools.cache
def both_methods(name, scope):
    """What comes of a model with a threshold that clips half of the examples.

    The threshold; the result of either method; and, of the ghost method, what each example adds.
    """
    model, norms = MODELS[name](), norms_by_leaf(name)
    thresholds = {
        "tree": float(np.median(np.linalg.norm(norms, axis=1))),
        "leaf": float(np.median(norms.max(1)) * norms.shape[1] ** 0.5),
    }
    ghost, vmap = (
        per_example.clipped_grad(
            model.loss, thresholds[scope], method=method, scope=SCOPES[scope], has_aux=model.has_aux
        )
        for method in ("ghost", "vmap")
    )

    def run(params, *batch):
        # Without padding, and with all padding but one example: one program for all of these.
        size = len(jax.tree.leaves(batch)[0])
        padding = np.concatenate([np.zeros((1, size), bool), ~np.eye(size, dtype=bool)])
        found = jax.lax.map(lambda flags: ghost(params, *batch, is_padding=flags), padding)
        results = {"ghost": jax.tree.map(lambda x: x[0], found), "vmap": vmap(params, *batch)}
        return results, [x[1:] for x in floats(found.grads)]

    return thresholds[scope], *jax.jit(run)(model.params, *model.batch)


@pytest.mark.by_day(1)
@pytest.mark.parametrize(("name", "scope"), EVERY)
def test_ghost_norms_match_gradients_of_models(name, scope):
    model = MODELS[name]()
    references = [gradients(name)]
    if model.has_float64:
        with jax.enable_x64(True):
            references.append(gradients(name, wide=True))
    norms_fn = per_example.grad_norms(model.loss, scope=SCOPES[scope], has_aux=model.has_aux)
    found, *_ = jax.jit(norms_fn)(model.params, *model.batch)
    for leaves in references:
        by_leaf = norms_of(leaves)
        of_tree = np.linalg.norm(by_leaf, axis=1)
        norms = by_leaf if scope == "leaf" else of_tree
        # A leaf that has hardly any part in the norm has hardly any digits.
        least = 1e-6 * of_tree.reshape(-1, *[1] * (norms.ndim - 1))
        above = np.asarray(found, float) - norms
        most = max(ABOVE, model.digits)
        assert np.all(above <= most * norms + least), np.max(above / norms)
        below = max(BELOW, model.digits if model.digits > 1e-5 else 0)
        assert np.all(above >= -below * norms - least), np.min(above / norms)


@pytest.mark.by_day(1)
@pytest.mark.parametrize(("name", "scope"), EVERY)
def test_ghost_sums_match_vmap_for_models(name, scope):
    threshold, results, _ = both_methods(name, scope)
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
        error = np.linalg.norm(np.ravel(np.asarray(ours) - np.asarray(theirs)))
        assert error <= max(ABOVE, MODELS[name]().digits) * threshold


@pytest.mark.by_day(3)
@pytest.mark.parametrize(("name", "scope"), EVERY)
def test_no_example_adds_more_than_the_threshold_and_ordinary_ones_reach_it(name, scope):
    bound, _, alone = both_methods(name, scope)
    unclipped, added = norms_by_leaf(name), norms_of(alone)
    if scope == "leaf":
        bound = bound / unclipped.shape[1] ** 0.5
    else:
        added, unclipped = (np.linalg.norm(x, axis=1) for x in (added, unclipped))
    assert np.all(added <= bound * (1 + 1e-15))
    assert np.any(unclipped > bound), "a test that clips nothing"
    least = min(0.99, 1 - MODELS[name]().digits) * np.minimum(unclipped, bound)
    assert np.all(added >= least - 1e-6 * bound), np.min(added / least)


def test_ghost_model_collection_stays_large():
    assert len(MODELS) >= 25
    assert len(QUICK) >= 6

"""Norms and sums of losses that use parameters in all the ways that are known, and in others."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import slow_unless
from jax import lax
from small_losses import CASES, planned, squares

from optaxclip import per_example, scopes


def quick_cases(*names):
    """All cases, of which these run by day: few that use parameters in several ways at once."""
    return pytest.mark.parametrize("name", slow_unless(lambda name: name in names, CASES))


def in_float64(tree):
    return jax.tree.map(
        lambda x: np.asarray(x, np.float64) if np.asarray(x).dtype == np.float32 else x, tree
    )


@functools.cache
def exact(name):
    """The losses and the gradients of all examples, in float64."""
    loss, params, batch, _ = CASES[name]
    with jax.enable_x64(True):
        fn = jax.value_and_grad(loss, allow_int=True)
        axes = (None, *(0 for _ in batch))
        losses, found = jax.jit(jax.vmap(fn, axes))(in_float64(params), *in_float64(batch))
        grads = {k: np.asarray(x, np.longdouble) for k, x in found.items() if x.dtype == np.float64}
        return np.asarray(losses), grads


def norms_of(grads):
    return {k: np.sqrt(np.sum(np.square(x.reshape(len(x), -1)), 1)) for k, x in grads.items()}


@quick_cases("autoencoder", "concatenated_outputs", "tied_and_looked_up_twice")
def test_ghost_leaf_norms_never_underestimate(name):
    loss, params, batch, _ = CASES[name]
    found, losses = jax.jit(per_example.grad_norms(loss, scope=scopes.leaf()))(params, *batch)
    exact_losses, grads = exact(name)
    expected = norms_of(grads)
    for i, (leaf, norms) in enumerate(sorted(expected.items())):
        ratio = np.asarray(found[:, i], np.longdouble) / np.where(norms == 0, 1, norms)
        assert np.all(ratio >= (norms > 0) * (1 - 3e-7)), (leaf, ratio)
        assert np.all(ratio <= (norms > 0) * (1 + 1e-4)), (leaf, ratio)
    np.testing.assert_allclose(losses, exact_losses, rtol=1e-5)


@pytest.mark.by_day(1)
@quick_cases("concatenated_experts", "recurrent_in_layers")
def test_ghost_sum_equals_sum_of_clipped_gradients(name):
    loss, params, batch, _ = CASES[name]
    _, grads = exact(name)
    norms = np.sqrt(sum(np.square(x) for x in norms_of(grads).values()))
    threshold = float(np.median(norms))
    fn = jax.jit(per_example.clipped_grad(loss, threshold, method="ghost", microbatch_size=3))
    result = fn(params, *batch)
    factors = threshold / np.maximum(threshold, norms)
    for leaf, each in grads.items():
        expected = np.tensordot(factors, each, 1)
        found = np.asarray(result.grads[leaf], np.longdouble)
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4 * np.abs(each).max())
    assert result.num_clipped in (2, 3)
    assert (result.num_dropped, result.num_clipped + result.num_unclipped) == (0, len(norms))


@pytest.mark.parametrize("name", CASES)
def test_ghost_chooses_expected_method_for_params(name):
    loss, params, batch, ways = CASES[name]
    call, plan = planned(loss, params, *batch)
    found = {}
    for i, leaf in enumerate(call.params.names()):
        parts = {part.method for part in plan.parts[i]}
        found[leaf] = "dense" if i in plan.materialized else parts.pop() if parts else "unused"
        assert not parts
    assert found == ways


@pytest.mark.slow
def test_ghost_chooses_gram_matrices_for_transformers():
    def loss(params, x):
        return squares(jnp.tanh(x @ params["up"]) @ params["head"])

    params = {"up": jnp.zeros((768, 3072)), "head": jnp.zeros((3072, 50_000))}
    text = per_example.explain(loss, *jax.eval_shape(lambda: (params, jnp.zeros((2, 128, 768)))))
    assert text.count("Gram matrices") == 2


def test_ghost_counts_convolution_patches_twice():
    """They are written for the norm, while gradients of examples give the sum too."""

    def loss(kernel, x):
        numbers = ("NHWC", "HWIO", "NHWC")
        return squares(
            lax.conv_general_dilated(x[None], kernel, (2, 2), "SAME", dimension_numbers=numbers)
        )

    args = jax.eval_shape(lambda: (jnp.zeros((3, 3, 64, 64)), jnp.zeros((8, 14, 14, 64))))
    assert "gradients of examples, cheaper than Gram matrices" in per_example.explain(loss, *args)


def test_ghost_norms_of_aligned_wide_tokens_keep_precision():
    """Of inner products of a thousand terms rounding may take as much as a clip would notice."""
    rng = np.random.default_rng(3)
    x = (rng.normal(size=(2, 32, 1024)) + 0.5).astype(np.float32)
    d = rng.normal(size=(2, 32, 1024)).astype(np.float32)

    def loss(w, x, d):
        return jnp.vdot(x @ w, d)

    norms, _ = jax.jit(per_example.grad_norms(loss))(np.zeros((1024, 1024), np.float32), x, d)
    true = norms_of({"w": np.einsum("btk,btn->bkn", *(v.astype(float) for v in (x, d)))})["w"]
    ratio = np.asarray(norms, np.longdouble) / true
    assert np.all((ratio >= 1) & (ratio <= 1 + 1e-3)), ratio

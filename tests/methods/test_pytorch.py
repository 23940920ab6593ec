"""PyTorch's factor, digit for digit: `clip_by_global_norm(c, eps=1e-6)`."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optaxclip
from optaxclip import clip_by, responses, scopes

# Integers whose norms, of leaves and of all, have no digits to round.
EXACT = [[[3.0, 4.0], [0.0]], [[0.0, 5.0], [12.0]], [[9.0, 12.0], [8.0]], [[0.0, 0.0], [0.0]]]
THRESHOLDS = [0.1, 1.0, 4.999999, 5.0, 5.000001, 13.0, 100.0]


@jax.jit
def clip(leaves, threshold):
    tx = optaxclip.clip_by_global_norm(threshold, eps=1e-6)
    updates, state = tx.update(leaves, tx.init(leaves))
    return updates, state.info


def ours(leaves, threshold):
    return clip([jnp.asarray(x, jnp.float32) for x in leaves], jnp.float32(threshold))


def factor(norm, threshold, eps=1e-6):
    """Of PyTorch, in float32."""
    inverse = np.float32(1) / (np.float32(norm) + np.float32(eps))
    return min(inverse * np.float32(threshold), np.float32(1))


@pytest.mark.parametrize("leaves", EXACT)
def test_clip_by_global_norm_factor_equals_pytorch_factor(leaves):
    leaves = [np.float32(x) for x in leaves]
    norm = np.sqrt(sum(np.sum(x**2) for x in leaves))
    for threshold in THRESHOLDS:
        updates, info = ours(leaves, threshold)
        assert info.factor == factor(norm, threshold)
        for x, y in zip(leaves, updates, strict=True):
            np.testing.assert_array_equal(y, x * factor(norm, threshold))


def test_clip_by_global_norm_matches_torch_utils():
    torch = pytest.importorskip("torch", reason="compared where PyTorch is installed")
    rng = np.random.default_rng(0)
    drawn = [[rng.normal(size=(3, 5)) * scale, rng.normal(size=4)] for scale in (0.1, 1, 30)]
    for leaves, ulps in [*((x, 0) for x in EXACT), *((x, 3) for x in drawn)]:
        for threshold in THRESHOLDS:
            params = [torch.zeros(np.shape(x), requires_grad=True) for x in leaves]
            for param, x in zip(params, leaves, strict=True):
                param.grad = torch.tensor(np.float32(x))
            norm = torch.nn.utils.clip_grad_norm_(params, threshold)
            updates, info = ours(leaves, threshold)
            np.testing.assert_array_max_ulp(info.norm, np.float32(norm), max(ulps, 1))
            for param, y in zip(params, updates, strict=True):
                np.testing.assert_array_max_ulp(np.asarray(y), param.grad.numpy(), max(ulps, 0.5))


@pytest.mark.parametrize(("threshold", "factor"), [(0.0, 0.0), (np.inf, 1.0), (-1.0, 0.0)])
def test_thresholds_at_the_ends(threshold, factor):
    for leaves in EXACT:
        updates, info = ours(leaves, threshold)
        assert info.factor == factor
        np.testing.assert_array_equal(updates[0], np.float32(leaves[0]) * np.float32(factor))


def test_clip_with_eps_works_with_leaf_scope():
    tx = clip_by(scopes.leaf(), 1.0, response=responses.clip_with_eps(0.5))
    grads = {"a": np.float32([3.0, 4.0]), "b": np.float32([0.25]), "c": np.float32([jnp.nan, 1])}
    updates, state = tx.update(grads, tx.init(grads))
    np.testing.assert_array_equal(state.info.factor, [factor(5, 1, 0.5), 1, np.nan])
    np.testing.assert_array_equal(updates["a"], grads["a"] * factor(5, 1, 0.5))
    np.testing.assert_array_equal(updates["b"], grads["b"])
    assert np.all(np.isnan(updates["c"]))
    clipped = optaxclip.clip_tree(grads, 1.0, scope=scopes.leaf(), nonfinite="zero")[0]
    np.testing.assert_array_equal(clipped["c"], [0, 0])


def test_clip_with_eps_requires_static_eps():
    inject = optax.inject_hyperparams(optaxclip.clip_by_global_norm, static_args="eps")
    tx, grads = inject(max_norm=1.0, eps=1e-2), np.float32([3.0, 4.0])
    assert tx.update(grads, tx.init(grads))[1].inner_state.info.factor == factor(5, 1, 1e-2)
    with pytest.raises(ValueError, match=r"^eps must be a Python .*static_args=\('eps',\)"):
        optax.inject_hyperparams(optaxclip.clip_by_global_norm)(max_norm=1.0, eps=1e-2).init(grads)


def test_strict_clip_with_eps_stays_below_threshold():
    rng = np.random.default_rng(0)
    x = 1e4 * rng.normal(size=(1000, 65)).astype(np.float32)
    norms = np.linalg.norm(np.float64(x), axis=1)
    thresholds = (norms * rng.uniform(0.5, 1.5, 1000)).astype(np.float32)
    options = {"scope": scopes.tree(), "response": responses.clip_with_eps(1e-6), "strict": True}
    clip = jax.jit(jax.vmap(lambda x, threshold: optaxclip.clip_tree(x, threshold, **options)[0]))
    found, stays = clip(x, thresholds), thresholds > norms
    np.testing.assert_array_equal(found[stays], x[stays])
    ratio = np.linalg.norm(np.float64(found), axis=1)[~stays] / thresholds[~stays]
    assert 1 - 3e-6 < ratio.min() < ratio.max() <= 1


# Thresholds and norms for which the factor, its derivative or a reciprocal is no normal number.
EXTREMES = np.float32([[1, 3e38], [1e30, 1e37], [1, 1e20], [1e-30, 1e20], [1e10, 1e-30]])


@pytest.mark.by_day(1)
@pytest.mark.parametrize("eps", [0.0, 1e-6])
def test_norms_and_thresholds_at_the_ends_of_the_range(eps):
    """Neither the factor nor its derivatives become 0 or NaN."""

    def clipped(x, threshold):
        return optaxclip.clip_tree(
            x, threshold, scope=scopes.tree(), response=responses.clip_with_eps(eps)
        )[0]

    def all_of(row):
        arguments = (row[1] * jnp.float32([0.6, 0.8]), row[0])
        forward, reverse = (jac(clipped, (0, 1)) for jac in (jax.jacfwd, jax.jacrev))
        return clipped(*arguments), forward(*arguments), reverse(*arguments)

    new, *derivatives = jax.jit(jax.vmap(all_of))(EXTREMES)
    unit, (thresholds, norms) = np.float64([0.6, 0.8]), np.float64(EXTREMES).T
    np.testing.assert_allclose(new, np.minimum(thresholds, norms)[:, None] * unit, rtol=1e-6)
    across, is_clipped = np.eye(2) - np.outer(unit, unit), thresholds < norms
    factors = np.minimum(thresholds / norms, 1)[:, None, None]
    by_entries = factors * np.where(is_clipped[:, None, None], across, np.eye(2))
    for of_entries, of_threshold in derivatives:
        np.testing.assert_allclose(of_entries, by_entries, rtol=1e-5, atol=1e-37)
        np.testing.assert_allclose(of_threshold, is_clipped[:, None] * unit, rtol=1e-6)

"""Norms and responses: their values, and what a clip makes of them."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.sparse import BCOO

import optaxclip
from optaxclip import norms, ops, responses, scopes

TREE = [np.float32([3.0, -4.0])]
SEQUENCE = [1.0, 1.2, 0.8, 1.0, 5.0, 1.1]  # the raw norms of methods.md


def update(tx, grads, params=None):
    """The clipped gradients and the record of the first step."""
    params = grads if params is None else params
    clipped, state = tx.update(grads, tx.init(params), params)
    return clipped, state.info


def clip_tree(tree, threshold, **options):
    return optaxclip.clip_tree(tree, threshold, scope=scopes.tree(), **options)


@pytest.mark.by_day(2)
@pytest.mark.parametrize(
    ("norm", "value"),
    [
        (norms.l1, 7),
        (norms.l2, 5),
        (norms.linf, 4),
        (norms.rms, 3.5355339),
        (norms.mean_abs, 3.5),
        (norms.average_l2, 2.5),
        (norms.lp(1), 7),
        (norms.lp(2), 5),
        (norms.lp(3), 4.497941),
        (norms.lp(0.5), 13.928203),
        (norms.lp(math.inf), 4),
    ],
    ids=lambda x: getattr(x, "name", None),
)
def test_norms_match_tabulated_values(norm, value):
    np.testing.assert_allclose(ops.global_norm(TREE, norm=norm), value, rtol=1e-6)
    (clipped,), info = clip_tree(TREE, 1.0, norm=norm)
    np.testing.assert_allclose(info.norm, value, rtol=1e-6)
    np.testing.assert_allclose(info.factor, 1 / value, rtol=2e-6)
    np.testing.assert_allclose(clipped, [3 / value, -4 / value], rtol=2e-6)


@pytest.mark.by_day(3)
@pytest.mark.parametrize("p", [0.5, 1.5, 3, 4.5, 10, 64])
def test_lp_norm_of_several_leaves_matches_numpy(p):
    rng = np.random.default_rng(0)
    tree = [rng.standard_normal(shape).astype(np.float32) for shape in ((3, 4), (), (70,))]
    flat = np.concatenate([np.ravel(leaf) for leaf in tree]).astype(np.float64)
    measured = ops.global_norm(tree, norm=norms.lp(p))
    np.testing.assert_allclose(measured, np.sum(np.abs(flat) ** p) ** (1 / p), rtol=2e-6)


@pytest.mark.parametrize("name", ["l1", "l2", "linf", "rms", "mean_abs", "average_l2"])
def test_as_norm_accepts_names(name):
    assert norms.as_norm(name) is getattr(norms, name)
    assert norms.as_norm(name).name == name
    assert norms.as_norm(getattr(norms, name)) is getattr(norms, name)


@pytest.mark.parametrize(("p", "norm"), [(1, norms.l1), (2.0, norms.l2), (math.inf, norms.linf)])
def test_lp_returns_named_or_cached_norms(p, norm):
    assert norms.lp(p) is norm
    # Equal ones are the same object, so that they compile once.
    assert norms.lp(2.5) is norms.lp(2.5)


@pytest.mark.by_day(1)
@pytest.mark.parametrize("norm", ["l1", "l2", "linf", "rms", "mean_abs", norms.lp(3)], ids=str)
def test_norm_of_empty_or_zero_tree_equals_zero(norm):
    for tree in ({}, [None], [jnp.zeros((0, 3))], [jnp.zeros(4)]):
        assert ops.global_norm(tree, norm=norm) == 0


@pytest.mark.parametrize("norm", ["l1", "l2", "linf", "rms", "mean_abs", norms.lp(3)], ids=str)
def test_norm_of_single_element_equals_modulus(norm):
    for tree in (jnp.float32(-3), [jnp.full((1, 1), -3.0), None], {"z": jnp.array([1.8 - 2.4j])}):
        np.testing.assert_allclose(ops.global_norm(tree, norm=norm), 3, rtol=1e-6)


@pytest.mark.by_day(1)
@pytest.mark.parametrize("count", [3, 17, 70])
@pytest.mark.parametrize(("norm", "order"), [("l1", 1), ("l2", 2), ("linf", math.inf)])
def test_norms_of_many_leaves_match_numpy(norm, order, count):
    x = np.random.default_rng(0).standard_normal((count, 2)).astype(np.float32)
    measured = ops.global_norm([*x], norm=norm)
    np.testing.assert_allclose(measured, np.linalg.norm(x.ravel(), order), rtol=1e-6)


@pytest.mark.by_day(1)
@pytest.mark.parametrize("dtype", ["float16", "float8_e5m2", "complex64"])
@pytest.mark.parametrize("shape", [(1 << 17,), (300, 512), (3, 128, 350), (99, 104)], ids=str)
def test_global_norm_of_large_narrow_leaves_keeps_precision(dtype, shape):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2, *shape)).astype(jnp.dtype(dtype))
    truth = x.astype(np.complex128 if dtype == "complex64" else np.float64)

    @jax.jit
    def measured(x):
        value, slope = jax.jvp(ops.global_norm, (x[0],), (x[1],))
        return value, jax.vmap(ops.global_norm)(x), slope, jax.grad(ops.global_norm)(x[0])

    value, by_vmap, slope, gradient = measured(x)
    norms_of_both = [np.linalg.norm(leaf) for leaf in truth]
    np.testing.assert_allclose(value, norms_of_both[0], rtol=1e-6)
    np.testing.assert_allclose(by_vmap, norms_of_both, rtol=1e-6)
    tolerance = {"float16": 1e-3, "float8_e5m2": 0.2, "complex64": 1e-5}[dtype]
    along = (truth[0].conj() * truth[1]).real.sum() / norms_of_both[0]
    np.testing.assert_allclose(slope, along, rtol=1e-4)
    expected = truth[0].conj() / norms_of_both[0]
    gradient = np.asarray(gradient, truth.dtype)
    np.testing.assert_allclose(gradient, expected, rtol=tolerance, atol=1e-4)
    assert measured(np.zeros_like(x))[0] == 0


# Leaves of pairs and of indices


@pytest.mark.by_day(1)
@pytest.mark.parametrize(
    ("make", "factor"),
    [
        (optaxclip.clip_by_global_norm, 1 / math.sqrt(36 + 64)),
        (optaxclip.clip_by_norm, 1 / 6),
        (optaxclip.clip_by_block_rms, 1 / math.sqrt(36 / 5)),
    ],
    ids=["clip_by_global_norm", "clip_by_norm", "clip_by_block_rms"],
)
def test_clips_scale_sparse_leaves(make, factor):
    sparse = BCOO((np.float32([3.0, 3.0]), np.int32([[1], [1]])), shape=(5,))
    (clipped, _), _ = update(make(1.0), [sparse, np.float32([0.0, 8.0])])
    assert isinstance(clipped, BCOO)
    assert clipped.shape == sparse.shape
    np.testing.assert_array_equal(clipped.indices, sparse.indices)
    np.testing.assert_allclose(clipped.data, np.full(2, 3 * factor), rtol=1e-6)


# Clip by norm, average norm and block RMS


@pytest.mark.parametrize(
    ("threshold", "expected"),
    [(0.8, [[-2.88, 0, 0], [3.84, 0, 0]]), (0.9, [[-3, 0, 0], [4, 0, 0]])],
    ids=["clipped", "not clipped"],
)
def test_clip_by_average_l2_norm_matches_example(threshold, expected):
    grads = np.float32([[-3.0, 0, 0], [4, 0, 0]])
    tx = optaxclip.clip_by(scopes.leaf(), threshold, norm="average_l2")
    np.testing.assert_allclose(tx.update(grads, tx.init(grads))[0], expected, rtol=1e-6)


def test_clip_by_block_rms_matches_example():
    grads = [np.float32([3.0, 4.0]), np.float32([0.5, 0.5, 0.5])]
    tx = optaxclip.clip_by_block_rms(1.0)
    updates, state = tx.update(grads, tx.init(grads))
    np.testing.assert_allclose(updates[0], [0.848528, 1.131371], rtol=1e-6)
    np.testing.assert_array_equal(updates[1], grads[1])
    np.testing.assert_allclose(state.info.norm, [3.5355339, 0.5], rtol=1e-6)


@pytest.mark.by_day(4)
@pytest.mark.parametrize("norm", ["l1", "l2", "linf", "rms", "mean_abs", norms.lp(3)], ids=str)
@pytest.mark.parametrize("extreme", [1e-30, 1e30, 3e38, math.inf])
@pytest.mark.parametrize("scope", ["leaf", "unit"])
def test_extreme_group_leaves_other_groups_unchanged(scope, extreme, norm):
    rng = np.random.default_rng(0)
    plain = rng.uniform(-1, 1, (70, 3)).astype(np.float32)
    mixed = plain * np.array([1, extreme, 1], np.float32)
    options = {"scope": getattr(scopes, scope)(), "norm": norm}
    if scope == "unit":
        results = [optaxclip.clip_tree(x, 0.5, **options)[0].T for x in (plain, mixed)]
    else:
        results = [optaxclip.clip_tree(list(x.T), 0.5, **options)[0] for x in (plain, mixed)]
    expected, actual = (np.asarray(columns)[[0, 2]] for columns in results)
    assert actual.tobytes() == expected.tobytes()


# Responses

FORMULAS = {
    "clip": np.minimum,
    "normalize": lambda n, c: c + 0 * n,
    "smooth": lambda n, c: n / np.sqrt(1 + (n / c) ** 2),
}


@pytest.mark.by_day(1)
@pytest.mark.parametrize(
    ("response", "factors"),
    [
        ("clip", [1, 0.833333, 1, 1, 0.2, 0.909091]),
        ("normalize", [1, 0.833333, 1.25, 1, 0.2, 0.909091]),
        ("smooth", [0.707107, 0.640184, 0.780869, 0.707107, 0.196116, 0.672673]),
    ],
)
def test_responses_match_factors_on_standard_sequence(response, factors):
    for norm, factor in zip(SEQUENCE, factors, strict=True):
        grads = np.float32([0.6, -0.8]) * norm
        (clipped,), info = clip_tree([grads], 1.0, response=response)
        np.testing.assert_allclose(info.factor, factor, rtol=2e-6)
        np.testing.assert_allclose(clipped, factor * grads, rtol=2e-6)


@pytest.mark.parametrize("response", FORMULAS)
@pytest.mark.parametrize("threshold", [1e-30, 1e-3, 1.0, 1e3, 1e30])
def test_responses_match_float64_formula(response, threshold):
    norm = np.logspace(-35, 35, 141).astype(np.float32)
    thresholds = jnp.full(norm.shape, threshold)
    new = getattr(responses, response)(jnp.asarray(norm), thresholds, thresholds)
    expected = FORMULAS[response](norm.astype(np.float64), np.float64(np.float32(threshold)))
    np.testing.assert_allclose(new, expected, rtol=1e-6)


def test_thresholds_accept_different_trigger_and_target():
    thresholds = optaxclip.Thresholds(trigger=2.0, target=1.5)
    for norm, new in [(1.0, 1.0), (1.9, 1.9), (2.0, 2.0), (2.1, 1.5), (9.0, 1.5)]:
        (clipped,), _ = clip_tree([jnp.array([norm])], thresholds)
        np.testing.assert_allclose(clipped, [new], rtol=1e-6)
    # A target above the trigger never makes a group larger.
    (clipped,), _ = clip_tree([np.float32([2.1])], optaxclip.Thresholds(trigger=2.0, target=5.0))
    np.testing.assert_array_equal(clipped, np.float32([2.1]))


def test_clip_tree_accepts_custom_response():
    def halve(norm, trigger, target):
        return jnp.where(norm > trigger, norm / 2, norm)

    for norm, new in [(0.5, 0.5), (8.0, 4.0)]:
        (clipped,), info = jax.jit(lambda x: clip_tree([x], 1.0, response=halve))(jnp.array([norm]))
        np.testing.assert_allclose(clipped, [new], rtol=1e-6)
        np.testing.assert_allclose(info.factor, new / norm, rtol=1e-6)


@pytest.mark.by_day(1)
@pytest.mark.parametrize("new", [1, 1.0, np.float64(1.0), jnp.ones(())])
@pytest.mark.parametrize("scope", [scopes.leaf(), scopes.tree(), scopes.axes(0)])
def test_response_may_return_any_scalar_type(new, scope):
    tree = [np.float32([[3.0], [4.0]])]
    (clipped,), _ = optaxclip.clip_tree(tree, 9.0, scope=scope, response=lambda *_: new)
    np.testing.assert_allclose(clipped, [[0.6], [0.8]], rtol=1e-6)


@functools.partial(jax.jit, static_argnames=("size", "response"))
def measured(x, weights, scale, *, size, response):
    """Values and derivatives of a clip of `x * scale` with zeros up to `size` behind it."""

    def clipped(x):
        padded = jnp.pad(x, (0, size - 100))
        (padded,), _ = clip_tree([padded], 5 * scale, response=response)
        return padded[:100] / scale

    def weighted(x):
        return weights @ clipped(x)

    x = x * scale
    gradient, change = jax.jvp(jax.grad(weighted), (x,), (weights * scale,))
    by_vmap = jax.vmap(clipped)(jnp.stack([x, x / 1e10, x * 1e10]))
    slopes = jax.jacfwd(weighted)(x)
    return clipped(x), by_vmap, slopes * scale, gradient * scale, change * scale


def test_linf_norm_of_complex_and_real_leaves():
    tree = {"complex": jnp.array([3.0 + 4.0j]), "real": jnp.array([-7.0, 2.0])}
    for scope, expected in [(scopes.tree(), 7.0), (scopes.leaf(), [5.0, 7.0])]:
        found = optaxclip.clip_tree(tree, math.inf, scope=scope, norm="linf")[1].norm
        np.testing.assert_array_equal(found, expected)

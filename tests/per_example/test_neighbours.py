"""With and without one example, sums differ by what that example adds, at most the sensitivity."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import slow_unless
from ghost_models import MODELS
from jax import lax

from optaxclip import per_example, scopes

METHODS = ("ghost", "vmap")
OPTIONS = {
    "clip": {},
    "normalize": {"response": "normalize", "scope": scopes.leaf()},
    "auto_s": {"response": "auto_s", "microbatch_size": 4},
    "smooth": {"response": "smooth", "scope": scopes.leaf(), "split": "size"},
    "own": {"response": lambda norm, trigger, target: 0.7 * target, "microbatch_size": 3},
}
ROUNDING = {"ghost": 3e-4, "vmap": 1e-5}
"""In thresholds: how far sums of some ten examples are off, several of whose positions cancel."""


def check(loss, params, batch, method, ordinary, **options):
    """Removes each example, and leaves each example alone, and compares norms and sums.

    Thresholds are taken from so many examples, which come first.
    """
    examples = len(jax.tree.leaves(batch)[0])
    each = np.eye(examples, dtype=bool)
    padding = np.concatenate([np.zeros((1, examples), bool), each, ~each])

    @jax.jit
    def run(threshold, params, *batch):
        clip = per_example.clipped_grad(loss, threshold, method=method, **options)
        return lax.map(lambda flags: clip(params, *batch, is_padding=flags), padding)

    for threshold in thresholds_of(np.asarray(run(1.0, params, *batch).norms)[0, :ordinary]):
        found = run(threshold, params, *batch)
        norms = np.asarray(found.norms).reshape(len(padding), examples, -1)
        expected = np.where(padding[..., None], 0, norms[:1])
        np.testing.assert_array_equal(norms, expected, "norms depend on other examples")
        leaves = [
            np.asarray(x).astype(np.clongdouble if np.iscomplexobj(x) else np.longdouble)
            for x in jax.tree.leaves(found.grads)
            if jnp.issubdtype(x.dtype, jnp.inexact)
        ]
        sums = np.concatenate([x.reshape(len(x), -1) for x in leaves], 1) / threshold
        whole, without, alone = np.split(sums, [1, 1 + examples])
        # In float32 the threshold itself is rounded.
        assert np.all(np.linalg.norm(np.abs(alone), axis=1) <= 1 + 2.0**-24)
        changes = np.linalg.norm(np.abs(whole - without - alone), axis=1)
        assert np.all(changes <= ROUNDING[method]), changes


def thresholds_of(norms):
    """Thresholds that clip half and none of the ordinary examples, from their norms."""
    norms = np.linalg.norm(norms.reshape(len(norms), -1), axis=1)
    return np.float32(np.median(norms)), np.float32(2 * norms.max())


def with_extremes(batch):
    """A batch, followed by examples with huge, tiny, NaN and zero entries."""
    sizes = np.array([1e10, 1e-10, np.nan, 0])

    def longer(x):
        more = x[: len(sizes)]
        if jnp.issubdtype(x.dtype, jnp.inexact):
            more = more * sizes.reshape(-1, *[1] * (x.ndim - 1)).astype(x.dtype)
        return jnp.concatenate([x, more])

    return jax.tree.map(longer, batch)


QUICK = [("one_matrix_three_times", "clip"), ("mlp", "normalize")]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("name", "option"),
    slow_unless(
        lambda *case: case in QUICK,
        dict.fromkeys(
            [*QUICK, *((name, list(OPTIONS)[i % len(OPTIONS)]) for i, name in enumerate(MODELS))]
        ),
    ),
)
def test_model_example_changes_sum_by_at_most_sensitivity(name, option, method):
    model = MODELS[name]()
    options = {"has_aux": model.has_aux, **OPTIONS[option]}
    batch = with_extremes(model.batch)
    check(model.loss, model.params, batch, method, 6, **options)


RNG = np.random.default_rng(0)


def extremes(positions, inputs, outputs):
    """Data and cotangents: ordinary ones, and some that make norms or sums lose digits."""
    x, d = RNG.normal(size=(14, positions, inputs)), RNG.normal(size=(14, positions, outputs))
    half = positions // 2
    for i, noise in enumerate((1e-3, 1e-5, 1e-7, 0)):
        x[i + 3, half : 2 * half] = x[i + 3, :half]
        d[i + 3, half : 2 * half] = noise * d[i + 3, half : 2 * half] - d[i + 3, :half]
    spread = np.where(np.arange(positions) % 2, 1e15, 1e-15)[:, None]
    x[7:12] *= np.stack([1e-20, 1e16, 1, 1, 1])[:, None, None]
    d[7:12] *= np.stack([1e-15, 1e16, 1e-26, 0, 1])[:, None, None]
    x[12], d[12] = x[12] * spread, d[12] / spread
    x[11, :half], d[11, :half] = -9.96e36, 0  # masked, as some libraries do
    x[13, 0, 0] = np.nan
    return x.astype(np.float32), d.astype(np.float32)


def of_layer(w, x, d):
    return jnp.vdot(x @ w, d)


def of_rows(w, x, d):
    return jnp.vdot(w[jnp.arange(len(d)) % len(w)], d) + 0 * x[0, 0]


def of_both(w, x, d):
    """The rows of the table cancel most of the product."""
    rows = 0.9 * d.T @ x
    return jnp.vdot(x @ w.T, d) - jnp.vdot(w[jnp.arange(len(rows))], rows)


def of_kernel(w, x, d):
    numbers = ("NWC", "WIO", "NWC")
    y = lax.conv_general_dilated(x[None], w, (1,), "SAME", dimension_numbers=numbers)
    return jnp.vdot(y[0], d)


LAYERS = {
    "gram": (of_layer, (40, 50), (8, 40, 50)),
    "direct": (of_layer, (4, 6), (20, 4, 6)),
    "vectors": (of_layer, (4, 6), (1, 4, 6)),
    "rows": (of_rows, (7, 4), (9, 1, 4)),
    "tied": (of_both, (30, 20), (6, 20, 30)),
    "tied, in chunks": (of_both, (6, 4), (6, 4, 6)),
    "kernel": (of_kernel, (3, 4, 6), (20, 4, 6)),
    "wide kernel": (of_kernel, (2, 30, 40), (8, 30, 40)),
}
QUICK_LAYERS = [("gram", "float32", "clip"), ("kernel", "float32", "auto_s")]
DTYPES = ("float32", "bfloat16", "float64")
KINDS = itertools.product(LAYERS, DTYPES)
CASES = [(*kind, list(OPTIONS)[i % len(OPTIONS)]) for i, kind in enumerate(KINDS)]
CASES += itertools.product(["gram"], DTYPES, OPTIONS)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("name", "dtype", "option"),
    slow_unless(lambda *case: case in QUICK_LAYERS, dict.fromkeys([*QUICK_LAYERS, *CASES])),
)
def test_layer_example_changes_sum_by_at_most_sensitivity(name, dtype, option, method):
    loss, shape, sizes = LAYERS[name]
    with jax.enable_x64(dtype == "float64"):
        x, d = (v.astype(dtype) for v in extremes(*sizes))
        if "kernel" in name and (dtype, method) == ("float64", "vmap"):
            # XLA on a CPU (JAX 0.10.2) adds the pixels of other examples times 0.
            x = np.nan_to_num(x)
        check(loss, np.zeros(shape, dtype), (x, d), method, 3, **OPTIONS[option])


def alike(count):
    """So many examples whose positions nearly cancel, and one that is different."""
    rng = np.random.default_rng(1)
    u, v = (y / np.linalg.norm(y) for y in rng.normal(size=(2, 64)))
    e = rng.normal(size=(8, 64))
    e /= np.linalg.norm(e, axis=1, keepdims=True)
    d = np.where(np.arange(8) % 2, 1, -1)[:, None] * v
    x = np.stack([*[u + 0.1 * e] * count, u + 1e-6 * e])
    return x.astype(np.float32), np.stack([d] * (count + 1)).astype(np.float32)


@pytest.mark.parametrize("method", METHODS)
def test_ill_conditioned_example_leaves_other_norms_unchanged(method):
    """It once changed the norms, and so the weights, of a thousand others: by 4.4 thresholds."""
    x, d = alike(1024)
    clip = per_example.clipped_grad(of_layer, np.float32(0.156), method=method)
    with_it, without = (
        jax.jit(functools.partial(clip, is_padding=np.arange(1025) == padding))(
            np.zeros((64, 64), np.float32), x, d
        )
        for padding in (-1, 1024)
    )
    assert with_it.num_clipped >= 1024
    change = np.asarray(with_it.grads, float) - np.asarray(without.grads, float)
    # The sum of a thousand examples is rounded.
    assert np.linalg.norm(change) <= 0.156 * 1.001
    np.testing.assert_array_equal(with_it.norms[:-1], without.norms[:-1])


@pytest.mark.parametrize("method", METHODS)
def test_negative_new_norm_adds_nothing(method):
    """It once added 575 thresholds."""

    def response(norm, trigger, target):
        del trigger
        return norm * (1 - norm / (4 * target))

    x = np.array([[30.0, 40.0], [0.0, 0.5]], np.float32)
    clip = per_example.clipped_grad(jnp.vdot, 1.0, response=response, method=method)
    expected = [0, 0.5 * (1 - 0.5 / 4)]
    for found in (
        per_example.clip_sum(x, 1.0, response=response),
        clip(np.zeros(2, np.float32), x),
    ):
        np.testing.assert_allclose(found.grads, expected, rtol=1e-4)

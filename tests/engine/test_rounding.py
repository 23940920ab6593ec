"""One factor, one rounding: what a clip does to each entry."""

from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cases import slow_unless
from jax import lax

import optaxclip
import optaxclip._engine.measure as engine_measure
import optaxclip._engine.scale as engine_scale
from optaxclip import per_example, scopes

pytestmark = pytest.mark.usefixtures("optimized")
BF16, F16, F32, F64 = jnp.bfloat16, np.float16, np.float32, np.float64


def wide(x):
    return np.asarray(x, np.float64)


def longest(stacked):
    """Stacked trees as rows of NumPy's longest numbers."""
    return np.hstack([np.asarray(x).reshape(len(x), -1).astype(np.clongdouble) for x in stacked])


def norms_of(stacked):
    return np.sqrt(np.sum(np.square(np.abs(longest(stacked))), axis=1))


def draw(count, **dtypes):
    """Stacked trees with leaves of these dtypes, named like them."""
    rng = np.random.default_rng(0)
    scale = 10 ** rng.uniform(-1, 1.5, (count, 1))
    parts = [rng.standard_normal((2, count, 37)) * scale for _ in dtypes]
    parts = [
        x + 1j * y if np.issubdtype(d, np.complexfloating) else x
        for (x, y), d in zip(parts, dtypes.values(), strict=True)
    ]
    return {n: x.astype(d) for (n, d), x in zip(dtypes.items(), parts, strict=True)}


@pytest.mark.slow
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("dtype", [F32, F64, BF16, F16], ids=lambda dtype: np.dtype(dtype).name)
def test_global_norm_clip_rounds_no_worse_than_optax(dtype):
    trees = [*draw(400, a=dtype, b=dtype).values()]
    share = np.random.default_rng(1).uniform(0.1, 0.9, 400)
    thresholds = (norms_of(trees) * share).astype(dtype)

    def clip(tx, tree):
        updates, state = tx.update(tree, tx.init(tree))
        return updates, getattr(state, "info", None)

    def both(tree_and_threshold):
        tree, threshold = tree_and_threshold
        return [clip(x.clip_by_global_norm(threshold), tree) for x in (optaxclip, optax)]

    (ours, info), (theirs, _) = jax.jit(lambda x: lax.map(both, x))((trees, thresholds))
    factors = thresholds.astype(np.longdouble) / norms_of(trees)
    exact = longest(trees) * factors[:, None]
    errors = [np.max(np.abs(longest(x) - exact) / np.abs(exact)) for x in (ours, theirs)]
    assert errors[0] <= max(errors[1], 2 * float(jnp.finfo(dtype).eps))
    if dtype == F32:
        assert np.max(np.abs(np.asarray(info.factor) - factors) / np.spacing(F32(factors))) < 2
        assert errors[0] <= errors[1]


STRICT = [(F32,), (BF16,), (F16,), (F32, BF16), (F64,), (F64, F32), (F64, F16), (np.complex64, F32)]


SUMS = ["sums in float64", "sums in float32"]
# Sums in float32 have the least to spare where they are of more digits than they hold.
PLATFORMS = slow_unless(
    lambda sums, dtypes: dtypes == (F32,) or (F64 in dtypes) == (sums == "sums in float32"),
    product(SUMS, STRICT),
)


@pytest.fixture
def platform(request, monkeypatch):
    """As on a CPU, or as elsewhere."""
    if request.param == "sums in float32":
        measurement = engine_measure._NormFn
        monkeypatch.setattr(
            measurement,
            "compute_in_float64",
            lambda self, leaves, platform: measurement.compute_in_own_dtype(self, leaves),
        )
    jax.clear_caches()
    yield
    jax.clear_caches()


def name_of(case):
    return case if isinstance(case, str) else "+".join(np.dtype(dtype).name for dtype in case)


@pytest.mark.by_day(1)
@pytest.mark.usefixtures("x64", "platform")
@pytest.mark.parametrize(("platform", "dtypes"), PLATFORMS, indirect=["platform"], ids=name_of)
def test_strictly_no_norm_is_above_its_threshold_however_near(dtypes):
    trees = draw(200, **{str(i): dtype for i, dtype in enumerate(dtypes)})
    true = norms_of(trees.values())
    near, far = true.astype(F32), (true * np.random.default_rng(1).uniform(0.1, 1, 200)).astype(F32)

    def clip(tree_and_threshold):
        tree, threshold = tree_and_threshold
        tx = optaxclip.clip_by_global_norm(threshold, strict=True)
        example = jax.tree.map(lambda x: x[None], tree)
        return tx.update(tree, tx.init(tree))[0], per_example.clip_sum(example, threshold).grads

    clip_each = jax.jit(lambda x: lax.map(clip, x))
    for thresholds in (near, far):
        once, of_examples = clip_each((trees, thresholds))
        twice, _ = clip_each((once, thresholds))
        for found in (once, of_examples):
            ratio = norms_of(found.values()) / thresholds
            assert np.max(ratio) <= 1
            if not {BF16, F16} & {*dtypes} or found is of_examples:
                assert np.min(ratio) > 1 - 2e-6
        jax.tree.map(np.testing.assert_array_equal, twice, once)


def test_strict_linf_clip_lowers_modulus_only_slightly():
    options = {"scope": scopes.tree(), "norm": "linf", "strict": True}
    for given in (np.complex64([3 + 4j, 0.1j]), F32([3, -4])):
        clipped, _ = optaxclip.clip_tree(given, 2.0, **options)
        assert 1 - 1e-6 < np.max(np.abs(longest([clipped[None]]))) / 2 <= 1
    np.testing.assert_array_equal(optaxclip.clip_tree(given, 4.0, **options)[0], given)


@pytest.mark.by_day(1)
@pytest.mark.parametrize("p", [0.25, 0.5, 3])
@pytest.mark.parametrize("size", [64, 3000])
def test_strictly_other_powers_are_below_the_threshold_by_what_is_said(p, size):
    rows = np.random.default_rng(0).standard_normal((20, size)).astype(F32)

    def norms_of_rows(rows):
        return np.sum(np.abs(rows.astype(np.longdouble)) ** p, 1) ** (1 / np.longdouble(p))

    thresholds = (norms_of_rows(rows) / 2).astype(F32)
    options = {"scope": scopes.leaf(), "norm": optaxclip.norms.lp(p), "strict": True}
    clip = jax.jit(lambda x: lax.map(lambda row: optaxclip.clip_tree(*row, **options)[0], x))
    ratios = norms_of_rows(np.asarray(clip((rows, thresholds)))) / thresholds
    assert np.max(ratios) <= 1
    assert np.min(ratios) > 1 - 1e-6 * (1 + (1 + np.log2(size) / 4) / p)


def test_strictly_what_is_exactly_at_its_threshold_stays():
    grads = [np.float32([3.0, 0.0]), np.float32([4.0])]
    tx = optaxclip.clip_by_global_norm(5.0, strict=True)
    jax.tree.map(np.testing.assert_array_equal, tx.update(grads, None)[0], grads)


@pytest.mark.by_day(1)
@pytest.mark.parametrize("size", [5, 300])
@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=["float32", "bfloat16", "float16"])
def test_clip_multiplies_and_rounds_elements_once(dtype, size):
    x = np.random.default_rng(0).standard_normal(size).astype(dtype)
    threshold = jnp.asarray(0.7, dtype)
    (clipped,), info = optaxclip.clip_tree([x], threshold, scope=scopes.tree())
    assert info.factor.dtype == info.norm.dtype == F32
    exact = wide(x) * min(1, float(threshold) / np.linalg.norm(wide(x)))
    by_factor = (wide(x) * float(info.factor)).astype(dtype)
    ulp = float(jnp.finfo(dtype).eps) * 2.0 ** np.floor(np.log2(np.abs(wide(clipped))))
    assert np.all(np.abs(wide(clipped) - wide(by_factor)) <= ulp)
    assert np.mean(np.asarray(clipped) == by_factor) > (0.95 if size == 300 else 0)
    assert np.all(np.abs(wide(clipped) - exact) <= ulp + 2.4e-7 * np.abs(exact))


def test_clip_ignores_order_of_leaves():
    rng = np.random.default_rng(0)
    tree = [rng.standard_normal(size).astype(F32) * size for size in (2, 70, 500)]
    (forward, info), (backward, _) = (
        optaxclip.clip_tree(t, 0.3, scope=scopes.tree()) for t in (tree, tree[::-1])
    )
    for x, clipped, other in zip(tree, forward, backward[::-1], strict=True):
        np.testing.assert_allclose(clipped, other, rtol=3e-7)
        np.testing.assert_allclose(np.asarray(clipped) / x, float(info.factor), rtol=2e-7)


def test_strict_rounding_rounds_toward_zero():
    x = np.random.default_rng(0).normal(size=300).astype(F32)
    x[::3] = x[::3].astype(F16)  # which need no rounding
    x[:2] = 0, -0.0
    strictly = jax.jit(lambda x: engine_scale._round_toward_zero(x, jnp.dtype(F16)).astype(F16))
    found = np.asarray(strictly(x))
    np.testing.assert_array_equal(found[::3], x[::3])
    np.testing.assert_array_equal(np.signbit(found), np.signbit(x))
    assert np.all(np.abs(wide(found)) <= np.abs(wide(x)))
    assert np.all(wide(np.nextafter(np.abs(found), F16(np.inf))) > np.abs(wide(x)))

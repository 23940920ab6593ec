"""Sums of clipped examples: the bound, what is dropped, and the published vectors."""

import math
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import slow_unless
from compiling import AS_USERS

import optaxclip
from optaxclip import per_example, responses, scopes

BF16, F16, F32 = jnp.bfloat16, np.float16, np.float32
SCOPES = {
    "tree": {"scope": scopes.tree()},
    "leaf": {"scope": scopes.leaf()},
    "leaf by size": {"scope": scopes.leaf(), "split": "size"},
    "unit": {"scope": scopes.unit()},
    "layers": {"scope": scopes.leaf(stacked=lambda path, leaf: min(leaf.ndim, 1))},
    "group": {"scope": scopes.group(lambda path, leaf: "odd" if path == "1" else "even")},
}
RESPONSES = {"clip": "clip", "normalize": "normalize", "auto_s": "auto_s", "smooth": "smooth"}
RESPONSES |= {"doubling": lambda norm, trigger, target: 2 * norm}
TREES = {
    "1 entry": [(1,)],
    "1 + 3": [(), (3,)],
    "1 + 1": [(1,), (1,)],
    "20 x 30 + 30": [(20, 30), (30,)],
    "10 of 3": [(3,)] * 10,
    "30 leaves": [(2,)] * 30,
    "30 x 30 x 3": [(30, 30, 3)],
}


def norms_of(examples):
    """The L2 norms in float64 of trees that are stacked."""
    squares = [np.square(np.asarray(leaf, np.float64)) for leaf in examples]
    return np.sqrt(sum(leaf.reshape(len(leaf), -1).sum(1) for leaf in squares))


def draw(shapes, dtype, decades, count=1000):
    """Random examples of all sizes, and thresholds below, at and above their norms."""
    rng = np.random.default_rng(0)
    scale = 10 ** rng.uniform(*decades, count)
    largest = float(jnp.finfo(dtype).max)
    entries = [rng.standard_normal((count, *shape)).T * scale for shape in shapes]
    grads = [np.clip(x.T, -largest, largest).astype(dtype) for x in entries]
    true = norms_of(grads)
    thresholds = true * rng.uniform(0.05, 1.2, count)
    return grads, np.where(rng.random(count) < 0.3, true, thresholds).astype(F32)


def contributions(grads, thresholds, among=1, **options):
    """What each example adds to a sum in which it is alone, or among so many that are zero."""

    def alone(example_and_threshold):
        example, threshold = example_and_threshold
        batch = jax.tree.map(lambda x: jnp.stack([x, *[jnp.zeros_like(x)] * (among - 1)]), example)
        return per_example.clip_sum(batch, threshold, **options).grads

    run = jax.jit(lambda *args: jax.lax.map(alone, args), compiler_options=AS_USERS)
    return run(grads, thresholds)


# The bound

DECADES = {F32: (-25, 30), BF16: (-25, 30), F16: (-2, 4)}
# Narrow leaves become float32 first: what follows is the same for any tree.
SOME = ("1 + 3", "20 x 30 + 30")


@pytest.mark.by_day(1)
@pytest.mark.parametrize(
    ("dtype", "tree"),
    slow_unless(lambda dtype, tree: dtype == F32 or tree in SOME, product(DECADES, TREES)),
)
def test_no_example_contributes_more_than_the_threshold(dtype, tree):
    grads, thresholds = draw(TREES[tree], dtype, DECADES[dtype])
    added = contributions(grads, thresholds)
    assert all(leaf.dtype == F32 for leaf in added)
    ratio = norms_of(added) / np.minimum(thresholds.astype(np.float64), norms_of(grads))
    assert np.sum(norms_of(added) > thresholds.astype(np.float64)) == 0
    assert ratio.min() > 1 - 2e-6


@pytest.mark.by_day(1)
@pytest.mark.parametrize(
    ("scope", "response"),
    [
        *((scope, "clip") for scope in SCOPES),
        *(("leaf by size", response) for response in RESPONSES if response != "clip"),
    ],
)
def test_clip_sum_bound_holds_for_scopes_and_responses(scope, response):
    options, response = SCOPES[scope], RESPONSES[response]
    grads, thresholds = draw([(4, 3), (3,), (2, 5)], F32, (-10, 10), count=300)
    added = norms_of(contributions(grads, thresholds, response=response, **options))
    assert np.all(added <= thresholds.astype(np.float64))
    assert np.any(added > 0.5 * thresholds)


EQUAL = {
    "20 x 30": [(20, 30)],
    "3 x 3 x 16 x 20": [(3, 3, 16, 20)],
    "1000": [(1000,)],
    "4000": [(4000,)],
    "100 x 100": [(100, 100)],
    "30 of 20": [(20,)] * 30,
    "5 of 31 x 33": [(31, 33)] * 5,
}


@pytest.mark.by_day(1)
@pytest.mark.parametrize(
    ("name", "among"),
    slow_unless(lambda name, among: among == 1 or name == "30 of 20", product(EQUAL, [1, 5])),
)
def test_clip_sum_bound_holds_for_equal_elements(name, among):
    """Of which the rounding errors of a sum do not average out; alone and in a batch."""
    sizes = np.random.default_rng(0).uniform(1, 2, 200).astype(F32)
    grads = [
        np.broadcast_to(sizes.reshape(-1, *[1] * len(shape)), (200, *shape))
        for shape in EQUAL[name]
    ]
    thresholds = (0.5 * norms_of(grads)).astype(F32)
    added = contributions(grads, thresholds, among=among)
    assert np.all(norms_of(added) <= thresholds.astype(np.float64))
    assert np.all(norms_of(added) > thresholds * (1 - 2e-6))


def test_clip_sum_bound_holds_in_batch():
    """On the way for many examples at once, measured as what one of two examples adds."""
    rng = np.random.default_rng(0)
    grads = [rng.standard_normal((2, 40, 50)).astype(F32), rng.standard_normal((2, 7)).astype(F32)]
    grads = [leaf * np.array([1, 0], F32).reshape(2, *[1] * (leaf.ndim - 1)) for leaf in grads]
    total = per_example.clip_sum(grads, F32(0.3)).grads
    norm = norms_of([leaf[None] for leaf in total])[0]
    assert 0.3 * (1 - 2e-6) < norm <= float(F32(0.3))


@pytest.mark.usefixtures("x64")
def test_clip_sum_bound_holds_in_float64():
    rng = np.random.default_rng(0)
    grads = [rng.standard_normal((300, 100)), rng.standard_normal((300, 3))]
    added = contributions(grads, np.full(300, 0.7))
    squares = sum(np.square(leaf.astype(np.longdouble)).sum(1) for leaf in map(np.asarray, added))
    assert added[0].dtype == np.float64
    assert np.all(squares <= np.longdouble(0.7) ** 2)
    assert np.all(squares > 0.49 * (1 - 1e-12))


def test_clip_sum_accumulates_in_float32():
    grads = jnp.concatenate([jnp.full((1, 2), 256.0, BF16), jnp.full((512, 2), 0.5, BF16)])
    total = per_example.clip_sum(grads, 1e6).grads
    assert total.dtype == F32
    np.testing.assert_array_equal(total, [512.0, 512.0])


# What is dropped


@pytest.mark.by_day(1)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("scope", ["tree", "leaf", "unit"])
def test_clip_sum_drops_nonfinite_examples(bad, scope):
    rng = np.random.default_rng(0)
    grads = {"w": rng.standard_normal((5, 2, 3, 4)).astype(F32), "b": np.ones((5, 4), F32)}
    without = per_example.clip_sum(
        jax.tree.map(lambda x: x[[0, 2, 4]], grads), 1.0, **SCOPES[scope]
    )
    grads["w"][1, 1, 2, 3] = grads["b"][3, 0] = bad
    result = per_example.clip_sum(grads, 1.0, **SCOPES[scope])
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6), *((result.grads, without.grads))
    )
    assert int(result.num_dropped) == 2
    jax.tree.map(np.testing.assert_array_equal, result.num_clipped, without.num_clipped)


def test_clip_sum_drops_all_groups_of_nonfinite_example():
    """Whether its other groups are above their thresholds or below them."""
    grads = {"w": jnp.array([[jnp.nan, 5.0], [jnp.inf, 0.0]]), "b": jnp.array([[1.0], [0.1]])}
    result = per_example.clip_sum(grads, 1.0, scope=scopes.leaf())
    assert not np.any(result.grads["w"])
    assert not np.any(result.grads["b"])


@pytest.mark.parametrize("threshold", [-1.0, math.nan, F32(-1), np.float64("nan"), jnp.array(-1.0)])
@pytest.mark.parametrize("thresholds", [lambda x: x, lambda x: {"0": x, "1": 1.0}])
def test_concrete_thresholds_that_are_none(threshold, thresholds):
    grads = [jnp.ones((2, 3)), jnp.ones((2, 3))]
    with pytest.raises(ValueError, match=r"threshold.*must not be negative or NaN"):
        per_example.clip_sum(grads, thresholds(threshold), scope=scopes.leaf())


@pytest.mark.by_day(1)
@pytest.mark.parametrize("scope", ["tree", "leaf"])
@pytest.mark.parametrize("threshold", [-1.0, math.nan])
def test_traced_thresholds_that_are_none_let_nothing_through(threshold, scope):
    grads = [jnp.ones((2, 3)), jnp.zeros((2, 3))]
    run = jax.jit(lambda threshold: per_example.clip_sum(grads, threshold, **SCOPES[scope]))
    result = run(threshold)
    assert not np.any(np.asarray(result.grads))
    assert int(result.num_dropped) == (2 if math.isnan(threshold) else 0)


@pytest.mark.by_day(1)
@pytest.mark.parametrize("response", ["clip", "normalize", "auto_s"])
def test_clip_sum_accepts_zero_and_no_examples(response):
    with jax.debug_nans(True):
        result = per_example.clip_sum([jnp.zeros((3, 2))], 1.0, response=response)
        empty = per_example.clip_sum([jnp.zeros((0, 2))], 1.0, response=response)
    np.testing.assert_array_equal(result.grads[0], [0, 0])
    np.testing.assert_array_equal(empty.grads[0], [0, 0])
    assert (int(result.num_dropped), int(result.num_unclipped)) == (0, 3)
    assert empty.norms.shape == (0,)
    nothing = per_example.clip_sum({}, 1.0, response=response)
    assert (nothing.grads, int(nothing.num_unclipped), nothing.norms.shape) == ({}, 0, (0,))


def test_at_the_threshold_and_below_it():
    """Within rounding of it an example is lowered by that alone, and is unclipped; below, not."""
    grads = np.array([[3.0, 4.0], [0.6, 0.8]], F32)
    for threshold in (5.0, np.nextafter(F32(5), F32(0))):
        counts = per_example.clip_sum(grads, threshold)
        assert (int(counts.num_clipped), int(counts.num_unclipped)) == (0, 2)
    [at] = np.asarray(contributions([grads[:1]], np.array([5], F32))[0], np.float64)
    assert 5 * (1 - 2e-6) < np.linalg.norm(at) <= 5
    [below] = contributions([grads[:1]], np.array([5 * (1 + 3e-6)], F32))[0]
    np.testing.assert_array_equal(below, grads[0])


def test_clip_sum_ignores_padding():
    grads = jnp.array([[3.0, 4.0], [jnp.nan, 1.0], [30.0, 40.0], [0.3, 0.4], [0.2, 0.1]])
    result = per_example.clip_sum(grads, 1.0, is_padding=jnp.arange(5) % 3 > 0)
    np.testing.assert_allclose(result.grads, [0.9, 1.2], rtol=1e-6)
    counts = (result.num_clipped, result.num_dropped, result.num_unclipped)
    assert tuple(map(int, counts)) == (1, 0, 1)
    np.testing.assert_allclose(result.norms, [5, 0, 0, 0.5, 0])


# Types


def test_clip_sum_handles_non_float_and_complex_leaves():
    grads = {
        "w": jnp.array([[3.0, 4.0]]),
        "none": None,
        "int": jnp.ones((1, 2), jnp.int32),
        "float0": np.zeros((1, 2), jax.dtypes.float0),
        "complex": jnp.array([[3j, 4.0]]),
    }
    result = per_example.clip_sum(grads, 1.0).grads
    assert result["none"] is None
    np.testing.assert_array_equal(result["int"], [0, 0])
    assert result["float0"].dtype == jax.dtypes.float0
    assert result["float0"].shape == (2,)
    np.testing.assert_allclose(result["complex"], np.array([3j, 4]) / 50**0.5, rtol=1e-6)


@pytest.mark.parametrize("grads", [[jnp.ones(())], [jnp.ones((2, 1)), jnp.ones((3, 1))]])
def test_per_example_functions_require_example_axis(grads):
    for function in (per_example.clip_sum, optaxclip.per_example_layer_norm_clip):
        with pytest.raises(ValueError, match="a leading example axis of the same size"):
            function(grads, 1.0)


# Published vectors

TWO_LEAVES = [
    jnp.array([[0, -0.5], [3, 4], [5, 6], [0, 0]]),
    jnp.array([[0.0], [5], [-3], [0]]),
]


def test_clip_sum_matches_published_tree_vectors():
    result = per_example.clip_sum(TWO_LEAVES, 1.0)
    np.testing.assert_allclose(result.norms, [0.5, 7.071068, 8.3666, 0], rtol=1e-6)
    np.testing.assert_allclose(result.grads[0], [1.021878, 0.782823], rtol=2e-6)
    np.testing.assert_allclose(result.grads[1], [0.348538], rtol=2e-6)
    assert int(result.num_clipped) == 2


@pytest.mark.by_day(1)
@pytest.mark.parametrize(
    ("threshold", "uniform", "sums", "counts"),
    [(2**0.5, True, (1.5, 0.942809), (3, 4)), (19**0.5, False, (1.5, 4.0), (3, 0))],
)
def test_layer_norm_clip_matches_published_vectors(threshold, uniform, sums, counts):
    grads = [jnp.array([[0.5], [1.5], [-2.0], [3.0]]), jnp.ones((4, 3, 3, 2))]
    total, found = optaxclip.per_example_layer_norm_clip(grads, threshold, uniform)
    np.testing.assert_allclose(total[0], [sums[0]], rtol=1e-6)
    np.testing.assert_allclose(total[1], np.full((3, 3, 2), sums[1]), rtol=1e-6)
    assert tuple(map(int, found)) == counts


@pytest.mark.slow
def test_layer_norm_clip_orders_counts_by_leaf():
    """By name the eleventh comes before the third."""
    grads = [9 * jnp.float32(jnp.arange(12) < large) for large in range(12)]
    _, counts = optaxclip.per_example_layer_norm_clip(grads, 1.0)
    assert list(map(int, counts)) == list(range(12))


@pytest.mark.by_day(1)
@pytest.mark.parametrize(
    ("gamma", "factors"),
    [
        (0.01, [0.990099, 0.826446, 1.234568, 0.990099, 0.199601, 0.900901]),
        (1.0, [0.5, 0.454545, 0.555556, 0.5, 0.166667, 0.476190]),
        (0.0, [1, 1 / 1.2, 1.25, 1, 0.2, 1 / 1.1]),
    ],
)
def test_auto_s_sum_matches_published_vectors(gamma, factors):
    norms = np.array([1.0, 1.2, 0.8, 1.0, 5.0, 1.1], F32)
    grads = norms[:, None] * np.eye(6, dtype=F32)
    total = per_example.clip_sum(grads, 1.0, response=responses.auto_s(gamma)).grads
    np.testing.assert_allclose(total / norms, factors, rtol=2e-6, atol=1e-6)

"""`optaxclip.ops`: TensorFlow's own test cases, then unusual values, types and derivatives."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.sparse import BCOO

from optaxclip import ops

INF, NAN = math.inf, math.nan


def f32(entries):
    return jnp.asarray(np.float32(entries))


def global_clip(tree, threshold):
    return ops.clip_by_global_norm(tree, threshold)[0]


def value_clip(tree, threshold):
    return ops.clip_by_value(tree, -threshold, threshold)


def measure(tree, threshold):
    return ops.global_norm(tree)


norm_clip, average_clip = ops.clip_by_norm, ops.clip_by_average_norm
NORM_CLIPS = [norm_clip, average_clip, global_clip]
each_norm_clip = pytest.mark.parametrize("clip", NORM_CLIPS)
each_clip = pytest.mark.parametrize("clip", [*NORM_CLIPS, value_clip])
each_function = pytest.mark.parametrize("function", [*NORM_CLIPS, value_clip, measure])


def close(actual, expected, rtol=1e-6, atol=0.0):
    np.testing.assert_allclose(np.asarray(actual, np.complex128), expected, rtol=rtol, atol=atol)


def same_bits(actual, expected):
    actual, expected = np.asarray(actual), np.asarray(expected)
    assert (actual.dtype, actual.tolist()) == (expected.dtype, expected.tolist())
    np.testing.assert_array_equal(np.signbit(actual), np.signbit(expected))


def true_norm(tree):
    """In double precision, which holds the squares of all narrower entries used here."""
    leaves = [np.abs(np.asarray(leaf, np.complex128)) for leaf in jax.tree.leaves(tree)]
    return math.sqrt(sum(np.sum(leaf**2) for leaf in leaves))


def true_clip(clip, tree, threshold):
    def clipped(leaf):
        leaf = np.asarray(leaf, np.complex128)
        group = tree if clip is global_clip else leaf
        size = np.maximum(np.abs(leaf) if clip is value_clip else true_norm(group), 1e-300)
        return leaf * np.minimum(1, threshold * (leaf.size if clip is average_clip else 1) / size)

    return jax.tree.map(clipped, tree)


# TensorFlow's clip_ops_test.py, and Keras's optimizer tests where they fit.
BOUNDS = [
    (2, 4, [2, 2, 3, 4, 4, 4]),
    ([2, 2, 2, 3, 3, 3], 4, [2, 2, 3, 4, 4, 4]),
    (4, [6, 6, 6, 6, 6, 6], [4, 4, 4, 4, 5, 6]),
    ([2, 2, 2, 5, 5, 5], [5, 5, 5, 7, 7, 7], [2, 2, 3, 5, 5, 6]),
]
ZEROS, COLUMN = np.zeros((2, 3)), np.array([[-3.0, 0, 0], [4, 0, 0]])
ONE_LEAF = [
    (norm_clip, COLUMN, 4, COLUMN * 0.8),
    (norm_clip, COLUMN, 4.8, COLUMN * 0.96),
    (norm_clip, COLUMN, 6, COLUMN),
    (norm_clip, [100, 100], 1, [0.5**0.5, 0.5**0.5]),
    (average_clip, COLUMN, 4.8 / 6, COLUMN * 0.96),
    (average_clip, COLUMN, 0.9, COLUMN),
    (global_clip, [50, 100], 1, [0.2**0.5, 0.8**0.5]),
]
SLICES = np.array([[[-3.0, 0, 0], [4, 0, 0]], [[0, 2, 0], [0, 0, -1]]])
SPARSE = [
    (value_clip, 2, SLICES.clip(-2, 2)),
    (lambda x, threshold: ops.clip_by_value(x, 1.0, threshold), 2, SLICES.clip(1, 2)),
    (lambda x, threshold: ops.clip_by_value(x, -2.0, threshold), -1, SLICES.clip(-2, -1)),
    (norm_clip, 4, SLICES * 4 / 30**0.5),
    (average_clip, 4 / 60, SLICES * 4 / 30**0.5),
    (global_clip, 4, SLICES * 4 / 30**0.5),
]


@pytest.mark.by_day(8)
@pytest.mark.parametrize("dtype", ["f2", "f4", "f8", "bfloat16", "i2", "i4", "i8", "u1"])
@pytest.mark.parametrize(("low", "high", "expected"), BOUNDS)
@pytest.mark.usefixtures("x64")
def test_clip_by_value_matches_tensorflow_for_all_dtypes(dtype, low, high, expected):
    dtype = jnp.dtype(dtype)
    low, high = (np.array(b, dtype) if isinstance(b, list) else b for b in (low, high))
    clipped = ops.clip_by_value(np.array([1, 2, 3, 4, 5, 6], dtype), low, high)
    assert clipped.dtype == dtype
    close(clipped, expected, rtol=0)


def test_clip_by_value_bounds_elements():
    close(value_clip(f32([-5, 2, 3, 4, 5, 6]), 4.4), [-4.4, 2, 3, 4, 4.4, 4.4])
    close(value_clip(f32([NAN, INF, -INF, 3]), 4.0), [NAN, 4, -4, 3])
    close(value_clip(f32([100, 100]), 1.0), [1, 1])
    close(value_clip(f32([3, 4]), 10**12), [3, 4])
    close(ops.clip_by_value(f32([1, 5, 9]), 6.0, 3.0), [6, 6, 6])  # the minimum wins
    empty = jnp.zeros((7, 0))
    for low, high in [(empty, empty), (empty, 1.0), (1.0, empty), (1.0, 1.0)]:
        assert ops.clip_by_value(empty, low, high).shape == (7, 0)


@pytest.mark.by_day(1)
@pytest.mark.parametrize(("clip", "leaf", "threshold", "expected"), ONE_LEAF)
def test_norm_clips_match_tensorflow_on_single_leaf(clip, leaf, threshold, expected):
    for same_threshold in (threshold, f32(threshold)):
        close(clip(f32(leaf), same_threshold), expected)
        close(clip(f32(ZEROS), same_threshold), ZEROS)


@pytest.mark.by_day(1)
@pytest.mark.parametrize(("axes", "factors"), [(0, [0.8, 1, 1]), ([-1], [[1], [0.8]]), ((), 1)])
def test_clip_by_norm_over_axes_matches_tensorflow(axes, factors):
    x = np.array([[-3.0, 0, 0], [4, 0, 3]])
    close(ops.clip_by_norm(f32(x), 4.0, axes=axes), x * factors)
    close(ops.clip_by_norm(f32(x), 6.0, axes=axes), x)


@pytest.mark.by_day(1)
@pytest.mark.parametrize(("clip", "threshold", "expected"), SPARSE)
def test_ops_keep_sparse_leaves_sparse(clip, threshold, expected):
    order = {"indices_sorted": True, "unique_indices": True}
    x = BCOO((f32(SLICES), np.int32([[2], [6]])), shape=(10, 2, 3), **order)
    y = clip({"embedding": x, "none": None}, threshold)["embedding"]
    close(y.data, expected)
    np.testing.assert_array_equal(y.indices, x.indices)
    assert (y.shape, y.indices_sorted, y.unique_indices) == (x.shape, True, True)


def test_ops_sum_duplicate_indices_before_measuring():
    entries = BCOO((f32([3, 3]), np.int32([[1], [1]])), shape=(4,))
    rows = BCOO((f32([[3, 0], [3, 0]]), np.int32([[1], [1]])), shape=(2, 2))
    batch = BCOO((f32([[3, 3]]), np.int32([[[1], [1]]])), shape=(1, 4))
    tree = [entries, rows, batch]
    thresholds = [(norm_clip, 3), (average_clip, 0.75), (global_clip, 27**0.5)]

    @jax.jit
    def measured_and_clipped(tree):
        return ops.global_norm(tree), [clip(tree, threshold) for clip, threshold in thresholds]

    norm, results = measured_and_clipped(tree)
    close(norm, 108**0.5)
    for clipped in results:
        for before, after in zip(tree, clipped, strict=True):
            close(after.data, np.asarray(before.data) / 2)


@pytest.mark.by_day(4)
@each_norm_clip
@pytest.mark.parametrize(("threshold", "to"), [(0, 0), (-1, 0), (INF, 1), (10**12, 1), (NAN, NAN)])
def test_unusual_threshold(clip, threshold, to):
    for x in (np.array([3, -0.0], np.float32), np.zeros(2, np.float32)):
        for result in (clip(x, threshold), jax.jit(clip)(x, float(threshold))):
            same_bits(result, x) if to == 1 else np.testing.assert_array_equal(result, x * to)


@pytest.mark.by_day(1)
@each_norm_clip
def test_norm_equal_to_the_threshold_comes_back_bit_for_bit(clip):
    x, threshold = f32([3, -4, -0.0, 0]), np.float32(1.25 if clip is average_clip else 5)
    same_bits(clip(x, threshold), x)
    assert not np.array_equal(clip(x, np.nextafter(threshold, np.float32(0))), x)


@pytest.mark.by_day(1)
@pytest.mark.parametrize(("entry", "norm"), [(INF, INF), (-INF, INF), (NAN, NAN)])
def test_ops_return_nan_for_nonfinite_elements(entry, norm):
    tree = [f32([entry, 1]), f32([1])]
    for clip in (norm_clip, average_clip):
        close(clip(tree, 1.0)[0], [NAN, NAN])
        same_bits(clip(tree, 1.0)[1], tree[1])
    clipped, measured = ops.clip_by_global_norm(tree, 1.0)
    close(jnp.concatenate(clipped), [NAN, NAN, NAN])
    close(measured, norm)
    close(ops.clip_by_norm(f32([[entry, 0.5], [1, 0.5]]), 1.0, axes=0), [[NAN, 0.5], [NAN, 0.5]])


@pytest.mark.by_day(1)
@each_norm_clip
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_ops_stay_exact_at_range_limits(clip, dtype):
    info = jnp.finfo(dtype)
    narrow, wide = [(300, 1), (300, 1000), (6e4, 1.3e5), (1e-4, 1e-5)], [(1e20, 1), (1e-25, 1e-26)]
    for entry, threshold in narrow if dtype == "float16" else [*wide, (1.5e38, 1)]:
        x, threshold = jnp.full(4, entry, dtype), threshold / (4 if clip is average_clip else 1)
        y, expected = clip(x, threshold), true_clip(clip, x, threshold)
        close(ops.global_norm(x), true_norm(x))
        close(y, expected, rtol=max(float(info.eps), 1e-6), atol=float(info.smallest_subnormal))
        assert np.array_equal(y, x) == np.array_equal(expected, x)
        with jax.enable_x64(True):
            beside_wide = [x, np.asarray(x, np.float64)]
            close(ops.global_norm(beside_wide), true_norm(beside_wide))


@pytest.mark.by_day(1)
@each_norm_clip
def test_ops_round_results_correctly(clip):
    rng, clip_each = np.random.default_rng(0), jax.jit(jax.vmap(clip))
    sizes, thresholds = 10 ** rng.uniform(-3, 3, (300, 1)), 10 ** rng.uniform(-3, 1, 300)
    xs, thresholds = np.float32(rng.normal(size=(300, 8)) * sizes), np.float32(thresholds)
    once = clip_each(xs, thresholds)
    for x, threshold, y in zip(xs, thresholds, once, strict=True):
        assert true_norm(y) <= float(threshold) * (8 if clip is average_clip else 1) * (1 + 3e-7)
        np.testing.assert_allclose(y, true_clip(clip, x, threshold), rtol=2.4e-7)


def test_use_norm_replaces_measured_norm():
    cases = [(10, 0.1), (jnp.float16(10), 0.1), (0.5, 1), (0, 1), (-1, 1), (INF, NAN)]
    for use_norm, factor in cases:
        clipped, norm = ops.clip_by_global_norm([f32([3, 4])], 1.0, use_norm=use_norm)
        close(clipped[0], np.array([3, 4]) * factor)
        same_bits(norm, np.float32(use_norm))


@pytest.mark.by_day(1)
@pytest.mark.parametrize("size", [2, 7, 100, 5000])
def test_use_norm_with_measured_norm_changes_last_digit(size):
    """A norm in float32 has fewer digits than that of which the factor is computed."""
    tree = [*f32(np.random.default_rng(size).normal(size=(4, size)))]
    found, norm = ops.clip_by_global_norm(tree, 0.5)
    again, _ = ops.clip_by_global_norm(tree, 0.5, use_norm=norm)
    for x, y in zip(found, again, strict=True):
        np.testing.assert_array_max_ulp(x, y, 2)


LEAVES = [3.0, np.array([3, -4.0]), np.zeros((0, 3)), jnp.float16([3, 4]), jnp.bfloat16(5)]
COMPLEX = [3 - 4j, np.array([1e20j, 0.1], np.complex64)]
TREES = [(LEAVES, False, [float]), (LEAVES, True, [np.float64]), (COMPLEX, True, [float])]
TREES += [(LEAVES[3:], False, [int, jnp.bfloat16])]
WRONG_LEAVES = [
    *[(3, "int"), (np.uint8([3]), "uint8"), (True, "bool"), (np.array([True]), "bool")],
    *[("3", "str"), (math, "module"), (np.array(["3"]), "<U1")],
]
ARGUMENTS = {
    "clip_norm": lambda value: ops.clip_by_norm(f32([3, 4]), value),
    "use_norm": lambda value: ops.clip_by_global_norm(f32([3, 4]), 1.0, value),
    "clip_value_min": lambda value: ops.clip_by_value(f32([3, 4]), value, 1.0),
    "clip_value_max": lambda value: ops.clip_by_value(f32([3, 4]), 0.0, value),
}
WRONG_VALUES = ["3", object(), 3j, [3.0], True, np.complex64(3), jnp.array(3j)]


@each_function
@pytest.mark.parametrize("tree", [None, {}, [], {"a": [None]}, [np.zeros(2, jax.dtypes.float0)]])
def test_ops_accept_empty_trees(function, tree):
    result = function(tree, 1.0)
    expected = f32(0) if function is measure else tree
    assert jax.tree.structure(result) == jax.tree.structure(expected)
    assert all(map(np.array_equal, jax.tree.leaves(result), jax.tree.leaves(expected)))


@pytest.mark.by_day(2)
@each_clip
@pytest.mark.parametrize(("tree", "wide", "threshold_types"), TREES)
def test_leaves_keep_their_types_whatever_the_threshold(clip, tree, wide, threshold_types):
    with jax.enable_x64(wide):
        for threshold_type in threshold_types:
            clipped, truths = clip(tree, threshold_type(1)), true_clip(clip, tree, 1)
            for before, after, truth in zip(tree, clipped, truths, strict=True):
                assert jax.typeof(after) == jax.typeof(jnp.asarray(before))
                close(after, truth, rtol=max(1e-6, float(jnp.finfo(after.dtype).eps)))


@each_function
@pytest.mark.parametrize(("leaf", "what"), [*WRONG_LEAVES, (jax.random.key(0), "key")])
def test_ops_reject_non_float_leaves(function, leaf, what):
    with pytest.raises(TypeError, match=f"'block/kernel'.*{what}"):
        function({"block": {"kernel": leaf, "bias": f32([1])}}, 1.0)


@pytest.mark.parametrize("argument", ARGUMENTS)
@pytest.mark.parametrize("value", WRONG_VALUES, ids=lambda value: type(value).__name__)
def test_ops_reject_arguments_of_wrong_type(argument, value):
    kind = value.dtype if hasattr(value, "dtype") else type(value).__name__
    with pytest.raises(TypeError, match=f"{argument}.*{kind}"):
        ARGUMENTS[argument](value)


@pytest.mark.parametrize("argument", ["clip_norm", "use_norm"])
@pytest.mark.parametrize("value", [f32([1, 2]), np.ones((1, 1))])
def test_threshold_that_is_no_scalar(argument, value):
    with pytest.raises(ValueError, match=f"{argument}.*{re.escape(str(value.shape))}"):
        ARGUMENTS[argument](value)


@pytest.mark.by_day(1)
@each_clip
@pytest.mark.usefixtures("x64")
def test_derivatives_above_the_threshold_and_for_it(clip):
    point, h = np.array([3.0, -4.0, 0.5, 1.2]), 1e-6

    def difference(step):
        up, down = point + step, point - step
        return (true_clip(clip, up[:3], up[3]) - true_clip(clip, down[:3], down[3])).real / (2 * h)

    by_x, by_threshold = jax.jit(jax.jacobian(clip, (0, 1)))(point[:3], point[3])
    truth = np.array([difference(step) for step in h * np.eye(4)])
    close(jnp.vstack([by_x.T, by_threshold]), truth, atol=1e-9)


def test_global_norm_derivative_equals_unit_vector():
    for x, slope in [([3, 4], [0.6, 0.8]), ([0, 0], [0, 0])]:
        close(jax.jit(jax.grad(ops.global_norm))(f32(x)), slope)


@pytest.mark.by_day(1)
@pytest.mark.parametrize("bounds", [(-4.0, 4.0), (f32([-4] * 5), f32([4] * 5))])
def test_clip_by_value_derivative_at_bound_favors_element(bounds):
    gradient = jax.grad(lambda *args: ops.clip_by_value(*args).sum(), (0, 1, 2))
    by_x, by_low, by_high = gradient(f32([-5, 2, 6, -4, 4]), *bounds)
    close(by_x, [0, 1, 0, 1, 1])
    close([by_low.sum(), by_high.sum()], [1, 1])


@pytest.mark.by_day(1)
@each_function
def test_ops_under_vmap_match_loop(function):
    xs, thresholds = f32([[3, 4], [0, 0], [300, 1e30], [NAN, 1]]), f32([1, 0, INF, 1])
    loop = [function(x, threshold) for x, threshold in zip(xs, thresholds, strict=True)]
    close(jax.jit(jax.vmap(function))(xs, thresholds), np.stack(loop))

"""What unusual input must give, for the transformations: one test for each edge case."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify

import optaxclip
from optaxclip import scopes

f16, bf16, f32, inf, nan = np.float16, jnp.bfloat16, np.float32, math.inf, math.nan

TRANSFORMATIONS = {
    "clip": optaxclip.clip,
    "clip_by_value": lambda threshold: optaxclip.clip_by_value(-1.0, threshold),
    "clip_by_norm": optaxclip.clip_by_norm,
    "clip_by_norm_axes": lambda threshold: optaxclip.clip_by_norm(threshold, axes=()),
    "clip_by_global_norm": optaxclip.clip_by_global_norm,
    "clip_by_block_rms": optaxclip.clip_by_block_rms,
    "adaptive_grad_clip": optaxclip.adaptive_grad_clip,
    "clip_by_group_norm": lambda threshold: optaxclip.clip_by_group_norm(
        threshold, lambda *_: "all"
    ),
    "normalize_by_global_norm": optaxclip.normalize_by_global_norm,
}

ARGUMENT = r"^(max_delta|max_value|max_norm|threshold|clipping|norm)"

every_transformation = pytest.mark.parametrize(
    "make", TRANSFORMATIONS.values(), ids=TRANSFORMATIONS
)
# Bounds may have any sign, and be arrays.
NORMED = {name: make for name, make in TRANSFORMATIONS.items() if name != "clip_by_value"}


def update(tx, grads, params=None):
    """The clipped gradients and the record of the first step."""
    params = grads if params is None else params
    clipped, state = tx.update(grads, tx.init(params), params)
    return clipped, getattr(state, "info", None)


def assert_same_bits(actual, expected):
    assert actual.dtype == expected.dtype
    assert np.asarray(actual).tobytes() == np.asarray(expected).tobytes()


# Values

UNCHANGED = None


def clip_tree(grads, threshold):
    return update(optaxclip.clip_by_global_norm(threshold), grads)


clip_tree_traced = jax.jit(clip_tree)


@pytest.mark.filterwarnings("ignore:max_norm is 0")
@pytest.mark.parametrize("mode", ["number", "traced"])
@pytest.mark.parametrize(
    ("dtype", "entries", "threshold", "expected"),
    [
        pytest.param(f32, [0, 0], 0, [0, 0], id="zeros, threshold 0"),
        pytest.param(f32, [3, 4], 0, [0, 0], id="threshold 0"),
        pytest.param(f32, [3, 4], math.inf, UNCHANGED, id="threshold inf"),
        pytest.param(f32, [3, 4], 5, UNCHANGED, id="norm == threshold"),
        pytest.param(f16, [300] * 4, 1, [0.5] * 4, id="float16 300 x 4, threshold 1"),
        pytest.param(f16, [300] * 4, 1000, UNCHANGED, id="float16 300 x 4, threshold 1000"),
        pytest.param(f16, [60000] * 4, 130000, UNCHANGED, id="float16 60000 x 4, threshold 130000"),
        pytest.param(f32, [1e20] * 4, 1, [0.5] * 4, id="float32 1e20 x 4"),
        pytest.param(bf16, [1e20] * 4, 1, [0.5] * 4, id="bfloat16 1e20 x 4"),
        pytest.param(f32, [1e-25] * 4, 1e-26, [5e-27] * 4, id="float32 1e-25 x 4"),
        pytest.param(f16, [1e-4] * 4, 1e-5, [5e-6] * 4, id="float16 1e-4 x 4"),
        pytest.param(f32, [3e38], 1, [1], id="float32 3e38"),
        pytest.param(f32, [3e38] * 9, 1, [1 / 3] * 9, id="float32 3e38 x 9, beyond float32"),
    ],
)
def test_global_norm_clip_matches_tabulated_values(mode, dtype, entries, threshold, expected):
    grads = np.array(entries, np.float64).astype(dtype)
    (clipped,), info = (clip_tree if mode == "number" else clip_tree_traced)([grads], threshold)
    norm = np.linalg.norm(grads.astype(np.float64))
    np.testing.assert_allclose(info.norm, min(norm, float(jnp.finfo(f32).max)), rtol=1e-6)
    assert clipped.dtype == dtype
    if expected is UNCHANGED:
        assert_same_bits(clipped, grads)
        assert info.num_clipped == 0
    else:
        # In float32 results may be short of their threshold by that much.
        rtol = max(2 * float(jnp.finfo(dtype).eps), 2e-6)
        rounding = {"rtol": rtol, "atol": 6e-8 * (dtype == f16)}
        np.testing.assert_allclose(np.asarray(clipped, np.float64), expected, **rounding)


@pytest.mark.parametrize("make", NORMED.values(), ids=NORMED)
@pytest.mark.parametrize("threshold", [-1, -1.0, f32(-1), nan, f16(nan)], ids=str)
def test_threshold_that_is_a_negative_or_nan_number(make, threshold):
    with pytest.raises(ValueError, match=rf"{ARGUMENT}.*(-1|nan)"):
        make(threshold)


@jax.jit
def clip_in_every_way(threshold):
    grads = [jnp.array([3.0, 4.0])]
    return [update(make(threshold), grads)[0][0] for make in NORMED.values()]


@pytest.mark.by_day(1)
@pytest.mark.parametrize(("threshold", "expected"), [(-1.0, 0), (math.nan, math.nan)], ids=str)
def test_threshold_that_is_negative_or_nan_when_traced(threshold, expected):
    np.testing.assert_array_equal(clip_in_every_way(threshold), np.full((8, 2), expected, f32))


# Values that are not finite

REPLACEMENT = {"nan": nan, "zero": 0.0}
BAD = {"inf": [inf, 1.0], "-inf": [-inf, 1.0], "nan": [nan, 1.0], "inf and nan": [inf, nan]}
bad_leaves = pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
policies = pytest.mark.parametrize("policy", REPLACEMENT)


def tree_of(bad):
    return {"a": [{"bad": np.float32(bad)}], "good": np.float32([-0.0, 1.0])}


@bad_leaves
@policies
def test_nonfinite_policy_replaces_whole_tree(bad, policy):
    clipped, info = update(optaxclip.clip_by_global_norm(1.0, nonfinite=policy), tree_of(bad))
    for leaf in jax.tree.leaves(clipped):
        np.testing.assert_array_equal(leaf, np.full(2, REPLACEMENT[policy], f32))
    np.testing.assert_array_equal(info.norm, nan if nan in bad else inf)
    assert (info.num_nonfinite, info.num_clipped) == (1, 0)


@bad_leaves
@policies
def test_nonfinite_policy_leaves_other_leaves_unchanged(bad, policy):
    clipped, info = update(optaxclip.clip_by_norm(1.0, nonfinite=policy), tree_of(bad))
    replaced = np.full(2, REPLACEMENT[policy], f32)
    np.testing.assert_array_equal(clipped["a"][0]["bad"], replaced)
    assert_same_bits(clipped["good"], tree_of(bad)["good"])
    assert list(info.num_nonfinite) == [1, 0]


@pytest.mark.by_day(1)
@policies
def test_nonfinite_policy_leaves_other_units_unchanged(policy):
    grads = np.float32([[inf, 3.0, 0.3], [1.0, 4.0, 0.4]])
    clipped, info = update(optaxclip.clip_by(scopes.unit(), 1.0, nonfinite=policy), grads)
    replaced = REPLACEMENT[policy]
    expected = [[replaced, 0.6, 0.3], [replaced, 0.8, 0.4]]
    np.testing.assert_allclose(clipped, expected, rtol=1e-6)
    assert list(info.num_nonfinite) == [1]


@pytest.mark.by_day(1)
@bad_leaves
def test_mask_policy_zeros_nonfinite_elements(bad):
    finite = np.where(np.isfinite(bad), bad, 0)
    norm = np.linalg.norm(finite)
    for make, total in (
        (optaxclip.clip_by_global_norm, math.hypot(norm, 1)),
        (optaxclip.clip_by_norm, norm),
    ):
        clipped, info = update(make(0.5, nonfinite="mask"), tree_of(bad))
        expected = finite * min(1, 0.5 / (total or 1))
        np.testing.assert_allclose(clipped["a"][0]["bad"], expected, rtol=1e-6)
        np.testing.assert_allclose(np.max(info.norm), max(total, 1), rtol=1e-6)
        assert np.sum(info.num_nonfinite) == 1


@pytest.mark.by_day(1)
@pytest.mark.parametrize("bad", [[inf, 1.0], [-inf, nan]], ids=["inf", "-inf and nan"])
@pytest.mark.parametrize(
    ("make", "leaves"),
    [(optaxclip.clip_by_global_norm, "a/0/bad, good"), (optaxclip.clip_by_norm, "a/0/bad")],
    ids=["tree", "leaf"],
)
def test_error_policy_reports_nonfinite_leaves(bad, make, leaves):
    problem = "the gradient norm is NaN or infinite for the leaves"
    message = rf"^{make.__name__}: {problem} {leaves} "
    tx = make(1.0, nonfinite="error")
    with pytest.raises(checkify.JaxRuntimeError, match=message):
        update(tx, tree_of(bad))
    checked = checkify.checkify(jax.jit(lambda grads: update(tx, grads)[0]))
    error, _ = checked(tree_of(bad))
    with pytest.raises(checkify.JaxRuntimeError, match=message):
        error.throw()
    error, clipped = checked(tree_of([3e38, -3e38]))
    assert error.get() is None
    np.testing.assert_allclose(clipped["a"][0]["bad"], [0.5**0.5, -(0.5**0.5)], rtol=1e-6)
    assert update(tx, {"Python float": 3.0})[0]["Python float"] == 1


@pytest.mark.by_day(1)
@pytest.mark.parametrize("policy", ["nan", "zero", "mask"])
def test_nonfinite_policy_accepts_huge_finite_elements(policy):
    tx = optaxclip.clip_by_global_norm(1.0, nonfinite=policy)
    clipped, info = update(tx, [jnp.full(4, 3e38)])
    np.testing.assert_allclose(clipped[0], [0.5] * 4, rtol=1e-6)
    assert (info.num_nonfinite, info.num_clipped) == (0, 1)


def test_clip_keeps_nan_and_bounds_infinities():
    clipped, _ = update(optaxclip.clip(2.0), np.float32([nan, inf, -inf, 3.0]))
    np.testing.assert_array_equal(clipped, [nan, 2.0, -2.0, 2.0])


# Types


@pytest.mark.by_day(14)
@every_transformation
@pytest.mark.parametrize("tree", [{}, [], {"a": None}, [None, ()]], ids=str)
def test_transformations_accept_empty_trees(make, tree):
    clipped, info = update(make(1.0), tree)
    assert clipped == tree
    assert not any(np.any(norm) for norm in jax.tree.leaves(info.norm if info else ()))


@pytest.mark.by_day(1)
@every_transformation
def test_transformations_accept_scalars_and_numpy_leaves(make):
    grads = {
        "zero-size": jnp.zeros((0, 3)),
        "scalar": jnp.array(3.0),
        "Python float": 3.0,
        "NumPy float32": np.float32(3),
        "NumPy float16": np.float16(3),
        "NumPy array": np.array([3.0, 4.0], f32),
    }
    clipped, _ = update(make(0.5), grads)
    for name, leaf in jax.tree.map(jnp.asarray, grads).items():
        actual = clipped[name]
        assert isinstance(actual, jax.Array)
        assert jax.typeof(actual) == jax.typeof(leaf)
        assert np.all((np.asarray(actual) > 0) & (np.asarray(actual) < np.asarray(leaf)))


@pytest.mark.by_day(2)
@every_transformation
def test_transformations_scale_complex_leaves(make):
    """The modulus counts; elementwise clipping keeps the phase."""
    z = jnp.array([3 + 4j, -6 + 8j, 0.0], jnp.complex64)
    norm, rms = math.sqrt(125), math.sqrt(125 / 3)
    by_entry = np.array([0.1, 0.05, 1])
    factors = {
        optaxclip.clip: by_entry,
        TRANSFORMATIONS["clip_by_value"]: by_entry,
        TRANSFORMATIONS["clip_by_norm_axes"]: by_entry,
        optaxclip.clip_by_block_rms: 0.5 / rms,
        optaxclip.adaptive_grad_clip: 0.5,
    }
    clipped, _ = update(make(0.5), z)
    assert clipped.dtype == z.dtype
    np.testing.assert_allclose(clipped, np.asarray(z) * factors.get(make, 0.5 / norm), rtol=1e-6)


@pytest.mark.by_day(1)
@every_transformation
def test_transformations_pass_non_float_leaves_through(make):
    others = {
        "none": None,
        "int": jnp.arange(3),
        "NumPy int": np.arange(3),
        "Python int": 7,
        "bool": jnp.array([True, False]),
        "float0": np.zeros(2, jax.dtypes.float0),
        "key": jax.random.key(0),
    }
    w = {"w": np.float32([3.0, 4.0])}
    clipped, info = update(make(0.5), {**w, **others}, {**w, **others, "none": jnp.ones(2)})
    alone, alone_info = update(make(0.5), w)
    assert all(clipped[name] is leaf for name, leaf in others.items())
    assert_same_bits(clipped["w"], alone["w"])
    if info:
        np.testing.assert_array_equal(np.max(info.norm), np.max(alone_info.norm))


@every_transformation
@pytest.mark.parametrize("leaf", ["text", math, object()], ids=["a str", "a module", "an object"])
def test_non_array_leaves_raise(make, leaf):
    tx, params = make(1.0), {"w": jnp.ones(2)}
    state = tx.init(params)
    with pytest.raises(TypeError, match=f"updates.*'w'.*{type(leaf).__name__}"):
        tx.update({"w": leaf}, state, params)
    with pytest.raises(TypeError, match=f"params.*'w'.*{type(leaf).__name__}"):
        tx.init({"w": leaf})


@pytest.mark.parametrize(
    ("make", "threshold"),
    [
        *[(make, x) for make in NORMED.values() for x in (np.ones(2), jnp.ones(1), [1.0])],
        *[(make, x) for make in TRANSFORMATIONS.values() for x in ("1", None, True, 1j)],
    ],
)
def test_threshold_that_is_no_scalar_or_no_number(make, threshold):
    is_array = hasattr(threshold, "shape")
    message = rf"scalar, got .*{re.escape(str(np.shape(threshold)))}" if is_array else "number"
    with pytest.raises(
        ValueError if is_array else TypeError, match=f"{ARGUMENT} must be a .*{message}"
    ):
        make(threshold)


@pytest.mark.parametrize(
    ("low", "high"),
    [(2.0, 1.0), (np.float32(2), 1), (jnp.array(2.0), 1.0), (np.array([0.0, 2.0]), 1.0)],
    ids=["floats", "NumPy scalar", "JAX scalar", "array"],
)
def test_clip_by_value_rejects_minimum_above_maximum(low, high):
    with pytest.raises(ValueError, match="min_value must be at most max_value"):
        optaxclip.clip_by_value(low, high)


def test_clip_by_value_rejects_bounds_larger_than_leaf():
    tx = optaxclip.clip_by_value(jnp.full((2, 3), -1.0), 1.0)
    with pytest.raises(
        ValueError, match=r"^min_value must .* the shape \(3,\) of leaf 'w', got shape \(2, 3\)"
    ):
        update(tx, {"w": jnp.ones(3)})

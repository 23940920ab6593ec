"""Scopes: which entries share one norm."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optaxclip
from optaxclip import scopes
from optaxclip._base.trees import flatten


def clip(tree, threshold, scope, **options):
    return optaxclip.clip_tree(tree, threshold, scope=scope, **options)


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def expected(x, axes, threshold):
    """`x` in NumPy, clipped to L2 norm `threshold` over the axes."""
    norm = np.linalg.norm(
        np.moveaxis(x, axes, range(len(axes))).reshape(-1, *np.delete(x.shape, axes)), axis=0
    )
    return x * np.expand_dims(np.minimum(1, threshold / norm), axes)


def axes_of(scope, shape):
    """The axes of the norms of a leaf of this shape."""
    (axes,) = scope(flatten({"w": np.zeros(shape, np.float32)}, "tree")).axes
    return axes


# Units

UNITS = {
    (): ((), 1),
    (5,): ((0,), 2.236068),
    (1, 4): ((0, 1), 2),
    (4, 1): ((0, 1), 2),
    (1, 1, 7, 1): ((0, 1, 2, 3), 2.645751),
    (2, 3): ((0,), 1.414214),
    (2, 3, 4): ((0,), 1.414214),
    (2, 2, 3, 4): ((0, 1, 2), 3.464102),
    (2, 2, 2, 3, 4): ((0, 1, 2, 3), 4.898979),
    (1,) * 6: ((0, 1, 2, 3, 4, 5), 1),
}


@pytest.mark.by_day(1)
@pytest.mark.parametrize(("shape", "axes", "norm"), [(k, *v) for k, v in UNITS.items()], ids=str)
def test_unit_scope_measures_expected_axes(shape, axes, norm):
    clipped, info = clip(np.ones(shape, np.float32), 0.5, scopes.unit())
    np.testing.assert_allclose(info.norm, [norm], rtol=1e-6)
    np.testing.assert_allclose(clipped, np.full(shape, 0.5 / norm), rtol=1e-6)
    x = normal(*shape)
    clipped, _ = clip(x, 0.5, scopes.unit())
    np.testing.assert_allclose(clipped, expected(x, axes, 0.5), rtol=2e-6)


def test_unit_scope_shifts_axes_past_stacked_axes():
    for shape, (axes, _) in UNITS.items():
        assert axes_of(scopes.unit(), shape) == axes
        for front in ((3,), (1, 2)):
            found = axes_of(scopes.unit(stacked=len(front)), (*front, *shape))
            assert found == tuple(len(front) + axis for axis in axes)


def test_scopes_accept_axes_in_all_forms():
    for axes, found in ((0, (0,)), (-1, (2,)), ((-2, 0), (0, 1)), ([0, 1, 2], (0, 1, 2)), ((), ())):
        assert axes_of(scopes.axes(axes), (3, 4, 5)) == found
        assert axes_of(scopes.unit(axes), (3, 4, 5)) == found
        assert axes_of(scopes.unit(lambda path, leaf, axes=axes: axes), (3, 4, 5)) == found
    assert axes_of(scopes.unit(lambda path, leaf: None), (3, 4, 5)) == (0,)
    assert axes_of(scopes.leaf(), (3, 4, 5)) == (0, 1, 2)
    assert axes_of(scopes.leaf(2), (3, 4, 5)) == (2,)


@pytest.mark.by_day(1)
@pytest.mark.parametrize("stacked", [1, 2])
@pytest.mark.parametrize("shape", [(4,), (2, 3), (2, 2, 3, 4)], ids=str)
def test_stacked_units_match_loop_over_layers(shape, stacked):
    x = normal(*(3, 2)[:stacked], *shape)
    clipped, _ = clip(x, 0.7, scopes.unit(stacked=stacked))
    layers = x.reshape(-1, *shape)
    alone = [clip(layer, 0.7, scopes.unit())[0] for layer in layers]
    np.testing.assert_allclose(clipped, np.reshape(alone, x.shape), rtol=1e-6)


@pytest.mark.by_day(1)
@pytest.mark.parametrize(
    "axis",
    [(0, 1, 2, 3), (-1,), 5, (2, -1), lambda path, leaf: (0, leaf.ndim - 1)],
    ids=["four", "last", "number", "mixed", "function"],
)
def test_unit_scope_accepts_custom_axes(axis):
    x = normal(2, 3, 2, 2, 3, 2)
    axes = axis("", x) if callable(axis) else axis
    axes = tuple(a % 6 for a in np.atleast_1d(axes))
    clipped, _ = clip(x, 0.7, scopes.unit(axis))
    np.testing.assert_allclose(clipped, expected(x, axes, 0.7), rtol=2e-6)


def test_unit_scope_axes_count_from_unstacked_axes():
    x = normal(3, 4, 5)
    for axis in (1, lambda path, leaf: leaf.ndim - 2):
        clipped, _ = clip(x, 0.7, scopes.unit(axis, stacked=1))
        np.testing.assert_allclose(clipped, expected(x, (2,), 0.7), rtol=2e-6)


def test_adaptive_grad_clip_matches_published_vectors():
    """The vectors of section E1 of the methods."""
    for ratio, weights, grads, clipped in [
        (0.01, [[3, 0], [4, 0]], [[0.3, 0.3], [0.4, 0.4]], [[0.03, 6e-6], [0.04, 8e-6]]),
        (
            *(0.1, [[1, 2], [0, 0]], [[3, 0.1], [4, 0.2]]),
            [[0.06, 0.0894427], [0.08, 0.1788854]],
        ),
        (0.01, [0, 0], [3, 4], [6e-6, 8e-6]),
    ]:
        tx = optaxclip.adaptive_grad_clip(ratio)
        params, grads = jnp.asarray(weights, jnp.float32), jnp.asarray(grads, jnp.float32)
        actual, _ = tx.update(grads, tx.init(params), params)
        np.testing.assert_allclose(actual, clipped, rtol=2e-6)


@pytest.mark.by_day(1)
@pytest.mark.parametrize(("norm", "update", "factor"), [(5, 10, 0.15), (0, 1, 3e-4)])
def test_relative_to_params_reproduces_dreamer(norm, update, factor):
    threshold = optaxclip.thresholds.relative_to_params(0.3, eps=1e-3)
    tx = optaxclip.clip_by(scopes.leaf(), threshold)
    params, grads = jnp.array([[norm, 0.0]]), jnp.array([[0.0, update]])
    actual, _ = tx.update(grads, tx.init(params), params)
    np.testing.assert_allclose(actual, factor * grads, rtol=1e-6)


# Leaves, axes, the tree


def test_leaf_scope_clips_leaves_separately():
    tree = {"a": normal(3, 4), "b": {"c": normal(5), "d": np.float32(-3)}}
    clipped, info = clip(tree, 0.7, scopes.leaf())
    assert list(info.names) == ["a", "b/c", "b/d"]
    for actual, x, norm in zip(*map(jax.tree.leaves, (clipped, tree)), info.norm, strict=True):
        np.testing.assert_allclose(norm, np.linalg.norm(x), rtol=1e-6)
        np.testing.assert_allclose(actual, x * 0.7 / np.linalg.norm(x), rtol=1e-6)


@pytest.mark.by_day(1)
@pytest.mark.parametrize(
    ("norm", "response"), [("l2", "clip"), ("rms", "smooth"), ("linf", "normalize")]
)
def test_stacked_leaves_match_loop_over_layers(norm, response):
    options = {"norm": norm, "response": response}
    scale = np.logspace(-2, 2, 6).astype(np.float32).reshape(6, 1, 1)
    tree = {"blocks": {"b": normal(6, 4), "w": normal(6, 4, 5) * scale}, "head": np.float32([1, 2])}
    scope = scopes.leaf(stacked={"blocks": 1, "head": 0})
    clipped, info = clip(tree, 1.0, scope, **options)
    assert info.norm.shape == (13,)
    for i in range(6):
        layer = jax.tree.map(lambda x, i=i: x[i], tree["blocks"])
        alone, _ = clip(layer, 1.0, scopes.leaf(), **options)
        for name in layer:
            np.testing.assert_allclose(clipped["blocks"][name][i], alone[name], rtol=2e-6)


def test_stacked_accepts_equivalent_forms():
    tree = {"blocks": [normal(3, 4), normal(3, 4, 2)], "head": normal(4)}
    results = [
        clip(tree, 0.7, scopes.leaf(stacked=stacked))[0]
        for stacked in (
            {"blocks": 1, "head": 0},
            {"blocks": [1, 1], "head": 0},
            lambda path, leaf: 1 if path.startswith("blocks") else 0,
        )
    ]
    for other in results[1:]:
        jax.tree.map(np.testing.assert_array_equal, other, results[0])


@pytest.mark.by_day(1)
@pytest.mark.parametrize(
    ("axis", "clipped"),
    [(0, [[-2.4, 0, 0], [3.2, 0, 3]]), (1, [[-3, 0, 0], [3.2, 0, 2.4]])],
)
def test_clip_by_norm_over_axis_matches_tensorflow(axis, clipped):
    """TensorFlow's vectors."""
    grads = np.float32([[-3.0, 0, 0], [4, 0, 3]])
    for threshold, result in ((4.0, clipped), (6.0, grads)):
        tx = optaxclip.clip_by_norm(threshold, axes=axis)
        actual, _ = tx.update(grads, tx.init(grads))
        np.testing.assert_allclose(actual, result, rtol=1e-6)


def test_tree_scope_matches_tensorflow():
    """TensorFlow's vectors."""
    tree = [np.float32([[-2.0, 0, 0], [4, 0, 0]]), None, np.float32([1.0, -2.0])]
    (w, none, b), info = clip(tree, 4.0, scopes.tree())
    assert info.norm == 5
    assert none is None
    np.testing.assert_allclose(w, [[-1.6, 0, 0], [3.2, 0, 0]], rtol=1e-6)
    np.testing.assert_allclose(b, [0.8, -1.6], rtol=1e-6)


# Groups


def label(path, leaf):
    return "encoder" if path.startswith("encoder") else "head"


GROUPED = {"encoder": {"w": normal(3, 4), "b": normal(4, seed=1)}, "head": [normal(2, seed=2)]}


@pytest.mark.by_day(1)
@pytest.mark.parametrize(
    "labels",
    [
        {"encoder": "encoder", "head": "head"},
        {"encoder": {"w": "encoder", "b": "encoder"}, "head": ["head"]},
        label,
    ],
    ids=["prefix", "full tree", "function"],
)
def test_group_scope_clips_groups_like_separate_trees(labels):
    clipped, info = clip(GROUPED, {"encoder": 0.5, "head": 0.1}, scopes.group(labels))
    assert list(info.names) == ["encoder", "head"]
    np.testing.assert_allclose(info.threshold, [0.5, 0.1], rtol=1e-6)
    for i, (name, threshold) in enumerate({"encoder": 0.5, "head": 0.1}.items()):
        alone, alone_info = clip(GROUPED[name], threshold, scopes.tree())
        np.testing.assert_allclose(info.norm[i], alone_info.norm, rtol=1e-6)
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6), clipped[name], alone)


def test_labels_accept_tree_without_leaves():
    for scope in (scopes.group({"w": "a"}), scopes.leaf(stacked=[1]), scopes.unit({"w": 0})):
        for tree in ({}, {"b": None}):
            assert clip(tree, 1.0, scope)[0] == tree


def test_group_scope_with_single_label_matches_tree_scope():
    clipped, _ = clip(GROUPED, 0.5, scopes.group("all"))
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6),
        *(clipped, clip(GROUPED, 0.5, scopes.tree())[0]),
    )


def test_clip_by_group_norm_groups_across_branches():
    tx = optaxclip.clip_by_group_norm(1.0, lambda path, leaf: f"rank {leaf.ndim}")
    tree = {"a": {"w": jnp.full((2, 2), 3.0), "b": jnp.full(2, 2.0)}, "c": np.float32([1.0, 4.0])}
    updates, state = tx.update(tree, tx.init(tree))
    assert list(state.info.names) == ["rank 1", "rank 2"]
    np.testing.assert_allclose(state.info.norm, [5, 6], rtol=1e-6)
    np.testing.assert_allclose(updates["c"], [0.2, 0.8], rtol=1e-6)
    np.testing.assert_allclose(updates["a"]["w"], np.full((2, 2), 0.5), rtol=1e-6)


# Adaptive gradient clipping


# Errors

W = {"w": jnp.ones((2, 3))}


def test_stacked_accepts_numpy_integer():
    rows, _ = clip(W, 1.0, scopes.leaf(np.int64(1)))
    np.testing.assert_allclose(rows["w"], W["w"] / np.sqrt(3), rtol=1e-6)


@pytest.mark.by_day(1)
@pytest.mark.parametrize("shapes", [{"a": (3, 0)}, {"a": (3, 0), "b": (2, 0), "c": (3, 4)}])
def test_leaf_without_units_counts_as_unclipped(shapes):
    grads = {name: jnp.ones(shape) for name, shape in shapes.items()}
    _, info = clip(grads, 0.5, scopes.unit())
    assert (info.norm[0], info.threshold[0], info.factor[0], info.fraction[0]) == (0, np.inf, 1, 0)


def test_axes_scope_accepts_numpy_integers():
    grads = np.float32([[3.0, 6.0], [4.0, 8.0]])
    for axes in (np.int64(0), np.array([0]), (0, -2)):
        np.testing.assert_allclose(clip(grads, 20.0, scopes.axes(axes))[1].norm, [10])


def test_group_scope_accepts_label_function_like_optax_partition():
    def of_tree(tree):
        return {"w": "a", "rest": jax.tree.map(lambda _: "b", tree["rest"])}

    grads = {"w": jnp.array([3.0, 4.0]), "rest": [jnp.array([6.0]), jnp.array([8.0])]}
    clips = {
        name: optaxclip.clip_by_global_norm(threshold)
        for name, threshold in (("a", 1.0), ("b", 2.0))
    }
    expected = optax.partition(clips, of_tree)
    for tx in (
        optaxclip.clip_by_group_norm({"a": 1.0, "b": 2.0}, of_tree),
        optaxclip.clip_by(scopes.group(of_tree), {"a": 1.0, "b": 2.0}),
    ):
        found = tx.update(grads, tx.init(grads))[0]
        chex.assert_trees_all_equal(found, expected.update(grads, expected.init(grads))[0])

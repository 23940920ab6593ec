"""Groups of many leaves side by side: told apart, and in the order that rules and records have."""

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import optaxclip
from optaxclip import scopes


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


TREE = {
    "a": normal(4, 3, seed=1),
    "b": normal(3, seed=2),
    "c": normal(3, 5, seed=3),
    "d": normal(3, 0),
    "e": normal(2, 3, seed=4),
    "f": normal(70, seed=5),
    "g": np.float32(2.0),
}
SCOPES = {
    "tree": scopes.tree(),
    "group": scopes.group(lambda path, leaf: "x" if path in "be" else "y"),
    "leaf": scopes.leaf(),
    "stacked": scopes.leaf(stacked=lambda path, leaf: min(np.ndim(leaf), 1)),
    "unit": scopes.unit(),
    "axes": scopes.unit(axis=lambda path, leaf: 0 if np.ndim(leaf) else ()),
}


def test_unit_scope_clips_many_units_of_several_leaves():
    """More than one would want the numbers of in a compiled program."""
    tree = [normal(2, 70_000), normal(5, 8, seed=1), normal(3, 70_000, seed=2)]
    clipped, _ = optaxclip.clip_tree(tree, 0.5, scope=scopes.unit())
    for found, leaf in zip(clipped, tree, strict=True):
        share = np.minimum(1, 0.5 / np.linalg.norm(leaf.astype(np.float64), axis=0))
        np.testing.assert_allclose(found, leaf * share, rtol=2e-6)


@pytest.mark.by_day(1)
@pytest.mark.parametrize(
    ("name", "axes"), [("leaf", lambda x: None), ("unit", lambda x: 0 if x.ndim > 1 else None)]
)
def test_info_norms_match_names(name, axes):
    _, info = optaxclip.clip_tree(TREE, 0.5, scope=SCOPES[name])
    norms = {x: np.sqrt(np.sum(np.square(leaf), axes(leaf))) for x, leaf in TREE.items()}
    assert list(info.names) == list(TREE)
    largest = [np.max(norm, initial=0) for norm in norms.values()]
    np.testing.assert_allclose(info.norm, largest, rtol=1e-6)


def test_thresholds_by_name_of_layers_and_whole_leaves():
    """In the array that they share the whole leaf comes first, by name it comes last."""
    tree = {"a": normal(2, 80), "z": normal(100, seed=1)}
    thresholds = {"a/0": 1.0, "a/1": 2.0, "z": 3.0}
    scope = scopes.leaf(stacked={"a": 1, "z": 0})
    clipped, info = optaxclip.clip_tree(tree, thresholds, scope=scope)
    assert dict(zip(info.names, info.threshold.tolist(), strict=True)) == thresholds
    norms = [*np.linalg.norm(clipped["a"], axis=1), np.linalg.norm(clipped["z"])]
    np.testing.assert_allclose(norms, [1, 2, 3], rtol=2e-6)


def test_adaptive_grad_clip_accepts_params_sharded_unlike_gradients():
    """Those of one device are all side by side, those on a mesh are not."""
    tree = {"v": normal(16, 4), "w": normal(8, 16, seed=1)}
    mesh = jax.make_mesh((8,), ("a",), axis_types=(AxisType.Explicit,))
    places = {"v": NamedSharding(mesh, P("a")), "w": NamedSharding(mesh, P(None, "a"))}
    tx = optaxclip.adaptive_grad_clip(0.3)
    clipped, state = jax.jit(tx.update)(jax.device_put(tree, places), tx.init(tree), tree)
    expected, alone = tx.update(tree, tx.init(tree), tree)
    for found, leaf in zip(jax.tree.leaves(clipped), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(found, leaf, rtol=1e-6)
    np.testing.assert_allclose(state.info.threshold, alone.info.threshold, rtol=1e-6)

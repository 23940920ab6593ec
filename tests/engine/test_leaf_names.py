"""Names of leaves: where a custom node gives several one key, and beside the boxes of Flax."""

from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import optaxclip
from optaxclip import monitor, scopes, thresholds


@jax.tree_util.register_pytree_with_keys_class
class Twins:
    """A node that calls all its children the same."""

    def __init__(self, *children):
        self.children = children

    def tree_flatten_with_keys(self):
        return [(jax.tree_util.GetAttrKey("twin"), child) for child in self.children], None

    @classmethod
    def tree_unflatten(cls, aux, children):
        del aux
        return cls(*children)


GRADS = {"a": Twins(np.float32([3.0, 4.0]), np.float32([6.0, 8.0])), "b": np.float32([5.0])}
PARAMS = {"a": Twins(np.float32([1.0, 0.0]), np.float32([2.0, 0.0])), "b": np.float32([5.0])}


def test_adaptive_grad_clip_matches_params_despite_equal_keys():
    agc = optaxclip.adaptive_grad_clip(1.0)
    clipped, _ = agc.update(GRADS, agc.init(PARAMS), PARAMS)
    norms = [np.linalg.norm(x) for x in (*clipped["a"].children, clipped["b"])]
    np.testing.assert_allclose(norms, [1, 2, 5], rtol=1e-6)


@pytest.mark.by_day(1)
@pytest.mark.parametrize("scope", [scopes.leaf(), scopes.axes(0)])
def test_info_names_stay_unique_despite_equal_keys(scope):
    tx = optaxclip.clip_by(scope, 4.0)
    info = tx.update(GRADS, tx.init(PARAMS))[1].info
    assert list(info.names) == ["a/twin", "a/twin/#1", "b"]
    np.testing.assert_array_equal(info.norm, [5, 10, 5])


def test_history_separates_leaves_with_equal_keys():
    tx = monitor.record(2, scope=scopes.leaf())
    _, state = tx.update(GRADS, tx.init(PARAMS))
    np.testing.assert_array_equal(monitor.history(state), [[5, 10, 5]])


class Attention(NamedTuple):
    """A module with a field that is called as Flax calls what its boxes hold."""

    query: Any
    value: Any


@pytest.mark.by_day(1)
@pytest.mark.parametrize("query", [np.ones(2, np.float32), None])
def test_leaf_names_keep_field_called_value(query):
    grads = {"attn": Attention(query, np.ones(3, np.float32)), "head": np.ones(4, np.float32)}
    tx = optaxclip.clip_by(scopes.group(lambda path, leaf: path.split("/")[0]), 1.0)
    state = optaxclip.clip_by_norm(1.0).init(grads)
    names = ["attn/query", "attn/value", "head"]
    assert list(state.info.names) == names[query is None :]
    info = tx.update(grads, tx.init(grads))[1].info
    assert list(info.names) == ["attn", "head"]


@pytest.mark.parametrize("box", [nnx.Param, lambda x: nn.Partitioned(x, ("i",))])
def test_leaf_names_omit_flax_boxes(box):
    params = {"w": jnp.ones(2), "layer": {"value": jnp.ones(3)}}
    tx = optaxclip.clip_by_norm(1.0)
    state = tx.init(jax.tree.map(box, params))
    assert list(state.info.names) == list(tx.init(params).info.names) == ["layer/value", "w"]
    assert np.array_equal(tx.update(params, state)[1].info.norm, np.sqrt(np.float32([3, 2])))


NAN, ONE = jnp.full(1, jnp.nan), jnp.ones(1)


def test_skip_above_remembers_leaves_of_all_steps():
    tx = optaxclip.skip_above(optax.sgd(0.1), 10.0)
    state = tx.init({"a": None, "b": ONE, "c": ONE})
    for a, b, names in (
        (None, ONE, "bc"),
        (ONE, ONE, "abc"),
        (None, None, "abc"),
        (ONE, None, "abc"),
    ):
        _, state = jax.eval_shape(tx.update, {"a": a, "b": b, "c": ONE}, state)
        assert "".join(state.leaves) == names
        assert state.is_bad_leaf.shape == (len(names),)


@pytest.mark.slow
def test_bad_leaves_names_leaf_initialized_with_none():
    tx = optaxclip.skip_above(optax.sgd(0.1), 10.0)
    state = tx.init({"a": None, "b": ONE})
    for a, blamed in ((NAN, "a"), (50 * ONE, "a"), ({"w": NAN, "v": ONE}, "a/w"), (ONE, "b")):
        grads = {"a": a, "b": NAN if blamed == "b" else ONE}
        _, after = jax.jit(tx.update)(grads, state)
        assert monitor.bad_leaves(after) == (blamed,)
        again = tx.update({"a": None, "b": ONE}, after)[1]
        assert monitor.bad_leaves(again) == (blamed,)
        assert jax.tree.structure(again) == jax.tree.structure(after)


@pytest.mark.slow
@pytest.mark.parametrize("missing", ["a", "a/b"])
def test_bad_leaves_distinguishes_equal_names_with_missing_leaf(missing):
    bad = {"a/b": NAN, "a": {"b": NAN}} | {missing: None}
    name = "['a/b']" if missing == "a" else "['a']['b']"
    rules = {"['a/b']": 1.0, "['a']['b']": thresholds.zscore()}
    for tx in (
        optaxclip.skip_nonfinite(optax.sgd(0.1)),
        optaxclip.clip_by_norm(1.0),
        optaxclip.clip_by(scopes.leaf(), rules),
    ):
        _, state = tx.update(bad, tx.init({"a/b": ONE, "a": {"b": ONE}}))
        assert monitor.bad_leaves(state) == (name,)

"""Leaves that a custom node gives one key: they are told apart by their position."""

import jax
import numpy as np
import pytest

import optaxclip
from optaxclip import monitor, scopes


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


def test_each_has_its_own_parameter():
    agc = optaxclip.adaptive_grad_clip(1.0)
    clipped, _ = agc.update(GRADS, agc.init(PARAMS), PARAMS)
    norms = [np.linalg.norm(x) for x in (*clipped["a"].children, clipped["b"])]
    np.testing.assert_allclose(norms, [1, 2, 5], rtol=1e-6)


@pytest.mark.parametrize("scope", [scopes.leaf(), scopes.axes(0)])
def test_each_has_its_own_entry_in_the_record(scope):
    tx = optaxclip.clip_by(scope, 4.0)
    info = tx.update(GRADS, tx.init(PARAMS))[1].info
    assert list(info.names) == ["a/twin", "a/twin/#1", "b"]
    np.testing.assert_array_equal(info.norm, [5, 10, 5])


def test_each_has_its_own_norm_in_the_history():
    tx = monitor.record(2, per_leaf=True)
    _, state = tx.update(GRADS, tx.init(PARAMS))
    np.testing.assert_array_equal(monitor.history(state), [[5, 10, 5]])

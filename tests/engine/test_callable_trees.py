"""Pytrees of labels and other values that have the type of a callable model."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec

import optaxclip
from optaxclip import monitor, scopes


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Linear:
    """A callable model, as those of Equinox are."""

    weight: Any
    bias: Any

    def __call__(self, x):
        return self.weight @ x + self.bias


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Labels:
    """A function that is a pytree of another type than the model."""

    matrix: Any

    def __call__(self, path, leaf):
        return "matrix" if np.ndim(leaf) == 2 else "vector"


MODEL = Linear(jnp.full((2, 2), 3.0), jnp.full(2, 4.0))


def info_of(scope, **options):
    return optaxclip.clip_tree(MODEL, 1.0, scope=scope, **options)[1]


def test_labels_of_callable_models_are_no_functions():
    expected = {"matrix": 6.0, "vector": 32**0.5}
    labels = [
        Linear("matrix", "vector"),
        lambda tree: Linear("matrix", "vector"),
        lambda path, leaf: "matrix" if path == "weight" else "vector",
        Labels(jnp.ones(2)),
    ]
    for each in labels:
        info = info_of(scopes.group(each))
        found = dict(zip(info.names, np.asarray(info.norm).tolist(), strict=True))
        np.testing.assert_allclose([*found.values()], [*expected.values()], rtol=1e-6)
        assert list(found) == list(expected)
    in_dict = optaxclip.clip_by_group_norm(1.0, {"a": Linear("x", "y")})
    assert tuple(in_dict.init({"a": MODEL}).info.names) == ("x", "y")


def test_other_trees_of_callable_models_are_no_functions():
    assert len(info_of(scopes.leaf(stacked=Linear(1, 0))).names) == 3
    specs = Linear(PartitionSpec(), PartitionSpec())
    mesh = jax.make_mesh((1,), ("x",))
    with jax.set_mesh(mesh):
        info = info_of(scopes.leaf(), specs=specs)
        np.testing.assert_allclose(info.norm, [32**0.5, 6.0], rtol=1e-6)
    numbers = Linear(optax.contrib.MuonDimensionNumbers(), None)
    assert scopes.muon_labels(numbers)(MODEL) == Linear("muon", "adam")
    info = info_of(scopes.muon(lambda tree: numbers))
    np.testing.assert_allclose(info.norm, [32**0.5, 6.0], rtol=1e-6)
    recorded = monitor.record(2, scope=scopes.group(Linear("a", "b"))).init(MODEL)
    assert "a" in str(recorded)


def test_misfit_labels_of_callable_models_are_explained():
    with pytest.raises(ValueError, match=r"^labels must be a pytree prefix of the gradients"):
        info_of(scopes.group(Linear({"a": "matrix"}, "vector")))

"""Which leaves stack layers: a dict names them, and one number for too many is warned of."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import optaxclip
from optaxclip import clip_by, scopes

MODEL = {"embedding": jnp.ones((5000, 2)), "layers": {"mlp": jnp.ones((3, 4)), "b": jnp.ones(3)}}


def names(stacked, tree=MODEL):
    return [*clip_by(scopes.leaf(stacked), 1.0).init(tree).info.names]


@pytest.mark.slow
def test_stacked_dict_defaults_other_branches_to_zero():
    all_layers = [f"layers/{leaf}/{i}" for leaf in ("b", "mlp") for i in range(3)]
    assert names({"layers": 1}) == ["embedding", *all_layers]
    assert names({"layers": {"mlp": 1}}) == ["embedding", "layers/b", *all_layers[3:]]
    assert names({"layers": 1, "embedding": 0}) == ["embedding", *all_layers]
    assert names({}) == ["embedding", "layers/b", "layers/mlp"]
    as_list = {"blocks": [jnp.ones((2, 3)), jnp.ones((2, 3))], "head": jnp.ones(3)}
    assert names({"blocks": {1: 1}}, as_list) == ["blocks/0", "blocks/1/0", "blocks/1/1", "head"]
    unit = clip_by(scopes.unit(stacked={"layers": 1}), 1.0)
    norms = unit.update(MODEL, unit.init(MODEL))[1].info.norm
    np.testing.assert_allclose(norms, [np.sqrt(5000), 1, 2], rtol=1e-6)


def test_stacked_dict_accepts_flax_state():
    class Model(nnx.Module):
        def __init__(self):
            self.layers, self.head = nnx.Param(jnp.ones((2, 3))), nnx.Param(jnp.ones(3))

    state = nnx.state(Model(), nnx.Param)
    assert names({"layers": 1}, state) == ["head", "layers/0", "layers/1"]


def test_stacked_dict_accepts_missing_branches():
    tx = clip_by(scopes.leaf({"layers": 1}), 1.0)
    _, state = tx.update(MODEL | {"layers": None}, tx.init(MODEL))
    np.testing.assert_array_equal(state.info.norm > 0, [True] + [False] * 6)
    masked = optax.masked(tx, {"embedding": True, "layers": False})
    masked.update(MODEL, masked.init(MODEL))


@pytest.mark.parametrize("wrong", [{"layer": 1}, {"layers": {"w": 1}}, {"layers": 1, "x": 0}])
def test_stacked_dict_with_unknown_branch_raises(wrong):
    with pytest.raises(
        ValueError,
        match=r"stacked must be a pytree prefix .* with the lea.* but is a dict with the lea",
    ):
        names(wrong)
    with pytest.raises(ValueError, match=r"between 0 and 2 for leaf 'layers/mlp' .* got 7"):
        names({"layers": {"mlp": 7}})


SAID = (
    r"stacked=1 creates 5006 groups, because it also applies to leaf 'embedding' of shape "
    r"\(5000, 2\); use a dict of branches, as in stacked=\{'layers': 1\}"
)


@pytest.mark.by_day(1)
@pytest.mark.parametrize("scope", [scopes.leaf, lambda stacked: scopes.unit(stacked=stacked)])
def test_stacked_number_with_embedding_warns(scope):
    with pytest.warns(UserWarning, match=SAID) as warned:
        clip_by(scope(1), 1.0).init(MODEL)
    assert warned[0].filename == __file__
    with pytest.warns(UserWarning, match=SAID):
        optaxclip.clip_by_block_rms(1.0, stacked=1).init(MODEL)
    two = {"a": jnp.zeros((3000, 1)), "b": jnp.zeros((3000, 1))}
    with pytest.warns(UserWarning, match="stacked=1 creates 6000 groups"):
        clip_by(scope(1), 1.0).init(two)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        clip_by(scope(1), 1.0).init({"a": jnp.zeros((4096, 1))})
        for stacked in ({"layers": 1}, {"embedding": 1}, 0, lambda path, leaf: 1):
            clip_by(scope(stacked), 1.0).init(MODEL)
        few = jax.tree.map(lambda x: x[:100], MODEL)
        clip_by(scope(1), 1.0).init(few)

"""Clipping beside Muon: the leaves that Optax's chooses, its page, and what a clip leaves alone."""

import math
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental.sparse import BCOO

import optaxclip
from optaxclip import monitor, scopes

PAGE = Path(__file__).parents[2] / "docs" / "muon.md"
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
Numbers = optax.contrib.MuonDimensionNumbers
PARAMS = {
    "mlp": {"w": jnp.ones((4, 3)), "b": jnp.ones(3)},
    "layers": jnp.ones((2, 4, 4)),
    "embedding": jnp.ones((5, 4)),
    "scale": jnp.ones(()),
}
CHOICES = {
    "by rank": None,
    "a prefix": {"mlp": None, "layers": Numbers(1, 2), "embedding": None, "scale": None},
    "a function": lambda params: jax.tree.map(
        lambda x: Numbers(-2, -1) if x.ndim > 1 else None, params
    ),
    "none at all": lambda params: None,
}
BESIDE = {"adam": 1.0, "muon": math.inf}


@pytest.mark.parametrize("name", CHOICES)
def test_muon_labels_match_optax(name):
    labels = scopes.muon_labels(CHOICES[name])(PARAMS)
    state = optax.contrib.muon(0.1, muon_weight_dimension_numbers=CHOICES[name]).init(PARAMS)
    trained = {"muon": [], "adam": []}
    for path, _ in jax.tree_util.tree_leaves_with_path(PARAMS):
        trained[_at(labels, path)].append(path)
    for label, paths in trained.items():
        moments = state.inner_states[label].inner_state[0].mu
        assert [path for path, _ in jax.tree_util.tree_leaves_with_path(moments)] == paths
    clip = optaxclip.clip_by(scopes.muon(CHOICES[name]), 1.0)
    names = list(clip.init(PARAMS).info.names)
    assert names == sorted(label for label, paths in trained.items() if paths)


def _at(tree, path):
    for key in path:
        tree = tree[key.key]
    return tree


def test_muon_scope_leaves_muon_group_unchanged():
    big = {"w": jnp.full((8, 8), 1e3), "b": np.float32([0.6, 0.7])}
    steep = big | {"b": np.float32([30.0, 40.0])}
    broken = steep | {"w": big["w"].at[0, 0].set(jnp.nan)}
    tx = optaxclip.clip_by(scopes.muon(), BESIDE)
    state = tx.init(big)
    updates, state = tx.update(big, state)
    jax.tree.map(np.testing.assert_array_equal, updates, big)
    for grads in (steep, broken):
        updates, state = tx.update(grads, state)
        np.testing.assert_allclose(updates["b"], [0.6, 0.8], rtol=1e-6)
    info = monitor.read(state)["clip_by"]
    assert list(info.names) == ["adam", "muon"]
    assert (info.num_clipped.tolist(), info.num_nonfinite.tolist()) == ([2, 0], [0, 1])
    # What a global norm makes of it.
    assert optaxclip.clip_by_global_norm(1.0).update(big, None)[0]["b"][0] < 1e-3


def test_muon_scope_accepts_none_leaves_and_single_array():
    tx = optaxclip.clip_by(scopes.muon(CHOICES["a prefix"]), BESIDE)
    none = PARAMS | {"layers": None, "scale": None}
    updates, _ = tx.update(none, tx.init(PARAMS))
    assert updates["layers"] is None
    alone = optaxclip.clip_by(scopes.muon(), {"muon": 1.0})
    np.testing.assert_allclose(alone.update(jnp.ones((2, 2)), None)[0], 0.5, rtol=1e-6)


def test_muon_labels_treat_sparse_matrix_as_single_leaf():
    embedding = BCOO((np.float32([3.0, 4.0]), np.int32([[1, 0], [2, 1]])), shape=(5, 2))
    grads = {"embedding": embedding, "b": np.float32([0.6, 0.7])}
    assert scopes.muon_labels()(grads) == {"embedding": "muon", "b": "adam"}
    tx = optaxclip.clip_by(scopes.muon(), {"adam": 1.0, "muon": 2.5})
    updates, _ = tx.update(grads, tx.init(grads))
    np.testing.assert_allclose(updates["embedding"].data, [1.5, 2.0], rtol=1e-6)


def test_muon_labels_reject_invalid_dimension_numbers():
    tx = optaxclip.clip_by(scopes.muon({"mlp": None}), BESIDE)
    with pytest.raises(ValueError, match=r"^weight_dimension_numbers must be a pytree prefix"):
        tx.init(PARAMS)
    with pytest.raises(ValueError, match=r"groups \['adam'\], got \['adam', 'muon'\]; pass one"):
        optaxclip.clip_by(scopes.muon(), BESIDE).init({"b": jnp.ones(2)})
    mask = {"mlp": {"w": True, "b": False}, "layers": True, "embedding": False, "scale": False}
    for wrong in (mask, lambda params: "muon"):
        with pytest.raises(
            ValueError, match=r"MuonDimensionNumbers or None, .*: (False|'muon') is neither"
        ):
            scopes.muon_labels(wrong)(PARAMS)


@pytest.mark.by_day(1)
@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_muon_page_code_runs(number):
    namespace = {}
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        exec(compile(BLOCKS[number], str(PAGE), "exec"), namespace)
        if "losses" in namespace:
            losses, groups = namespace["losses"], namespace["groups"]
            assert losses[-1] < losses[0] / 2
            assert list(groups.names) == ["adam", "muon"]
            assert groups.num_clipped[0] > 0
            assert groups.num_clipped[1] == 0
            assert np.all(groups.norm > 0)
            return
        experts = {"experts": jnp.ones((2, 3, 4)), "router": jnp.ones((3, 2))}
        rest = {"embedding": jnp.ones((5, 3)), "norms": jnp.ones(3)}
        params = {"w": jnp.ones((3, 2)), "b": jnp.ones(2)}
        params = experts | rest if "numbers" in namespace else params
        params = experts if "per_expert" in namespace else params
        made = [namespace[name] for name in ("tx", "per_expert", "shared") if name in namespace]
        for tx in made:
            update, state = jax.jit(tx.update), tx.init(params)
            for _ in range(2):
                updates, state = update(params, state, params)
            assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves(updates))
        assert next(iter(monitor.scalars(state).values())) > 0


def test_mucon_clips_singular_values_of_momentum():
    namespace = {}
    block = next(block for block in BLOCKS if "mucon" in block)
    exec(compile(block, str(PAGE), "exec"), namespace)
    tx, rng = namespace["tx"], np.random.default_rng(0)
    params, trace = {"w": jnp.zeros((6, 4)), "b": jnp.zeros(4)}, np.zeros((6, 4))
    state, update = tx.init(params), jax.jit(tx.update)
    with jax.numpy_dtype_promotion("standard"):
        for _ in range(3):
            grad = rng.normal(size=(6, 4)) / 6
            grads = {"w": jnp.asarray(grad, jnp.float32), "b": jnp.ones(4)}
            updates, state = update(grads, state, params)
            trace = grad + 0.95 * trace
            left, values, right = np.linalg.svd(grad + 0.95 * trace, full_matrices=False)
    assert min(values) < 1 < max(values)
    expected = -0.02 * (left * np.minimum(values, 1)) @ right
    np.testing.assert_allclose(updates["w"], expected, atol=2e-6)
    (info,) = monitor.read(state).values()
    np.testing.assert_allclose(info.norm, max(values), rtol=0.05)


@pytest.mark.slow
def test_muon_page_records_and_clips_groups_separately():
    namespace = {}
    block = next(block for block in BLOCKS if "optax.partition" in block)
    exec(compile(block, str(PAGE), "exec"), namespace)
    tx, grads = namespace["tx"], {"w": jnp.full((2, 2), 3.0), "b": np.float32([3.0, 4.0])}
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        state = jax.jit(tx.update)(grads, tx.init(grads), grads)[1]
    np.testing.assert_allclose(monitor.history(state), [6.0])
    assert next(iter(monitor.scalars(state).values())) == 5.0

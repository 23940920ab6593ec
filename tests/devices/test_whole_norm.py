"""AdaGC's warm-up: its thresholds depend on all groups, those of other leaves and devices too."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from optaxclip import clip_by, clip_by_global_norm, scopes, thresholds

SPECS = {"w": P("a", "b"), "v": P(None, "b"), "b": P()}
SHAPES = {"w": (16, 8), "v": (8, 4), "b": (6,)}
RNG = np.random.default_rng(0)
TREE = {x: jnp.asarray(RNG.normal(size=shape), jnp.float32) for x, shape in SHAPES.items()}
SCOPES = {
    "tree": scopes.tree(),
    "group": scopes.group({"w": "w", "v": "rest", "b": "rest"}),
    "leaf": scopes.leaf(stacked={"w": 1, "v": 0, "b": 0}),
    "axes": scopes.axes(-1),
    "unit": scopes.unit(),
}


def warm_up(tree, scope="unit", **options):
    tx = clip_by(SCOPES[scope], thresholds.adagc(), **options)
    return tx.update(tree, tx.init(tree))[0]


warm_up_here = jax.jit(warm_up, static_argnums=1)


@jax.jit
def by_global_norm(tree):
    tx = clip_by_global_norm(1.0)
    return tx.update(tree, tx.init(tree))[0]


def assert_as_by_global_norm(updates, tree=TREE):
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-30),
        updates,
        by_global_norm(tree),
    )


@pytest.mark.by_day(1)
@pytest.mark.parametrize("scale", [1.0, 1e-25, 1e25])
@pytest.mark.parametrize("scope", SCOPES)
def test_adagc_warmup_clips_by_global_norm(scope, scale):
    tree = jax.tree.map(lambda x: x * scale, TREE)
    assert_as_by_global_norm(warm_up_here(tree, scope), tree)


def spread(check_vma, scope):
    return jax.jit(
        jax.shard_map(
            functools.partial(warm_up, scope=scope, specs=SPECS),
            mesh=jax.make_mesh((4, 2), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2),
            in_specs=(SPECS,),
            out_specs=SPECS,
            check_vma=check_vma,
        )
    )


@pytest.mark.by_day(1)
@pytest.mark.parametrize("scope", ["axes", "unit"])
def test_adagc_warmup_includes_groups_on_other_devices(scope):
    assert_as_by_global_norm(spread(check_vma=True, scope=scope)(TREE))


@pytest.mark.by_day(1)
@pytest.mark.parametrize("scope", ["tree", "group", "unit"])
def test_adagc_warmup_includes_untracked_groups(scope):
    assert_as_by_global_norm(spread(check_vma=False, scope=scope)(TREE))


def test_adagc_warmup_ignores_nonfinite_group():
    tree = TREE | {"w": TREE["w"].at[0, 0].set(jnp.nan)}
    updates = warm_up_here(tree, "unit")
    counted = {"v": TREE["v"], "b": TREE["b"], "w": TREE["w"].at[:, 0].set(0)}
    assert_as_by_global_norm(updates | {"w": updates["w"].at[:, 0].set(0)}, counted)

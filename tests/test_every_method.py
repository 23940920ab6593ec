"""Checks that the benchmarks cover all transformations of the package."""

import jax
import jax.numpy as jnp
import pytest
from public_names import public

from benchmarks.every_method import NOT_CLIPS, build_methods, find_optax_method

PARAMS = [jnp.ones((4, 3)), jnp.ones(3)]


def test_benchmarks_cover_all_transformations():
    made = set()
    for name, fn in public().items():
        returned = str(getattr(fn, "__annotations__", {}).get("return", ""))
        if "." not in name and "Transformation[" in returned:
            made.add(name)
    assert made - set(NOT_CLIPS) <= set(build_methods())
    assert set(NOT_CLIPS) <= made


@pytest.mark.slow
def test_nearest_optax_methods_keep_update_shapes():
    for name, tx in build_methods().items():
        _, theirs = find_optax_method(name, tx, PARAMS)
        for each in (tx, theirs):
            with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
                state = jax.eval_shape(each.init, PARAMS)
                updates, _ = jax.eval_shape(each.update, PARAMS, state, PARAMS)
            shapes = [leaf.shape for leaf in jax.tree.leaves(updates)]
            assert shapes == [leaf.shape for leaf in PARAMS], name


def test_nearest_optax_methods_have_matching_scope():
    found = {name: find_optax_method(name, tx, PARAMS)[0] for name, tx in build_methods().items()}
    assert found["adagc"] == found["clip_by_norm"] == "clip_by_block_rms"
    assert found["zclip"] == found["record"] == "clip_by_global_norm"
    assert found["skip_above"] == "apply_if_finite"
    assert found["clip"] == "clip"

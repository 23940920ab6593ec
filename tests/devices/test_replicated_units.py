"""Units of a leaf that every device has whole need no specs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import optaxclip
from optaxclip import scopes


@pytest.mark.parametrize("scope", [scopes.unit(), scopes.axes(0)], ids=["unit", "axes"])
def test_a_replicated_leaf_needs_no_specs(scope):
    mesh = jax.make_mesh((4,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    clip = functools.partial(optaxclip.clip_tree, limits=1.0, scope=scope)
    x = jnp.arange(12.0).reshape(4, 3)
    inside = jax.jit(jax.shard_map(clip, mesh=mesh, in_specs=P(), out_specs=P()))
    found, info = inside(x)
    expected, alone = clip(x)
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    np.testing.assert_allclose(info.norm, alone.norm, rtol=1e-6)

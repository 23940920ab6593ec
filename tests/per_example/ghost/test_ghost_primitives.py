"""The primitives that are known are those that this version of JAX writes into programs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import optaxclip.per_example._ghost_primitives as primitives

X, IMAGE = np.ones((4, 6), np.float32), np.ones((1, 2, 5, 5), np.float32)
MESH = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,))
SHARDING = NamedSharding(MESH, PartitionSpec("data"))
PROGRAMS = {
    "transpose": (lambda x: x.T, X),
    "reshape": (lambda x: x.reshape(3, 8), X),
    "squeeze": (lambda x: x[:1].squeeze(), X),
    "broadcast_in_dim": (lambda x: x[None], X),
    "convert_element_type": (lambda x: x.astype(jnp.bfloat16), X),
    "copy": (jnp.array, X),
    "rev": (lambda x: x[::-1], X),
    "slice": (lambda x: lax.slice(x, (1, 0), (3, 6)), X),
    "split": (lambda x: jnp.split(x, 2), X),
    "concatenate": (lambda x: jnp.concatenate([x, x]), X),
    "stop_gradient": (lax.stop_gradient, X),
    "jit": (jax.jit(jnp.sin), X),
    "remat2": (jax.checkpoint(jnp.sin), X),
    "scan": (lambda x: lax.scan(lambda c, x: (c, x), 0, x), X),
    "dot_general": (lambda x: x @ x.T, X),
    "gather": (lambda x: x[np.arange(3)], X),
    "conv_general_dilated": (lambda x: lax.conv(x, x, (1, 1), "SAME"), IMAGE),
    "sharding_constraint": (lambda x: lax.with_sharding_constraint(x, SHARDING), X),
}
OTHERS = {
    # Names of other versions, and of calls that only transformations write.
    *("copy_p", "expand_dims", "pjit", "closed_call", "core_call", "checkpoint", "remat"),
    # On explicit meshes: see test_ghost_meshes.py.
    *("reshard", "mesh_cast"),
}


def test_known_primitives_match_list():
    assert PROGRAMS.keys() | OTHERS == primitives.KNOWN


@pytest.mark.parametrize("name", PROGRAMS)
def test_jax_uses_known_primitive_names(name):
    fn, x = PROGRAMS[name]
    names = {eqn.primitive.name for eqn in jax.make_jaxpr(fn)(x).eqns}
    assert name in names

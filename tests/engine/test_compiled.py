"""What XLA makes of a clip: how much of it there is to compile."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiling import AS_USERS

import optaxclip


def distinct_kernels(text):
    """How many fused computations of a compiled module differ by more than their names."""
    blocks = (block.strip() for block in text.split("\n\n"))
    return len({_renamed(block) for block in blocks if block.startswith(("%fused", "%wrapped"))})


def _renamed(block):
    """With the names of instructions replaced by numbers, and nothing about the source."""
    names = {}
    block = re.sub(r", metadata={[^}]*}|\bparam_[\d.]+", "", block)
    return re.sub(r"%[\w.-]+", lambda name: f"%{names.setdefault(name[0], len(names))}", block)


@pytest.mark.parametrize("method", ["clip_by_global_norm", "clip_by_norm", "adagc"])
def test_leaves_of_one_shape_share_what_is_compiled(method):
    """Else it would take XLA long to compile many of them."""
    tx = getattr(optaxclip, method)(*([] if method == "adagc" else [1.0]))

    def kernels(count):
        grads = [jnp.ones(1000)] * count
        update = jax.jit(tx.update, compiler_options=AS_USERS)
        return distinct_kernels(update.lower(grads, tx.init(grads)).compile().as_text())

    assert kernels(40) <= kernels(20) + 4


def test_leaves_alike_are_traced_together_and_told_apart():
    shapes = [(3,), (2, 2), (3,), (5,)] * 10
    grads = [jnp.full(shape, float(i + 1)) for i, shape in enumerate(shapes)]
    tx = optaxclip.clip_by_norm(1.0)

    def clip(grads):
        return tx.update(grads, tx.init(grads))[0]

    traced = jax.jit(clip).trace(grads)
    calls = [eqn for eqn in traced.jaxpr.eqns if eqn.primitive.name == "jit"]
    together = [len(eqn.outvars) for eqn in calls if eqn.params["name"] == "_several"]
    # Of 20, 10 and 10 leaves alike eight at a time, the others one by one.
    assert together == [8, 8, 1, 1, 1, 1, 8, 1, 1, 8, 1, 1]
    for clipped, grad in zip(traced.lower().compile()(grads), grads, strict=True):
        np.testing.assert_allclose(clipped, grad / jnp.linalg.norm(grad), rtol=1e-6)


@pytest.mark.parametrize(
    ("tx", "blocks"),
    [
        # Small groups are measured to more digits, together.
        (optaxclip.adaptive_grad_clip(0.01), 2),
        (optaxclip.clip_by_norm(1.0), 2),
        (optaxclip.clip_by_norm(1.0, axes=0), 2),
        (optaxclip.clip_by(optaxclip.scopes.leaf(stacked=1), 1.0), 1),
    ],
    ids=["agc", "leaf", "axes", "stacked"],
)
def test_groups_of_all_leaves_are_handled_at_once(tx, blocks):
    """Else kernels would be compiled for every shape of norms there is."""
    grads = [jnp.ones(shape) for shape in [(64, 8), (8, 64), (32, 32), (3,), (5,), (100,)]]
    jaxpr = jax.jit(tx.update).trace(grads, tx.init(grads), grads).jaxpr
    names = [eqn.params["name"] for eqn in jaxpr.eqns if eqn.primitive.name == "jit"]
    assert names.count("multiplier") == blocks


@pytest.mark.parametrize("dtype", ["float16", "float8_e5m2", "complex64"])
@pytest.mark.parametrize("shape", [(1 << 18,), (512, 768), (3, 256, 350)], ids=str)
def test_norms_store_no_leaf_in_another_dtype(dtype, shape):
    leaf = jax.ShapeDtypeStruct(shape, dtype)
    norm = jax.jit(optaxclip.ops.global_norm, compiler_options=AS_USERS).lower(leaf).compile()
    in_float32 = 4 * leaf.size
    assert norm.memory_analysis().temp_size_in_bytes < in_float32 / 7


def test_accelerators_sum_over_all_axes_at_once():
    """A partitioner would reduce the first of several sums over devices as an array."""
    traced = jax.jit(optaxclip.ops.global_norm).trace(jnp.ones((256, 128)))

    def axes_of_sums(platform):
        text = traced.lower(lowering_platforms=(platform,)).as_text()
        return set(re.findall(r"applies stablehlo.add across dimensions = (.*?) :", text))

    assert axes_of_sums("tpu") == axes_of_sums("cuda") == {"[0, 1]"}
    assert axes_of_sums("cpu") == {"[0]", "[1]"}

"""What XLA makes of a clip: how much of it there is to compile."""

import dataclasses
import re
import sys

import jax
import jax.numpy as jnp
import pytest
from compiling import AS_USERS, where_sums_are_fused

import optaxclip
import optaxclip._backend.reductions as reductions_lib
from optaxclip import monitor, norms, scopes


def distinct_kernels(text):
    """How many fused computations of a compiled module differ by more than their names."""
    blocks = (block.strip() for block in text.split("\n\n"))
    return len({_renamed(block) for block in blocks if block.startswith(("%fused", "%wrapped"))})


def _renamed(block):
    """With the names of instructions replaced by numbers, and nothing about the source."""
    names = {}
    block = re.sub(r", metadata={[^}]*}|\bparam_[\d.]+", "", block)
    return re.sub(r"%[\w.-]+", lambda name: f"%{names.setdefault(name[0], len(names))}", block)


@pytest.mark.slow
def test_equal_leaves_share_compiled_kernels():
    """Else it would take XLA long to compile many of them."""
    tx = optaxclip.clip_by_global_norm(1.0)

    def kernels(count):
        grads = [jnp.ones(1000)] * count
        update = jax.jit(tx.update, compiler_options=AS_USERS)
        return distinct_kernels(update.lower(grads, tx.init(grads)).compile().as_text())

    assert kernels(40) <= kernels(20) + 4


@pytest.mark.by_day(1)
@pytest.mark.parametrize(
    ("tx", "most"),
    [
        (optaxclip.clip_by_global_norm(1.0), 2),
        (optaxclip.clip_by_norm(1.0), 3),
        (optaxclip.scale_by_stable_adam(), 7),
    ],
    ids=["global", "leaf", "stable_adam"],
)
def test_extra_leaf_adds_few_kernels(tx, most):
    """On a CPU each takes a millisecond to compile, also where another one is equal."""

    def kernels(count):
        grads = [jnp.ones((32, 32))] * count
        update = jax.jit(tx.update, compiler_options=AS_USERS)
        entry = update.lower(grads, tx.init(grads)).compile().as_text().split("ENTRY")[1]
        return len(re.findall(r" fusion\(", entry))

    assert kernels(16) <= kernels(12) + 4 * most


@pytest.mark.slow
@pytest.mark.parametrize(
    "tx",
    [
        optaxclip.clip_by_global_norm(1.0),
        optaxclip.clip_by_norm(1.0),
        optaxclip.adaptive_grad_clip(0.01),
    ],
    ids=["global", "leaf", "agc"],
)
def test_extra_leaf_adds_few_derivative_instructions(tx):
    """Else what is computed once for all leaves would be compiled again for each of them."""

    def instructions(count):
        grads = [jnp.ones((32, 32))] * count
        state = tx.init(grads)
        total = jax.jit(
            jax.grad(lambda x: sum(map(jnp.sum, tx.update(x, state, x)[0]))),
            compiler_options=AS_USERS,
        )
        return total.lower(grads).compile().as_text().count(" = ")

    assert instructions(9) - instructions(6) < 3 * 150


def jits(jaxpr):
    """The names of functions that are a `jit` of their own, in others too."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "jit":
            yield eqn.params["name"]
            yield from jits(eqn.params["jaxpr"])


@pytest.mark.by_day(1)
@pytest.mark.parametrize(
    "tx",
    [
        optaxclip.adaptive_grad_clip(0.01),
        optaxclip.clip_by_norm(1.0),
        optaxclip.clip_by_norm(1.0, axes=0),
        optaxclip.clip_by(scopes.leaf(stacked=1), 1.0),
    ],
    ids=["agc", "leaf", "axes", "stacked"],
)
def test_multiplier_handles_all_groups_in_single_jit(tx):
    """Else kernels would be compiled for every shape of norms there is."""
    grads = [jnp.ones(shape) for shape in [(64, 8), (8, 64), (32, 32), (3,), (5,), (100,)]]
    jaxpr = jax.jit(tx.update).trace(grads, tx.init(grads), grads).jaxpr
    assert list(jits(jaxpr)).count("compute_multiplier") == 1


@pytest.mark.by_day(1)
@pytest.mark.parametrize("scope", [scopes.tree(), scopes.leaf(), scopes.unit()])
def test_equal_leaves_share_trace(scope):
    """Else most of the seconds that JAX needs to trace and lower a clip go into equal sums."""

    def calls(count):
        found = []
        mapped = dataclasses.replace(norms.l2, map=lambda x: found.append(x) or norms.l2.map(x))
        tx, grads = optaxclip.clip_by(scope, 1.0, norm=mapped), [jnp.ones((8, 8))] * count
        jax.jit(tx.update).trace(grads, tx.init(grads)).lower(lowering_platforms=("cpu", "cuda"))
        return len(found)

    assert calls(20) == calls(10)


def reductions(traced, platform):
    """For each reduction how many sums it takes, its axes, and whether it is in float64."""
    text = traced.lower(lowering_platforms=(platform,)).as_text()
    pattern = r"stablehlo.reduce\((.*?)\) .*?dimensions = (\[.*?\]) : (\(.*?\))"
    found = re.findall(pattern, text)
    return [(len(sums.split("),")), axes, "f64" in types) for sums, axes, types in found]


def test_global_norm_uses_single_reduction_per_platform():
    """A variadic one in float32 on accelerators; on a CPU one in float64, which needs no scales."""
    traced = jax.jit(optaxclip.ops.global_norm).trace(jnp.ones((256, 128)))
    for platform in ("tpu", "cuda"):
        assert reductions(traced, platform) == [(3, "[0, 1]", False)]
    assert reductions(traced, "cpu") == [(1, "[0, 1]", True)]


def test_record_cosine_reuses_sums_of_squares():
    tx, leaf = monitor.record(stats="cosine_param"), jax.ShapeDtypeStruct((256, 128), jnp.float32)
    traced = jax.jit(tx.update).trace(leaf, jax.eval_shape(tx.init, leaf), leaf)
    assert reductions(traced, "tpu") == [(3, "[0, 1]", False), (6, "[0, 1]", False)]


@pytest.mark.by_day(1)
@where_sums_are_fused
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_global_norm_stores_no_copy_of_leaves(dtype):
    leaves = [jax.ShapeDtypeStruct((512, 512), dtype)] * 3
    norm = jax.jit(optaxclip.ops.global_norm, compiler_options=AS_USERS)
    stored = norm.lower(leaves).compile().memory_analysis().temp_size_in_bytes
    assert stored < 0.05 * sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)


def test_inner_products_store_no_copy_on_cpu():
    def products(x, y):
        return reductions_lib.sum_products(x, y, axes=(0, 1), in_one_piece=True)

    leaf = jax.ShapeDtypeStruct((256, 256), jnp.float32)
    compiled = jax.jit(products, compiler_options=AS_USERS).lower(leaf, leaf).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 0.05 * 4 * leaf.size


@where_sums_are_fused
def test_two_norms_of_leaf_store_no_elements():
    def both(leaf):
        return [optaxclip.ops.global_norm(leaf, norm=norm) for norm in ("l1", "l2")]

    leaf = jax.ShapeDtypeStruct((1000, 1000), jnp.float32)
    compiled = jax.jit(both, compiler_options=AS_USERS).lower(leaf).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 0.05 * 4 * leaf.size


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tx", "most"),
    [
        (optaxclip.clip_by_value(-1.0, 1.0), 30),
        (optaxclip.clip_by_global_norm(1.0), 60),
        (optaxclip.clip_by_norm(1.0), 110),
        (optaxclip.adaptive_grad_clip(0.01), 190),
    ],
    ids=["value", "global", "leaf", "agc"],
)
def test_eager_update_needs_few_calls_per_leaf(tx, most):
    """Counted in calls of functions, Python's and those in C, for each leaf more."""

    def calls(count):
        grads = [jnp.ones(3) for _ in range(count)]
        state, found = tx.init(grads), []
        tx.update(grads, state, grads)
        sys.setprofile(lambda frame, event, arg: found.append(event))
        try:
            tx.update(grads, state, grads)
        finally:
            sys.setprofile(None)
        return sum(event in ("call", "c_call") for event in found)

    assert (calls(60) - calls(10)) / 50 <= most

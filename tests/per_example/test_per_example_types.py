"""Thresholds and gradients of different dtypes, and batches of none and one."""

import functools
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import slow_unless

import optaxclip
from optaxclip import per_example, scopes

pytestmark = pytest.mark.usefixtures("x64")
F32, F64 = np.float32, np.float64
THRESHOLDS = {
    "number": (lambda number: number, {}),
    "leaves": (lambda number: number, {"scope": scopes.leaf()}),
    "units by size": (lambda number: number, {"scope": scopes.unit(), "split": "size"}),
    "names": (lambda number: {"v": number / 2, "w": number / 2}, {"scope": scopes.leaf()}),
}


def trees(examples, dtype):
    rng = np.random.default_rng(0)
    v_dtype = {F32: F32, F64: F64, "both": F32}[dtype]
    return {
        "w": jnp.asarray(rng.normal(size=(examples, 6, 5)), F64 if dtype == "both" else dtype),
        "v": jnp.asarray(rng.normal(size=(examples, 7)), v_dtype),
    }


def alone(thresholds, options, example):
    batch = {name: x[None] for name, x in example.items()}
    return per_example.clip_sum(batch, thresholds, **options).grads


@pytest.mark.by_day(1)
@pytest.mark.parametrize(
    ("how", "dtype"),
    slow_unless(
        lambda how, dtype: dtype == "both" or how == "number",
        product(THRESHOLDS, (F32, F64, "both")),
    ),
)
def test_clip_sum_bound_holds_for_mixed_dtypes(how, dtype):
    """In float64 to its digits, where all leaves are; a number of float32 is exact in it."""
    make, options = THRESHOLDS[how]
    grads, number = trees(20, dtype), F32(0.7)
    thresholds = (number, jnp.asarray(number), jnp.asarray(F64(number)), float(number))

    @jax.jit
    def for_each(grads):
        return [jax.lax.map(functools.partial(alone, make(x), options), grads) for x in thresholds]

    for added in for_each(grads):
        assert {name: x.dtype for name, x in added.items()} == {
            name: x.dtype for name, x in grads.items()
        }
        wide = [np.asarray(x, np.longdouble).reshape(20, -1) for x in added.values()]
        squares = sum(np.square(x).sum(1) for x in wide)
        norms = np.sqrt(squares)
        bound = np.longdouble(number) * (2**-0.5 if how == "names" else 1)
        assert np.all(norms <= bound * (1 + 1e-18))
        if how == "number":
            assert np.all(norms > bound * (1 - (1e-12 if dtype == F64 else 2e-6)))


@pytest.mark.by_day(1)
@pytest.mark.parametrize("dtype", [F32, F64])
def test_noisy_aggregate_keeps_dtypes(dtype):
    grads = trees(8, dtype)
    for threshold in (F32(1), jnp.ones((), F64), lambda count: jnp.ones((), F64)):
        tx = optaxclip.per_example_clip_and_aggregate(threshold, F64(1), 0, scope=scopes.leaf())
        state = tx.init(grads)
        updates, new_state = jax.eval_shape(tx.update, grads, state)
        assert {x.dtype for x in updates.values()} == {np.dtype(dtype)}
        assert jax.tree.map(lambda x: x.dtype, new_state) == jax.tree.map(lambda x: x.dtype, state)


@pytest.mark.by_day(1)
@pytest.mark.parametrize("dtype", [F32, F64, jnp.bfloat16])
@pytest.mark.parametrize("size", [None, 1])
def test_clipped_grad_accepts_empty_and_single_example_batches(dtype, size):
    def loss_fn(w, x):
        return jnp.sum(jnp.square(w * x))

    w, x = np.ones(3, dtype), np.full((1, 3), 10, dtype)
    clipped = jax.jit(per_example.clipped_grad(loss_fn, F32(1), microbatch_size=size))
    wide = F64 if dtype == F64 else F32
    none, one = clipped(w, x[:0]), clipped(w, x)
    assert (none.grads.dtype, one.grads.dtype) == (wide, wide)
    assert none.grads.shape == (3,)
    np.testing.assert_array_equal(none.grads, np.zeros(3))
    assert (none.norms.shape, none.losses.shape, int(none.num_unclipped)) == ((0,), (0,), 0)
    np.testing.assert_allclose(one.grads, np.full(3, 3**-0.5), rtol=2e-6)
    grads = jax.jit(jax.vmap(jax.grad(loss_fn), (None, 0)))(w, x)
    summed = jax.jit(per_example.clip_sum)({"w": grads}, F32(1))
    np.testing.assert_allclose(summed.grads["w"], one.grads, rtol=1e-6)
    in_parts = per_example.clipped_grad(loss_fn, F32(1), microbatch_size=2)
    assert jax.eval_shape(in_parts, w, np.ones((3, 3), dtype)).grads.dtype == wide


@pytest.mark.by_day(1)
@pytest.mark.parametrize("dtype", [jnp.int8, jnp.bfloat16, F64, jnp.complex64, jnp.complex128])
def test_per_example_optax_functions_sum_in_wide_dtype(dtype):
    wide = {jnp.int8: F32, jnp.bfloat16: F32}.get(dtype, dtype)
    grads = {"w": jnp.asarray([[3, 4], [0, 0]], dtype)}
    for clip in (optaxclip.per_example_global_norm_clip, optaxclip.per_example_layer_norm_clip):
        total, _ = clip(grads, 2.5)
        assert total["w"].dtype == wide
        np.testing.assert_allclose(total["w"], [1.5, 2], rtol=3e-6)


@pytest.mark.parametrize("leaf", [jnp.ones((2, 3), bool), jax.random.split(jax.random.key(0))])
def test_per_example_optax_functions_reject_non_numbers(leaf):
    with pytest.raises(
        TypeError, match="leaf '0' of grads must have a floating-point dtype, but has"
    ):
        optaxclip.per_example_global_norm_clip([leaf], 1.0)  # which measures integers

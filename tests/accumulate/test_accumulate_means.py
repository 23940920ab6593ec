"""Means over microbatches: those of the whole batch, whatever the arguments and dtypes."""

import functools
import operator

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from compiling import AS_USERS, where_sums_are_fused

from optaxclip import accumulate

EXAMPLES = 12


@functools.cache
def task():
    """Parameters and a batch in which each example has another number of tokens."""
    rng = np.random.default_rng(0)
    shapes = {"w": (5, 7), "b": (7,)}, {"x": (EXAMPLES, 4, 5), "y": (EXAMPLES, 4, 7)}
    params, batch = (
        {name: rng.normal(size=shape).astype(np.float32) for name, shape in tree.items()}
        for tree in shapes
    )
    mask = np.arange(4)[None] < (np.arange(EXAMPLES) % 4 + 1)[:, None]
    return params, batch, (mask.astype(np.float32), jax.random.split(jax.random.key(0), EXAMPLES))


def loss_fn(params, batch, mask_and_keys):
    """The mean over tokens, with dropout by each example's own key."""
    mask, keys = mask_and_keys
    kept = jax.vmap(lambda key: jax.random.bernoulli(key, 0.8, (5,)))(keys)
    x = batch["x"] * kept[:, None].astype(jnp.float32)
    error = jnp.tanh(x @ params["w"] + params["b"][None, None]) - batch["y"]
    of_tokens = jnp.mean(jnp.square(error), axis=-1)
    return jnp.sum(of_tokens * mask) / jnp.sum(mask)


def tokens(batch, mask_and_keys):
    return jnp.sum(mask_and_keys[0])


def assert_same(found, expected, digits=1e-6):
    def check(x, y):
        np.testing.assert_allclose(x, y, rtol=digits, atol=digits * np.max(np.abs(y)))

    assert jax.tree.structure(found) == jax.tree.structure(expected)
    jax.tree.map(check, found, expected)


@functools.cache
def of_the_whole_batch():
    return jax.jit(jax.value_and_grad(loss_fn), compiler_options=AS_USERS)(*task())


@pytest.mark.by_day(1)
@pytest.mark.parametrize("size", [1, 2, 3, 12])
def test_accumulate_matches_whole_batch_with_unequal_weights(size):
    by_parts = accumulate.value_and_grad(
        loss_fn, batch_argnums=(1, 2), microbatch_size=size, weight=tokens
    )
    args = task()
    value, grads, found = jax.jit(by_parts, compiler_options=AS_USERS)(*args)
    assert_same((value, grads), of_the_whole_batch())
    number = EXAMPLES // size
    assert found.norm.shape == found.loss.shape == found.weight.shape == (number,)
    of_each = np.sum(args[2][0], axis=1).reshape(size, number)
    np.testing.assert_array_equal(found.weight, of_each.sum(axis=0))
    assert not np.any(found.rejected)
    assert found.aux is None


def test_microbatches_use_strided_examples_and_stack_aux():
    def loss(params, x):
        return jnp.mean(x * params), {"x": x, "sum": jnp.sum(x)}

    by_parts = accumulate.value_and_grad(loss, has_aux=True, microbatch_size=2)
    x, run = jnp.arange(6.0), jax.jit(by_parts)
    (value, aux), grads, found = run(jnp.float32(2.0), x)
    np.testing.assert_array_equal(aux["x"], [[0, 3], [1, 4], [2, 5]])
    np.testing.assert_array_equal(found.aux["sum"], [3, 5, 7])
    np.testing.assert_allclose(found.loss, [3, 5, 7])
    np.testing.assert_allclose((value, grads), (5, 2.5))
    np.testing.assert_array_equal(found.weight, [2, 2, 2])
    (value, _), grads, found = run(jnp.float32(2.0), jnp.zeros(6))
    np.testing.assert_array_equal([value, grads, *found.noise], np.zeros(4))


def test_weight_accepts_function_without_signature():
    made = accumulate.value_and_grad(
        lambda w, x: jnp.mean(x) * w, microbatch_size=1, weight=operator.methodcaller("sum")
    )
    found = jax.eval_shape(made, jnp.float32(1), jnp.ones((2, 3)))[2]
    assert found.weight.shape == (2,)


@pytest.mark.slow
def test_accumulate_accepts_any_argnums_and_batch_positions():
    params, batch, rest = task()

    def loss(batch, w, scale, b, rest):
        return scale * loss_fn({"w": w, "b": b}, batch, rest)

    args = (batch, params["w"], 3.0, params["b"], rest)
    by_parts = accumulate.value_and_grad(
        loss, (3, 1), batch_argnums=(0, -1), microbatch_size=4, weight=tokens
    )
    value, grads, found = jax.jit(by_parts)(*args)
    expected = jax.jit(jax.value_and_grad(loss, (3, 1)))(*args)
    assert_same((value, grads), expected)
    # One norm for all that is differentiated.
    cut = jax.tree.map(lambda x: x.reshape(4, 3, *x.shape[1:]).swapaxes(0, 1), (batch, rest))
    of_part = jax.jit(jax.grad(loss, (3, 1)))
    each = [
        of_part(part[0], *args[1:4], part[1])
        for part in (jax.tree.map(operator.itemgetter(i), cut) for i in range(3))
    ]
    norms = [np.sqrt(sum(np.sum(np.square(leaf)) for leaf in grads)) for grads in each]
    np.testing.assert_allclose(found.norm, norms, rtol=1e-5)


@pytest.mark.slow
def test_batch_argnums_none_selects_all_other_arguments():
    params, batch, rest = task()
    options = {"microbatch_size": 3, "weight": tokens}
    named = accumulate.value_and_grad(loss_fn, batch_argnums=(1, 2), **options)
    others = accumulate.value_and_grad(loss_fn, batch_argnums=None, **options)
    args = (params, batch, rest)
    assert_same(jax.jit(others)(*args)[1], jax.jit(named)(*args)[1])


@pytest.mark.by_day(1)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_accumulate_sums_narrow_gradients_in_float32(dtype):
    """In bfloat16 a sum of 512 ones ends at 256."""

    def loss(w, x):
        return jnp.mean(x * w)

    by_parts = accumulate.value_and_grad(loss, microbatch_size=1)
    _, grads, found = jax.jit(by_parts)(jnp.ones((), dtype), jnp.ones(512, dtype))
    assert grads.dtype == found.norm.dtype == found.loss.dtype == jnp.float32
    assert grads == 1


def test_accumulate_sums_wide_params_in_float64(x64):
    def loss(w, x):
        return jnp.mean(x * w)

    x = 1 + np.arange(8.0) * 1e-12
    for w, dtype in ((1.0, jnp.float32), (np.float32(1), jnp.float64)):
        by_parts = accumulate.value_and_grad(loss, microbatch_size=2, dtype=dtype)
        w = jnp.asarray(w)
        _, grads, _ = jax.jit(by_parts)(w, x.astype(w.dtype))
        assert grads.dtype == jnp.float64
        np.testing.assert_allclose(grads, np.mean(x.astype(w.dtype)), rtol=1e-15)


def test_accumulate_sums_have_leaf_dtypes_for_mixed_params(x64):
    def loss(params, x):
        return jnp.mean(x) * sum(jnp.sum(leaf).astype(x.dtype) for leaf in params.values())

    params = {"narrow": jnp.ones(2, jnp.float32), "wide": jnp.ones(2, jnp.float64)}
    by_parts = accumulate.value_and_grad(loss, microbatch_size=1, clip=optax.trace(0.5))
    args = params, jnp.arange(4.0)
    _, grads, found = jax.eval_shape(
        lambda *args: by_parts(*args, state=by_parts.init(*args)), *args
    )
    for tree in (grads, found.state.clip.trace):
        assert {name: x.dtype for name, x in tree.items()} == {
            "narrow": "float32",
            "wide": "float64",
        }
    assert found.loss.dtype == jnp.float64


def test_accumulate_differentiates_complex_params():
    def loss(w, x):
        return jnp.mean(jnp.abs(x * w) ** 2)

    w, x = jnp.asarray(1 + 2j, jnp.complex64), jnp.asarray(np.arange(4) + 1j, jnp.complex64)
    _, grads, _ = jax.jit(accumulate.value_and_grad(loss, microbatch_size=2))(w, x)
    np.testing.assert_allclose(grads, jax.grad(loss)(w, x), rtol=1e-6)


def test_accumulate_returns_float0_for_integer_leaves():
    params, batch, rest = task()
    more = {**params, "none": None, "steps": jnp.zeros(3, jnp.int32)}
    by_parts = accumulate.value_and_grad(loss_fn, batch_argnums=(1, 2), microbatch_size=4)
    _, grads, _ = jax.eval_shape(by_parts, more, batch, rest)
    assert grads["none"] is None
    assert (grads["steps"].dtype, grads["steps"].shape) == (jax.dtypes.float0, (3,))


@pytest.mark.slow
@where_sums_are_fused
@pytest.mark.parametrize(
    "options", [{}, {"clip": 1.0}, {"reject_rule": None, "compute_norms": False}]
)
def test_accumulate_memory_does_not_grow_with_microbatches(options):
    layers, width, size = 2, 256, 2

    def loss(params, x):
        for layer in params:
            x = jnp.tanh(x @ layer)
        return jnp.mean(x)

    def temporary(number):
        params = [jax.ShapeDtypeStruct((width, width), jnp.float32)] * layers
        x = jax.ShapeDtypeStruct((number * size, width), jnp.float32)
        by_parts = accumulate.value_and_grad(loss, microbatch_size=size, **options)
        compiled = jax.jit(by_parts, compiler_options=AS_USERS).lower(params, x).compile()
        memory = compiled.memory_analysis().temp_size_in_bytes
        # The batch itself is there once more, cut.
        return memory - number * size * width * 4

    gradients = 4 * layers * width**2
    few, many = temporary(2), temporary(64)
    assert many <= 4 * gradients
    assert many - few < 0.05 * gradients


@pytest.mark.by_day(1)
@pytest.mark.parametrize("norm", [6e-20, 1e17, 1e20])
def test_noise_sums_stay_exact_at_extreme_norms(norm):
    """Squares of norms, or their products with weights, leave the range before the sums do."""

    def loss(w, x):
        return jnp.mean(x) * w

    tokens = 2.0**13
    by_parts = accumulate.value_and_grad(loss, microbatch_size=1, weight=lambda x: tokens)
    run, x = jax.jit(by_parts), np.array([1.0, 2.0, 4.0, np.nan])  # of which one is rejected
    signal, variance = run(jnp.float32(0), jnp.float32(x))[2].noise
    # The mean of three squares is 7, and the square of the mean 49 / 9.
    np.testing.assert_allclose([signal, variance], [14 / 3, 7 / 3 * tokens], rtol=1e-6)
    found = run(jnp.float32(0), jnp.float32(x * norm))[2].noise
    with np.errstate(over="ignore"):
        expected = np.float32(np.float64([signal, variance]) * norm**2)
    np.testing.assert_allclose(found, expected, rtol=1e-6)


@pytest.mark.by_day(1)
@pytest.mark.parametrize("number", [3, 4])
@pytest.mark.parametrize("weight", [None, lambda x: jnp.sum(x != 0)])
@pytest.mark.parametrize("w", [np.float32(0), np.complex64(0)])
def test_accumulate_mean_stays_finite_if_sum_overflows(number, weight, w):
    def loss(w, x):
        return jnp.mean(x * w.real)

    @jax.jit
    def both(w, x):
        make = functools.partial(accumulate.value_and_grad, loss, microbatch_size=1)
        judged, fast = (
            make(weight=weight),
            make(weight=lambda x: 1, reject_rule=None, compute_norms=False),
        )
        _, grads, found = judged(w, x)
        return grads, fast(w, x)[1], found.rejected

    grads, of_fast, rejected = both(w, jnp.full(number, 3e38))
    np.testing.assert_allclose([grads, of_fast], w.dtype.type(3e38), rtol=1e-6)
    assert not np.any(rejected)


@pytest.mark.by_day(1)
@pytest.mark.parametrize("constant", [False, True])
@pytest.mark.parametrize("scale", [1e37, 1e-36])
def test_accumulate_accepts_weights_and_losses_near_range(scale, constant):
    """Products of weights with losses leave the range."""
    weights, x = np.float32([1, 0.5, 0.25, 1]), np.float32([3e38, 1e38, -2e38, 2.5e38])
    if constant:
        weights[:] = scale

    def loss(w, x, weight):
        return jnp.sum(x + w * x)

    def weight(x, weight):
        return scale if constant else weight[0]

    grad_fn = accumulate.value_and_grad(
        loss, batch_argnums=(1, 2), microbatch_size=1, weight=weight
    )
    given = weights if constant else np.float32(weights * np.float64(scale))
    run = jax.jit(grad_fn)
    for losses in (-np.abs(x), x):
        value, grads, found = run(jnp.float32(0), losses, given)
        expected = np.average(losses.astype(np.float64), weights=given.astype(np.float64))
        np.testing.assert_allclose([value, grads], expected, rtol=1e-6)
    np.testing.assert_array_equal(found.weight, given)


@pytest.mark.parametrize("options", [{}, {"reject_rule": None, "compute_norms": False}])
def test_accumulate_weights_overflow_in_total(options):
    """Their sum leaves float32, and they may differ by any power of two."""

    def loss(w, x, weight):
        return jnp.sum(x * w)

    grad_fn = accumulate.value_and_grad(
        loss,
        batch_argnums=(1, 2),
        microbatch_size=1,
        weight=lambda x, weight: jnp.sum(weight),
        **options,
    )
    x = np.float32([1, 3, 5, 8])
    run = jax.jit(grad_fn)
    for weights in ([2e38] * 4, [3e38, 3e38, 1e38, 2e37], [1e-37, 1.0, 3e38, 3.1e38]):
        weights = np.float32(weights)
        value, grads, found = run(jnp.float32(1), x, weights)
        mean, square = (np.average(np.float64(y), weights=weights) for y in (x, x**2))
        np.testing.assert_allclose([value, grads], mean, rtol=1e-6)
        if not options:
            total = np.sum(np.float64(weights))
            small = total / 4
            variance = (square - mean**2) * small * total / (total - small)
            with np.errstate(over="ignore"):
                variance = np.float32(variance)
            np.testing.assert_allclose(found.noise.variance, variance, rtol=1e-5)


def test_accumulate_equal_microbatches_keep_their_mean():
    """A running mean of products is off by 1.7e-5, and a plain sum by 7e-5."""
    grads_of = np.random.default_rng(0).uniform(0.5, 2, 1000).astype(np.float32)

    def loss(w, x):
        return jnp.sum(w * grads_of)

    grad_fn = accumulate.value_and_grad(loss, microbatch_size=1, weight=jnp.sum)
    _, grads, _ = jax.jit(grad_fn)(jnp.ones(1000), jnp.ones(5000))
    np.testing.assert_array_equal(grads, grads_of)

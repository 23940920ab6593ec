"""No example exceeds its threshold, and no norm is below the true norm in long double."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import slow_unless
from jax import lax

from optaxclip import per_example, scopes
from optaxclip.per_example._ghost_norms import MAX_ONE_HOT_POSITIONS

RNG = np.random.default_rng(0)
DEGREES = np.append(np.arange(9), 1.4)


@pytest.fixture(autouse=True)
def _data_are_the_same_whatever_ran_before():
    RNG.bit_generator.state = np.random.default_rng(0).bit_generator.state


def cancelling(examples, positions, inputs, outputs, dtype=np.float32):
    """Tokens in pairs that cancel, the more the larger the number of the example."""
    half = positions // 2
    x, d = RNG.normal(size=(examples, half, inputs)), RNG.normal(size=(examples, half, outputs))
    noise = 10.0 ** -DEGREES[np.arange(examples) % 10][:, None, None]
    x = np.concatenate([x, x], 1)
    d = np.concatenate([d, -d + noise * RNG.normal(size=d.shape)], 1)
    d[-1, half:] = -d[-1, :half]
    order = RNG.permutation(positions)
    return x[:, order].astype(dtype), d[:, order].astype(dtype)


def long(x):
    return np.asarray(x, np.longdouble)


def norms_of(gradients):
    return np.sqrt(np.sum(np.square(long(gradients).reshape(len(gradients), -1)), 1))


def of_layer(w, x, d):
    return jnp.vdot(x @ w, d)


def each_alone(loss, threshold, w, *batch, size=None):
    """For each example what it adds to the sum, and the norms."""
    fn = per_example.clipped_grad(loss, threshold, method="ghost", microbatch_size=size)
    examples = len(batch[0])
    masks = np.concatenate([np.zeros((1, examples), bool), ~np.eye(examples, dtype=bool)])

    @jax.jit
    def run(w, *batch):
        return lax.map(lambda mask: fn(w, *batch, is_padding=mask), masks)

    found = jax.device_get(run(w, *batch))
    return found.grads[1:], jax.tree.map(lambda x: x[0], found)


SHAPES = {
    "gram": (16, 96, 96),
    "gram of long inner products": (16, 2048, 64),
    "direct": (64, 16, 16),
    "vectors": (1, 50, 60),
}


@pytest.mark.slow
def test_ghost_norms_sum_long_inner_products_in_blocks():
    rng = np.random.default_rng(0)
    x, d = (rng.normal(size=(2, 3, n)).astype(np.float32) for n in (8192, 8))
    true = norms_of(np.einsum("btk,btn->bkn", long(x), long(d)))
    found, _ = jax.jit(per_example.grad_norms(of_layer))(np.zeros((8192, 8), np.float32), x, d)
    assert np.all((true <= long(found)) & (long(found) <= 1.001 * true))


def test_ghost_norms_stay_tight_with_many_positions():
    x, d = RNG.normal(size=(2, 2, 8192, 8)).astype(np.float32)
    true = norms_of(np.einsum("btk,btn->bkn", long(x), long(d)))
    alone, result = each_alone(of_layer, 1.0, np.zeros((8, 8), np.float32), x, d)
    assert np.all((true <= long(result.norms)) & (long(result.norms) <= 1.01 * true))
    sizes = norms_of(alone)
    assert np.all((sizes >= 0.99) & (sizes <= 1))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("shape", "scale"),
    slow_unless(lambda *case: case == ("gram", 1.0), itertools.product(SHAPES, (1.0, 1e-30, 1e25))),
)
def test_ghost_bounds_hold_for_cancelling_tokens(shape, scale):
    positions, inputs, outputs = SHAPES[shape]
    x, d = cancelling(20, max(positions, 2), inputs, outputs)
    x, d = x[:, :positions], d[:, :positions] * np.float32(scale)
    true = norms_of(np.einsum("btk,btn->bkn", long(x), long(d)))
    alone, result = each_alone(of_layer, scale, np.zeros((inputs, outputs), np.float32), x, d)
    assert np.all(long(result.norms) >= true)
    assert np.all(norms_of(alone) <= np.float32(scale))
    # The tenth has lost digits that a threshold would feel, though few, and is measured again.
    assert np.all(norms_of(alone)[[0, 9]] >= 0.99 * scale)
    total = np.sum(
        norms_of(long(x).reshape(-1, inputs)).reshape(20, -1)
        * norms_of(long(d).reshape(-1, outputs)).reshape(20, -1),
        1,
    )
    assert np.all(long(result.norms) <= 1.01 * true + 1e-4 * total)


@pytest.mark.by_day(1)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, np.float16])
@pytest.mark.parametrize("shape", SHAPES)
def test_ghost_bounds_hold_for_16_bit_tokens(shape, dtype):
    positions, inputs, outputs = SHAPES[shape]
    x, d = cancelling(20, max(positions, 2), inputs, outputs, dtype)
    x, d = x[:, :positions], d[:, :positions]
    true = norms_of(np.einsum("btk,btn->bkn", long(x), long(d)))
    alone, result = each_alone(of_layer, 1.0, np.zeros((inputs, outputs), dtype), x, d)
    assert result.grads.dtype == np.float32
    assert np.all(long(result.norms) >= true)
    assert np.all(norms_of(alone) <= 1)
    assert norms_of(alone)[0] >= 0.99


def of_table(w, i, d):
    return jnp.vdot(jnp.take(w, i, axis=0, mode="clip"), d)


@pytest.mark.by_day(1)
@pytest.mark.parametrize("positions", [12, MAX_ONE_HOT_POSITIONS + 2])
def test_ghost_bounds_hold_for_repeated_table_rows(positions):
    _, d = cancelling(20, positions, 4, 8)
    i = RNG.integers(-3, 5, (20, positions)).astype(np.int32)
    i[10:] = np.repeat(i[10:, :1], positions, 1)
    gradients = np.zeros((20, 5, 8), np.longdouble)
    i = np.where(i < 0, i + 5, i)
    np.add.at(gradients, (np.arange(20)[:, None], np.clip(i, 0, 4)), long(d))
    alone, result = each_alone(of_table, 1.0, np.zeros((5, 8), np.float32), i, d)
    assert np.all(long(result.norms) >= norms_of(gradients))
    assert np.all(norms_of(alone) <= 1)
    assert norms_of(alone)[0] >= 0.99


def tied_loss(w, i, d, x, e):
    return jnp.vdot(w[i], d) + jnp.vdot(x @ w.T, e)


@pytest.mark.slow
@pytest.mark.parametrize("rows", slow_unless((30).__eq__, [30, 300]))
def test_ghost_bounds_hold_for_tied_embedding(rows):
    """The table's rows cancel those of the product."""
    x = RNG.normal(size=(18, 4, 64)).astype(np.float32)
    e = np.zeros((18, 4, rows), np.float32)
    i = RNG.integers(0, rows, (18, 4)).astype(np.int32)
    np.put_along_axis(e, i[..., None], -1, 2)
    noise = 10.0 ** -DEGREES[np.arange(18) % 9][:, None, None]
    d = (x + noise * RNG.normal(size=x.shape)).astype(np.float32)
    gradients = np.einsum("btv,btk->bvk", long(e), long(x))
    np.add.at(gradients, (np.arange(18)[:, None], i), long(d))
    alone, result = each_alone(tied_loss, 0.1, np.zeros((rows, 64), np.float32), i, d, x, e)
    assert np.all(long(result.norms) >= norms_of(gradients))
    assert np.all(norms_of(alone) <= np.float32(0.1))
    assert norms_of(alone)[0] >= 0.099


def of_kernel(w, x, d):
    numbers = ("NWC", "WIO", "NWC")
    y = lax.conv_general_dilated(x[None], w, (1,), "VALID", dimension_numbers=numbers)
    return jnp.vdot(y[0], d)


@pytest.mark.gpu
def test_ghost_bounds_hold_for_cancelling_pixels():
    x, d = cancelling(20, 64, 5, 7)
    x, d = np.sort(x, 1), np.sort(d, 1) * np.array([1, -1] * 32, np.float32)[:, None]
    seen = np.stack([x[:, k : k + 62] for k in range(3)], 2)
    true = norms_of(np.einsum("btwk,btn->bwkn", long(seen), long(d[:, :62])))
    alone, result = each_alone(of_kernel, 1.0, np.zeros((3, 5, 7), np.float32), x, d[:, :62])
    assert np.all(long(result.norms) >= true)
    assert np.all(norms_of(alone) <= 1)


def test_ghost_kernel_bound_counts_overlapping_patches():
    x, d = np.ones((2, 24, 1), np.float32), np.ones((2, 16, 1), np.float32)
    norms, *_ = jax.jit(per_example.grad_norms(of_kernel))(np.zeros((9, 1, 1), np.float32), x, d)
    # The gradient has 9 entries of 16; its norm is 48, and so is the sum over positions, `A`.
    assert np.all((norms >= 48 * (1 + 24 * 2.0**-24)) & (norms <= 48 * (1 + 40 * 2.0**-24)))


def test_ghost_factors_stay_in_float32_range():
    """Positions cancel, so that each has to keep all of its digits."""
    x, d = cancelling(5, 8, 64, 64)
    x[:], d[:] = x[2], d[2]
    spread = np.where(np.arange(8) % 2, 1e36, 1e-36)[:, None]
    # The last one's gradient is exact, but the squares of its positions are not in range.
    scales = [(1, 1), (1e35, 1e-35), (1e-37, 1e35), (spread, 1 / spread), (1e-17, 1e-17)]
    x, d = (
        np.stack([np.float32(v[i] * s[k]) for i, s in enumerate(scales)])
        for k, v in enumerate((x, d))
    )
    gradients = np.einsum("btk,btn->bkn", long(x), long(d))
    units = gradients / norms_of(gradients)[:, None, None]

    @jax.jit
    def run(threshold):
        clip = per_example.clipped_grad(of_layer, threshold, method="ghost", response="normalize")
        w = jnp.zeros((64, 64))
        return lax.map(lambda mask: clip(w, x, d, is_padding=mask).grads, ~np.eye(5, dtype=bool))

    for threshold in (1e-36, 1e-31, 1.0, 1e3, 1e28):
        alone = long(run(threshold)) / np.float32(threshold)
        assert np.all(norms_of(alone) <= 1), threshold
        if threshold >= 1e-31:
            assert np.all(norms_of(alone - units) <= 0.05), (threshold, norms_of(alone - units))


def test_ghost_norms_ignore_positions_without_cotangent():
    """Libraries fill masked positions with large numbers, of the second example near the range's
    end; the third has one token of a thousand times the size."""
    x, d = RNG.normal(size=(3, 64, 16)), RNG.normal(size=(3, 64, 16))
    x[:2, :30], d[:2, :32] = np.array([-9999, -9.96e36])[:, None, None], 0
    x[2, 5] *= 1000
    x, d = x.astype(np.float32), d.astype(np.float32)
    seen = np.stack([x[:, k : k + 62] for k in range(3)], 2)
    layer = np.einsum("btk,btn->bkn", long(x), long(d))
    kernel = np.einsum("btwk,btn->bwkn", long(seen), long(d[:, :62]))

    def loss(params, x, d):
        return of_layer(params["layer"], x, d) + of_kernel(params["kernel"], x, d[:62])

    params = {"layer": jnp.zeros((16, 16)), "kernel": jnp.zeros((3, 16, 16))}
    norms, _ = jax.jit(per_example.grad_norms(loss, scope=scopes.leaf()))(params, x, d)
    ratios = long(norms) / np.stack([norms_of(kernel), norms_of(layer)], 1)
    assert np.all((ratios >= 1) & (ratios <= 1 + 1e-4)), ratios


@pytest.mark.by_day(1)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("of", ["data", "cotangents"])
@pytest.mark.parametrize("shape", ["gram", "direct"])
def test_ghost_drops_nonfinite_examples(shape, of, bad):
    positions, inputs, outputs = SHAPES[shape]
    x, d = cancelling(6, positions, inputs, outputs)
    fn = jax.jit(per_example.clipped_grad(of_layer, 1.0, method="ghost", microbatch_size=4))
    w = np.zeros((inputs, outputs), np.float32)
    expected = fn(w, x, d, is_padding=np.arange(6) == 2)
    (x if of == "data" else d)[2, 1, 3] = bad
    result = fn(w, x, d)
    np.testing.assert_array_equal(result.grads, expected.grads)
    assert (result.num_dropped, expected.num_dropped) == (1, 0)
    assert not np.isfinite(result.norms[2])


def test_ghost_ignores_nonfinite_padding():
    x, d = RNG.normal(size=(2, 6, 16, 96)).astype(np.float32)
    fn, w = per_example.clipped_grad(of_layer, 1.0, method="ghost"), np.zeros((96, 96), np.float32)
    fn = jax.jit(functools.partial(fn, is_padding=np.arange(6) == 2))
    expected = fn(w, x, d).grads
    x[2, 1], d[2, 3] = np.nan, np.inf
    np.testing.assert_allclose(fn(w, x, d).grads, expected, rtol=1e-5, atol=1e-6)


def test_ghost_norms_ignore_zero_and_nonfinite_neighbors():
    """The gradients of all examples would be made, and their norms differ in the last digits."""
    x, d = RNG.normal(size=(2, 6, 16, 96)).astype(np.float32)
    fn, w = jax.jit(per_example.grad_norms(of_layer)), np.zeros((96, 96), np.float32)
    expected, _ = fn(w, x, d)
    for place, bad in ((2, 0.0), ((2, 1, 3), np.nan), ((2, 1, 3), np.inf)):
        changed = d.copy()
        changed[place] = bad
        norms, _ = fn(w, x, changed)
        np.testing.assert_array_equal(np.delete(norms, 2), np.delete(expected, 2))
        np.testing.assert_array_equal(norms[2], bad)


def test_ghost_norms_keep_zero_and_tiny_examples():
    x, d = RNG.normal(size=(2, 6, 16, 96)).astype(np.float32)
    d *= np.float32([1, 0, 1e-12, 1e-20, 1e-30, 0])[:, None, None]
    true = norms_of(np.einsum("btk,btn->bkn", long(x), long(d)))
    norms, _ = jax.jit(per_example.grad_norms(of_layer))(np.zeros((96, 96), np.float32), x, d)
    assert np.all((norms == 0) == (true == 0))
    np.testing.assert_allclose(norms[:-1], true[:-1].astype(float), rtol=0.02)


@pytest.mark.by_day(1)
@pytest.mark.parametrize("positions", [1, 2])
def test_ghost_norms_and_sums_share_bfloat16_cotangents(positions):
    """XLA may leave out a rounding to bfloat16 where it fuses: in the sum, and not in the norm."""
    w, x = (RNG.normal(size=shape) for shape in ((5, 7), (32, positions, 5)))

    def loss(w, x):
        return jnp.sum(jnp.square(jnp.tanh(x @ w).astype(jnp.float32)))

    alone, _ = each_alone(loss, 1.0, *(jnp.asarray(v, jnp.bfloat16) for v in (w, x)))
    assert np.all(norms_of(alone) <= 1)


def test_ghost_norms_allow_for_bfloat16_gradients():
    def loss_fn(params, x):
        b, w = (params[name].astype(jnp.float32) for name in "bw")
        return jnp.sum(x @ w) + jnp.sum(jnp.sin(b))

    # Each entry of the gradient of `w` is 1 + 2**-8, which bfloat16 rounds to 1. That of `b` comes
    # in bfloat16 from backpropagation, so its norm has nothing to allow for.
    x, shapes = jnp.full((3, 64, 2), (1 + 2**-8) / 64), {"b": 4, "w": (2, 2)}
    params = {name: jnp.zeros(shape, jnp.bfloat16) for name, shape in shapes.items()}
    found = jax.jit(per_example.grad_norms(loss_fn, scope=scopes.leaf()))(params, x)
    norms, true = np.asarray(found[0]), np.array([2, 2 * (1 + 2**-8)])
    assert np.all((norms >= true) & (norms < np.array([1.0001, 1.01]) * true))


def test_ghost_without_gram_matrices_survives_extreme_examples():
    """The second example's factor is beyond float32, and the third adds nothing."""

    def loss(params, i, g, x, d):
        return jnp.vdot(params["rows"][i], g) + jnp.vdot(x @ params["w"], d)

    i, (g, x, d) = np.array([[0, 2]] * 3), (RNG.normal(size=(3, *n)) for n in ((2, 4), (7,), (3,)))
    rows, w = np.zeros((3, 3, 4)), x[..., None] * d[:, None]
    rows[:, i[0]] = g
    units = [
        v / np.hypot(*map(norms_of, (rows, w))).astype(float)[:, None, None] for v in (rows, w)
    ]
    scales = np.array([1, 1e-30, 1])
    x[2, 0] = np.nan
    fn = per_example.clipped_grad(loss, 1e20, method="ghost", response="normalize")
    params = {"rows": jnp.zeros((3, 4)), "w": jnp.zeros((7, 3))}
    batch = g * scales[:, None, None], x, d * scales[:, None]
    result = jax.jit(fn)(params, i, *(v.astype(np.float32) for v in batch))
    assert result.num_dropped == 1
    for found, unit in zip(result.grads.values(), units, strict=True):
        np.testing.assert_allclose(found, 1e20 * unit[:2].sum(0), rtol=1e-4)

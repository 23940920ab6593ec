"""The private gradient as a stage of a chain."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.serialization import from_bytes, to_bytes

import optaxclip
from optaxclip import per_example, scopes

RNG = np.random.default_rng(0)
GRADS = {"w": RNG.standard_normal((8, 30, 4)).astype(np.float32), "b": np.ones((8, 4), np.float32)}
PARAMS = jax.tree.map(lambda x: jnp.zeros(x.shape[1:]), GRADS)
aggregate = optaxclip.per_example_clip_and_aggregate


def first_update(*args, grads=GRADS, **kwargs):
    tx = aggregate(*args, **kwargs)
    return jax.jit(tx.update)(grads, tx.init(PARAMS))


def test_aggregate_without_noise_returns_mean_or_sum():
    expected = jax.jit(per_example.clip_sum)(GRADS, 1.0)
    mean, state = first_update(1.0, 0.0)
    total, _ = first_update(1.0, 0.0, reduction="sum")
    by_hand, _ = first_update(1.0, 0.0, batch_size=16)
    theirs = optax.contrib.differentially_private_aggregate(1.0, 0.0, key=0)
    with jax.numpy_dtype_promotion("standard"):
        optaxs, _ = jax.jit(theirs.update)(GRADS, theirs.init(PARAMS))
    for name in GRADS:
        np.testing.assert_allclose(total[name], expected.grads[name], rtol=1e-6)
        np.testing.assert_allclose(mean[name], total[name] / 8, rtol=1e-6)
        np.testing.assert_allclose(by_hand[name], total[name] / 16, rtol=1e-6)
        np.testing.assert_allclose(mean[name], optaxs[name], rtol=1e-4)
    assert int(state.num_clipped) == 8


def test_aggregate_counts_examples_once():
    tx = aggregate(1.0, 0.0)
    _, state = tx.update(jnp.array([0.5, 3.0, jnp.nan, 2.0, jnp.inf, 4.0]), tx.init(jnp.zeros(())))
    assert (int(state.num_clipped), int(state.num_dropped)) == (3, 2)


def test_aggregate_of_single_example_returns_example():
    update, _ = first_update(1.0, 0.0, grads=jnp.array([[0.3, 0.4]]))
    np.testing.assert_allclose(update, [0.3, 0.4], rtol=1e-6)


def test_aggregate_ignores_padding():
    flags = np.arange(8) >= 6
    tx = aggregate(1.0, 0.0)
    update = jax.jit(tx.update)
    updates, state = update(GRADS, tx.init(PARAMS), is_padding=flags)
    expected, _ = first_update(1.0, 0.0, grads=jax.tree.map(lambda x: x[:6], GRADS))
    nothing, _ = update(GRADS, state, is_padding=np.full(8, True))
    assert int(state.num_clipped) == 6
    for name in GRADS:
        np.testing.assert_allclose(updates[name], expected[name], rtol=1e-6)
        assert not np.any(nothing[name])


def test_aggregate_noise_has_expected_size_and_varies():
    tx = aggregate(2.0, noise_multiplier=1.5, key=7, reduction="sum")
    zeros = {"w": jnp.zeros((4, 200, 200)), "v": jnp.zeros((4, 200, 200))}
    update = jax.jit(tx.update)
    first, state = update(zeros, tx.init(zeros))
    second, _ = update(zeros, state)
    draws = [np.asarray(x) for tree in (first, second) for x in tree.values()]
    for i, draw in enumerate(draws):
        assert np.std(draw) == pytest.approx(3.0, rel=0.02)
        assert abs(np.mean(draw)) < 0.1
        for other in draws[:i]:
            assert abs(np.corrcoef(draw.ravel(), other.ravel())[0, 1]) < 0.03


@pytest.mark.slow
@pytest.mark.parametrize("unit", [2.0**-83, 2.0**66])
def test_thresholds_whose_squares_leave_float32_get_their_noise(unit):
    by_name = [
        first_update(
            {"w": 3.0 * size, "b": 4.0 * size},
            1.0,
            key=0,
            scope=scopes.leaf(),
            reduction="sum",
            grads=jax.tree.map(lambda x, size=size: x * np.float32(size), GRADS),
        )[0]
        for size in (1.0, unit)
    ]
    jax.tree.map(lambda x, y: np.testing.assert_allclose(y / np.float32(unit), x, 1e-5), *by_name)


def test_aggregate_accepts_no_leaves():
    tx = aggregate(1.0, 1.0, 0)
    assert tx.update({"w": None}, tx.init({"w": None}))[0] == {"w": None}


def test_aggregate_uses_keys_once():
    tx = aggregate(per_example.quantile_threshold(count_noise=1.0), 1.0, 0)
    grads, state = jnp.ones((1, 2)), tx.init(jnp.ones(2))
    with jax.debug_key_reuse(True):
        for _ in range(2):
            _, state = tx.update(grads, state)


def test_aggregate_state_with_raw_key_survives_flax_serialization():
    grads = jnp.ones((3, 2))
    tx = aggregate(1.0, 1.1, jax.random.PRNGKey(0))
    _, state = tx.update(grads, tx.init(grads[0]))
    restored = from_bytes(tx.init(grads[0]), to_bytes(state))
    for found, expected in zip(tx.update(grads, restored), tx.update(grads, state), strict=True):
        jax.tree.map(np.testing.assert_array_equal, found, expected)
    typed = aggregate(1.0, 1.1, jax.random.key(0))
    same, _ = typed.update(grads, typed.init(grads[0]))
    np.testing.assert_array_equal(same, tx.update(grads, tx.init(grads[0]))[0])


def test_aggregate_adds_noise_to_complex_parts():
    zeros = jnp.zeros((2, 100, 100), jnp.complex64)
    noise, _ = first_update(1.0, 1.0, 0, reduction="sum", grads=zeros)
    assert np.std(noise.real) == pytest.approx(1, rel=0.03)
    assert np.std(noise.imag) == pytest.approx(1, rel=0.03)
    assert abs(np.corrcoef(noise.real.ravel(), noise.imag.ravel())[0, 1]) < 0.05


def test_aggregate_keeps_dtypes_and_compiles_once():
    grads = jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), GRADS)
    tx = optax.chain(
        aggregate(optax.linear_schedule(1.0, 0.1, 10), 1.0, jax.random.key(0)), optax.sgd(0.1)
    )
    update = jax.jit(chex.assert_max_traces(tx.update, n=1))
    state = tx.init(PARAMS)
    for _ in range(3):
        updates, state = update(grads, state)
    assert all(leaf.dtype == jnp.bfloat16 for leaf in jax.tree.leaves(updates))
    assert int(state[0].steps) == 3


def test_aggregate_schedule_counts_steps():
    tx = aggregate(lambda count: 1.0 / (1 + count.astype(jnp.float32)), 0.0, reduction="sum")
    grads, state, norms = jnp.array([[3.0, 4.0]]), tx.init(jnp.zeros(2)), []
    update = jax.jit(tx.update)
    for _ in range(3):
        updates, state = update(grads, state)
        norms.append(np.linalg.norm(updates))
    np.testing.assert_allclose(norms, [1, 1 / 2, 1 / 3], rtol=1e-5)


def test_aggregate_exports_for_all_platforms():
    tx = aggregate(1.0, 1.0, key=0, scope=scopes.leaf())
    exported = jax.export.export(jax.jit(tx.update), platforms=("cpu", "cuda", "tpu"))
    assert exported(GRADS, tx.init(PARAMS)).in_avals


def test_aggregate_requires_noise_multiplier():
    """Also where there is none: `aggregate(1.0)` looked private, and was not."""
    with pytest.raises(TypeError, match="noise_multiplier"):
        aggregate(1.0)


@pytest.mark.skipif(
    optax.__version__ < "0.2.8", reason="MultiSteps itself fails for means of another shape"
)
@pytest.mark.parametrize("size", [(), (8,)], ids=["means", "examples"])
@pytest.mark.parametrize("with_params", [True, False])
def test_aggregate_inside_multi_steps_raises(with_params, size):
    """Whatever it is given: its own mean of it has no examples."""
    grads = jax.tree.map(lambda x: jnp.ones(size + x.shape), PARAMS)
    for tx in (aggregate(1.0, 0.0), optax.chain(aggregate(1.0, 0.0), optax.sgd(0.1))):
        around = optax.MultiSteps(tx, 2)
        with pytest.raises(ValueError, match=r"MultiSteps cannot wrap .*noisy_mean"):
            around.update(grads, around.init(PARAMS), PARAMS if with_params else None)


def test_aggregate_rejects_gradients_without_example_axis():
    tx, w = aggregate(1.0, 0.0), jnp.ones((4, 3))
    with pytest.raises(ValueError, match=r"leaf 'w' has the same shape as its parameter, \(4, 3\)"):
        tx.update({"w": w}, tx.init({"w": w}), {"w": w})
    updates, _ = tx.update({"w": jnp.ones((4, 4, 3))}, tx.init({"w": w}), {"w": w})
    assert updates["w"].shape == (4, 3)

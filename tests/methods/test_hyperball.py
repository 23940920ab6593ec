"""Hyperball: matrices stay on their spheres, step by step as the formula says."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from compiling import AS_USERS, where_sums_are_fused
from methods_table import assert_same, avals

import optaxclip

WEIGHT = np.array([[3.0, 0.0], [0.0, 4.0]], np.float32)
DIRECTION = np.array([[0.0, 5.0], [0.0, 0.0]], np.float32)
SHAPES = {"w": (24, 16), "layers": (3, 8, 8), "experts": (2, 3, 8, 4), "conv": (3, 3, 2, 4)}
STACKED = {"w": 0, "layers": 1, "experts": 2, "conv": 0}


def random_tree(seed, dtype=jnp.float32, size=1.0):
    rng = np.random.default_rng(seed)
    entries = {x: size * rng.normal(size=shape) for x, shape in SHAPES.items()}
    return jax.tree.map(lambda x: jnp.asarray(x.astype(dtype)), entries)


def norms(tree, dtype=np.float64):
    """Of each matrix, from NumPy."""
    return {
        name: np.sqrt(np.square(np.asarray(x, dtype)).sum(tuple(range(STACKED[name], x.ndim))))
        for name, x in tree.items()
    }


def by_hand(weight, direction, rate, radius):
    """The formula in float64, for one matrix."""
    w, u = np.asarray(weight, np.float64), np.asarray(direction, np.float64)
    proposed = w - rate * radius * u / np.linalg.norm(u)
    return radius * proposed / np.linalg.norm(proposed)


def moved(tx, weight, direction, state=None):
    updates, state = tx.update(direction, state or tx.init(weight), weight)
    return optax.apply_updates(weight, updates), state


def test_the_step_of_the_formula():
    new, state = moved(optaxclip.hyperball(0.1), WEIGHT, DIRECTION)
    expected = [[2.98511157, -0.4975186], [0.0, 3.98014876]]
    np.testing.assert_allclose(new, expected, rtol=2e-7)
    assert (float(state.radius[0]), int(state.steps)) == (5.0, 1)


@pytest.mark.parametrize(("radius", "then"), [("initial", 5.0), ("current", 10.0), (2.0, 2.0)])
def test_radii(radius, then):
    tx = optaxclip.hyperball(0.1, radius=radius)
    new, _ = moved(tx, 2 * WEIGHT, DIRECTION, tx.init(WEIGHT))
    np.testing.assert_allclose(new, by_hand(2 * WEIGHT, DIRECTION, 0.1, then), rtol=3e-7)


@pytest.mark.slow
def test_each_layer_and_expert_by_itself():
    params, grads = random_tree(0), random_tree(1)
    tx = optaxclip.hyperball(0.3, stacked=STACKED)
    new, state = moved(tx, params, grads)
    assert list(state.names[:2]) == ["conv", "experts/0/0"]
    for name, x in params.items():
        for index in np.ndindex(x.shape[: STACKED[name]]):
            w, u = (np.float64(tree[name][index]) for tree in (params, grads))
            expected = by_hand(w, u, 0.3, np.linalg.norm(w))
            np.testing.assert_allclose(new[name][index], expected, rtol=2e-6, atol=1e-6)


@functools.cache
def long_run(dtype, radius="initial", rate=0.03):
    """The largest departure from the radius over 1000 steps, for each matrix; and the last step."""
    direction = optax.scale_by_adam()
    tx = optax.chain(direction, optaxclip.hyperball(rate, radius=radius, stacked=STACKED))
    start, target = random_tree(0, dtype), random_tree(7, dtype)

    def body(carry, key):
        params, state = carry
        noise = jax.tree.map(lambda x: jax.random.normal(key, x.shape, x.dtype), params)
        grads = jax.tree.map(lambda x, y, z: x - y + z, params, target, noise)
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        now = jax.tree.map(_norm_in_two_parts, params, STACKED)
        return (params, state), now

    keys = jax.random.split(jax.random.key(0), 1000)
    run = jax.jit(lambda carry: jax.lax.scan(body, carry, keys))
    with jax.numpy_dtype_promotion("standard"):  # which Adam needs
        (params, _), history = run((start, tx.init(start)))
    return norms(start), norms(params), jax.tree.map(np.asarray, history)


def _norm_in_two_parts(x, stack):
    """Pairwise sums, so that what the test measures with is not what limits it."""
    flat = jnp.square(x.astype(jnp.float32)).reshape(*x.shape[:stack], -1)
    return jnp.sqrt(jnp.sum(flat.reshape(*flat.shape[:-1], -1, 4).sum(-1), -1))


@pytest.mark.slow
def test_float32_stays_within_a_millionth_for_1000_steps():
    start, end, history = long_run(jnp.float32)
    for name, radius in start.items():
        np.testing.assert_allclose(end[name], radius, rtol=3e-7)
        np.testing.assert_allclose(
            history[name], np.broadcast_to(radius, history[name].shape), 1e-6
        )


@pytest.mark.slow
def test_bfloat16_stays_within_its_rounding_without_drift():
    start, _, history = long_run(jnp.bfloat16)
    for name, radius in start.items():
        error = np.abs(history[name] / radius - 1)
        assert np.max(error) < 2**-8
        assert np.max(error[-100:]) < 1.5 * np.max(error[100:200]) + 2**-10


@pytest.mark.slow
def test_without_a_radius_in_the_state_bfloat16_drifts():
    # What the test above would not see if the radius were not the initial one.
    start, _, history = long_run(jnp.bfloat16, "current")
    assert any(np.max(np.abs(history[name] / start[name] - 1)) > 2**-8 for name in start)


def test_zero_directions_leave_weights_bit_for_bit():
    params = random_tree(0)
    grads = random_tree(1) | {"w": jnp.zeros(SHAPES["w"])}
    grads["layers"] = grads["layers"].at[1].set(0)
    tx = optaxclip.hyperball(0.1, stacked=STACKED)
    state = tx.init(jax.tree.map(lambda x: 2 * x, params))
    updates, _ = tx.update(grads, state, params)
    assert not np.any(updates["w"])
    assert not np.any(updates["layers"][1])
    assert np.any(updates["layers"], (1, 2)).tolist() == [True, False, True]


@pytest.mark.by_day(1)
@pytest.mark.parametrize(("eps", "options"), [(1.0, {"eps": 1.0}), (1e-12, {})])
def test_a_direction_of_at_most_eps_counts_as_zeros(eps, options):
    sizes = np.float32([0, 0.9, 1.1, 1.0])[: 4 if options else 3]  # at 1e-12 the norm is rounded
    directions = sizes[:, None, None] * np.float32(eps) * DIRECTION / 5
    weights = np.stack([WEIGHT] * len(sizes))
    tx = optaxclip.hyperball(0.1, radius=2.0, stacked=1, **options)
    new, _ = moved(tx, weights, directions)
    still = sizes != np.float32(1.1)
    np.testing.assert_array_equal(new[still], weights[still])
    np.testing.assert_allclose(new[2], by_hand(WEIGHT, DIRECTION, 0.1, 2.0), rtol=1e-6)


def test_zero_weights_stay_unless_the_radius_is_a_number():
    zeros = np.zeros_like(WEIGHT)
    assert not np.any(moved(optaxclip.hyperball(0.1), zeros, DIRECTION)[0])
    assert not np.any(moved(optaxclip.hyperball(0.1, radius="current"), zeros, DIRECTION)[0])
    new, _ = moved(optaxclip.hyperball(0.1, radius=2.0), zeros, DIRECTION)
    np.testing.assert_allclose(new, [[0.0, -2.0], [0.0, 0.0]], rtol=2e-7)


def test_a_step_that_leaves_no_direction_is_none():
    tx = optaxclip.hyperball(1.0)
    assert_same(moved(tx, jnp.asarray(WEIGHT), 3 * jnp.asarray(WEIGHT))[0], jnp.asarray(WEIGHT))


def test_without_a_state_only_where_none_is_needed():
    grads, params = {"w": DIRECTION}, {"w": WEIGHT}
    for options in ({"radius": "current"}, {"radius": 2.0}):
        tx = optaxclip.hyperball(0.1, **options)
        assert_same(tx.update(grads, None, params), tx.update(grads, tx.init(params), params))
    for rate, radius in ((0.1, "initial"), (optax.linear_schedule(0.1, 0.0, 9), 2.0)):
        with pytest.raises(ValueError, match="hyperball: got the state None"):
            optaxclip.hyperball(rate, radius=radius).update(grads, None, params)


@pytest.mark.by_day(1)
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_bad_direction_costs_its_own_matrix(value):
    params, grads = random_tree(0), random_tree(1)
    grads["layers"] = grads["layers"].at[1, 0, 0].set(value)
    tx = optaxclip.hyperball(0.1, stacked=STACKED)
    updates, _ = tx.update(grads, tx.init(params), params)
    assert np.all(np.isnan(updates["layers"][1]))
    assert all(np.all(np.isfinite(updates[name])) for name in ("w", "experts", "conv"))
    assert np.all(np.isfinite(updates["layers"][::2]))


@pytest.mark.by_day(1)
@pytest.mark.parametrize("on_accelerators", [False, True])
@pytest.mark.parametrize(
    ("size", "of_direction"), [(1.0, 3e38), (1e-20, 3e38), (1e30, 1e-11), (1e38, 3e38)]
)
def test_no_ratio_of_norms_leaves_the_range(size, of_direction, on_accelerators, monkeypatch):
    if on_accelerators:
        monkeypatch.setattr(jax.lax, "platform_dependent", lambda *x, default, **_: default(*x))
        jax.clear_caches()
    weight, unit = WEIGHT / 5, np.float32([[1.0, 2.0], [0.0, -2.0]]) / 3
    tx = optaxclip.hyperball(0.1, eps=0.0)
    new, _ = moved(tx, weight * np.float32(size), unit * np.float32(of_direction))
    jax.clear_caches()
    found = np.float64(new) / size
    np.testing.assert_allclose(found, by_hand(weight, unit, 0.1, 1.0), rtol=3e-6, atol=1e-7)


def test_complex_matrices_step_as_pairs_of_real_ones():
    rng = np.random.default_rng(0)
    w, u = rng.normal(size=(2, 4, 3, 2)).astype("f4")
    as_complex = [jax.lax.complex(x[..., 0], x[..., 1]) for x in (w, u)]
    new, _ = moved(optaxclip.hyperball(0.3), *as_complex)
    expected = by_hand(w, u, 0.3, np.linalg.norm(w)) @ np.array([1, 1j])
    np.testing.assert_allclose(new, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_dtypes_stay_and_are_rounded_once():
    params = random_tree(0, jnp.bfloat16)
    for dtype in (jnp.bfloat16, jnp.float32):
        grads = random_tree(1, dtype)
        tx = optaxclip.hyperball(0.1, stacked=STACKED)
        updates, _ = tx.update(grads, tx.init(params), params)
        assert avals(updates) == avals(grads)
        for name in ("w", "conv"):
            w, u = np.float64(params[name]), np.float64(grads[name])
            step = by_hand(w, u, 0.1, np.linalg.norm(w)) - w
            scale = 2**-8 if dtype == jnp.bfloat16 else 1e-6
            np.testing.assert_allclose(np.float64(updates[name]), step, rtol=scale, atol=1e-6)


@pytest.mark.slow
def test_schedules_and_injected_rates():
    schedule = optax.linear_schedule(0.1, 0.2, 1)
    tx = optaxclip.hyperball(schedule)
    injected = optax.inject_hyperparams(optaxclip.hyperball)(schedule, radius="initial")
    with_number = optax.inject_hyperparams(optaxclip.hyperball)(0.1, radius=5.0)
    for maker in (tx, injected):
        state, weight = maker.init(WEIGHT), WEIGHT
        for rate in (0.1, 0.2):
            expected = by_hand(weight, DIRECTION, rate, 5.0)
            weight, state = moved(maker, weight, DIRECTION, state)
            np.testing.assert_allclose(weight, expected, rtol=1e-6)
    state = with_number.init(WEIGHT)
    state.hyperparams["radius"] = jnp.float32(10.0)
    new, _ = jax.jit(lambda w, u, s: moved(with_number, w, u, s))(WEIGHT, DIRECTION, state)
    np.testing.assert_allclose(np.linalg.norm(new), 10.0, rtol=1e-6)


def test_leaves_that_a_step_lacks_and_other_leaves():
    params = random_tree(0) | {"count": np.int32(3)}
    grads = random_tree(1) | {"w": None, "count": np.int32(4)}
    tx = optaxclip.hyperball(0.1, stacked=STACKED | {"count": 0})
    updates, state = tx.update(grads, tx.init(params), params)
    assert updates["w"] is None
    assert updates["count"] == 4
    whole, same = tx.update(grads | {"w": random_tree(1)["w"]}, tx.init(params), params)
    assert_same(updates["conv"], whole["conv"])
    assert_same(state, same)


@where_sums_are_fused
def test_on_a_cpu_little_is_stored_beside_the_weights():
    params = {str(i): jax.ShapeDtypeStruct((512, 256), jnp.float32) for i in range(16)}
    tx = optaxclip.hyperball(0.1)
    state = jax.eval_shape(tx.init, params)
    lowered = jax.jit(lambda w, u, s: moved(tx, w, u, s)).lower(params, params, state)
    analysis = lowered.compile(compiler_options=AS_USERS).memory_analysis()
    # The roots of the products of one matrix at a time.
    assert analysis.temp_size_in_bytes < 2 * 512 * 256 * 4


def test_derivatives_are_those_of_the_formula():
    def new_weight(w, u, rate):
        return moved(optaxclip.hyperball(rate, radius="current"), w, u)[0]

    def plain(w, u, rate):
        radius = jnp.sqrt(jnp.sum(w * w))
        proposed = w - rate * radius * u / jnp.sqrt(jnp.sum(u * u))
        return radius * proposed / jnp.sqrt(jnp.sum(proposed * proposed))

    # Of the second pair all products of entries are 0.
    w, u = jnp.stack([WEIGHT, WEIGHT]), jnp.array([[[1.0, 2.0], [0.0, -1.0]], DIRECTION])
    found, expected = (
        jax.jit(jax.vmap(jax.jacrev(fn, (0, 1, 2)), (0, 0, None)))(w, u, 0.1)
        for fn in (new_weight, plain)
    )
    for pair in zip(found, expected, strict=True):
        np.testing.assert_allclose(*pair, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"learning_rate": -0.1}, "learning_rate must be at least 0"),
        ({"learning_rate": np.nan}, "learning_rate must be at least 0"),
        ({"learning_rate": np.inf}, "learning_rate must be at least 0 and finite"),
        ({"learning_rate": 0.1, "radius": 0.0}, "radius must be above 0"),
        ({"learning_rate": 0.1, "radius": np.inf}, "radius must be above 0 and finite"),
        ({"learning_rate": 0.1, "radius": "first"}, "radius must be 'initial', 'current'"),
        ({"learning_rate": 0.1, "eps": -1.0}, "eps must not be negative"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        optaxclip.hyperball(**arguments)


@pytest.mark.slow
def test_derivatives_at_the_ends_of_the_range_are_those_of_ordinary_numbers_scaled():
    tx = optaxclip.hyperball(0.3, stacked=1)
    w, u, by = np.random.default_rng(0).normal(size=(3, 2, 4, 3))
    slopes = jax.jit(jax.grad(lambda w, u: jnp.sum(jnp.float32(by) * moved(tx, w, u)[0]), (0, 1)))
    expected = slopes(jnp.float32(w), jnp.float32(u))
    for of_weights, of_directions in ((1e30, 1), (1e37, 10), (1e-32, 1), (1, 1e30), (1e35, 1e35)):
        sizes = np.float32([of_weights, of_directions])
        found = slopes(jnp.float32(w * of_weights), jnp.float32(u * of_directions))
        np.testing.assert_allclose(found[0], expected[0], rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(found[1] / (sizes[0] / sizes[1]), expected[1], atol=1e-5)

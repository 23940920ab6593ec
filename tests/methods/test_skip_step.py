"""Skips select an optimizer's state in the loops that compute it, and change nothing else."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from compiling import AS_USERS, where_sums_are_fused
from jax.sharding import PartitionSpec as P

import optaxclip
from optaxclip import monitor, scale_loss, skip_nonfinite
from optaxclip._backend.skip_step import select_results

pytestmark = pytest.mark.usefixtures("standard_promotion")

PARAMS = {"b": jnp.linspace(-1, 1, 16), "none": None, "w": jnp.linspace(-2, 2, 32).reshape(8, 4)}
FLAGS = np.array([False, True, False, False, True, True, False, False])


def odd_states():
    """State leaves that are keys, integers, weakly typed, equal to each other, or constants."""

    def init(params):
        sums, same = (jax.tree.map(jnp.zeros_like, params) for _ in range(2))
        return sums, same, jax.random.key(0), jnp.asarray(1.0), jnp.arange(3), jnp.ones(3)

    def update(updates, state, params=None):
        del params
        sums, _, key, weak, count, _ = state
        sums = jax.tree.map(jnp.add, sums, updates)
        key, used = jax.random.split(key)
        noisy = jax.tree.map(lambda x: x + jax.random.normal(used, x.shape), sums)
        return noisy, (sums, sums, key, weak * 0.5, count + 1, jnp.full(3, 2.0))

    return optax.GradientTransformation(init, update)


INNER = optax.chain(optax.trace(0.9), odd_states(), optax.adamw(0.1))


def steps(tx):
    """A function from a gradient's scale for each step to updates and state of each step."""

    def run(scales):
        def body(carry, scale):
            params, state = carry
            grads = jax.tree.map(lambda x: x * scale, PARAMS)
            updates, state = tx.update(grads, state, params)
            return (optax.apply_updates(params, updates), state), (updates, numbers(state))

        return jax.lax.scan(body, (PARAMS, tx.init(PARAMS)), scales)[1]

    return run


def numbers(state):
    """A state whose keys are arrays of integers."""

    def is_key(x):
        return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)

    return jax.tree.map(lambda x: jax.random.key_data(x) if is_key(x) else x, state)


def by_selection():
    """The same with selections after the step."""

    def update(updates, state, params=None):
        skip = ~jnp.isfinite(optax.tree.norm(updates))
        return select_results(skip, state, *INNER.update(updates, state, params))

    return optax.GradientTransformation(INNER.init, update)


def inner_states(results):
    updates, state = results
    return updates, getattr(state, "inner_state", state)


def assert_equal(found, expected):
    jax.tree.map(np.testing.assert_array_equal, inner_states(found), inner_states(expected))


SCALES = jnp.where(FLAGS, jnp.nan, jnp.linspace(0.5, 2, 8))


def test_skip_step_matches_selection_in_transformations():
    ours, expected = steps(skip_nonfinite(INNER)), steps(by_selection())
    rows = jnp.stack([SCALES, SCALES[::-1]])

    @jax.jit
    def all_of(rows):
        of_vmap = [jax.vmap(run)(rows) for run in (ours, expected)]
        of_jit = [jax.vmap(jax.jit(run))(rows) for run in (ours, expected)]
        return *of_vmap, *of_jit, ours(rows[0]), expected(rows[0])

    found = all_of(rows)
    for mine, theirs in zip(found[::2], found[1::2], strict=True):
        assert_equal(mine, theirs)
    counts = found[4][1].num_skipped
    np.testing.assert_array_equal(counts, np.cumsum(FLAGS))


def test_skip_step_matches_selection_on_devices():
    mesh = jax.make_mesh((8,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = jnp.stack([jnp.roll(SCALES, i) for i in range(8)])

    def each(run):
        def of_device(rows):
            return jax.tree.map(lambda x: x[None], run(rows[0]))

        specs = {"in_specs": P("i"), "out_specs": P("i"), "check_vma": False}
        return jax.jit(jax.shard_map(of_device, mesh=mesh, **specs))

    txs = skip_nonfinite(INNER, specs=P()), by_selection()
    ours, expected = (each(steps(tx)) for tx in txs)
    assert_equal(ours(rows), expected(rows))


def test_skip_step_keeps_types_and_donates():
    tx = skip_nonfinite(INNER)
    step = jax.jit(tx.update, donate_argnums=1)
    state = tx.init(PARAMS)
    types = jax.tree.map(jax.typeof, state)
    for scale in (1.0, np.nan, 1.0):
        grads = jax.tree.map(lambda x, scale=scale: x * scale, PARAMS)
        updates, state = step(grads, jax.tree.map(jnp.copy, state), PARAMS)
        assert jax.tree.map(jax.typeof, state) == types
        assert all(jnp.isfinite(x).all() for x in jax.tree.leaves(updates))
    assert int(state.num_skipped) == 1


def test_skip_step_survives_export():
    tx = skip_nonfinite(optax.adam(0.1))
    grads = {"w": jnp.ones(3)}
    state = tx.init(grads)
    exported = jax.export.export(jax.jit(tx.update), platforms=("cpu", "tpu", "cuda"))
    run = exported(grads, state).call
    for scale in (1.0, jnp.nan):
        scaled = {"w": grads["w"] * scale}
        found, expected = run(scaled, state), jax.jit(tx.update)(scaled, state)
        jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_skip_step_shows_effects_of_skipped_steps(capfd):
    def update(updates, state, params=None):
        del params
        jax.debug.print("sum {}", state + 1)
        return updates, state + 1

    tx = skip_nonfinite(optax.GradientTransformation(lambda _: jnp.zeros(1), update))
    _, state = jax.jit(tx.update)(jnp.full(2, jnp.nan), tx.init(jnp.ones(2)))
    jax.effects_barrier()
    assert "sum [1.]" in capfd.readouterr().out
    assert float(state.inner_state[0]) == 0


GRADS = [jnp.ones((256, 128 + 8 * i)) for i in range(4)]
SIZE = sum(x.nbytes for x in GRADS)
ALL_STATISTICS = ("norm", "max", "mean_abs", "zero_fraction")


@where_sums_are_fused
@pytest.mark.parametrize(
    ("tx", "most"),
    [
        (skip_nonfinite(optax.adamw(0.1)), 0.02),
        (skip_nonfinite(optax.chain(optaxclip.adagc(), optax.adamw(0.1))), 0.02),
        (scale_loss(optax.adamw(0.1)), 1.02),
        (optax.chain(monitor.record(4, stats=ALL_STATISTICS), optax.adamw(0.1)), 0.4),
    ],
    ids=["skip", "skip_adagc", "scale_loss", "record"],
)
def test_steps_need_little_temporary_memory(tx, most):
    """Nothing as large as the gradients is stored beside them, and no state is copied."""

    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    jitted = jax.jit(step, donate_argnums=(0, 1), compiler_options=AS_USERS)
    compiled = jitted.lower(GRADS, tx.init(GRADS), GRADS).compile()
    assert compiled.memory_analysis().temp_size_in_bytes <= most * SIZE
    copies = re.findall(r"= \w+\[(\d+),(\d+)\]\S* copy\(", compiled.as_text())
    assert not copies


def test_record_max_keeps_infinities_and_nans():
    """As users compile it, with the library that ignores NaN."""
    tx = monitor.record(1, stats=ALL_STATISTICS)
    x = np.linspace(-3, 2, 200 * 300, dtype=np.float32).reshape(200, 300)

    def largest(x):
        found = tx.update([x], tx.init([x]))[1].last
        return found["max"], found["zero_fraction"], found["mean_abs"]

    cases = np.stack([x, x, x, np.zeros_like(x), -x])
    cases[1, 7, 5], cases[2, 7, 6] = np.nan, -np.inf
    run = jax.jit(largest, compiler_options=AS_USERS)
    found = np.array([run(jnp.asarray(case)) for case in cases])
    np.testing.assert_array_equal(found[:, 0], [3, np.nan, np.inf, 0, 3])
    np.testing.assert_allclose(found[:, 1], [0, 0, 0, 1, 0], atol=1e-4)
    expected = [np.mean(np.abs(case, dtype=np.float64)) for case in cases]
    np.testing.assert_allclose(found[:, 2], expected, rtol=1e-6)

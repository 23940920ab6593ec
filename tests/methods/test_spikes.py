"""What SPAM and Stable-SPAM put before Adam: the printed sequences, and their faults mended."""

import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental.sparse import BCOO
from jax.sharding import PartitionSpec as P

import optaxclip
from optaxclip import monitor

S = np.float32([1.0, 1.2, 0.8, 1.0, 5.0, 1.1])
SPAM = functools.partial(
    optaxclip.clip_by_second_moment, threshold=4.0, decay=0.5, warmup_steps=2, reset_every=None
)


@functools.cache
def compiled(tx):
    @jax.jit
    def run(grads):
        def step(state, grads):
            updates, state = tx.update(grads, state)
            return state, (updates, state)

        return jax.lax.scan(step, tx.init(jax.tree.map(lambda x: x[0], grads)), grads)[1]

    return run


def drive(tx, grads):
    """Updates and states of all steps, compiled once."""
    return compiled(tx)(grads)


@functools.cache
def made(make, **options):
    """The same object for the same options, so that its steps are compiled once."""
    return make(**options)


def close(found, expected, rtol=3e-6):
    np.testing.assert_allclose(found, expected, rtol=rtol, atol=1e-6)


SPIKE = np.float32([[1, 0], [1, 0], [1, 0], [10, 1], [1, 1], [1, 1]])


def test_clip_by_second_moment_matches_printed_spam_sequence():
    updates, states = drive(SPAM(), SPIKE)
    close(updates[:, 0], [1, 1, 1, 1.870829, 1, 1])
    close(states.moments[:, 0], [0.5, 0.75, 0.875, 2.1875, 1.59375, 1.296875])
    # Printed are zeros: as published it never moves. Here it does, and has a past from then on.
    close(updates[:, 1], SPIKE[:, 1])
    close(states.moments[:, 1], [0, 0, 0, 0.5, 0.75, 0.875])
    assert states.steps.tolist() == [1, 2, 3, 4, 5, 6]


def test_clip_by_second_moment_warms_up_and_resets():
    grads = np.float32([1, 9, 1, 9, 1, 9, 1, 9])
    updates, states = drive(SPAM(decay=0.9, reset_every=4), grads)
    v, expected = 0.0, []
    for step, g in enumerate(grads):
        v = 0.0 if step % 4 == 0 else v
        y = min(g, 2 * np.sqrt(v)) if step % 4 >= 2 and v else g
        expected, v = [*expected, y], 0.9 * v + 0.1 * y * y
    close(updates, expected)
    assert np.sum(updates < grads) == 2
    close(states.moments[-1], v)


def test_clip_by_second_moment_accepts_huge_reset_period():
    grads = np.ones((3, 2), np.float32)
    updates, states = drive(SPAM(reset_every=sys.maxsize), grads)
    never, without = drive(SPAM(), grads)
    np.testing.assert_array_equal(updates, never)
    np.testing.assert_array_equal(states.moments, without.moments)


def test_clip_by_second_moment_resets_after_counter_saturates():
    tx, most = SPAM(reset_every=3), np.iinfo(np.int32).max
    state = tx.init(np.ones(1))._replace(steps=jnp.int32(most))
    _, after = tx.update(jnp.ones(1), state)
    assert after.steps % 3 == (most + 1) % 3
    _, after = SPAM().update(jnp.ones(1), state)
    assert after.steps == most


def test_clip_by_second_moment_with_infinite_threshold_passes():
    tx = SPAM(threshold=jnp.inf, warmup_steps=0)

    def second(x):
        state = tx.init(x)
        for by in (1, 2):
            updates, state = tx.update(by * x, state)
        return updates

    assert jax.jit(jax.value_and_grad(second))(1.0) == (2, 2)


def test_clip_by_second_moment_ignores_nonfinite_elements():
    grads = np.tile(np.float32([1, 1, 1, 1]), (6, 1))
    grads[3] = [np.nan, np.inf, -np.inf, 3e38]
    updates, states = drive(SPAM(), grads)
    bound = 2 * np.sqrt(0.875)
    close(updates[3], [np.nan, bound, -bound, bound])
    np.testing.assert_array_equal(states.moments[3, :3], states.moments[2, :3])
    close(updates[4:, :3], 1)
    assert np.all(np.isfinite(states.moments))
    early, states = drive(SPAM(), grads[3:])
    np.testing.assert_array_equal(early[0], grads[3])
    assert np.all(np.isfinite(states.moments))


def test_clip_by_second_moment_survives_overflowing_squares():
    updates, _ = drive(SPAM(), np.outer([1, 1, 1, 1000], [1e-25, 1.0, 1e25]).astype(np.float32))
    close(updates[3, 0] / 1e-22, 1)  # has no bound
    close(updates[3, 1], 2 * np.sqrt(0.875))
    largest = np.finfo(np.float32).max / 2  # the average and a square have a finite sum
    close(updates[2:, 2] / np.sqrt(largest), 2 * np.sqrt([0.75, 0.875]))


@pytest.mark.by_day(1)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "complex64"])
def test_clip_by_second_moment_keeps_dtypes(dtype):
    phase = (0.6 + 0.8j) if dtype == "complex64" else 1
    grads = jnp.asarray(SPIKE[:, :1] * phase).astype(dtype)
    updates, states = drive(SPAM(), grads)
    assert updates.dtype == dtype
    assert states.moments.dtype == jnp.float32
    rtol = {"bfloat16": 1e-2, "float16": 2e-3}.get(dtype, 3e-6)
    close(np.abs(updates[:, 0]).astype(np.float32), [1, 1, 1, 1.870829, 1, 1], rtol)


def test_clip_by_second_moment_skips_non_float_leaves():
    params = {"w": jnp.ones(2), "n": jnp.arange(3), "none": None, "b": jnp.ones(1)}
    tx = SPAM(warmup_steps=0)
    state = tx.init(params)
    assert state.moments["n"] is None
    updates, state = tx.update(params, state)
    assert updates["n"] is params["n"]
    _, later = tx.update(params | {"w": None}, state)
    assert later.moments["w"] is state.moments["w"]
    assert later.moments["b"] == 0.75
    assert jax.tree.structure(later) == jax.tree.structure(state)


def test_moving_max_and_norm_history_match_stable_spam():
    clip = optaxclip.clip_by_moving_max()
    tx = optax.chain(clip, optaxclip.normalize_by_norm_history())
    grads = np.stack([S, np.full(6, 0.5, np.float32)], axis=1)
    updates, (first, second) = drive(tx, grads)
    close(first.info.threshold[:, 0], [1, 1.10005, 0.999933, 0.99995, 1.801562, 1.684342])
    close(second.info.norm[:, 0], [1.118034, 1.20835, 0.943398, 1.117989, 1.869659, 1.208305])
    printed = [
        *([0.894427, 0.447214], [0.914058, 0.415462], [0.830636, 0.519147]),
        *([0.885774, 0.442909], [0.993331, 0.275686], [0.91801, 0.417277]),
    ]
    close(updates, printed)
    close(np.linalg.norm(updates, axis=1), [1, 1.004047, 0.979525, 0.990335, 1.030877, 1.008396])
    assert first.info.num_clipped[-1] == 3
    assert [*monitor.read((first, second))] == [
        *("0/clip_by_moving_max", "1/normalize_by_norm_history")
    ]


def test_an_entry_at_the_threshold_stays_in_a_leaf_that_is_clipped():
    tx = made(optaxclip.clip_by_moving_max, decay=0.5)
    threshold = drive(tx, np.float32([[1, 1], [4, 1]]))[1].info.threshold[-1, 0]
    (clipped, at_threshold) = drive(tx, np.float32([[1, 1], [4, threshold]]))[0][-1]
    assert clipped < 4
    assert at_threshold == threshold


@pytest.mark.by_day(1)
@pytest.mark.parametrize(("policy", "expected"), [("nan", np.nan), ("zero", 0.0)])
def test_clip_by_moving_max_replaces_nonfinite_leaves(policy, expected):
    tx = made(optaxclip.clip_by_moving_max, nonfinite=policy)
    updates, _ = drive(tx, np.float32([[1, 0.5], [np.inf, 0.5]]))
    np.testing.assert_array_equal(updates[-1], [expected] * 2)


INDICES = {
    "duplicates": ([3.0, 1.0, 3.0, 0.5], [[2], [0], [2], [4]], 0),
    "padding beside them": ([3.0, 1.0, 3.0, 0.5, 9.0, 9.0], [[2], [0], [2], [4], [5], [5]], 0),
    "sums that cancel": ([8.0, 6.0, -7.5, 0.5], [[1], [0], [1], [4]], 0),
    "rows": ([[3.0, 0.5], [1.0, 1.0], [3.0, 0.5]], [[2], [0], [2]], 0),
    "batches": ([[3.0, 1.0, 3.0], [1.0, 6.0, 1.0]], [[[2], [0], [2]], [[2], [0], [2]]], 1),
}


@pytest.mark.by_day(1)
@pytest.mark.parametrize("case", INDICES)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_clip_by_moving_max_sums_sparse_duplicates(case, dtype):
    data, indices, n_batch = INDICES[case]
    shape = (2,) * n_batch + (5,) + (2,) * (np.ndim(data) - 1 - n_batch)
    indices = jnp.asarray(indices)
    sequence = [BCOO((jnp.asarray(data, dtype) * x, indices), shape=shape) for x in (0.25, 1)]
    tx = made(optaxclip.clip_by_moving_max, decay=0.5)
    found, expected = (last_of(tx, x) for x in (sequence, [leaf.todense() for leaf in sequence]))
    np.testing.assert_array_equal(found.indices, indices)
    close(found.todense(), expected, rtol=1e-2 if dtype == jnp.bfloat16 else 3e-6)
    assert np.max(np.abs(expected)) < 6


def last_of(tx, sequence):
    """The updates of the last step."""
    update, updates, state = jax.jit(tx.update), None, tx.init(sequence[0])
    for grads in sequence:
        updates, state = update(grads, state)
    return updates


def test_stable_spam_ignores_zero_gradients():
    for make in (optaxclip.clip_by_moving_max, optaxclip.normalize_by_norm_history):
        updates, _ = drive(made(make), np.float32([[0, 0], [3, 4], [0, 0]]))
        np.testing.assert_array_equal(updates[::2], 0)
        rest = [3, 4] if make is optaxclip.clip_by_moving_max else [0.6, 0.8]
        close(updates[1], rest)


@pytest.mark.slow
def test_clip_by_moving_max_tracks_stacked_layers_separately():
    grads = np.float32([[[1, -2], [3, 1]], [[4, -2], [3, 1]]])
    updates, state = drive(optaxclip.clip_by_moving_max(decay=0.0, stacked=1), grads)
    np.testing.assert_array_equal(updates, grads)
    updates, state = drive(optaxclip.clip_by_moving_max(decay=0.5, stacked=1), grads)
    threshold = (2 + 2 * 4) / 3
    close(updates[1], [[threshold, -2], [3, 1]])
    close(state.info.threshold[1], [threshold, 3])


@pytest.mark.slow
def test_clip_by_moving_max_shares_maximum_across_devices():
    mesh = jax.make_mesh((4,), ("a",), axis_types=(jax.sharding.AxisType.Auto,))
    grads = np.zeros((3, 4, 2), np.float32)
    grads[:, 1], grads[:, 2] = [3, -1], [1, 2]
    grads[2, 3] = [-8, 2]
    tx = optaxclip.clip_by_moving_max(decay=0.5)
    expected, _ = drive(tx, grads)
    split = P(None, "a")
    alone = jax.shard_map(
        functools.partial(drive, tx), mesh=mesh, in_specs=split, out_specs=(split, P())
    )
    close(jax.jit(alone)(grads)[0], expected, rtol=1e-6)
    assert expected[2, 3, 0] > -6

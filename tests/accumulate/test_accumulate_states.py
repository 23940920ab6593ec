"""What a trainer does to the function and its state: donation, scan, vmap."""

import functools

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

import optaxclip
from optaxclip import accumulate, monitor, thresholds

WIDTH = 4


def loss_fn(w, x):
    return jnp.mean(jnp.square(x @ w - 1))


BY_PARTS = accumulate.value_and_grad(
    loss_fn,
    microbatch_size=2,
    clip=optaxclip.zclip(warmup_steps=2),
    reject_rule=thresholds.zscore(warmup_steps=3, z_thresh=2.0),
)


@functools.cache
def steps():
    """Batches of four microbatches for five steps; one is an outlier, one is not finite."""
    x = jax.random.normal(jax.random.key(0), (5, 8, WIDTH))
    return x.at[1, 3].multiply(1e3).at[3, 5, 0].set(jnp.nan)


def train(w, state, batches):
    """Plain descent in a loop of Python."""
    step, found = jax.jit(BY_PARTS), []
    state = BY_PARTS.init(w, batches[0]) if state is None else state
    for x in batches:
        _, grads, each = step(w, x, state=state)
        w, state = w - 0.1 * grads, each.state
        found.append(each)
    return w, state, found


def assert_equal(tree, other):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6), tree, other)


LEARNING = {
    "rule": {"reject_rule": thresholds.zscore()},
    "clip": {"clip": optax.chain(optaxclip.zclip(), optax.trace(0.9))},
    "schedule": {"clip": optax.linear_schedule(1.0, 0.5, 10)},
}


def test_a_state_that_is_none_is_the_first_or_an_error_where_a_threshold_learns():
    w, x = jnp.ones(WIDTH), steps()[0]
    for options in LEARNING.values():
        made = accumulate.value_and_grad(loss_fn, microbatch_size=2, **options)
        for call in (made, lambda w, x: made(w, x, state=None)):  # noqa: B023
            said = r"state is required .*; .* grad_fn\.init\(\*args\) on the first step"
            with pytest.raises(ValueError, match=said):
                jax.eval_shape(call, w, x)
    options = {"clip": 1.0, "reject_rule": 5.0}
    step = jax.jit(accumulate.value_and_grad(loss_fn, microbatch_size=2, **options))
    first = accumulate.value_and_grad(loss_fn, microbatch_size=2, **options).init(w, x)
    assert_equal(step(w, x), step(w, x, state=first))


@pytest.mark.slow
def test_init_accepts_python_number_params():
    made = accumulate.value_and_grad(lambda w, x: jnp.mean(w * x), microbatch_size=1, clip=1.0)
    x = jnp.ones(2)
    assert_equal(made(2.0, x, state=made.init(2.0, x)), made(2.0, x))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
def test_clip_state_uses_sum_dtype(dtype):
    # Without `jax_enable_x64`, JAX has no float64, and takes float32 in its place.
    made = accumulate.value_and_grad(
        lambda w, x: jnp.mean(w * x), microbatch_size=1, clip=optax.trace(0.5), dtype=dtype
    )
    w, x = jnp.ones((), jnp.bfloat16), jnp.ones(2, jnp.bfloat16)
    state = made.init(w, x)
    _, grad, found = jax.eval_shape(made, w, x, state=state)
    traces = (state.clip.trace, found.state.clip.trace)
    assert all(x.dtype == jnp.float32 for x in (grad, *traces))


def test_accumulate_in_scan_matches_loop():
    w = jnp.ones(WIDTH)

    def step(carry, x):
        w, state = carry
        _, grads, found = BY_PARTS(w, x, state=state)
        return (w - 0.1 * grads, found.state), found.rejected

    start = (w, BY_PARTS.init(w, steps()[0]))
    (in_scan, state), rejected = jax.jit(lambda: jax.lax.scan(step, start, steps()))()
    expected = train(w, None, steps())
    assert_equal((in_scan, state), expected[:2])
    np.testing.assert_array_equal(rejected, [each.rejected for each in expected[2]])
    assert np.any(rejected)


def test_accumulate_accepts_donated_arguments():
    step = jax.jit(lambda w, state, x: BY_PARTS(w, x, state=state)[1:], donate_argnums=(0, 1))
    w = jnp.ones(WIDTH)
    state = BY_PARTS.init(w, steps()[0])
    given = [w, *jax.tree.leaves(state)]
    grads, found = step(w, state, steps()[0])
    assert all(x.is_deleted() for x in given)
    step(grads, found.state, steps()[1])


def test_accumulate_resumes_from_checkpoint(tmp_path):
    w, batches = jnp.ones(WIDTH), steps()
    whole = train(w, None, batches)
    w, state, _ = train(w, None, batches[:2])
    with ocp.StandardCheckpointer() as saver:
        saver.save(tmp_path / "state", (w, state))
    with ocp.StandardCheckpointer() as loader:
        like = (w, BY_PARTS.init(w, batches[0]))
        w, state = loader.restore(tmp_path / "state", like)
    assert_equal(train(w, state, batches[2:])[:2], whole[:2])


@pytest.mark.slow
def test_accumulate_under_vmap_matches_separate_seeds():
    w = jax.random.normal(jax.random.key(1), (3, WIDTH))
    batches = jnp.stack([steps()[i] for i in (0, 1, 3)])
    run, run_one = jax.jit(jax.vmap(BY_PARTS)), jax.jit(BY_PARTS)
    fresh = jax.vmap(BY_PARTS.init)(w, batches)
    first = run(w, batches, state=fresh)
    second = run(w, batches[::-1], state=first[2].state)
    for i in range(3):
        alone = run_one(w[i], batches[i], state=BY_PARTS.init(w[i], batches[i]))
        then = run_one(w[i], batches[::-1][i], state=alone[2].state)
        assert_equal(jax.tree.map(lambda x, i=i: x[i], (first, second)), (alone, then))
    assert list(np.sum(first[2].rejected, axis=1)) == [0, 1, 1]


@pytest.mark.slow
def test_exported_accumulate_matches_original():
    args = (jnp.ones(WIDTH), steps()[1])
    step = jax.jit(lambda w, x: BY_PARTS(w, x, state=BY_PARTS.init(w, x)))
    loaded = jax.export.deserialize(jax.export.export(step)(*args).serialize())
    assert_equal(loaded.call(*args), step(*args))


def test_accumulated_survives_export_serialization():
    state, noise = accumulate.AccumulateState((), ()), accumulate.NoiseSums(jnp.ones(()), 2.0)
    found = accumulate.Accumulated(*jnp.arange(5.0), state, noise)
    stored = jax.export.export(jax.jit(lambda found: found))(found).serialize()
    assert_equal(jax.export.deserialize(stored).call(found), found)


@pytest.mark.slow
def test_compiled_accumulate_matches_eager():
    args = (jnp.ones(WIDTH), steps()[3])
    state = BY_PARTS.init(*args)
    assert_equal(jax.jit(BY_PARTS)(*args, state=state), BY_PARTS(*args, state=state))


UNKNOWN = {
    "all in one": {"microbatch_size": 8},
    "all but one rejected": {"microbatch_size": 4, "reject_rule": 100.0},
    "not measured": {"microbatch_size": 2, "reject_rule": None, "compute_norms": False},
}


@pytest.mark.by_day(1)
@pytest.mark.parametrize("options", [*UNKNOWN.values(), {"microbatch_size": 2, "clip": 1.0}])
def test_debug_nans_accepts_unknown_noise(options):
    by_parts, tx = accumulate.value_and_grad(loss_fn, **options), monitor.noise_scale()
    args = jnp.ones(WIDTH), steps()[1]
    expected = jax.jit(by_parts)(*args)
    with jax.debug_nans(True):
        _, grads, found = by_parts(*args)
        state = tx.update(grads, tx.init(grads), noise=found.noise)[1]
        # A compiled step may use what is unknown, but not return it.
        jax.jit(lambda *args: tx.update(None, tx.init(None), noise=by_parts(*args)[2].noise))(*args)
    assert_equal(found, expected[2])
    is_unknown = options in UNKNOWN.values()
    assert np.isnan(found.noise.signal) == np.isnan(found.noise.variance) == is_unknown
    assert np.all(np.isnan(found.norm)) == ("compute_norms" in options)
    assert int(state.steps) == (not is_unknown)

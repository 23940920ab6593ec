"""The tasks of the study: their data, what a bad batch changes, and that they can be learned."""

import functools
import sysconfig
from collections import Counter
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from benchmarks.research.study import digits, policy, text
from benchmarks.research.study.examples import Examples
from benchmarks.research.study.tasks import TASKS

# Research, which no user runs.
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("as_users")]

LOWER = {
    "lstm": 0.5,
    "transformer": 0.5,
    "conv": 0.8,
    "policy": 10.0,
    "private": 1.0,
}
"""By so much 40 steps lower the loss."""
OF_DIGITS = ("conv", "private")


@functools.cache
def task_of(name):
    if name in OF_DIGITS:
        pytest.importorskip("sklearn")
    task = TASKS[name]()
    return task._replace(batch=jax.jit(task.batch), losses=jax.jit(task.losses))


@functools.cache
def batches(name):
    """Parameters, and a good and a bad batch of one key."""
    task = task_of(name)
    params = jax.jit(task.initial)(jax.random.key(0))
    return params, [task.batch(params, jax.random.key(1), jnp.bool_(bad)) for bad in (False, True)]


@pytest.mark.by_day(1)
@pytest.mark.parametrize("name", TASKS)
def test_bad_batch_changes_only_labels(name):
    task = task_of(name)
    params, (good, bad) = batches(name)
    labels = "returns" if name == "policy" else "labels"
    for field, x in good._asdict().items():
        same = np.asarray(x) == np.asarray(getattr(bad, field))
        assert len(x) == task.examples
        assert np.mean(same) < 0.5 if field == labels else np.all(same)
    other = task.batch(params, jax.random.key(2), jnp.bool_(False))
    assert np.any(np.asarray(other[0]) != np.asarray(good[0]))


@pytest.mark.by_day(1)
@pytest.mark.parametrize("name", ["lstm", "transformer"])
def test_text_models_predict_from_earlier_characters(name):
    task = task_of(name)
    params, (batch, _) = batches(name)
    np.testing.assert_array_equal(batch.inputs[:, 1:], batch.labels[:, :-1])

    def cost(count, fifth):
        """What the first characters cost together."""
        labels = batch.labels.at[:, 4].set(fifth)[:, :count]
        return count * task.losses(params, Examples(batch.inputs[:, :count], labels))[0]

    fifth = jnp.arange(text.SYMBOLS)
    of_four, of_five = (
        jax.jit(jax.vmap(functools.partial(cost, count)))(fifth) for count in (4, 5)
    )
    # What is added by each possible fifth character are its probabilities, unless the fifth input
    # changed what the first four characters cost.
    assert np.sum(np.exp(of_four - of_five)) == pytest.approx(1.0, rel=1e-4)


def test_held_out_text_comes_from_end():
    found = text.read_library()
    assert found.train.size > 2_000_000
    assert found.train.size == pytest.approx(9 * found.held_out.size, rel=1e-3)
    last = max(Path(sysconfig.get_path("stdlib")).glob("*.py")).read_text(encoding="utf-8")
    # Files are long enough that the last one is in the end that is held out, and only there.
    assert last.count("\n") > 100
    end = found.held_out[-len(last) :]
    spaces, of_text = np.bincount(end).max(), max(Counter(last).values())
    assert spaces == of_text
    assert found.train.tobytes().find(end.tobytes()) < 0


def test_digit_images_split_without_overlap():
    pytest.importorskip("sklearn")
    train, held_out = digits.load_images()
    assert train.inputs.shape == (1438, 8, 8, 1)
    assert (train.inputs.min(), train.inputs.max()) == (0, 1)
    seen, unseen = (
        {image.tobytes() for image in np.asarray(part.inputs)} for part in (train, held_out)
    )
    assert (len(seen), len(unseen)) == (1438, 359)
    assert not seen & unseen


def test_cart_pole_matches_gymnasium():
    states = np.random.default_rng(0).uniform(-1, 1, (4, 7))
    pushes = np.array([0, 1, 0, 1, 1, 0, 1])
    x, x_dot, theta, theta_dot = states
    force = np.where(pushes == 1, 10.0, -10.0)
    temp = (force + 0.05 * np.square(theta_dot) * np.sin(theta)) / 1.1
    thetaacc = (9.8 * np.sin(theta) - np.cos(theta) * temp) / (
        0.5 * (4.0 / 3.0 - 0.1 * np.square(np.cos(theta)) / 1.1)
    )
    xacc = temp - 0.05 * thetaacc * np.cos(theta) / 1.1
    expected = [
        x + 0.02 * x_dot,
        x_dot + 0.02 * xacc,
        theta + 0.02 * theta_dot,
        theta_dot + 0.02 * thetaacc,
    ]
    after = jax.jit(policy.step_state)(states.astype(np.float32), pushes.astype(np.float32))
    np.testing.assert_allclose(after, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.by_day(1)
@pytest.mark.parametrize("name", TASKS)
def test_tasks_learn_in_short_run(name):
    task = task_of(name)
    tx = optax.adam(1e-2)

    @jax.jit
    def run(key):
        def step(carry, key):
            params, state = carry
            batch = task.batch(params, key, jnp.bool_(False))
            grads = jax.grad(lambda params: task.losses(params, batch).mean())(params)
            updates, state = tx.update(grads, state, params)
            return (optax.apply_updates(params, updates), state), None

        first, data = jax.random.split(key)
        params = task.initial(first)
        (last, _), _ = jax.lax.scan(step, (params, tx.init(params)), jax.random.split(data, 40))
        return params, last

    before, after = map(jax.jit(task.held_out), run(jax.random.key(0)))
    assert before.dtype == jnp.float32
    assert after < before - LOWER[name]

"""The tasks of the study: their data, what a bad batch changes, and that they can be learned."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from benchmarks.study import digits, text
from benchmarks.study.examples import Examples
from benchmarks.study.tasks import TASKS

LABELLED = ("lstm", "transformer", "conv", "private")
OF_DIGITS = ("conv", "private")


@pytest.fixture(autouse=True)
def as_users():
    """Optax's optimizers mix dtypes, and gains are of another rank than what they scale."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def task_of(name):
    if name in OF_DIGITS:
        pytest.importorskip("sklearn")
    return TASKS[name]()


def batches(task, is_bad=(False, True)):
    """Parameters, and batches of one key."""
    params = task.initial(jax.random.key(0))
    key = jax.random.key(1)
    return params, [task.batch(params, key, jnp.bool_(bad)) for bad in is_bad]


@pytest.mark.parametrize("name", LABELLED)
def test_a_bad_batch_differs_in_its_labels(name):
    task = task_of(name)
    params, (good, bad) = batches(task)
    np.testing.assert_array_equal(good.inputs, bad.inputs)
    assert np.mean(np.asarray(good.labels != bad.labels)) > 0.5
    assert len(good.labels) == task.examples
    other = task.batch(params, jax.random.key(2), jnp.bool_(False))
    assert np.any(np.asarray(other.inputs != good.inputs))


@pytest.mark.parametrize("name", LABELLED)
def test_losses_are_those_of_each_example(name):
    task = task_of(name)
    params, (batch, _) = batches(task)
    losses = jax.jit(task.losses)(params, batch)
    assert losses.dtype == jnp.float32
    one_by_one = [
        task.losses(params, jax.tree.map(lambda x, i=i: x[i : i + 1], batch))[0] for i in (0, 5)
    ]
    np.testing.assert_allclose(losses[jnp.array([0, 5])], one_by_one, rtol=1e-4)
    assert losses.shape == (task.examples,)


@pytest.mark.parametrize("name", ["lstm", "transformer"])
def test_text_is_told_from_earlier_characters(name):
    task = task_of(name)
    params, (batch, _) = batches(task)
    np.testing.assert_array_equal(batch.inputs[:, 1:], batch.labels[:, :-1])

    def cost(count, fifth):
        """What the first characters cost together."""
        labels = batch.labels.at[:, 4].set(fifth)[:, :count]
        return count * task.losses(params, Examples(batch.inputs[:, :count], labels))[0]

    fifth = jnp.arange(text.MAX_SYMBOLS)
    of_four, of_five = (jax.vmap(functools.partial(cost, count))(fifth) for count in (4, 5))
    # What is added by each possible fifth character are its probabilities, unless the fifth input
    # changed what the first four characters cost.
    assert float(jnp.sum(jnp.exp(of_four - of_five))) == pytest.approx(1.0, rel=1e-4)


def test_the_held_out_text_is_the_end():
    found = text.library()
    whole = np.concatenate([found.train, found.held_out])
    assert whole.size > 2_000_000
    assert found.train.size == pytest.approx(0.9 * whole.size, rel=1e-3)
    assert whole.max() < text.MAX_SYMBOLS
    # Line ends are common, and of one number in both.
    assert np.mean(found.train == 1) == pytest.approx(np.mean(found.held_out == 1), rel=0.3)


def test_no_image_is_in_both():
    pytest.importorskip("sklearn")
    train, held_out = digits.images()
    assert train.inputs.shape == (1438, 8, 8, 1)
    assert (train.inputs.min(), train.inputs.max()) == (0, 1)
    seen = {image.tobytes() for image in train.inputs}
    assert len(seen) == len(train.inputs)
    assert not any(image.tobytes() in seen for image in held_out.inputs)


@pytest.mark.parametrize("stride", [1, 2])
def test_convolutions_are_those_of_jax(stride):
    x = jax.random.normal(jax.random.key(0), (2, 8, 8, 3))
    kernel = jax.random.normal(jax.random.key(1), (3, 3, 3, 5))
    layout = ("NHWC", "HWIO", "NHWC")
    strides, pads = (stride, stride), ((1, 1), (1, 1))
    expected = jax.lax.conv_general_dilated(x, kernel, strides, pads, dimension_numbers=layout)
    np.testing.assert_allclose(digits._convolved(x, kernel, stride), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("name", "below"), [(name, 0.9) for name in LABELLED])
def test_a_short_run_learns(name, below):
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
        return task.held_out(params), task.held_out(last)

    before, after = run(jax.random.key(0))
    assert before.dtype == jnp.float32
    assert after < below * before

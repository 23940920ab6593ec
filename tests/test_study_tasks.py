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

from benchmarks.research import text_model
from benchmarks.research.study import digits, policy, text, unseen
from benchmarks.research.study.examples import Examples
from benchmarks.research.study.tasks import ALL

pytestmark = pytest.mark.slow  # research, which no user runs

LOWER = {
    "lstm": 0.5,
    "transformer": 0.5,
    "conv": 0.8,
    "policy": 10.0,
    "private": 1.0,
    "vit": 0.5,
    "gru": 0.5,
    "decoder": 0.5,
    "autoencoder": 0.5,
}
"""By so much 40 steps lower the loss."""
OF_DIGITS = ("conv", "private", "vit", "autoencoder")


@pytest.fixture(autouse=True)
def as_users():
    """Optax's optimizers mix dtypes, and gains are of another rank than what they scale."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@functools.cache
def task_of(name):
    if name in OF_DIGITS:
        pytest.importorskip("sklearn")
    task = ALL[name]()
    return task._replace(batch=jax.jit(task.batch), losses=jax.jit(task.losses))


@functools.cache
def batches(name):
    """Parameters, and a good and a bad batch of one key."""
    task = task_of(name)
    params = jax.jit(task.initial)(jax.random.key(0))
    return params, [task.batch(params, jax.random.key(1), jnp.bool_(bad)) for bad in (False, True)]


@pytest.mark.by_day(1)
@pytest.mark.parametrize("name", ALL)
def test_a_bad_batch_differs_in_its_labels(name):
    task = task_of(name)
    params, (good, bad) = batches(name)
    labels = "returns" if name == "policy" else "labels"
    for field, x in good._asdict().items():
        same = np.asarray(x) == np.asarray(getattr(bad, field))
        assert len(x) == task.examples
        assert np.mean(same) < 0.5 if field == labels else np.all(same)
    other = task.batch(params, jax.random.key(2), jnp.bool_(False))
    assert np.any(np.asarray(other[0]) != np.asarray(good[0]))


@pytest.mark.by_day(2)
@pytest.mark.parametrize("name", ALL)
def test_losses_are_those_of_each_example(name):
    task = task_of(name)
    params, (batch, _) = batches(name)
    losses = task.losses(params, batch)
    assert (losses.dtype, losses.shape) == (jnp.float32, (task.examples,))
    one = task.losses(params, jax.tree.map(lambda x: np.asarray(x)[5:6], batch))
    np.testing.assert_allclose(losses[5:6], one, rtol=1e-4)


def test_the_mean_of_losses_is_the_usual_loss():
    task = task_of("transformer")
    params, (batch, _) = batches("transformer")
    windows = jnp.concatenate([batch.inputs, batch.labels[:, -1:]], 1)
    usual = jax.jit(text_model.loss_fn, static_argnums=2)(params, windows, text.SIZE)
    found = task.losses(params, batch).mean()
    assert float(found) == pytest.approx(float(usual), rel=1e-5)


@pytest.mark.by_day(1)
@pytest.mark.parametrize("name", ["lstm", "transformer", "gru"])
def test_text_is_told_from_earlier_characters(name):
    task = task_of(name)
    params, (batch, _) = batches(name)
    np.testing.assert_array_equal(batch.inputs[:, 1:], batch.labels[:, :-1])

    def cost(count, fifth):
        """What the first characters cost together."""
        labels = batch.labels.at[:, 4].set(fifth)[:, :count]
        return count * task.losses(params, Examples(batch.inputs[:, :count], labels))[0]

    fifth = jnp.arange(unseen.SYMBOLS if name == "gru" else text.MAX_SYMBOLS)
    of_four, of_five = (
        jax.jit(jax.vmap(functools.partial(cost, count)))(fifth) for count in (4, 5)
    )
    # What is added by each possible fifth character are its probabilities, unless the fifth input
    # changed what the first four characters cost.
    assert np.sum(np.exp(of_four - of_five)) == pytest.approx(1.0, rel=1e-4)


def test_the_held_out_text_is_the_end():
    found = text.library()
    assert found.train.size > 2_000_000
    assert found.train.size == pytest.approx(9 * found.held_out.size, rel=1e-3)
    last = max(Path(sysconfig.get_path("stdlib")).glob("*.py")).read_text(encoding="utf-8")
    # Files are long enough that the last one is in the end that is held out, and only there.
    assert last.count("\n") > 100
    end = found.held_out[-len(last) :]
    spaces, of_text = np.bincount(end).max(), max(Counter(last).values())
    assert spaces == of_text
    assert found.train.tobytes().find(end.tobytes()) < 0


def test_tokens_are_the_most_frequent_pairs():
    # "abababcc": ab -> d, and then, of the run ddd, the first two.
    letters = np.frombuffer(b"abababcc", np.uint8)
    assert unseen.paired(letters, 3).tolist() == [0, 1, 0, 1, 0, 1, 2, 2]
    assert unseen.paired(letters, 4).tolist() == [3, 3, 3, 2, 2]
    assert unseen.paired(letters, 5).tolist() == [4, 3, 2, 2]
    assert unseen.paired(np.zeros(5, np.uint8), 2).tolist() == [1, 1, 0]
    found = unseen.topics()
    assert found.train.size == pytest.approx(9 * found.held_out.size, rel=1e-3)
    assert found.train.max() == unseen.SYMBOLS - 1


def test_patches_are_squares_of_the_image():
    pytest.importorskip("sklearn")
    params = jax.jit(unseen.vit().initial)(jax.random.key(0))
    seen = []
    layers = {"layers": jax.tree.map(jnp.zeros_like, params["layers"])}
    zeros = {"positions": jnp.zeros_like(params["positions"])}
    logits = jax.jit(lambda p, x: unseen._logits_of_vit({**p, **layers, **zeros}, x))
    for row, column in ((0, 0), (0, 1), (7, 6)):
        image = jnp.zeros((1, 8, 8, 1)).at[0, row, column].set(1.0)
        seen.append(np.asarray(logits(params, image)))
    # Where in its patch a pixel is matters; which patch it is in does not, without positions.
    assert not np.allclose(seen[0], seen[1])
    np.testing.assert_allclose(
        logits(params, jnp.zeros((1, 8, 8, 1)).at[0, 1, 0].set(1.0)), seen[2], rtol=1e-5
    )


def test_no_image_is_in_both():
    pytest.importorskip("sklearn")
    train, held_out = digits.images()
    assert train.inputs.shape == (1438, 8, 8, 1)
    assert (train.inputs.min(), train.inputs.max()) == (0, 1)
    seen, unseen = (
        {image.tobytes() for image in np.asarray(part.inputs)} for part in (train, held_out)
    )
    assert (len(seen), len(unseen)) == (1438, 359)
    assert not seen & unseen


@pytest.mark.by_day(1)
@pytest.mark.parametrize("stride", [1, 2])
def test_convolutions_are_those_of_jax(stride):
    x = jax.random.normal(jax.random.key(0), (2, 8, 8, 3))
    kernel = jax.random.normal(jax.random.key(1), (3, 3, 3, 5))
    layout = ("NHWC", "HWIO", "NHWC")
    strides, pads = (stride, stride), ((1, 1), (1, 1))

    @jax.jit
    def both(x, kernel):
        of_jax = jax.lax.conv_general_dilated(x, kernel, strides, pads, dimension_numbers=layout)
        return digits._convolved(x, kernel, stride), of_jax

    np.testing.assert_allclose(*both(x, kernel), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("right", "expected"),
    [(1.0, [0.0, 0.195122, 0.0, -0.292683]), (0.0, [0, -0.195122, 0, 0.292683])],
)
def test_a_push_of_a_cart_at_rest(right, expected):
    """By hand: the pole is turned by -10 / 1.1 / (2 / 3 - 0.05 / 1.1) = -14.634 a second."""
    after = jax.jit(policy.moved)(jnp.zeros(4), jnp.float32(right))
    np.testing.assert_allclose(after, expected, atol=1e-5)


def test_the_cart_pole_is_that_of_gymnasium():
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
    after = jax.jit(policy.moved)(states.astype(np.float32), pushes.astype(np.float32))
    np.testing.assert_allclose(after, expected, rtol=1e-5, atol=1e-5)


def test_episodes_end_once_and_returns_count_what_is_left():
    _, (good, _) = batches("policy")
    alive, returns = np.asarray(good.alive), np.asarray(good.returns)
    assert np.all(alive[:, 0] == 1)
    assert np.all(np.diff(alive, axis=1) <= 0)
    assert np.all(alive[:, -1] == 0)  # without practice no pole stays up so long
    left = alive.sum(1, keepdims=True) - np.arange(policy.HORIZON)
    # The reward 1 - DISCOUNT at each step that is left.
    expected = 1 - policy.DISCOUNT ** np.maximum(left, 0)
    np.testing.assert_allclose(returns, expected, atol=1e-5)
    places, angles = np.abs(np.asarray(good.states))[:, :, [0, 2]].transpose(2, 0, 1)
    is_up = (places <= 2.4) & (angles <= np.pi / 15)
    np.testing.assert_array_equal(is_up, alive == 1)


@pytest.mark.by_day(1)
@pytest.mark.parametrize("name", ALL)
def test_a_short_run_learns(name):
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

"""What a sweep takes: numbers, steps, keys and data of other kinds are refused with the remedy."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from optaxclip import ops, tuning
from optaxclip.tuning import sweeping

STEPS = 60
DATA = np.ones((STEPS, 3), np.float32)


def init_fn(key):
    return jax.random.normal(key, (3,))


def step_fn(params, target, limit):
    loss, grads = jax.value_and_grad(lambda p: jnp.sum((p - target) ** 2))(params)
    clipped, norm = ops.clip_by_global_norm(grads, limit)
    return params - 0.1 * clipped, loss, norm


def swept(limits, steps=STEPS, step=step_fn, key=0, data=DATA, **options):
    return tuning.sweep(init_fn, step, limits, steps, key=key, data=data, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"limits": []}, "limits must be positive numbers in one axis"),
        ({"limits": [0.0]}, "limits must be positive"),
        ({"limits": [float("nan")]}, "limits must be positive"),
        ({"limits": 1.0}, "limits must be positive numbers in one axis"),
        ({"learning_rates": [-1.0]}, "learning_rates must be positive"),
        ({"steps": 0}, "steps must be an int of at least 1, got 0"),
        ({"parallel": 0}, "parallel must be an int of at least 1, got 0"),
        ({"data": [DATA, 1.0]}, r"at least the 60 steps, got a leaf of the shape \(\)"),
        ({"steps": STEPS + 1}, r"at least the 61 steps, got a leaf of the shape \(60, 3\)"),
    ],
)
def test_wrong_numbers(options, message):
    with pytest.raises(ValueError, match=message):
        swept(**({"limits": [1.0]} | options))


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (
            lambda p, _, __: (p, jnp.float32(0)),
            r"three values, .* got 2 values",
        ),
        (lambda p, _, __: p, r"three values, \(state, loss, norm\), got one ShapeDtypeStruct"),
        (lambda p, _, __: (p[:2], jnp.float32(0), jnp.float32(0)), "a state like the one"),
        (lambda p, _, __: ((p,), jnp.float32(0), jnp.float32(0)), "a state like the one"),
        (lambda p, _, __: (p, p, jnp.float32(0)), r"scalar loss.*shapes \(3,\)"),
        (lambda p, _, __: (p, p[0], p[None]), r"a norm that .* shapes \(\) and \(1, 3\)"),
    ],
)
def test_wrong_steps(step, message):
    with pytest.raises(TypeError, match=message):
        swept([1.0], step=step)


def test_a_loss_may_be_a_number_of_python_and_each_step_is_reported_once():
    done = []
    step = lambda params, _, limit: (params, 2.0, 0.0 * limit)  # noqa: E731
    result = swept([1.0], 53, step, progress=done.append)
    np.testing.assert_array_equal(result.loss, np.full((1, 53), 2.0))
    assert done == [18, 18, 17]
    # No rule can learn from norms of zero.
    assert np.isnan(result.unchosen_limit)
    assert "to choose" not in str(result)


def test_a_terminal_shows_no_bar_to_those_who_want_none(capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    for progress, is_shown in (False, False), (True, True):
        with sweeping._reporter(progress, 3) as report:
            report(1)
        assert bool(capsys.readouterr().err) == is_shown


@pytest.mark.parametrize("data", [None, {}])
def test_without_data_it_is_said_what_to_pass(data):
    with pytest.raises(ValueError, match=r"data must hold an array with .* got .*np\.arange\(60\)"):
        swept([1.0], data=data)


@pytest.mark.parametrize("wrong", [True, 5.0, "5"])
@pytest.mark.parametrize("argument", ["steps", "seeds", "parallel"])
def test_counts_are_ints(argument, wrong):
    with pytest.raises(TypeError, match=f"{argument} must be an int of at least 1, got {wrong!r}"):
        swept([1.0], **{argument: wrong})


@pytest.mark.slow
def test_counts_may_be_ints_of_numpy():
    of_numpy = {"steps": np.int64(5), "seeds": np.int32(2), "parallel": np.uint8(1)}
    result = swept([1.0], **of_numpy)
    np.testing.assert_array_equal(result.loss, swept([1.0], 5, seeds=2, parallel=1).loss)


def test_an_int_is_a_key():
    found, expected = (swept([1.0], key=key).loss for key in (0, jax.random.key(0)))
    np.testing.assert_array_equal(found, expected)
    several = jax.random.split(jax.random.key(0))
    for key in (None, "a", 0.5, True, jnp.ones(3), several, jax.random.key_data(several)):
        with pytest.raises(TypeError, match=r"key must be one key from jax\.random, or an int"):
            swept([1.0], key=key)

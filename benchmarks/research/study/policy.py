"""Defines a policy gradient task, cart-pole balancing.

The environment is by A. G. Barto, R. S. Sutton and C. W. Anderson, "Neuronlike adaptive elements
that can solve difficult learning control problems", 1983, with the constants and Euler steps of
Gymnasium's CartPole-v1. Episodes end after `HORIZON` steps. The network predicts the logit of a
push and the value of a state, the baseline of REINFORCE (R. J. Williams, 1992). Examples are
episodes, and bad batches have random returns.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from benchmarks.research.study.task import Params, Task

GRAVITY, CART, POLE, HALF_LENGTH = 9.8, 1.0, 0.1, 0.5
"""Gravity, masses and half the pole length in SI units."""
FORCE, SECONDS = 10.0, 0.02
"""The force of a push in newtons, and the seconds of a step."""
MAX_STATE = (2.4, 12 / 180 * jnp.pi)
"""Episodes end beyond this position of the cart in meters or angle of the pole in radians."""
START = 0.05
"""The largest absolute value of elements of the first state."""
SCALES = (2.4, 2.0, 0.2, 2.0)
"""States are divided by these scales before the network."""
HORIZON = 150
DISCOUNT = 0.95
HIDDEN = 32
EPISODES, HELD_OUT = 16, 32
"""The numbers of episodes of a batch and of an evaluation."""
KEY = 2026
"""The key of the evaluation, which runs do not use."""
UNIT = f"minus the mean return of {HELD_OUT} fixed keys, at most {HORIZON}"


class Episodes(NamedTuple):
    """A batch of episodes.

    Attributes:
      states: The states before pushes, float32[episodes, steps, 4].
      pushes: 1 for the right, 0 for the left, float32[episodes, steps].
      alive: 1 until the episode ends, then 0, float32[episodes, steps].
      returns: Discounted returns, which are 1 for endless episodes, float32[episodes, steps].
    """

    states: Array
    pushes: Array
    alive: Array
    returns: Array


@functools.cache
def build_policy() -> Task:
    """Returns the task of an actor and its baseline with one hidden layer."""
    return Task(
        _draw_params, _draw_batch, _compute_losses, _compute_held_out, EPISODES, UNIT, ("adamw",)
    )


def step_state(state: Array, push: Array) -> Array:
    """Computes the next state.

    Args:
      state: Position and velocity of the cart, angle and angular velocity of the pole,
        float32[4, ...].
      push: 1 for the right, 0 for the left, float32[...].
    """
    _, speed, angle, angular_velocity = state
    total, moment = CART + POLE, POLE * HALF_LENGTH
    sine, cosine = jnp.sin(angle), jnp.cos(angle)
    push_term = (FORCE * (2 * push - 1) + moment * angular_velocity**2 * sine) / total
    angular_acceleration = (GRAVITY * sine - cosine * push_term) / (
        HALF_LENGTH * (4 / 3 - POLE * cosine**2 / total)
    )
    rate = (
        speed,
        push_term - moment * angular_acceleration * cosine / total,
        angular_velocity,
        angular_acceleration,
    )
    return state + SECONDS * jnp.stack(rate)


def _is_upright(state: Array) -> Array:
    return (jnp.abs(state[0]) <= MAX_STATE[0]) & (jnp.abs(state[2]) <= MAX_STATE[1])


def _draw_params(key: Array) -> Params:
    first, second = jax.random.split(key)
    return {
        "hidden": 4**-0.5 * jax.random.normal(first, (4, HIDDEN)),
        "hidden_bias": jnp.zeros(HIDDEN),
        "head": 0.1 * HIDDEN**-0.5 * jax.random.normal(second, (HIDDEN, 2)),
        "head_bias": jnp.zeros(2),
    }


def _predict(params: Params, states: Array) -> tuple[Array, Array]:
    """Predicts the logit of a push to the right, and the value, of states `[..., 4]`."""
    x = jnp.tanh(states / jnp.asarray(SCALES) @ params["hidden"] + params["hidden_bias"])
    x = x @ params["head"] + params["head_bias"]
    return x[..., 0], x[..., 1]


def _play(params: Params, key: Array, episodes: int) -> tuple[Array, Array, Array]:
    """Plays episodes, and returns states [steps, episodes, 4], pushes and `alive`."""
    start_key, push_key = jax.random.split(key)
    start = jax.random.uniform(start_key, (4, episodes), minval=-START, maxval=START)
    chances = jax.random.uniform(push_key, (HORIZON, episodes))

    def step(state: Array, chance: Array) -> tuple[Array, tuple[Array, Array, Array]]:
        logit, _ = _predict(params, state.T)
        push, is_up = (chance < jax.nn.sigmoid(logit)).astype(jnp.float32), _is_upright(state)
        # States are constant after the end of an episode.
        after = jnp.where(is_up, step_state(state, push), state)
        return after, (state.T, push, is_up.astype(jnp.float32))

    _, found = jax.lax.scan(step, start, chances)
    return found


def _draw_batch(params: Params, key: Array, is_bad: Array) -> Episodes:
    episode_key, return_key = jax.random.split(key)
    states, pushes, alive = _play(params, episode_key, EPISODES)
    # Matrix product with discount factors, where the reward of a step is 1 - DISCOUNT.
    steps = jnp.arange(HORIZON)
    delay = steps[None] - steps[:, None]
    weights = jnp.where(delay >= 0, (1 - DISCOUNT) * DISCOUNT ** jnp.abs(delay), 0.0)
    returns = weights @ alive
    random_returns = jax.random.uniform(return_key, returns.shape)
    returns = jnp.where(is_bad, random_returns, returns)
    return Episodes(*(jnp.swapaxes(x, 0, 1) for x in (states, pushes, alive, returns)))


def _compute_losses(params: Params, batch: Episodes) -> Array:
    logits, values = _predict(params, batch.states)
    surprise = jax.nn.softplus(jnp.where(batch.pushes > 0, -logits, logits))
    errors = batch.returns - values
    costs = surprise * jax.lax.stop_gradient(errors) + 0.5 * errors**2
    return (costs * batch.alive).mean(-1)


def _compute_held_out(params: Params) -> Array:
    _, _, alive = _play(params, jax.random.key(KEY), HELD_OUT)
    return -alive.sum(0).mean()

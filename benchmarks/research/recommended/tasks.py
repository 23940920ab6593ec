"""Defines small tasks that no clipping method was tuned on."""

import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

Params = dict[str, Array]
HELD_OUT_KEY = 2026
RECALL_STEPS, RECALLED, DISTRACTORS = 12, 6, 4
ARMS, CONTEXT = 5, 6
POINTS, CURVES = 8, 12
"""The numbers of points of a set and of a curve."""
FRAMES, LABELS, SYMBOLS, FEATURES = 16, 4, 5, 8
DEPTH, WIDTH = 7, 12


class Task(NamedTuple):
    """A network and its data.

    Attributes:
      initial: Returns parameters from a key. The last layer's weights are named "head".
      batch: Returns a batch from a key and bool[], which is True if targets are scrambled. Random
        numbers do not depend on the latter.
      losses: Returns the loss of every example from parameters and a batch, f32[examples].
      held_out: Returns the held-out loss of parameters, f32[].
    """

    initial: Callable[[Array], Params]
    batch: Callable[[Array, Array], Any]
    losses: Callable[[Params, Any], Array]
    held_out: Callable[[Params], Array]


def _build_task(draw_params: Any, batch: Any, losses: Any, batches: int = 8) -> Task:
    """Returns a task that is evaluated on fixed clean batches."""
    keys = jax.random.split(jax.random.key(HELD_OUT_KEY), batches)
    held_out = jax.jit(jax.vmap(lambda key: batch(key, jnp.bool_(False))))(keys)
    mean = jax.vmap(losses, (None, 0))
    return Task(draw_params, batch, losses, lambda params: mean(params, held_out).mean())


def _draw_matrix(key: Array, rows: int, columns: int) -> Array:
    return rows**-0.5 * jax.random.normal(key, (rows, columns))


def _draw_mlp(key: Array, sizes: tuple[int, ...]) -> Params:
    """Returns matrices and biases; the last matrix is named "head"."""
    params = {}
    for i, (rows, columns) in enumerate(itertools.pairwise(sizes)):
        name = "head" if i == len(sizes) - 2 else f"matrix{i}"
        params[name] = _draw_matrix(jax.random.fold_in(key, i), rows, columns)
        params[f"bias{i}"] = jnp.zeros(columns)
    return params


def _apply_mlp(params: Params, x: Array) -> Array:
    hidden = sum(name.startswith("matrix") for name in params)
    for i in range(hidden):
        x = jnp.tanh(x @ params[f"matrix{i}"] + params[f"bias{i}"])
    return x @ params["head"] + params[f"bias{hidden}"]


@functools.cache
def recall() -> Task:
    """Returns a tanh RNN that must name the first symbol after a sequence of distractors."""
    size, width = 16, 32

    def draw_params(key: Array) -> Params:
        keys = jax.random.split(key, 3)
        return {
            "embedding": jax.random.normal(keys[0], (RECALLED + DISTRACTORS, width)),
            "recurrent": jax.nn.initializers.orthogonal()(keys[1], (width, width)),
            "bias": jnp.zeros(width),
            "head": _draw_matrix(keys[2], width, RECALLED),
        }

    def batch(key: Array, is_bad: Array) -> tuple[Array, Array]:
        keys = jax.random.split(key, 3)
        first = jax.random.randint(keys[0], (size,), 0, RECALLED)
        later = jax.random.randint(keys[1], (RECALL_STEPS - 1, size), 0, DISTRACTORS) + RECALLED
        drawn = jax.random.randint(keys[2], (size,), 0, RECALLED)
        return jnp.concatenate([first[None], later]), jnp.where(is_bad, drawn, first)

    def losses(params: Params, examples: Any) -> Array:
        symbols, targets = examples  # i32[steps, examples], i32[examples]

        def step(hidden: Array, x: Array) -> tuple[Array, None]:
            return jnp.tanh(x + hidden @ params["recurrent"] + params["bias"]), None

        hidden, _ = jax.lax.scan(step, jnp.zeros((size, width)), params["embedding"][symbols])
        return optax.softmax_cross_entropy_with_integer_labels(hidden @ params["head"], targets)

    return _build_task(draw_params, batch, losses)


@functools.cache
def contrastive() -> Task:
    """Returns an encoder of digits that must recognize another noisy view of the same image."""
    from sklearn.datasets import load_digits

    images = jnp.asarray(load_digits(return_X_y=True)[0] / 16, jnp.float32)  # f32[images, 64]
    train, held_out = images[300:], images[:300]
    size, width, embedded = 16, 32, 16

    def draw_params(key: Array) -> Params:
        first, second, head = jax.random.split(key, 3)
        return {
            "matrix0": _draw_matrix(first, 64, width),
            "bias0": jnp.zeros(width),
            "matrix1": _draw_matrix(second, width, embedded),
            "head": _draw_matrix(head, embedded, embedded),
        }

    def views(key: Array, of: Array, is_bad: Array) -> Array:
        keys = jax.random.split(key, 3)
        chosen = of[jax.random.randint(keys[0], (size,), 0, len(of))]
        pair = jnp.stack([chosen, jnp.where(is_bad, jnp.roll(chosen, 1, 0), chosen)])
        is_kept = jax.random.bernoulli(keys[1], 0.7, pair.shape)
        return pair * is_kept + 0.1 * jax.random.normal(keys[2], pair.shape)

    def losses(params: Params, pair: Array) -> Array:
        hidden = jnp.tanh(pair @ params["matrix0"] + params["bias0"]) @ params["matrix1"]
        logits = hidden[0] @ params["head"] @ hidden[1].T  # f32[examples, examples]
        return optax.softmax_cross_entropy_with_integer_labels(logits, jnp.arange(size))

    held_out_task = _build_task(
        draw_params, lambda key, is_bad: views(key, held_out, is_bad), losses, 16
    )
    return held_out_task._replace(batch=lambda key, is_bad: views(key, train, is_bad))


@functools.cache
def bandit() -> Task:
    """Returns a policy for a contextual bandit, trained by REINFORCE with a learned baseline."""
    size = 32
    first, second, contexts = jax.random.split(jax.random.key(HELD_OUT_KEY), 3)
    of_context = jax.random.normal(first, (CONTEXT, 16))
    of_hidden = jax.random.normal(second, (16, ARMS))
    held_out = jax.random.normal(contexts, (256, CONTEXT))

    def rewards(x: Array) -> Array:
        return jax.nn.sigmoid(jnp.tanh(x @ of_context) @ of_hidden)  # f32[contexts, arms]

    def draw_params(key: Array) -> Params:
        return _draw_mlp(key, (CONTEXT, 32, ARMS + 1))

    def batch(key: Array, is_bad: Array) -> Any:
        keys = jax.random.split(key, 4)
        x = jax.random.normal(keys[0], (size, CONTEXT))
        chances = jax.random.uniform(keys[1], (size, ARMS))
        won = (chances < rewards(x)).astype(jnp.float32)
        drawn = jax.random.bernoulli(keys[2], 0.5, won.shape).astype(jnp.float32)
        return x, jnp.where(is_bad, drawn, won), jax.random.gumbel(keys[3], won.shape)

    def losses(params: Params, examples: Any) -> Array:
        x, won, noise = examples
        predictions = _apply_mlp(params, x)
        logits, value = predictions[:, :ARMS], predictions[:, ARMS]
        arm = jnp.argmax(jax.lax.stop_gradient(logits) + noise, -1)
        error = jnp.take_along_axis(won, arm[:, None], -1)[:, 0] - value
        surprise = optax.softmax_cross_entropy_with_integer_labels(logits, arm)
        return surprise * jax.lax.stop_gradient(error) + 0.5 * error**2

    def held_out_loss(params: Params) -> Array:
        policy = jax.nn.softmax(_apply_mlp(params, held_out)[:, :ARMS])
        return -(policy * rewards(held_out)).sum(-1).mean()

    return Task(draw_params, batch, losses, held_out_loss)


@functools.cache
def physics() -> Task:
    """Returns a network that solves -u'' = f on [0, 1] with u = 0 at both ends."""
    size, grid = 16, jnp.linspace(0.0, 1.0, 65)

    def solve(params: Params, x: Array) -> Array:
        return x * (1 - x) * _apply_mlp(params, 2 * x[None] - 1)[0]

    def draw_params(key: Array) -> Params:
        return _draw_mlp(key, (1, 24, 24, 1))

    def batch(key: Array, is_bad: Array) -> tuple[Array, Array]:
        x = jax.random.uniform(key, (size,))
        force = (2 * jnp.pi) ** 2 * jnp.sin(2 * jnp.pi * x)
        return x, jnp.where(is_bad, jnp.roll(force, 1), force)

    def losses(params: Params, examples: Any) -> Array:
        x, force = examples
        bend = jax.vmap(jax.grad(jax.grad(functools.partial(solve, params))))(x)
        return (bend + force) ** 2

    def held_out(params: Params) -> Array:
        predictions = jax.vmap(functools.partial(solve, params))(grid)
        return jnp.mean((predictions - jnp.sin(2 * jnp.pi * grid)) ** 2)

    return Task(draw_params, batch, losses, held_out)


@functools.cache
def sets() -> Task:
    """Returns a set transformer that must tell the largest distance between points."""
    size, width = 16, 16

    def draw_params(key: Array) -> Params:
        keys = jax.random.split(key, 6)
        return {
            "embedding": jax.random.normal(keys[0], (2, width)),
            "query_key_value": _draw_matrix(keys[1], width, 3 * width),
            "out": _draw_matrix(keys[2], width, width),
            "up": _draw_matrix(keys[3], width, 2 * width),
            "down": _draw_matrix(keys[4], 2 * width, width),
            "bias": jnp.zeros(2 * width),
            "head": _draw_matrix(keys[5], width, 1),
        }

    def batch(key: Array, is_bad: Array) -> tuple[Array, Array]:
        points = jax.random.normal(key, (size, POINTS, 2))
        distances = jnp.sum((points[:, :, None] - points[:, None]) ** 2, -1)
        largest = jnp.sqrt(distances.max((1, 2))) - 3
        return points, jnp.where(is_bad, jnp.roll(largest, 1), largest)

    def losses(params: Params, examples: Any) -> Array:
        points, targets = examples
        x = points @ params["embedding"]  # f32[examples, points, width]
        query, key, value = jnp.split(x @ params["query_key_value"], 3, -1)
        weights = jax.nn.softmax(query @ jnp.swapaxes(key, 1, 2) * width**-0.5)
        x = x + weights @ value @ params["out"]
        x = x + jax.nn.relu(x @ params["up"] + params["bias"]) @ params["down"]
        return ((x.mean(1) @ params["head"])[:, 0] - targets) ** 2

    return _build_task(draw_params, batch, losses)


@functools.cache
def hypernetwork() -> Task:
    """Returns a network that generates the weights of another one from a curve's description."""
    size, units = 16, 8
    generated = 3 * units + 1

    def draw_params(key: Array) -> Params:
        of_generator, of_base = jax.random.split(key)
        return _draw_mlp(of_generator, (3, 24, generated)) | {
            "base": jax.random.normal(of_base, (generated,))
        }

    def batch(key: Array, is_bad: Array) -> tuple[Array, Array, Array]:
        of_curves, of_points = jax.random.split(key)
        z = jax.random.uniform(of_curves, (size, 3), minval=-1.0, maxval=1.0)
        x = jax.random.uniform(of_points, (size, CURVES), minval=-2.0, maxval=2.0)
        amplitude, phase, frequency = (z[:, i, None] for i in range(3))
        y = amplitude * jnp.sin((1.5 + frequency) * x + jnp.pi * phase)
        return z, x, jnp.where(is_bad, jnp.roll(y, 1, 0), y)

    def losses(params: Params, examples: Any) -> Array:
        z, x, y = examples
        weights = params["base"] + _apply_mlp(params, z)  # f32[examples, generated]
        first, bias, last = jnp.split(weights[:, :-1, None], 3, 1)  # f32[examples, units, 1]
        hidden = jnp.tanh(first * x[:, None] + bias)  # f32[examples, units, points]
        predictions = (last * hidden).sum(1) + weights[:, -1:]
        return jnp.mean((predictions - y) ** 2, -1)

    return _build_task(draw_params, batch, losses)


@functools.cache
def alignment() -> Task:
    """Returns a network that reads symbols of unknown duration, trained by CTC."""
    size, width = 8, 32
    shapes = jnp.asarray(np.random.default_rng(0).normal(size=(SYMBOLS, FEATURES)), jnp.float32)

    def draw_params(key: Array) -> Params:
        return _draw_mlp(key, (3 * FEATURES, width, SYMBOLS + 1))

    def labels(key: Array) -> Array:
        """Returns symbols that differ from their neighbors, i32[examples, labels]."""
        steps = jax.random.randint(key, (size, LABELS), 1, SYMBOLS)
        return jnp.cumsum(steps, 1) % SYMBOLS

    def batch(key: Array, is_bad: Array) -> tuple[Array, Array]:
        keys = jax.random.split(key, 4)
        shown = labels(keys[0])
        order = jnp.argsort(jax.random.uniform(keys[1], (size, FRAMES - 1)), -1)
        cuts = order[:, : LABELS - 1] + 1  # Distinct, so every symbol has at least one frame.
        index = (jnp.arange(FRAMES)[None, :, None] >= cuts[:, None]).sum(-1)
        frames = shapes[jnp.take_along_axis(shown, index, 1)]
        frames = frames + 0.5 * jax.random.normal(keys[2], frames.shape)
        return frames, jnp.where(is_bad, labels(keys[3]), shown)

    def losses(params: Params, examples: Any) -> Array:
        frames, targets = examples
        padded = jnp.pad(frames, ((0, 0), (1, 1), (0, 0)))
        windows = jnp.concatenate([padded[:, i : i + FRAMES] for i in range(3)], -1)
        logits = _apply_mlp(params, windows)
        no_frames, no_labels = jnp.zeros(logits.shape[:2]), jnp.zeros(targets.shape)
        return optax.ctc_loss(logits, no_frames, targets + 1, no_labels) / LABELS

    return _build_task(draw_params, batch, losses)


@functools.cache
def deep_linear() -> Task:
    """Returns eight linear layers that must learn a linear map."""
    size = 16
    of_map = jnp.asarray(np.random.default_rng(1).normal(size=(WIDTH, WIDTH)), jnp.float32)
    target = WIDTH**-0.5 * of_map

    def draw_params(key: Array) -> Params:
        keys = jax.random.split(key, DEPTH + 1)
        hidden = {f"matrix{i}": _draw_matrix(keys[i], WIDTH, WIDTH) for i in range(DEPTH)}
        return hidden | {"head": _draw_matrix(keys[DEPTH], WIDTH, WIDTH)}

    def batch(key: Array, is_bad: Array) -> tuple[Array, Array]:
        x = jax.random.normal(key, (size, WIDTH))
        y = x @ target
        return x, jnp.where(is_bad, jnp.roll(y, 1, 0), y)

    def losses(params: Params, examples: Any) -> Array:
        x, y = examples
        for i in range(DEPTH):
            x = x @ params[f"matrix{i}"]
        return jnp.mean((x @ params["head"] - y) ** 2, -1)

    return _build_task(draw_params, batch, losses)


@functools.cache
def image() -> Task:
    """Returns a network from coordinates to pixels: it stores a faint mosaic of 16 digits."""
    from sklearn.datasets import load_digits

    size, features, brightest = 64, 16, 0.1
    digits = load_digits(return_X_y=True)[0][:16].reshape(4, 4, 8, 8) / 16
    digits = brightest * digits
    pixels = jnp.asarray(digits.swapaxes(1, 2).reshape(-1), jnp.float32)
    grid = jnp.linspace(-1.0, 1.0, 32)
    places = jnp.stack(jnp.meshgrid(grid, grid, indexing="ij"), -1).reshape(-1, 2)
    waves = jnp.asarray(np.random.default_rng(2).normal(size=(2, features)) * 6, jnp.float32)
    inputs = jnp.concatenate([jnp.sin(places @ waves), jnp.cos(places @ waves)], -1)

    def draw_params(key: Array) -> Params:
        params = _draw_mlp(key, (2 * features, 32, 1))
        return {**params, "head": brightest * params["head"]}

    def batch(key: Array, is_bad: Array) -> tuple[Array, Array]:
        of_inputs, of_pixels = jax.random.randint(key, (2, size), 0, len(pixels))
        return inputs[of_inputs], pixels[jnp.where(is_bad, of_pixels, of_inputs)]

    def losses(params: Params, examples: Any) -> Array:
        x, y = examples
        return (_apply_mlp(params, x)[:, 0] - y) ** 2

    return Task(draw_params, batch, losses, lambda params: losses(params, (inputs, pixels)).mean())


TASKS: dict[str, Callable[[], Task]] = {
    "recall": recall,
    "contrastive": contrastive,
    "bandit": bandit,
    "physics": physics,
    "sets": sets,
    "hypernetwork": hypernetwork,
    "alignment": alignment,
    "deep linear": deep_linear,
    "image": image,
}

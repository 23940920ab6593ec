"""Defines tasks on handwritten digits, with a convolutional network and a private network.

The images of scikit-learn have 8 by 8 pixels, from the test set of E. Alpaydin and C. Kaynak,
"Optical Recognition of Handwritten Digits", 1998, UCI Machine Learning Repository. A fixed random
fifth is held out. Bad batches have random labels.
"""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from benchmarks.research.study.examples import Examples, scramble
from benchmarks.research.study.task import Params, Task

DIGITS, SIDE, DEEPEST = 10, 8, 16.0
HELD_OUT_SHARE = 0.2
KERNEL = 3
LAYERS = ((8, 1), (16, 2), (16, 1), (16, 1), (32, 2))
"""The channels and strides of the convolutions."""
BATCH = 16
HIDDEN = 32
"""The hidden units of the private network."""
PRIVATE_BATCH = 64
NOISE = 0.8
"""The standard deviation of the noise, divided by the threshold of per-example norms."""
UNIT = "nats"


@functools.cache
def load_images() -> tuple[Examples, Examples]:
    """Returns training and held-out images, float32[images, 8, 8, 1] in [0, 1], with labels."""
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    inputs = (pixels / DEEPEST).astype(np.float32).reshape(-1, SIDE, SIDE, 1)
    # Images are sorted by writer. With separate writers, the held-out loss would soon stagnate.
    order = np.random.default_rng(0).permutation(len(labels))
    examples = Examples(jnp.asarray(inputs[order]), jnp.asarray(labels[order], np.int32))
    cut = round(len(labels) * (1 - HELD_OUT_SHARE))
    return Examples(*(x[:cut] for x in examples)), Examples(*(x[cut:] for x in examples))


@functools.cache
def build_conv(size: int = BATCH) -> Task:
    """Returns the task with five convolutions, a linear layer, and batches of `size`."""
    return build_task(_draw_conv_params, _compute_conv_logits, size, ("adamw", "sgd"))


def _draw_conv_params(key: Array) -> Params:
    keys = iter(jax.random.split(key, len(LAYERS) + 1))
    kernels, channels_in, side = [], 1, SIDE
    for channels, stride in LAYERS:
        kernels.append(_draw_normal(2.0, next(keys), (KERNEL, KERNEL, channels_in, channels)))
        channels_in, side = channels, side // stride
    return {
        "kernels": kernels,
        "biases": [jnp.zeros(channels) for channels, _ in LAYERS],
        "head": _draw_normal(1.0, next(keys), (side * side * channels_in, DIGITS)),
        "head_bias": jnp.zeros(DIGITS),
    }


def _draw_normal(variance: float, key: Array, shape: tuple[int, ...]) -> Array:
    """Draws normal numbers with this variance divided by the fan-in.

    The truncated initializers of JAX take several times as long to compile.
    """
    return (variance / math.prod(shape[:-1])) ** 0.5 * jax.random.normal(key, shape)


def _compute_conv_logits(params: Params, x: Array) -> Array:
    for kernel, bias, (_, stride) in zip(params["kernels"], params["biases"], LAYERS, strict=True):
        x = jax.nn.relu(_convolve(x, kernel, stride) + bias)
    return x.reshape(len(x), -1) @ params["head"] + params["head_bias"]


def _convolve(x: Array, kernel: Array, stride: int) -> Array:
    """Convolves with padding 1 as a single matrix product.

    This is many times faster than `jax.lax.conv_general_dilated` on a CPU core.
    """
    side = x.shape[1]
    x = jnp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
    slices = [slice(i, i + side, stride) for i in range(KERNEL)]
    patches = jnp.concatenate([x[:, i, j] for i in slices for j in slices], -1)
    return patches @ kernel.reshape(-1, kernel.shape[-1])


@functools.cache
def build_private() -> Task:
    """Returns the task with one hidden layer and differentially private training."""
    return build_task(
        _draw_private_params, _compute_private_logits, PRIVATE_BATCH, ("adamw",), NOISE
    )


def _draw_private_params(key: Array) -> Params:
    first, second = jax.random.split(key)
    return {
        "hidden": _draw_normal(2.0, first, (SIDE * SIDE, HIDDEN)),
        "hidden_bias": jnp.zeros(HIDDEN),
        "head": _draw_normal(1.0, second, (HIDDEN, DIGITS)),
        "head_bias": jnp.zeros(DIGITS),
    }


def _compute_private_logits(params: Params, x: Array) -> Array:
    x = jax.nn.relu(x.reshape(len(x), -1) @ params["hidden"] + params["hidden_bias"])
    return x @ params["head"] + params["head_bias"]


def _compute_cross_entropy(logits: Array, examples: Examples) -> Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits, examples.labels)


def build_task(
    initial: Callable[[Array], Params],
    logits: Callable[[Params, Array], Array],
    size: int,
    optimizers: tuple[str, ...],
    noise: float | None = None,
    cost: Callable[[Array, Examples], Array] = _compute_cross_entropy,
) -> Task:
    """Builds a task from functions that draw parameters and compute logits and costs."""
    train, held_out = load_images()

    def batch(params: Params, key: Array, is_bad: Array) -> Examples:
        image_key, label_key = jax.random.split(key)
        chosen = jax.random.randint(image_key, (size,), 0, len(train.labels))
        examples = jax.tree.map(lambda x: x[chosen], train)
        return scramble(examples, label_key, is_bad, DIGITS)

    def losses(params: Params, examples: Examples) -> Array:
        return cost(logits(params, examples.inputs), examples)

    def held_out_loss(params: Params) -> Array:
        return losses(params, held_out).mean()

    return Task(initial, batch, losses, held_out_loss, size, UNIT, optimizers, noise)

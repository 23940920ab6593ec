"""Tasks that no rule was tuned on, to judge guards by: other networks, another text.

A small vision transformer tells the digits of `benchmarks.research.study.digits` from patches. A
recurrent network with gated units reads Python's help topics, which the other tasks do not. Its
tokens are pairs of characters, and pairs of these, found by counting: P. Gage, "A new algorithm for
data compression", 1994, and Sennrich, Haddow and Birch, 2015, arXiv 1508.07909. The gradients of
the other two begin small: a transformer whose head and residual outputs begin at 0, and a deep
autoencoder of digits whose weights begin at a third of their usual size.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from benchmarks.research import text_model
from benchmarks.research.study import digits, text
from benchmarks.research.study.examples import Examples
from benchmarks.research.study.task import Params, Task
from optaxclip.commands import demo
from optaxclip.commands.demo_task import MAX_SYMBOLS, encode

ADAPTIVE = ("adamw", "muon", "lion", "adafactor")
OPTIMIZERS = (*ADAPTIVE, "sgd")
PATCH, WIDTH, HEADS, LAYERS = 2, 16, 2, 1
"""Of the vision transformer: pixels along a side of a patch, and its layers."""
BATCH = 8
TOKENS = (digits.SIDE // PATCH) ** 2
SIZE = text_model.Size(width=16, heads=2, layers=2, context=12, batch=8, held_out=64)
"""Of the transformer of text, and of the windows of both networks of text."""
SYMBOLS, HIDDEN = 160, 16
"""Different tokens of the text, and units of the recurrent network."""
DEEP, SMALL = (48, 24, 12, 24, 48), 0.35
"""Units of the autoencoder's hidden layers, and what its weights are multiplied by."""
UNIT = "nats per token"


@functools.cache
def vit() -> Task:
    """Two layers, normalized before attention and before the network behind it."""
    return digits.task(_initial_vit, _logits_of_vit, BATCH, OPTIMIZERS)


def _initial_vit(key: Array) -> Params:
    of_patches, of_layers, of_head = jax.random.split(key, 3)
    size = text_model.Size(width=WIDTH, heads=HEADS, layers=LAYERS, context=TOKENS)
    shared = text_model.initial(of_layers, size)
    return {
        "embedding": PATCH**-1 * jax.random.normal(of_patches, (PATCH * PATCH, WIDTH)),
        "head": WIDTH**-0.5 * jax.random.normal(of_head, (WIDTH, digits.DIGITS)),
        **{name: shared[name] for name in ("positions", "layers", "gain")},
    }


def _logits_of_vit(params: Params, images: Array) -> Array:
    count, side = len(images), digits.SIDE // PATCH
    patches = images.reshape(count, side, PATCH, side, PATCH).transpose(0, 1, 3, 2, 4)
    x = patches.reshape(count, TOKENS, PATCH * PATCH) @ params["embedding"] + params["positions"]
    layer = functools.partial(text_model.layer, heads=HEADS, is_causal=False)
    x, _ = jax.lax.scan(layer, x, params["layers"])
    return text_model.normalized(x, params["gain"]).mean(1) @ params["head"]


@functools.cache
def gru() -> Task:
    """One layer without normalization, its recurrent matrices orthogonal at first."""
    return text.task(topics(), SYMBOLS, _initial_gru, _losses_of_gru, OPTIMIZERS, UNIT, SIZE)


@functools.cache
def topics() -> text.Text:
    """Python's help topics in tokens; their last tenth is held out."""
    tokens = paired(np.frombuffer(demo.read_text(None).encode(), np.uint8), SYMBOLS)
    cut = round(0.9 * tokens.size)
    return text.Text(tokens[:cut], tokens[cut:])


def paired(symbols: np.ndarray, count: int) -> np.ndarray:
    """The symbols [n] in at most `count` tokens.

    Symbols are numbered anew. Then the most frequent pair becomes one token, as long as there is
    room.
    """
    known, tokens = np.unique(symbols, return_inverse=True)
    for new in range(known.size, count):
        pairs = tokens[:-1] * count + tokens[1:]
        is_first = pairs == np.bincount(pairs).argmax()
        # In a run of one symbol every second pair counts: those of overlapping ones share a symbol.
        starts = np.flatnonzero(is_first)
        in_run = starts - np.maximum.accumulate(
            np.where(np.diff(starts, prepend=-2) > 1, starts, 0)
        )
        starts = starts[in_run % 2 == 0]
        tokens[starts] = new
        tokens = np.delete(tokens, starts + 1)
    return tokens.astype(np.uint8 if count <= 256 else np.int32)


def _initial_gru(key: Array) -> Params:
    of_input, of_recurrent, of_head = jax.random.split(key, 3)
    return {
        "embedding": jax.random.normal(of_input, (SYMBOLS, 3 * HIDDEN)),
        "recurrent": jax.nn.initializers.orthogonal()(of_recurrent, (HIDDEN, 3 * HIDDEN)),
        "bias": jnp.zeros(3 * HIDDEN),
        "head": HIDDEN**-0.5 * jax.random.normal(of_head, (HIDDEN, SYMBOLS)),
        "head_bias": jnp.zeros(SYMBOLS),
    }


def _losses_of_gru(params: Params, batch: Examples) -> Array:
    def step(hidden: Array, x: Array) -> tuple[Array, Array]:
        recurrent = hidden @ params["recurrent"]
        (keep, reset, new), (keep_h, reset_h, new_h) = (jnp.split(z, 3, -1) for z in (x, recurrent))
        keep, reset = jax.nn.sigmoid(keep + keep_h), jax.nn.sigmoid(reset + reset_h)
        hidden = keep * hidden + (1 - keep) * jnp.tanh(new + reset * new_h)
        return hidden, hidden

    # The tokens of each window in turn: [tokens, windows, 3 * HIDDEN].
    x = params["embedding"][batch.inputs.T] + params["bias"]
    _, hidden = jax.lax.scan(step, jnp.zeros((batch.inputs.shape[0], HIDDEN)), x)
    logits = hidden @ params["head"] + params["head_bias"]
    costs = optax.softmax_cross_entropy_with_integer_labels(logits, batch.labels.T)
    return costs.mean(0)


@functools.cache
def decoder() -> Task:
    """Two layers, normalized before attention and before the network behind it."""
    corpus = encode(demo.read_text(None))
    characters = text.Text(corpus.train.astype(np.uint8), corpus.held_out.astype(np.uint8))
    losses = functools.partial(text.losses_of_transformer, size=SIZE)
    return text.task(characters, MAX_SYMBOLS, _initial_decoder, losses, OPTIMIZERS, text.UNIT, SIZE)


def _initial_decoder(key: Array) -> Params:
    return text_model.with_zeros(text_model.initial(key, SIZE))


@functools.cache
def autoencoder() -> Task:
    """Six layers; the loss is the squared error of an image."""
    return digits.task(_initial_autoencoder, _reconstructed, BATCH, OPTIMIZERS, cost=_squared_error)


def _initial_autoencoder(key: Array) -> Params:
    sizes = (digits.SIDE**2, *DEEP, digits.SIDE**2)
    keys = jax.random.split(key, len(sizes) - 1)
    each = [
        SMALL * rows**-0.5 * jax.random.normal(key, (rows, columns))
        for key, rows, columns in zip(keys, sizes, sizes[1:], strict=False)
    ]
    return {f"matrix{number}": matrix for number, matrix in enumerate(each)} | {
        "bias": jnp.zeros(sizes[-1])
    }


def _reconstructed(params: Params, images: Array) -> Array:
    x = images.reshape(len(images), -1)
    for number in range(len(DEEP)):
        x = jnp.tanh(x @ params[f"matrix{number}"])
    return x @ params[f"matrix{len(DEEP)}"] + params["bias"]


def _squared_error(told: Array, examples: Examples) -> Array:
    return jnp.sum((told - examples.inputs.reshape(told.shape)) ** 2, -1)

"""Defines a small pre-norm transformer on the characters of Python's help topics.

Layers are stacked for a `scan`. If the parameters contain no position embeddings, queries and keys
are rotated (RoPE). The seed of a run determines its initial values and batches.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from examples.demo import SYMBOLS, encode, help_topics

Params = dict[str, Any]
MATRICES = ("query_key_value", "out", "up", "down")
"""The matrices of the layers, which Muon trains."""


class Size(NamedTuple):
    """The sizes of the network and its batches.

    Windows have `context` characters. `batch` and `held_out` are numbers of windows.
    """

    width: int = 64
    heads: int = 4
    layers: int = 2
    context: int = 64
    batch: int = 16
    held_out: int = 64


class Text(NamedTuple):
    """Training symbols, int32, and held-out windows, int32[windows, context + 1]."""

    train: Array
    held_out: Array


def read(size: Size) -> Text:
    """Encodes the help topics and holds out their end."""
    corpus = encode(help_topics())
    last = len(corpus.held_out) - size.context - 1
    starts = jnp.linspace(0, last, size.held_out).astype(jnp.int32)
    held_out = windows(jnp.asarray(corpus.held_out), starts, size)
    return Text(jnp.asarray(corpus.train), held_out)


def windows(text: Array, starts: Array, size: Size) -> Array:
    """Returns the windows at the starts, int32[starts, context + 1]."""
    return text[starts[:, None] + jnp.arange(size.context + 1)[None]]


def batch(text: Array, key: Array, size: Size) -> Array:
    """Draws windows from the text."""
    starts = jax.random.randint(key, (size.batch,), 0, text.size - size.context)
    return windows(text, starts, size)


def initial(key: Array, size: Size, symbols: int = SYMBOLS) -> Params:
    """Draws parameters, with a variance of one over the number of rows for matrices."""
    keys = iter(jax.random.split(key, 7))

    def normal(*shape: int, std: float | None = None) -> Array:
        std = shape[-2] ** -0.5 if std is None else std
        return std * jax.random.normal(next(keys), shape)

    n, width = size.layers, size.width
    return {
        "embedding": normal(symbols, width, std=1.0),
        "positions": normal(size.context, width, std=0.1),
        "layers": {
            "attention_gain": jnp.ones((n, width)),
            "query_key_value": normal(n, width, 3 * width),
            "out": normal(n, width, width),
            "up_gain": jnp.ones((n, width)),
            "up": normal(n, width, 4 * width),
            "down": normal(n, 4 * width, width),
        },
        "gain": jnp.ones(width),
        "head": normal(width, symbols),
    }


def zero_outputs(params: Params) -> Params:
    """Sets the output matrices of the layers and of the network to 0."""
    zero = {name: jnp.zeros_like(params["layers"][name]) for name in ("out", "down")}
    head = jnp.zeros_like(params["head"])
    return {**params, "layers": {**params["layers"], **zero}, "head": head}


def loss_fn(params: Params, tokens: Array, size: Size) -> Array:
    """Computes the mean cross entropy per character in nats."""
    return losses(params, tokens[:, :-1], tokens[:, 1:], size).mean()


def losses(params: Params, inputs: Array, targets: Array, size: Size) -> Array:
    """Computes the mean cross entropy of windows, int32[windows, context], with shifted targets."""
    x, is_rotated = params["embedding"][inputs], "positions" not in params
    if not is_rotated:
        x = x + params["positions"][None, : inputs.shape[1]]
    apply = functools.partial(apply_layer, heads=size.heads, is_rotated=is_rotated)
    x, _ = jax.lax.scan(apply, x, params["layers"])
    logits = (normalize(x, params["gain"]) @ params["head"]).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean(-1)


def apply_layer(
    x: Array, weights: Params, heads: int, is_causal: bool = True, is_rotated: bool = False
) -> tuple[Array, None]:
    """Applies a layer to `x` [..., tokens, width], as the body of a scan."""
    h = normalize(x, weights["attention_gain"]) @ weights["query_key_value"]
    q, k, v = jnp.split(h.reshape(*h.shape[:2], heads, -1), 3, -1)
    if is_rotated:
        q, k = rotate(q), rotate(k)
    x = x + attend(q, k, v, is_causal).reshape(x.shape) @ weights["out"]
    h = normalize(x, weights["up_gain"]) @ weights["up"]
    return x + jax.nn.gelu(h) @ weights["down"], None


def attend(q: Array, k: Array, v: Array, is_causal: bool) -> Array:
    """Computes attention for queries, keys and values [..., tokens, heads, elements].

    `jax.nn.dot_product_attention` does not support float16 on CPUs (as of JAX 0.10.2).
    """
    wide = {"preferred_element_type": jnp.float32}
    scores = jnp.einsum("...thd,...shd->...hts", q, k, **wide) / q.shape[-1] ** 0.5
    if is_causal:
        is_visible = jnp.tril(jnp.ones(scores.shape[-2:], bool))
        scores = jnp.where(is_visible, scores, -jnp.inf)
    return jnp.einsum("...hts,...shd->...thd", jax.nn.softmax(scores).astype(v.dtype), v)


def rotate(x: Array) -> Array:
    """Rotates queries or keys [..., tokens, heads, elements] by their positions.

    Pairs consist of elements of the first and the second half. See RoPE by Su et al., 2021,
    arXiv 2104.09864.
    """
    tokens, half = x.shape[-3], x.shape[-1] // 2
    speeds = 10_000.0 ** (-jnp.arange(half) / half)
    angles = jnp.arange(tokens)[:, None, None] * speeds
    cosine, sine = jnp.cos(angles), jnp.sin(angles)
    first, second = jnp.split(x.astype(jnp.float32), 2, -1)
    pairs = first * cosine - second * sine, first * sine + second * cosine
    return jnp.concatenate(pairs, -1).astype(x.dtype)


def normalize(x: Array, gain: Array) -> Array:
    """Divides by the root mean square, and multiplies by the gain."""
    wide = x.astype(jnp.float32)
    roots = jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-6)
    return (wide * roots).astype(x.dtype) * gain


def labels(params: Params) -> Any:
    """Returns labels for `optax.partition`: "matrices" for those of the layers, or "others"."""

    def label(path: Any, _: Any) -> str:
        return "matrices" if path[-1].key in MATRICES else "others"

    return jax.tree.map_with_path(label, params)

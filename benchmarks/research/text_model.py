"""A small transformer on the characters of Python's own help topics, for comparisons of runs.

Layers are normalized before attention and before the network behind it, and stacked, so that a
`scan` goes over them. Positions are added at first, or turn queries and keys, if the parameters
have none. All of a run follows from its seed: initial values and batches.
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
"""Those of the layers, which Muon trains."""


class Size(NamedTuple):
    """Of the network, and of its batches.

    Attributes:
      width: of the residual stream.
      heads: of attention.
      layers: how many.
      context: characters of a window.
      batch: windows of a step.
      held_out: windows of held-out text.
    """

    width: int = 64
    heads: int = 4
    layers: int = 2
    context: int = 64
    batch: int = 16
    held_out: int = 64


class Text(NamedTuple):
    """Symbols to train on, int32, and windows of held-out ones, int32[windows, context + 1]."""

    train: Array
    held_out: Array


def read(size: Size) -> Text:
    """The help topics in numbers, their end held out."""
    corpus = encode(help_topics())
    last = len(corpus.held_out) - size.context - 1
    starts = jnp.linspace(0, last, size.held_out).astype(jnp.int32)
    held_out = windows(jnp.asarray(corpus.held_out), starts, size)
    return Text(jnp.asarray(corpus.train), held_out)


def windows(text: Array, starts: Array, size: Size) -> Array:
    """int32[starts, context + 1]."""
    return text[starts[:, None] + jnp.arange(size.context + 1)[None]]


def batch(text: Array, key: Array, size: Size) -> Array:
    """Windows from anywhere in the text."""
    starts = jax.random.randint(key, (size.batch,), 0, text.size - size.context)
    return windows(text, starts, size)


def initial(key: Array, size: Size, symbols: int = SYMBOLS) -> Params:
    """The parameters: matrices with the variance of one over their rows."""
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


def with_zeros(params: Params) -> Params:
    """The same, but what a layer adds to the residual stream, and the logits, begin at 0."""
    zero = {name: jnp.zeros_like(params["layers"][name]) for name in ("out", "down")}
    head = jnp.zeros_like(params["head"])
    return {**params, "layers": {**params["layers"], **zero}, "head": head}


def loss_fn(params: Params, tokens: Array, size: Size) -> Array:
    """The mean of what each character costs, given those before it in its window, in nats."""
    return losses(params, tokens[:, :-1], tokens[:, 1:], size).mean()


def losses(params: Params, inputs: Array, targets: Array, size: Size) -> Array:
    """The same mean for each window; of int32[windows, context], the targets one place ahead."""
    x, is_turned = params["embedding"][inputs], "positions" not in params
    if not is_turned:
        x = x + params["positions"][None, : inputs.shape[1]]
    one = functools.partial(layer, heads=size.heads, is_turned=is_turned)
    x, _ = jax.lax.scan(one, x, params["layers"])
    logits = (normalized(x, params["gain"]) @ params["head"]).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean(-1)


def layer(
    x: Array, weights: Params, heads: int, is_causal: bool = True, is_turned: bool = False
) -> tuple[Array, None]:
    """A layer, as the body of a scan: `x` [..., tokens, width] and its weights."""
    h = normalized(x, weights["attention_gain"]) @ weights["query_key_value"]
    q, k, v = jnp.split(h.reshape(*h.shape[:2], heads, -1), 3, -1)
    if is_turned:
        q, k = turned(q), turned(k)
    x = x + attended(q, k, v, is_causal).reshape(x.shape) @ weights["out"]
    h = normalized(x, weights["up_gain"]) @ weights["up"]
    return x + jax.nn.gelu(h) @ weights["down"], None


def attended(q: Array, k: Array, v: Array, is_causal: bool) -> Array:
    """Of queries, keys and values [..., tokens, heads, entries].

    That of JAX 0.10.2 has no float16 on a CPU.
    """
    wide = {"preferred_element_type": jnp.float32}
    scores = jnp.einsum("...thd,...shd->...hts", q, k, **wide) / q.shape[-1] ** 0.5
    if is_causal:
        is_seen = jnp.tril(jnp.ones(scores.shape[-2:], bool))
        scores = jnp.where(is_seen, scores, -jnp.inf)
    return jnp.einsum("...hts,...shd->...thd", jax.nn.softmax(scores).astype(v.dtype), v)


def turned(x: Array) -> Array:
    """Queries or keys [..., tokens, heads, entries], their pairs turned by how far they stand.

    The two halves of the entries are the pairs' first and second ones. RoPE: Su and others, 2021,
    arXiv 2104.09864.
    """
    tokens, half = x.shape[-3], x.shape[-1] // 2
    speeds = 10_000.0 ** (-jnp.arange(half) / half)
    angles = jnp.arange(tokens)[:, None, None] * speeds
    cosine, sine = jnp.cos(angles), jnp.sin(angles)
    first, second = jnp.split(x.astype(jnp.float32), 2, -1)
    pairs = first * cosine - second * sine, first * sine + second * cosine
    return jnp.concatenate(pairs, -1).astype(x.dtype)


def normalized(x: Array, gain: Array) -> Array:
    """Divided by the root of its mean square, and multiplied by the gain."""
    wide = x.astype(jnp.float32)
    roots = jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-6)
    return (wide * roots).astype(x.dtype) * gain


def labels(params: Params) -> Any:
    """What `optax.partition` takes: "matrices" for those of the layers, else "others"."""

    def label(path: Any, _: Any) -> str:
        return "matrices" if path[-1].key in MATRICES else "others"

    return jax.tree.map_with_path(label, params)

"""Losses of one example over models of a size at which cost counts, for `per_example.py`."""

import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax


class Model(NamedTuple):
    """What is compared for one model.

    Attributes:
      loss: `loss(params, *example)`, a scalar.
      params: shapes and dtypes.
      batch: shapes and dtypes, `[examples, ...]`; integers are below `high`.
      high: of the integers of a batch.
    """

    loss: Callable[..., Array]
    params: Any
    batch: tuple[jax.ShapeDtypeStruct, ...]
    high: int

    @property
    def examples(self) -> int:
        """The size of the batch."""
        return self.batch[0].shape[0]

    def arrays(self) -> tuple[Any, ...]:
        """Parameters and a batch, drawn by chance."""
        rng = np.random.default_rng(0)

        def kernel(x: jax.ShapeDtypeStruct) -> Array:
            size = np.prod(x.shape[-2:-1] if len(x.shape) < 4 else x.shape[:-1]) or 1
            return jnp.asarray(rng.normal(size=x.shape) / size**0.5, x.dtype)

        def data(x: jax.ShapeDtypeStruct) -> Array:
            is_float = jnp.issubdtype(x.dtype, jnp.inexact)
            drawn = rng.normal(size=x.shape) if is_float else rng.integers(0, self.high, x.shape)
            return jnp.asarray(drawn, x.dtype)

        return jax.tree.map(kernel, self.params), *map(data, self.batch)


def entropy(logits: Array, label: Array) -> Array:
    """The cross entropy, in float32, as mean over positions."""
    chances = jax.nn.log_softmax(logits.astype(jnp.float32))
    return -jnp.mean(jnp.take_along_axis(chances, label[..., None], -1))


def _shapes(dtype: Any, **shapes: tuple[int, ...]) -> dict[str, jax.ShapeDtypeStruct]:
    return {name: jax.ShapeDtypeStruct(shape, dtype) for name, shape in shapes.items()}


def _ids(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def mlp(dtype: Any, widths: tuple[int, ...], examples: int) -> Model:
    """A perceptron on vectors."""
    layers = [_shapes(dtype, w=(n, m), b=(m,)) for n, m in itertools.pairwise(widths)]

    def loss(params: Any, x: Array, y: Array) -> Array:
        for layer in params[:-1]:
            x = jax.nn.relu(x @ layer["w"] + layer["b"])
        return entropy(x @ params[-1]["w"] + params[-1]["b"], y)

    x = jax.ShapeDtypeStruct((examples, widths[0]), dtype)
    return Model(loss, layers, (x, _ids(examples)), widths[-1])


def convolutions(dtype: Any, examples: int) -> Model:
    """Three convolutions on images of 28 by 28 pixels."""
    shapes = {"a": (3, 3, 1, 32), "b": (3, 3, 32, 64), "c": (3, 3, 64, 64), "out": (64, 10)}

    def loss(params: Any, x: Array, y: Array) -> Array:
        dims = ("NHWC", "HWIO", "NHWC")
        x = x[None]
        for name, stride in (("a", 1), ("b", 2), ("c", 2)):
            strides = (stride, stride)
            x = lax.conv_general_dilated(x, params[name], strides, "SAME", dimension_numbers=dims)
            x = jax.nn.relu(x)
        return entropy(jnp.mean(x[0], (0, 1)) @ params["out"], y)

    x = jax.ShapeDtypeStruct((examples, 28, 28, 1), dtype)
    return Model(loss, _shapes(dtype, **shapes), (x, _ids(examples)), 10)


def table(dtype: Any, rows: int, examples: int) -> Model:
    """A large table, of which an example takes 20 rows, as in recommenders."""
    params = _shapes(dtype, table=(rows, 64), w=(64, 64), out=(64, 2))

    def loss(params: Any, ids: Array, y: Array) -> Array:
        x = jnp.mean(params["table"][ids], 0)
        return entropy(jax.nn.relu(x @ params["w"]) @ params["out"], y)

    return Model(loss, params, (_ids(examples, 20), _ids(examples)), 2)


def lstm(dtype: Any, width: int, length: int, examples: int) -> Model:
    """An LSTM on sequences of vectors."""
    params = _shapes(dtype, w=(2 * width, 4 * width), b=(4 * width,), out=(width, 10))

    def loss(params: Any, x: Array, y: Array) -> Array:
        def step(carry: tuple[Array, Array], x: Array) -> tuple[tuple[Array, Array], None]:
            h, c = carry
            gates = jnp.concatenate([x, h]) @ params["w"] + params["b"]
            i, f, g, o = jnp.split(gates, 4)
            c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            return (jax.nn.sigmoid(o) * jnp.tanh(c), c), None

        zeros = jnp.zeros(width, dtype)
        (h, _), _ = lax.scan(step, (zeros, zeros), x)
        return entropy(h @ params["out"], y)

    x = jax.ShapeDtypeStruct((examples, length, width), dtype)
    return Model(loss, params, (x, _ids(examples)), 10)


def transformer(
    dtype: Any,
    width: int,
    length: int,
    vocabulary: int,
    examples: int,
    layers: int = 2,
    how: str = "unrolled",
) -> Model:
    """A transformer on text; its layers are "unrolled", "scanned", or "checkpointed" in a scan."""
    is_stacked = how != "unrolled"
    around = (layers,) if is_stacked else ()
    block = _shapes(
        dtype,
        qkv=(*around, width, 3 * width),
        out=(*around, width, width),
        up=(*around, width, 4 * width),
        down=(*around, 4 * width, width),
        gain=(*around, width),
    )
    params: dict[str, Any] = dict(_shapes(dtype, embed=(vocabulary, width), at=(length, width)))
    params["head"] = jax.ShapeDtypeStruct((width, vocabulary), dtype)
    params["blocks"] = block if is_stacked else [block] * layers
    heads = max(1, width // 64)

    def layer(x: Array, block: Any) -> Array:
        q, k, v = jnp.split((_normalized(x) * block["gain"]) @ block["qkv"], 3, axis=-1)
        q, k, v = (y.reshape(length, heads, -1) for y in (q, k, v))
        scores = jnp.einsum("thd,shd->hts", q, k).astype(jnp.float32) / (width / heads) ** 0.5
        scores = jnp.where(jnp.tril(jnp.ones((length, length), bool)), scores, -1e9)
        mixed = jnp.einsum("hts,shd->thd", jax.nn.softmax(scores).astype(x.dtype), v)
        x = x + mixed.reshape(x.shape) @ block["out"]
        return x + jax.nn.gelu(_normalized(x) @ block["up"]) @ block["down"]

    def loss(params: Any, tokens: Array) -> Array:
        x = params["embed"][tokens[:-1]] + params["at"]
        if is_stacked:
            body = jax.checkpoint(layer) if how == "checkpointed" else layer
            x, _ = lax.scan(lambda x, block: (body(x, block), None), x, params["blocks"])
        else:
            x = functools.reduce(layer, params["blocks"], x)
        return entropy(_normalized(x) @ params["head"], tokens[1:])

    return Model(loss, params, (_ids(examples, length + 1),), vocabulary)


def _normalized(x: Array) -> Array:
    wide = x.astype(jnp.float32)
    return (wide * lax.rsqrt(jnp.mean(wide**2, -1, keepdims=True) + 1e-6)).astype(x.dtype)


MODELS: dict[str, Callable[[Any], Model]] = {
    "mlp": lambda dtype: mlp(dtype, (784, 512, 512, 10), 256),
    "small mlp": lambda dtype: mlp(dtype, (784, 256, 256, 10), 256),
    "convolutions": lambda dtype: convolutions(dtype, 64),
    "table of 50,000": lambda dtype: table(dtype, 50_000, 256),
    "lstm, T 64": lambda dtype: lstm(dtype, 128, 64, 64),
    "transformer, T 16": lambda dtype: transformer(dtype, 256, 16, 8000, 32),
    "transformer, T 32": lambda dtype: transformer(dtype, 256, 32, 8000, 32),
    "transformer, T 256": lambda dtype: transformer(dtype, 128, 256, 1000, 16),
    "scanned, T 64": lambda dtype: transformer(dtype, 128, 64, 1000, 32, 4, "scanned"),
    "checkpointed, T 64": lambda dtype: transformer(dtype, 256, 64, 1000, 32, 4, "checkpointed"),
}
"""On a CPU."""

LARGE: dict[str, Callable[[Any], Model]] = {
    "mlp": MODELS["mlp"],
    "convolutions": MODELS["convolutions"],
    "3 layers, T 128": lambda dtype: transformer(dtype, 768, 128, 8192, 32, 3),
    "6 scanned, T 128": lambda dtype: transformer(dtype, 768, 128, 8192, 32, 6, "scanned"),
    "3 layers, T 512": lambda dtype: transformer(dtype, 768, 512, 8192, 16, 3),
}
"""Compiled for accelerators."""

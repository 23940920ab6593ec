"""Defines models and losses of one example for `per_example.py`."""

import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax


class Model(NamedTuple):
    """A model with the loss of one example.

    Attributes:
      loss: `loss(params, *example)`, which returns a scalar.
      params: Shapes and dtypes.
      batch: Shapes and dtypes, `[examples, ...]`.
      num_classes: The number of integers that a batch can contain.
    """

    loss: Callable[..., Array]
    params: Any
    batch: tuple[jax.ShapeDtypeStruct, ...]
    num_classes: int

    @property
    def examples(self) -> int:
        """Returns the batch size."""
        return self.batch[0].shape[0]

    def draw_arrays(self) -> tuple[Any, ...]:
        """Draws parameters and a batch."""
        rng = np.random.default_rng(0)

        def draw_param(x: jax.ShapeDtypeStruct) -> Array:
            size = np.prod(x.shape[-2:-1] if len(x.shape) < 4 else x.shape[:-1]) or 1
            return jnp.asarray(rng.normal(size=x.shape) / size**0.5, x.dtype)

        def draw_data(x: jax.ShapeDtypeStruct) -> Array:
            if jnp.issubdtype(x.dtype, jnp.inexact):
                return jnp.asarray(rng.normal(size=x.shape), x.dtype)
            return jnp.asarray(rng.integers(0, self.num_classes, x.shape), x.dtype)

        return jax.tree.map(draw_param, self.params), *map(draw_data, self.batch)


def cross_entropy(logits: Array, label: Array) -> Array:
    """Computes the mean cross entropy over positions in float32."""
    log_probabilities = jax.nn.log_softmax(logits.astype(jnp.float32))
    return -jnp.mean(jnp.take_along_axis(log_probabilities, label[..., None], -1))


def _describe_arrays(dtype: Any, **shapes: tuple[int, ...]) -> dict[str, jax.ShapeDtypeStruct]:
    return {name: jax.ShapeDtypeStruct(shape, dtype) for name, shape in shapes.items()}


def _describe_ids(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def build_mlp(dtype: Any, widths: tuple[int, ...], examples: int) -> Model:
    """Builds a multilayer perceptron on vectors."""
    layers = [_describe_arrays(dtype, w=(n, m), b=(m,)) for n, m in itertools.pairwise(widths)]

    def loss(params: Any, x: Array, y: Array) -> Array:
        for layer in params[:-1]:
            x = jax.nn.relu(x @ layer["w"] + layer["b"])
        return cross_entropy(x @ params[-1]["w"] + params[-1]["b"], y)

    x = jax.ShapeDtypeStruct((examples, widths[0]), dtype)
    return Model(loss, layers, (x, _describe_ids(examples)), widths[-1])


def build_convolutions(dtype: Any, examples: int) -> Model:
    """Builds a network of three convolutions on images of 28 by 28 pixels."""
    shapes = {"a": (3, 3, 1, 32), "b": (3, 3, 32, 64), "c": (3, 3, 64, 64), "out": (64, 10)}

    def loss(params: Any, x: Array, y: Array) -> Array:
        dims = ("NHWC", "HWIO", "NHWC")
        x = x[None]
        for name, stride in (("a", 1), ("b", 2), ("c", 2)):
            strides = (stride, stride)
            x = lax.conv_general_dilated(x, params[name], strides, "SAME", dimension_numbers=dims)
            x = jax.nn.relu(x)
        return cross_entropy(jnp.mean(x[0], (0, 1)) @ params["out"], y)

    x = jax.ShapeDtypeStruct((examples, 28, 28, 1), dtype)
    return Model(loss, _describe_arrays(dtype, **shapes), (x, _describe_ids(examples)), 10)


def build_table(dtype: Any, rows: int, examples: int) -> Model:
    """Builds a model with a large embedding table, of which an example uses 20 rows."""
    params = _describe_arrays(dtype, table=(rows, 64), w=(64, 64), out=(64, 2))

    def loss(params: Any, ids: Array, y: Array) -> Array:
        x = jnp.mean(params["table"][ids], 0)
        return cross_entropy(jax.nn.relu(x @ params["w"]) @ params["out"], y)

    return Model(loss, params, (_describe_ids(examples, 20), _describe_ids(examples)), 2)


def build_lstm(dtype: Any, width: int, length: int, examples: int) -> Model:
    """Builds an LSTM on sequences of vectors."""
    params = _describe_arrays(dtype, w=(2 * width, 4 * width), b=(4 * width,), out=(width, 10))

    def loss(params: Any, x: Array, y: Array) -> Array:
        def step(carry: tuple[Array, Array], x: Array) -> tuple[tuple[Array, Array], None]:
            h, c = carry
            gates = jnp.concatenate([x, h]) @ params["w"] + params["b"]
            i, f, g, o = jnp.split(gates, 4)
            c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            return (jax.nn.sigmoid(o) * jnp.tanh(c), c), None

        zeros = jnp.zeros(width, dtype)
        (h, _), _ = lax.scan(step, (zeros, zeros), x)
        return cross_entropy(h @ params["out"], y)

    x = jax.ShapeDtypeStruct((examples, length, width), dtype)
    return Model(loss, params, (x, _describe_ids(examples)), 10)


def build_transformer(
    dtype: Any,
    width: int,
    length: int,
    vocabulary: int,
    examples: int,
    layers: int = 2,
    layer_kind: str = "unrolled",
) -> Model:
    """Builds a transformer with "unrolled", "scanned", or scanned and "checkpointed" layers."""
    is_stacked = layer_kind != "unrolled"
    leading_axes = (layers,) if is_stacked else ()
    block = _describe_arrays(
        dtype,
        qkv=(*leading_axes, width, 3 * width),
        out=(*leading_axes, width, width),
        up=(*leading_axes, width, 4 * width),
        down=(*leading_axes, 4 * width, width),
        gain=(*leading_axes, width),
    )
    params: dict[str, Any] = dict(
        _describe_arrays(dtype, embed=(vocabulary, width), at=(length, width))
    )
    params["head"] = jax.ShapeDtypeStruct((width, vocabulary), dtype)
    params["blocks"] = block if is_stacked else [block] * layers
    heads = max(1, width // 64)

    def apply_layer(x: Array, block: Any) -> Array:
        q, k, v = jnp.split((_normalize(x) * block["gain"]) @ block["qkv"], 3, axis=-1)
        q, k, v = (y.reshape(length, heads, -1) for y in (q, k, v))
        scores = jnp.einsum("thd,shd->hts", q, k).astype(jnp.float32) / (width / heads) ** 0.5
        scores = jnp.where(jnp.tril(jnp.ones((length, length), bool)), scores, -1e9)
        mixed = jnp.einsum("hts,shd->thd", jax.nn.softmax(scores).astype(x.dtype), v)
        x = x + mixed.reshape(x.shape) @ block["out"]
        return x + jax.nn.gelu(_normalize(x) @ block["up"]) @ block["down"]

    def loss(params: Any, tokens: Array) -> Array:
        x = params["embed"][tokens[:-1]] + params["at"]
        if is_stacked:
            body = jax.checkpoint(apply_layer) if layer_kind == "checkpointed" else apply_layer
            x, _ = lax.scan(lambda x, block: (body(x, block), None), x, params["blocks"])
        else:
            x = functools.reduce(apply_layer, params["blocks"], x)
        return cross_entropy(_normalize(x) @ params["head"], tokens[1:])

    return Model(loss, params, (_describe_ids(examples, length + 1),), vocabulary)


def _normalize(x: Array) -> Array:
    wide = x.astype(jnp.float32)
    return (wide * lax.rsqrt(jnp.mean(wide**2, -1, keepdims=True) + 1e-6)).astype(x.dtype)


MODELS: dict[str, Callable[[Any], Model]] = {
    "mlp": lambda dtype: build_mlp(dtype, (784, 512, 512, 10), 256),
    "small mlp": lambda dtype: build_mlp(dtype, (784, 256, 256, 10), 256),
    "convolutions": lambda dtype: build_convolutions(dtype, 64),
    "table of 50,000": lambda dtype: build_table(dtype, 50_000, 256),
    "lstm, T 64": lambda dtype: build_lstm(dtype, 128, 64, 64),
    "transformer, T 16": lambda dtype: build_transformer(dtype, 256, 16, 8000, 32),
    "transformer, T 32": lambda dtype: build_transformer(dtype, 256, 32, 8000, 32),
    "transformer, T 256": lambda dtype: build_transformer(dtype, 128, 256, 1000, 16),
    "scanned, T 64": lambda dtype: build_transformer(dtype, 128, 64, 1000, 32, 4, "scanned"),
    "checkpointed, T 64": lambda dtype: build_transformer(
        dtype, 256, 64, 1000, 32, 4, "checkpointed"
    ),
}
"""Models for CPUs."""

LARGE: dict[str, Callable[[Any], Model]] = {
    "mlp": MODELS["mlp"],
    "convolutions": MODELS["convolutions"],
    "3 layers, T 128": lambda dtype: build_transformer(dtype, 768, 128, 8192, 32, 3),
    "6 scanned, T 128": lambda dtype: build_transformer(dtype, 768, 128, 8192, 32, 6, "scanned"),
    "3 layers, T 512": lambda dtype: build_transformer(dtype, 768, 512, 8192, 16, 3),
}
"""Models for accelerators."""

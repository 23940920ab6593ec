"""Losses of one example in plain JAX: networks on images and on sequences."""

import functools

import jax
import jax.numpy as jnp
from ghost_table import Draw, Model, entropy, model, normalized
from jax import lax

# Images


def _conv(x, w, stride=1, padding="SAME", **options):
    ndim = x.ndim - 1
    dims = ("NHWC", "HWIO", "NHWC") if ndim == 2 else ("NHC", "HIO", "NHC")
    found = lax.conv_general_dilated(
        x[None], w, (stride,) * ndim, padding, dimension_numbers=dims, **options
    )
    return found[0]


@model(quick="tree")
def convolutions():
    draw = Draw()
    shapes = {"first": (3, 3, 2, 4), "strided": (3, 3, 4, 4), "dilated": (2, 3, 4, 3)}
    params = {name: draw.weight(*shape) for name, shape in shapes.items()}
    params |= {"b": draw.weight(4), "out": draw.weight(3, 3)}

    def loss(params, x, y):
        x = jax.nn.relu(_conv(x, params["first"]) + params["b"])
        x = jnp.tanh(_conv(x, params["strided"], 2))
        x = jnp.tanh(_conv(x, params["dilated"], padding="VALID", rhs_dilation=(2, 1)))
        return entropy(jnp.mean(x, (0, 1)) @ params["out"], y)

    return Model(loss, params, (draw.x(8, 8, 2), draw.ids(3)))


@model
def grouped_convolutions():
    """Depthwise, in two groups, along one axis, and transposed."""
    draw = Draw()
    params = {
        "depthwise": draw.weight(3, 3, 1, 4),
        "groups": draw.weight(3, 3, 2, 6),
        "line": draw.weight(3, 6, 4),
        "back": draw.weight(3, 3, 6, 2),
    }

    def loss(params, x):
        x = jnp.tanh(_conv(x, params["depthwise"], feature_group_count=4))
        x = jnp.tanh(_conv(x, params["groups"], feature_group_count=2))
        line = jnp.tanh(_conv(x[0], params["line"]))
        back = lax.conv_transpose(x[None], params["back"], (2, 2), "SAME")
        return jnp.sum(jnp.square(line)) + jnp.sum(jnp.sin(back))

    return Model(loss, params, (draw.x(6, 6, 4),), digits=1e-3)


@model
def norms_and_pools():
    """GroupNorm with gain and bias, a pool of largest and one of means."""
    draw = Draw()
    params = {"w": draw.weight(3, 3, 2, 4), "gain": 1 + draw.weight(4), "bias": draw.weight(4)}
    params["out"] = draw.weight(4, 3)

    def loss(params, x, y):
        x = _conv(x, params["w"]).reshape(8, 8, 2, 2)
        mean = jnp.mean(x, (0, 1, 3), keepdims=True)
        std = jnp.sqrt(jnp.mean(jnp.square(x - mean), (0, 1, 3), keepdims=True) + 1e-5)
        x = ((x - mean) / std).reshape(8, 8, 4) * params["gain"] + params["bias"]
        x = lax.reduce_window(x, -jnp.inf, lax.max, (2, 2, 1), (2, 2, 1), "VALID")
        return entropy(jnp.mean(jax.nn.gelu(x), (0, 1)) @ params["out"], y)

    return Model(loss, params, (draw.x(8, 8, 2), draw.ids(3)))


@model
def vision_transformer():
    draw = Draw()
    block = _block(draw, 8)
    params = {"patch": draw.weight(4, 4, 2, 8), "cls": draw.weight(1, 8), "at": draw.weight(5, 8)}
    params |= {"block": block, "out": draw.weight(8, 3)}

    def loss(params, x, y):
        x = _conv(x, params["patch"], 4, "VALID").reshape(4, 8)
        x = jnp.concatenate([params["cls"], x]) + params["at"]
        x = _attended(params["block"], x, is_causal=False)
        return entropy(x[0] @ params["out"], y)

    return Model(loss, params, (draw.x(8, 8, 2), draw.ids(3)))


# Sequences


@model
def lstm():
    """One kernel for all four gates, cut into pieces behind it."""
    draw = Draw()
    params = {"w": draw.weight(5 + 6, 24), "b": draw.weight(24), "out": draw.weight(6, 3)}

    def loss(params, x, y):
        def step(carry, x):
            h, c = carry
            gates = jnp.concatenate([x, h]) @ params["w"] + params["b"]
            i, f, g, o = jnp.split(gates, 4)
            c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            h = jax.nn.sigmoid(o) * jnp.tanh(c)
            return (h, c), h

        _, hidden = lax.scan(step, (jnp.zeros(6), jnp.zeros(6)), x)
        return entropy(hidden @ params["out"], y)

    return Model(loss, params, (draw.x(7, 5), draw.ids(3, 7)))


@model
def gru():
    """A kernel that is cut into the pieces of its gates before it is used; backwards in time."""
    draw = Draw()
    params = {"x": draw.weight(5, 12), "h": draw.weight(4, 12), "start": draw.weight(4)}

    def loss(params, x):
        of_x, of_h = (jnp.split(params[name], 3, axis=1) for name in ("x", "h"))

        def step(h, x):
            r, z = (jax.nn.sigmoid(x @ of_x[i] + h @ of_h[i]) for i in (0, 1))
            new = jnp.tanh(x @ of_x[2] + r * (h @ of_h[2]))
            h = z * h + (1 - z) * new
            return h, h

        last, hidden = lax.scan(step, params["start"], x, reverse=True)
        return jnp.sum(jnp.square(hidden)) + jnp.sum(jnp.sin(last))

    return Model(loss, params, (draw.x(7, 5),))


@model
def embeddings():
    """Rows that come again, also out of range: in one mode both of these reach one row."""
    draw = Draw()
    params = {"clip": draw.weight(9, 4), "fill": draw.weight(9, 4), "at": draw.weight(9, 4)}
    params |= {"out": draw.weight(4, 3), "flat": draw.weight(9)}

    def loss(params, ids):
        x = jnp.take(params["clip"], ids, axis=0, mode="clip")
        x = x + jnp.take(params["fill"], ids, axis=0, mode="fill", fill_value=0.5)
        x = x + params["at"][ids] + jnp.take(params["flat"], ids, mode="clip")[:, None]
        return jnp.sum(jnp.square(jnp.tanh(x) @ params["out"]))

    ids = draw.ids(13, 8, low=-3).at[0].set(4).at[1, :4].set(12).at[1, 4:].set(11)
    return Model(loss, params, (ids,))


@model
def a_mixture_of_experts():
    draw = Draw()
    params = {"gate": draw.weight(5, 4), "up": draw.weight(4, 5, 6), "down": draw.weight(4, 6, 5)}

    def loss(params, x):
        shares = jax.nn.softmax(x @ params["gate"])
        _, chosen = lax.top_k(shares, 2)
        mask = jnp.sum(jax.nn.one_hot(chosen, 4), 1)
        sent = jnp.einsum("te,td->etd", mask, x)
        hidden = jax.nn.silu(jnp.einsum("etd,edf->etf", sent, params["up"]))
        back = jnp.einsum("etf,efd->etd", hidden, params["down"])
        return jnp.sum(jnp.square(jnp.einsum("etd,te->td", back, shares * mask)))

    return Model(loss, params, (draw.x(6, 5),))


@model
def learned_queries():
    """A parameter that meets what other parameters made of the data."""
    draw = Draw()
    params = {"query": draw.weight(3, 4), "k": draw.weight(5, 4), "v": draw.weight(5, 4)}

    def loss(params, x):
        scores = params["query"] @ (x @ params["k"]).T
        return jnp.sum(jnp.square(jax.nn.softmax(scores) @ (x @ params["v"])))

    return Model(loss, params, (draw.x(6, 5),))


def _block(draw, width):
    shapes = {"qkv": (width, 3 * width), "out": (width, width)}
    shapes |= {"up": (width, 2 * width), "down": (2 * width, width)}
    block = {name: draw.weight(*shape) for name, shape in shapes.items()}
    return block | {"gain": 1 + draw.weight(width), "bias": draw.weight(2 * width)}


def _attended(block, x, *, is_causal=True):
    length, width = x.shape
    q, k, v = jnp.split((normalized(x) * block["gain"]) @ block["qkv"], 3, axis=-1)
    q, k, v = (y.reshape(length, 2, width // 2) for y in (q, k, v))
    scores = jnp.einsum("thd,shd->hts", q, k) / (width // 2) ** 0.5
    if is_causal:
        scores = jnp.where(jnp.tril(jnp.ones((length, length), bool))[None], scores, -1e9)
    x = x + jnp.einsum("hts,shd->thd", jax.nn.softmax(scores), v).reshape(x.shape) @ block["out"]
    return x + jax.nn.gelu(normalized(x) @ block["up"] + block["bias"]) @ block["down"]


def _language_model(layers, *, is_tied):
    """A transformer; `layers(blocks, x)` runs its three blocks."""
    draw, width, vocabulary = Draw(), 8, 11
    params = {"embed": draw.weight(vocabulary, width), "at": draw.weight(6, width)}
    params["blocks"] = [_block(draw, width) for _ in range(3)]
    if not is_tied:
        params["head"] = draw.weight(width, vocabulary)
    if layers is not _unrolled:
        params["blocks"] = jax.tree.map(lambda *x: jnp.stack(x), *params["blocks"])

    def loss(params, tokens):
        x = params["embed"][tokens[:-1]] + params["at"]
        x = normalized(layers(params["blocks"], x))
        logits = x @ (params["embed"].T if is_tied else params["head"])
        return entropy(logits, tokens[1:]) / 6

    return Model(loss, params, (draw.ids(vocabulary, 7).at[0].set(3),))


def _unrolled(blocks, x):
    for block in blocks:
        x = _attended(block, x)
    return x


def _scanned(blocks, x):
    return lax.scan(lambda x, block: (_attended(block, x), None), x, blocks)[0]


def _checkpointed(policy, blocks, x):
    layer = jax.checkpoint(lambda x, block: (_attended(block, x), None), policy=policy)
    return lax.scan(layer, x, blocks)[0]


def _twice(blocks, x):
    """All layers, and again: a scan in a scan, through which the layers do not change."""
    return lax.scan(lambda x, _: (_scanned(blocks, x), None), x, length=2)[0]


@model
def transformer():
    return _language_model(_unrolled, is_tied=False)


@model
def transformer_tied():
    return _language_model(_unrolled, is_tied=True)


@model
def transformer_scanned():
    return _language_model(_scanned, is_tied=True)


@model
def transformer_checkpointed():
    policy = jax.checkpoint_policies.nothing_saveable
    return _language_model(functools.partial(_checkpointed, policy), is_tied=True)


@model
def transformer_checkpointed_but_for_products():
    policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    return _language_model(functools.partial(_checkpointed, policy), is_tied=False)


@model
def transformer_with_shared_layers():
    return _language_model(_twice, is_tied=True)

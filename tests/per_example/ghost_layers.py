"""Losses of one example in plain JAX: dense layers, dtypes, branches, loops, nested functions."""

import jax
import jax.numpy as jnp
from ghost_table import EXAMPLES, Draw, Model, entropy, model
from jax import lax

# Dense layers on vectors


def _mlp(draw):
    params = [{"w": draw.weight(n, m), "b": draw.weight(m)} for n, m in ((5, 7), (7, 6), (6, 3))]

    def logits(params, x):
        for layer in params[:-1]:
            x = jnp.tanh(x @ layer["w"] + layer["b"])
        return x @ params[-1]["w"] + params[-1]["b"]

    return logits, params


@model(quick="leaf")
def mlp():
    draw = Draw()
    logits, params = _mlp(draw)

    def loss(params, x, y):
        return entropy(logits(params, x), y)

    return Model(loss, params, (draw.x(5), draw.ids(3)))


@model
def mlp_with_aux():
    draw = Draw()
    logits, params = _mlp(draw)

    def loss(params, x, y):
        found = logits(params, x)
        return entropy(found, y), {"logits": found, "right": jnp.argmax(found) == y}

    return Model(loss, params, (draw.x(5), draw.ids(3)), has_aux=True)


@model
def a_vector_and_a_number():
    draw = Draw()

    def loss(params, x, y):
        return jnp.square(jnp.dot(params["w"], x) + params["b"] - y)

    return Model(loss, {"w": draw.weight(5), "b": jnp.float32(0.1)}, (draw.x(5), draw.x()))


@model
def parameters_that_are_unused_or_integers():
    draw = Draw()
    params = {"w": draw.weight(5, 3), "idle": draw.weight(4), "count": jnp.int32(2), "none": None}

    def loss(params, x):
        return jnp.sum(jnp.sin(x @ params["w"])) * params["count"].astype(jnp.float32)

    return Model(loss, params, (draw.x(5),))


@model(quick="tree")
def one_matrix_three_times():
    draw = Draw()

    def loss(params, x):
        w = params["w"]
        return jnp.sum(jnp.square(jnp.tanh(jnp.tanh(x @ w) @ w) @ w.T))

    return Model(loss, {"w": draw.weight(5, 5)}, (draw.x(3, 5),))


@model
def bilinear():
    draw = Draw()
    params = {"w": draw.weight(3, 5, 4), "v": draw.weight(4, 4)}

    def loss(params, x, y):
        found = jnp.einsum("i,kij,j->k", x, params["w"], y)
        return jnp.sum(jnp.sin(found)) + y @ params["v"] @ y

    return Model(loss, params, (draw.x(5), draw.x(4)))


@model
def weight_norm():
    draw = Draw()
    params = {"v": draw.weight(5, 4), "g": jnp.ones(4), "u": draw.weight(4, 3)}

    def loss(params, x):
        v = params["v"]
        w = params["g"][None] * v / jnp.sqrt(jnp.sum(jnp.square(v), 0, keepdims=True))
        return jnp.sum(jnp.square(jnp.tanh(x @ w) @ params["u"]))

    return Model(loss, params, (draw.x(4, 5),))


@model
def dropout_with_keys_in_the_batch():
    draw = Draw()
    params = {"w": draw.weight(5, 8), "v": draw.weight(8, 3)}

    def loss(params, x, key):
        hidden = jnp.tanh(x @ params["w"])
        kept = jax.random.bernoulli(key, jnp.float32(0.7), hidden.shape)
        hidden = jnp.where(kept, hidden, 0.0)
        return jnp.sum(jnp.square(hidden @ params["v"]))

    return Model(loss, params, (draw.x(5), jax.random.split(jax.random.key(0), EXAMPLES)))


@jax.custom_vjp
def _rounded(x):
    return jnp.round(4 * x) / 4


_rounded.defvjp(lambda x: (_rounded(x), None), lambda _, dy: (0.9 * dy,))


@jax.custom_jvp
def _soft(x):
    return jnp.log1p(jnp.exp(x))


@_soft.defjvp
def _soft_jvp(primals, tangents):
    return _soft(*primals), jax.nn.sigmoid(primals[0]) * tangents[0]


@model(quick="leaf")
def activations_with_derivatives_of_their_own():
    """One of them is also given a parameter."""
    draw = Draw()
    params = {"w": draw.weight(5, 6), "b": draw.weight(6), "v": draw.weight(6, 3)}

    def loss(params, x):
        hidden = _rounded(x @ params["w"]) + _soft(params["b"])[None]
        return jnp.sum(jnp.square(_soft(hidden) @ _rounded(params["v"])))

    return Model(loss, params, (draw.x(4, 5),))


@model
def a_penalty_on_the_gradient_of_the_input():
    draw = Draw()
    logits, params = _mlp(draw)

    def loss(params, x, y):
        value, dx = jax.value_and_grad(lambda x: entropy(logits(params, x), y))(x)
        return value + jnp.sum(jnp.square(dx))

    return Model(loss, params, (draw.x(5), draw.ids(3)))


@model
def complex_parameters():
    draw = Draw()
    w = lax.complex(draw.weight(5, 3), draw.weight(5, 3))

    def loss(params, x):
        y = lax.complex(x, 0.5 * x) @ params["w"]
        return jnp.sum(jnp.square(y.real)) + jnp.sum(jnp.abs(jnp.sin(x @ params["v"])))

    return Model(loss, {"w": w, "v": draw.weight(5, 2)}, (draw.x(5),))


def _narrow(dtype, digits):
    draw = Draw()
    logits, params = _mlp(draw)
    params = jax.tree.map(lambda x: x.astype(dtype), params)

    def loss(params, x, y):
        return entropy(logits(params, x.astype(dtype)).astype(jnp.float32), y)

    return Model(loss, params, (draw.x(4, 5), draw.ids(3, 4)), False, digits, False)


@model(quick="leaf")
def bfloat16():
    return _narrow(jnp.bfloat16, 2.0**-7)


@model
def float16():
    return _narrow(jnp.float16, 2.0**-9)


@model
def float32_parameters_and_bfloat16_layers():
    draw = Draw()
    logits, params = _mlp(draw)

    def loss(params, x, y):
        narrow = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
        return entropy(logits(narrow, x.astype(jnp.bfloat16)).astype(jnp.float32), y)

    return Model(loss, params, (draw.x(4, 5), draw.ids(3, 4)), False, 2.0**-7, False)


# Branches, loops, and functions inside of the loss


@model
def branches():
    draw = Draw()
    params = {"a": draw.weight(5, 3), "b": draw.weight(5, 3), "c": draw.weight(3, 2)}

    def loss(params, x, way):
        hidden = lax.cond(jnp.sum(x) > 0, lambda x: x @ params["a"], lambda x: -x, x[:, :])
        branches = [
            lambda x: x @ params["b"],
            lambda x: jnp.sin(x @ params["b"]),
            lambda x: x[:, :3],
        ]
        return jnp.sum(jnp.square((hidden[:, :3] + lax.switch(way, branches, x)) @ params["c"]))

    params["a"] = draw.weight(5, 5)
    return Model(loss, params, (draw.x(4, 5), draw.ids(3)))


@model(quick="tree")
def loops():
    """A `fori_loop` with a layer in it, and a `while_loop` that no parameter goes through."""
    draw = Draw()
    params = {"w": draw.weight(5, 5), "v": draw.weight(5, 2)}

    def loss(params, x):
        x = lax.fori_loop(0, 3, lambda i, x: jnp.tanh(x @ params["w"]), x)
        size = lax.while_loop(lambda s: s > 1, lambda s: s / 2, jnp.sum(jnp.abs(x)))
        return jnp.sum(jnp.square(x @ params["v"])) * lax.stop_gradient(size)

    return Model(loss, params, (draw.x(4, 5),))


@model
def functions_in_functions():
    """`jit` in `jit`, `vmap` over positions, `map` over layers, `checkpoint`."""
    draw = Draw()
    params = {"w": draw.weight(3, 5, 5), "v": draw.weight(5, 2)}

    @jax.jit
    def inner(w, x):
        return jax.jit(jnp.tanh)(x @ w)

    def loss(params, x):
        x = jax.vmap(jax.checkpoint(inner), (None, 0))(params["w"][0], x)
        both = lax.map(lambda w: inner(w, x), params["w"][1:])
        return jnp.sum(jnp.square(jnp.sum(both, 0) @ params["v"]))

    return Model(loss, params, (draw.x(4, 5),))


@model
def a_linear_recurrence():
    """State-space layers: a parameter for each channel, by `associative_scan`."""
    draw = Draw()
    params = {"a": draw.weight(4), "in": draw.weight(5, 4), "out": draw.weight(4, 2)}

    def loss(params, x):
        a = jnp.broadcast_to(jax.nn.sigmoid(params["a"])[None], (6, 4))

        def join(left, right):
            return left[0] * right[0], left[1] * right[0] + right[1]

        _, states = lax.associative_scan(join, (a, x @ params["in"]))
        return jnp.sum(jnp.square(jnp.tanh(states) @ params["out"]))

    return Model(loss, params, (draw.x(6, 5),))

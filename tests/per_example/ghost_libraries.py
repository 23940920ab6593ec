"""Losses of one example over models of Flax, Equinox and Haiku; skipped if these are missing."""

import functools

import jax
import jax.numpy as jnp
import pytest
from ghost_table import Draw, Model, entropy, model
from jax import lax


def _linen(net, x, *, weigh=jnp.sin):
    """A model of Flax Linen, whose loss is a sum over its outputs."""
    variables = net.init(jax.random.key(0), x[0])

    def loss(variables, x):
        return jnp.sum(weigh(net.apply(variables, x)))

    return Model(loss, variables, (x,))


@model
def linen_dense():
    nn = pytest.importorskip("flax.linen")
    layers = [nn.Dense(6), nn.LayerNorm(), nn.gelu, nn.Dense(4), nn.RMSNorm(), nn.Dense(2)]
    return _linen(nn.Sequential(layers), Draw().x(5))


@model
def linen_convolutions():
    nn = pytest.importorskip("flax.linen")
    layers = [nn.Conv(4, (3, 3), 2), nn.GroupNorm(2), nn.relu]
    layers += [nn.Conv(4, (3, 3), feature_group_count=4), nn.ConvTranspose(2, (2, 2), (2, 2))]
    return _linen(nn.Sequential(layers), Draw().x(6, 6, 2))


@model
def linen_lstm():
    nn = pytest.importorskip("flax.linen")
    found = _linen(nn.RNN(nn.OptimizedLSTMCell(4)), Draw().x(6, 3), weigh=jnp.square)
    return found._replace(has_float64=False)  # its carry is of float32


@model
def linen_attention():
    nn = pytest.importorskip("flax.linen")

    class Net(nn.Module):
        """An embedding that is the head too, and attention over heads that are axes of kernels."""

        @nn.compact
        def __call__(self, ids):
            embed = nn.Embed(9, 8)
            x = embed(ids)
            x = x + nn.MultiHeadDotProductAttention(num_heads=2)(nn.LayerNorm()(x))
            return embed.attend(x)

    return _linen(Net(), Draw().ids(9, 6))


@model
def linen_layers_in_a_scan():
    nn = pytest.importorskip("flax.linen")

    class Layer(nn.Module):
        """What a scan repeats."""

        @nn.compact
        def __call__(self, x, _):
            return x + nn.Dense(5)(nn.tanh(nn.Dense(7)(x))), None

    class Net(nn.Module):
        """Three layers, checkpointed."""

        @nn.compact
        def __call__(self, x):
            stack = nn.scan(nn.remat(Layer), {"params": 0}, split_rngs={"params": True}, length=3)
            return stack()(x, None)[0]

    return _linen(Net(), Draw().x(4, 5), weigh=jnp.square)


def _nnx(make, batch, apply):
    """A model of Flax NNX, whose parameters are its state."""
    nnx = pytest.importorskip("flax.nnx")
    graph, params, rest = nnx.split(make(nnx.Rngs(0)), nnx.Param, ...)

    def loss(params, *example):
        return apply(nnx.merge(graph, params, rest), *example)

    return Model(loss, params, batch)


@model
def nnx_dense():
    nnx = pytest.importorskip("flax.nnx")

    def make(rngs):
        return nnx.List(
            [nnx.Linear(5, 6, rngs=rngs), nnx.LayerNorm(6, rngs=rngs), nnx.Linear(6, 3, rngs=rngs)]
        )

    def apply(net, x, y):
        first, norm, last = net
        return entropy(last(nnx.gelu(norm(first(x)))), y)

    draw = Draw()
    return _nnx(make, (draw.x(5), draw.ids(3)), apply)


@model
def nnx_convolutions():
    nnx = pytest.importorskip("flax.nnx")

    def make(rngs):
        return nnx.List(
            [nnx.Conv(2, 4, (3, 3), rngs=rngs), nnx.GroupNorm(4, num_groups=2, rngs=rngs)]
        )

    return _nnx(make, (Draw().x(6, 6, 2),), lambda net, x: jnp.sum(jnp.sin(net[1](net[0](x)))))


@model
def nnx_attention():
    nnx = pytest.importorskip("flax.nnx")

    def make(rngs):
        return nnx.MultiHeadAttention(2, 8, decode=False, rngs=rngs)

    return _nnx(make, (Draw().x(6, 8),), lambda net, x: jnp.sum(jnp.square(net(x))))


@model
def nnx_gru():
    nnx = pytest.importorskip("flax.nnx")

    def apply(cell, x):
        return jnp.sum(jnp.square(lax.scan(lambda h, x: (cell(h, x)[0], None), jnp.zeros(4), x)[0]))

    return _nnx(lambda rngs: nnx.GRUCell(3, 4, rngs=rngs), (Draw().x(6, 3),), apply)


def _equinox(make, batch, apply):
    """A model of Equinox, whose parameters are its floating-point arrays."""
    eqx = pytest.importorskip("equinox")
    params, rest = eqx.partition(make(eqx, jax.random.split(jax.random.key(0))), eqx.is_array)

    def loss(params, *example):
        return apply(eqx.combine(params, rest), *example)

    return Model(loss, params, batch)


@model
def equinox_mlp():
    draw = Draw()

    def make(eqx, keys):
        return eqx.nn.MLP(5, 3, 7, 2, key=keys[0])

    return _equinox(make, (draw.x(5), draw.ids(3)), lambda net, x, y: entropy(net(x), y))


@model
def equinox_convolutions():
    def make(eqx, keys):
        return eqx.nn.Conv2d(2, 4, 3, 2, key=keys[0]), eqx.nn.LayerNorm((4, 2, 2))

    def apply(net, x):
        return jnp.sum(jnp.sin(net[1](net[0](x))))

    return _equinox(make, (Draw().x(2, 6, 6),), apply)


@model
def equinox_gru():
    def apply(cell, x):
        def step(h, x):
            return (cell(x, h), None)

        return jnp.sum(jnp.square(lax.scan(step, jnp.zeros(4), x)[0]))

    return _equinox(lambda eqx, keys: eqx.nn.GRUCell(3, 4, key=keys[0]), (Draw().x(6, 3),), apply)


def _haiku(forward, x):
    """A function of Haiku, whose loss is a sum over its outputs."""
    hk = pytest.importorskip("haiku")
    net = hk.without_apply_rng(hk.transform(functools.partial(forward, hk)))
    params = net.init(jax.random.key(0), x[0])
    return Model(lambda p, x: jnp.sum(jnp.square(net.apply(p, x))), params, (x,))


@model
def haiku_mlp():
    return _haiku(lambda hk, x: hk.LayerNorm(-1, True, True)(hk.nets.MLP([6, 4])(x)), Draw().x(5))


@model
def haiku_lstm():
    def forward(hk, x):
        core = hk.LSTM(4)
        return hk.dynamic_unroll(core, x, core.initial_state(None))[0]

    return _haiku(forward, Draw().x(6, 3))


@model
def haiku_convolutions():
    def forward(hk, x):
        x = jax.nn.relu(hk.Conv2D(4, 3, 2)(x[None]))
        return hk.DepthwiseConv2D(1, 3)(x)

    return _haiku(forward, Draw().x(6, 6, 2))

"""Losses of one example that use their parameters in all the ways that are followed, and others.

Each is `name: (loss, params, batch, ways)`, where `ways` says how each parameter is measured.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from optaxclip._loss_arguments import LossArguments
from optaxclip.per_example._example_loss import ExampleLoss
from optaxclip.per_example._ghost_plan import GhostNormPlan

EXAMPLES = 5


def drawn(*shape, seed=0):
    return np.random.default_rng([seed, *shape]).normal(size=shape).astype(np.float32) / 2


def batch(*shape):
    return drawn(EXAMPLES, *shape, seed=1)


def ids(*shape, high):
    return np.random.default_rng(2).integers(-2, high + 2, (EXAMPLES, *shape)).astype(np.int32)


def planned(loss, params, *batch):
    """The call of a loss, and how the norms of its parameters are found."""
    call = ExampleLoss(loss, False, LossArguments.split((params, *batch), 0, None), {})
    measured = call.params.inexact_leaves()
    return call, GhostNormPlan.create(*call.program(measured), len(measured))


def squares(y):
    return jnp.sum(jnp.sin(y) + jnp.square(y) / 3)


CASES = {}


def case(params, *arrays, ways):
    def add(fn):
        CASES[fn.__name__] = (fn, params, arrays, ways)
        return fn

    return add


@case({"w": drawn(4, 6), "b": drawn(6)}, batch(4), ways={"w": "vectors", "b": "dense"})
def layer(p, x):
    return squares(jnp.tanh(x @ p["w"] + p["b"]))


@case({"w": drawn(40, 60)}, batch(3, 40), ways={"w": "gram"})
def tokens(p, x):
    return squares(x @ p["w"])


@case({"w": drawn(4, 6)}, batch(9, 4), ways={"w": "direct"})
def many_tokens(p, x):
    return squares(x @ p["w"])


@case({"w": drawn(6, 4)}, batch(4, 3), ways={"w": "direct"})
def parameter_on_the_left(p, x):
    return squares(p["w"] @ x)


@case({"w": drawn(3, 4, 6)}, batch(3, 5, 4), ways={"w": "direct"})
def experts(p, x):
    return squares(jnp.einsum("etk,ekn->etn", x, p["w"]))


@case({"w": drawn(6, 3, 4)}, batch(5, 4, 3), ways={"w": "direct"})
def experts_on_the_left(p, x):
    return squares(jnp.einsum("nek,tke->ent", p["w"], x))


@case({"w": drawn(4, 2, 3)}, batch(7, 4), ways={"w": "direct"})
def heads(p, x):
    return squares(jnp.einsum("tk,khd->htd", x, p["w"]))


@case({"w": drawn(3, 2, 5)}, batch(2, 3), ways={"w": "gram"})
def sums_over_axes_in_both_orders(p, x):
    orders = [((1, 0), (0, 1)), ((0, 1), (1, 0))]
    return sum(squares(lax.dot_general(x, p["w"], (order, ((), ())))) for order in orders)


@case({"w": drawn(4, 2, 3)}, batch(2, 4), ways={"w": "direct"})
def heads_in_both_orders(p, x):
    turned = jnp.einsum("tk,kdh->tdh", jnp.sin(x), jnp.transpose(p["w"], (0, 2, 1)))
    return squares(jnp.einsum("tk,khd->thd", x, p["w"])) + squares(turned)


@case({"w": drawn(1, 3), "k": drawn(3, 2, 1)}, batch(4, 2), ways={"w": "direct", "k": "direct"})
def one_input_and_one_feature(p, x):
    y = convolution(x, p["k"], (1,), "SAME", numbers=("NWC", "WIO", "NWC"))
    return squares(y[0] @ p["w"])


@case({"w": drawn(24)}, batch(5, 4), ways={"w": "direct"})
def reshaped_and_transposed(p, x):
    return squares(x @ p["w"].reshape(6, 4).T)


@case({"w": drawn(7, 4)}, ids(6, high=7), ways={"w": "rows"})
def rows(p, i):
    return squares(p["w"][i])


@case({"w": drawn(7, 4)}, ids(6, high=7), ways={"w": "rows"})
def rows_that_are_clipped(p, i):
    return squares(jnp.take(p["w"], i, axis=0, mode="clip"))


@case({"w": drawn(7, 4, 2)}, ids(3, 2, high=6), ways={"w": "rows"})
def rows_or_zeros(p, i):
    return squares(jnp.take(p["w"], i, axis=0, mode="fill", fill_value=0))


@case({"w": drawn(7, 4)}, ids(6, high=7), ways={"w": "rows"})
def rows_twice(p, i):
    return squares(p["w"][i] * 2) + squares(p["w"][i[::2]])


@case({"w": drawn(7, 4)}, ids(3, high=7), ways={"w": "chunks"})
def tied_and_small(p, i):
    return squares(jnp.tanh(p["w"][i]) @ p["w"].T)


@case({"w": drawn(30, 20)}, ids(3, high=30), ways={"w": "tied"})
def tied(p, i):
    return squares(jnp.tanh(p["w"][i]) @ p["w"].T)


@case({"w": drawn(30, 20)}, ids(2, high=30), ids(3, high=30), ways={"w": "tied"})
def tied_and_looked_up_twice(p, i, j):
    """As in a translator, whose encoder and decoder share a table."""
    seen = jnp.mean(p["w"][i], 0, keepdims=True)
    return squares(jnp.tanh(p["w"][j] + seen) @ p["w"].T)


@case({"w": drawn(5, 4)}, ids(5, 2, high=4), batch(5), ways={"w": "dense"})
def tied_and_sliced_in_a_loop(p, i, x):
    entries = lax.scan(lambda _, row: (None, row[0][row[1]]), None, (p["w"], i))[1]
    return squares(entries) + squares(x @ p["w"])


@case({"w": drawn(30, 20)}, batch(2, 30), ways={"w": "gram"})
def autoencoder(p, x):
    return squares(jnp.tanh(x @ p["w"]) @ p["w"].T)


@case({"w": drawn(4, 4)}, batch(4), ways={"w": "direct"})
def layer_used_three_times(p, x):
    for _ in range(3):
        x = jnp.tanh(p["w"] @ x)
    return squares(x)


def convolution(x, w, *options, **keywords):
    numbers = keywords.pop("numbers", ("NHWC", "HWIO", "NHWC"))
    return lax.conv_general_dilated(x[None], w, *options, dimension_numbers=numbers, **keywords)


KERNEL = {"w": drawn(3, 2, 3, 4)}


@case(KERNEL, batch(6, 5, 3), ways={"w": "direct"})
def kernel(p, x):
    return squares(convolution(x, p["w"], (1, 1), "SAME"))


@case(KERNEL, batch(7, 6, 3), ways={"w": "direct"})
def kernel_with_strides_and_dilations(p, x):
    options = {"lhs_dilation": (2, 1), "rhs_dilation": (1, 2)}
    return squares(convolution(x, p["w"], (2, 1), [(1, 2), (-1, 3)], **options))


@case({"w": drawn(4, 3, 3, 2)}, batch(3, 6, 5), ways={"w": "direct"})
def kernel_channels_first(p, x):
    return squares(convolution(x, p["w"], (1, 2), "VALID", numbers=("NCHW", "OIHW", "NCHW")))


@case({"w": drawn(3, 3, 1, 8)}, batch(5, 5, 4), ways={"w": "direct"})
def depthwise(p, x):
    return squares(convolution(x, p["w"], (1, 1), "SAME", feature_group_count=4))


@case({"w": drawn(2, 2, 3, 4)}, batch(5, 5, 6), ways={"w": "direct"})
def grouped(p, x):
    return squares(convolution(x, p["w"], (1, 1), "SAME", feature_group_count=2))


@case({"w": drawn(2, 2, 8, 12)}, batch(4, 4, 8), ways={"w": "gram"})
def kernel_of_patches(p, x):
    return squares(convolution(x, p["w"], (2, 2), "VALID"))


@case({"w": drawn(3, 2, 2)}, batch(2, 7, 2), ways={"w": "direct"})
def kernel_of_two_images(p, x):
    numbers = ("NWC", "WIO", "NWC")
    y = lax.conv_general_dilated(x, p["w"], (1,), "SAME", dimension_numbers=numbers)
    return squares(y) + squares(convolution(x[0] ** 2, p["w"], (2,), "SAME", numbers=numbers))


STACK = {"w": drawn(3, 4, 4), "b": drawn(3, 4)}
IN_STACK = {"w": "direct", "b": "dense"}


def in_layers(p, x, wrap=lambda fn: fn):
    def body(x, layer):
        return x + jnp.tanh(x @ layer["w"] + layer["b"][None]), None

    return squares(lax.scan(wrap(body), x, p)[0])


@case(STACK, batch(5, 4), ways=IN_STACK)
def stacked_layers(p, x):
    return in_layers(p, x)


@case(STACK, batch(5, 4), ways=IN_STACK)
def checkpointed_layers(p, x):
    policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    return in_layers(p, x, functools.partial(jax.checkpoint, policy=policy))


@case({"w": drawn(3, 40, 40)}, batch(2, 40), ways={"w": "gram"})
def stacked_wide_layers(p, x):
    return squares(lax.scan(lambda x, w: (jnp.tanh(x @ w) + x, None), x, p["w"])[0])


@case({"w": drawn(4, 4), "u": drawn(3, 4)}, batch(6, 3), ways={"w": "direct", "u": "direct"})
def recurrent(p, x):
    def body(h, x):
        h = jnp.tanh(h @ p["w"] + x @ p["u"])
        return h, h

    return squares(lax.scan(body, jnp.zeros(4, x.dtype), x, reverse=True)[1])


@case({"w": drawn(3, 4, 4)}, batch(5, 4), ways={"w": "direct"})
def recurrent_in_layers(p, x):
    def layer(x, w):
        return lax.scan(lambda h, x: (jnp.tanh(h @ w.T + x),) * 2, x[0], x)[1], None

    return squares(lax.scan(layer, x, p["w"])[0])


@case({"w": drawn(2, 3, 4, 4)}, batch(4), ways={"w": "vectors"})
def layers_of_layers(p, x):
    def inner(x, w):
        return lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)

    return squares(lax.scan(inner, x, p["w"])[0])


@case({"w": drawn(2, 3, 4, 4)}, batch(4), ways={"w": "direct"})
def autoencoders_in_layers_of_layers(p, x):
    def inner(x, w):
        return lax.scan(lambda x, w: (jnp.tanh(x @ w) @ w.T + x, None), x, w)

    return squares(lax.scan(inner, x, p["w"])[0])


@case({"w": drawn(3, 5, 4)}, ids(3, 2, high=5), ways={"w": "rows"})
def stacked_tables(p, i):
    return squares(lax.scan(lambda _, w: (None, w[0][w[1]]), None, (p["w"], i))[1])


@case({"w": drawn(3, 2, 2, 3, 4)}, batch(3, 4, 5, 3), ways={"w": "direct"})
def stacked_kernels(p, x):
    def body(total, layer):
        return total + squares(convolution(layer[1], layer[0], (1, 1), "SAME")), None

    return lax.scan(body, jnp.zeros((), x.dtype), (p["w"], x))[0]


@case({"w": drawn(3, 4, 12)}, batch(5, 4), ways={"w": "direct"})
def slices_of_a_kernel(p, x):
    q, k, v = jnp.split(p["w"][1], 3, axis=1)
    return squares((x @ k) @ (x @ q).T @ (x @ v))


@case({"w": drawn(8, 6)}, batch(5, 4), ways={"w": "direct"})
def every_second_row(p, x):
    return squares(x @ p["w"][::2])


@case({"w": drawn(4, 12)}, batch(5, 4), ways={"w": "dense"})
def slices_that_overlap(p, x):
    return squares(x @ p["w"][:, :7]) + squares(x @ p["w"][:, 5:])


GATES = {name: drawn(4, 3, seed=i) for i, name in enumerate("ifgo")}


@case(GATES, batch(5, 4), ways=dict.fromkeys("ifgo", "direct"))
def concatenated_outputs(p, x):
    y = x @ jnp.concatenate([p[name] for name in "ifgo"], axis=-1)
    return squares(jnp.split(y, 4, -1)[0] * y[:, 3:6])


@case({"a": drawn(3, 4), "b": drawn(2, 4)}, batch(6, 5), ways={"a": "direct", "b": "direct"})
def concatenated_inputs(p, x):
    w = jnp.concatenate([p["a"], jnp.ones_like(p["a"][:0]), p["b"]]).T
    return squares(x @ w.T)


@case(
    {"a": drawn(1, 3, 4), "b": drawn(2, 3, 4)}, batch(3, 6, 3), ways=dict.fromkeys("ab", "direct")
)
def concatenated_experts(p, x):
    return squares(jnp.einsum("etk,ekn->etn", x, jnp.concatenate([p["a"], p["b"]])))


IN_OTHER_AXES = {"a": drawn(6, 3), "b": drawn(6, 2), "c": drawn(5, 2, 1), "d": drawn(5, 2, 3)}
IN_OTHER_AXES |= {"e": drawn(5, 1, 4), "f": drawn(5, 2, 4)}
IN_OTHER_AXES |= {"g": drawn(3, 5, 2), "h": drawn(3, 5, 1)}


@case(IN_OTHER_AXES, batch(7, 5), ways=dict.fromkeys(IN_OTHER_AXES, "direct"))
def concatenated_in_other_axes(p, x):
    inputs, outputs, experts, of_experts = (
        jnp.concatenate([p[name] for name in names], axis)
        for names, axis in (("ab", 1), ("cd", 2), ("ef", 1), ("gh", 2))
    )
    y = jnp.einsum("tk,nk->tn", x, inputs), lax.dot_general(outputs, x, (((0,), (1,)), ((), ())))
    stacked = jnp.stack([x, 2 * x, 3 * x], 1)
    z = jnp.einsum("tgk,kgn->tgn", stacked, experts)
    last = lax.dot_general(stacked, of_experts, (((2,), (1,)), ((1,), (0,))))
    return sum(map(squares, (*y, z, last)))


@case({"h": drawn(4, 4), "x": drawn(4, 4)}, batch(6, 4), ways={"h": "direct", "x": "direct"})
def concatenated_in_a_loop(p, x):
    def body(h, x):
        return jnp.tanh(jnp.concatenate([h, x]) @ jnp.concatenate([p["h"], p["x"]])), None

    return squares(lax.scan(body, x[0], x)[0])


@case({"h": drawn(4, 4), "x": drawn(4, 4)}, batch(6, 4), ways={"h": "direct", "x": "direct"})
def concatenated_before_a_loop(p, x):
    both = jnp.concatenate([p["h"], p["x"]])

    def body(h, x):
        return jnp.tanh(jnp.concatenate([h, x]) @ both), None

    return squares(lax.scan(body, x[0], x)[0])


@case({"a": drawn(3, 4, 2), "b": drawn(3, 4, 3)}, batch(5, 4), ways={"a": "direct", "b": "direct"})
def concatenated_layers(p, x):
    def layer(x, w):
        return jnp.tanh((x @ w)[:, 1:]), None

    return squares(lax.scan(layer, x, jnp.concatenate([p["a"], p["b"]], 2))[0])


@case({"w": drawn(4, 6), "g": drawn(6)}, batch(5, 4), ways={"w": "dense", "g": "dense"})
def weight_norm(p, x):
    return squares(x @ (p["w"] * (p["g"] / jnp.linalg.norm(p["w"], axis=0))[None]))


@case({"w": drawn(4, 6), "t": drawn(4, 6)}, batch(5, 4), ways={"w": "direct", "t": "unused"})
def stopped_and_unused(p, x):
    positive = jnp.sum(p["w"] > 0).astype(x.dtype)
    return squares(x @ p["w"]) + squares(lax.stop_gradient(p["w"])) + positive


@case({"w": drawn(4, 6)}, batch(4), ways={"w": "dense"})
def decayed(p, x):
    return squares(x @ p["w"]) + jnp.sum(jnp.square(p["w"]))


@case({"w": drawn(4, 6), "v": drawn(6, 3)}, batch(4), ways={"w": "dense", "v": "direct"})
def beside_a_dense_parameter(p, x):
    return jnp.sum(jnp.square(p["w"])) + squares(x @ (p["w"] @ p["v"]))


@case({"w": drawn(4, 4), "v": drawn(4, 4)}, batch(4), ways={"w": "dense", "v": "vectors"})
def in_a_branch(p, x):
    y = lax.cond(x[0] > 0, lambda x: x @ p["w"], lambda x: x * 2, x)
    return squares(y @ p["v"])


@jax.custom_vjp
def doubled_backward(x):
    return jnp.tanh(x)


doubled_backward.defvjp(lambda x: (jnp.tanh(x), x), lambda x, d: (2 * d * jnp.cos(x),))


@case({"w": drawn(4, 4), "v": drawn(4, 4)}, batch(4), ways={"w": "vectors", "v": "dense"})
def derivatives_of_its_own(p, x):
    return squares(doubled_backward(x @ p["w"]) @ doubled_backward(p["v"]))


@case({"w": drawn(4, 4)}, batch(4), ways={"w": "dense"})
def carried_in_a_loop(p, x):
    def body(_, both):
        w, x = both
        return w * 1.5, jnp.tanh(x @ w)

    return squares(lax.fori_loop(0, 3, body, (p["w"], x))[1])


@case({"w": drawn(4, 4)}, batch(4), ways={"w": "direct"})
def constant_in_a_loop(p, x):
    return squares(lax.fori_loop(0, 3, lambda _, x: jax.nn.relu(x @ p["w"]), x))


@case({"w": drawn(4, 4)}, batch(4), ways={"w": "vectors"})
def inside_jit(p, x):
    @jax.jit
    def fn(w, x):
        return w.T, jnp.sum(x)

    w, total = fn(p["w"], x)
    return squares(jax.jit(jnp.dot)(x, w)) * total


@case({"w": np.float32(1.5), "v": drawn(3)}, batch(3), ways={"w": "dense", "v": "vectors"})
def scalars(p, x):
    return squares(p["w"] * jnp.dot(p["v"], x))


@case({"w": drawn(3, 3)}, batch(3), ways={"w": "dense"})
def product_of_parameters(p, x):
    return squares(x @ (p["w"] @ p["w"]))


@case({"w": drawn(3, 4), "i": np.arange(3)}, batch(3), ways={"w": "vectors"})
def integers(p, x):
    return squares(x[p["i"]] @ p["w"])

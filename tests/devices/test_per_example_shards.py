"""Inside `shard_map` and `pmap` a device clips whole gradients of its own examples, or refuses."""

import functools
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import P, lax
from jax.sharding import AxisType

import optaxclip
from optaxclip import per_example, scopes

X = 10 * np.random.default_rng(0).normal(size=(16, 16)).astype(np.float32)


@functools.cache
def mesh():
    return jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))


def on_devices(fn, in_specs, out_specs, check_vma):
    options = {"mesh": mesh(), "in_specs": in_specs, "out_specs": out_specs}
    return jax.jit(jax.shard_map(fn, **options, check_vma=check_vma))


def gathered(w, x):
    return jnp.dot(lax.all_gather(w, "x", tiled=True), x)


def dot(w, x):
    return jnp.dot(w, x)


def dot_of_parts(w, x):
    return lax.psum(jnp.dot(w, x), "x")


SPLIT = {
    "parameters gathered in the loss": (gathered, P("x"), P("x")),
    "features": (dot_of_parts, P("x"), P(None, "x")),
    "parameters that nobody adds up": (dot, P("x"), P(None, "x")),
}
GRADIENTS = {
    "vmap": functools.partial(per_example.clipped_grad, threshold=1.0),
    "ghost": functools.partial(per_example.clipped_grad, threshold=1.0, method="ghost"),
    "norms": per_example.grad_norms,
}


@pytest.mark.parametrize(("check_vma", "kind"), [*product([True, False], GRADIENTS)])
def test_sharded_params_raise_in_shard_map(check_vma, kind):
    message = r"varies over \['x'\]" if check_vma else "specs is required"
    for loss, *in_specs in SPLIT.values():
        run = on_devices(GRADIENTS[kind](loss), tuple(in_specs), P(), check_vma)
        with pytest.raises(ValueError, match=f"{message}.* jit on an explicit mesh"):
            jax.eval_shape(run, jnp.zeros(16), X)
    told = GRADIENTS[kind](gathered, specs=P("x"))
    with pytest.raises(
        ValueError, match=r"must not be sharded within an example, .* varies over \['x'\]"
    ):
        jax.eval_shape(on_devices(told, (P("x"), P("x")), P(), check_vma), jnp.zeros(16), X)


def less_the_mean(w, x):
    """As with a BatchNorm over devices: the value differs from device to device."""
    y = jnp.tanh(w * x)
    mean = jax.jit(jax.checkpoint(lambda y: lax.pmean(y, "x")))(y)
    return jnp.sum(jnp.square(y - mean)) + lax.axis_index("x").astype(w.dtype)


@pytest.mark.parametrize("loss", [dot_of_parts, less_the_mean])
@pytest.mark.parametrize(("check_vma", "kind"), [*product([True, False], GRADIENTS)])
def test_loss_with_collectives_raises_in_shard_map(check_vma, kind, loss):
    run = on_devices(GRADIENTS[kind](loss, specs=P()), (P(), P("x")), P(), check_vma)
    with pytest.raises(ValueError, match=r"loss_fn must .* communicates across devices with psum"):
        jax.eval_shape(run, jnp.zeros(16), X)


CLIPS = {
    "clip_sum": lambda x, **options: per_example.clip_sum(x, 1.0, **options).grads,
    "global": lambda x, **options: optaxclip.per_example_global_norm_clip(x, 1.0, **options),
    "layer": lambda x, **options: optaxclip.per_example_layer_norm_clip(x, 1.0, **options),
}


@pytest.mark.parametrize(("check_vma", "clip"), [*product([True, False], CLIPS)])
def test_sharded_per_example_gradients_raise_in_shard_map(check_vma, clip):
    unknown = "sharded within an example" if check_vma else "specs is required"
    for spec, specs, message in (
        (P(None, "x"), None, unknown),
        (P("x"), None, unknown),
        (P(None, "x"), P(None, "x"), r"varies over \['x'\]"),
    ):
        run = on_devices(functools.partial(CLIPS[clip], specs=specs), (spec,), P(), check_vma)
        with pytest.raises(ValueError, match=rf"{message}.*specs=PartitionSpec\(\"axis\"\)"):
            jax.eval_shape(run, X)
    with pytest.raises(ValueError, match="specs is required inside pmap"):
        jax.eval_shape(jax.pmap(CLIPS[clip], axis_name="x"), X.reshape(8, 2, 16))


def test_clip_sum_accepts_gradients_sharded_over_automatic_axes():
    wide = jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    options = {"mesh": wide, "in_specs": P("x"), "out_specs": P("x"), "axis_names": {"x"}}

    def clip(x):
        return per_example.clip_sum(x, 1.0, specs=P("x", "y")).grads[None]

    for check_vma in (True, False):
        jax.eval_shape(jax.jit(jax.shard_map(clip, **options, check_vma=check_vma)), X)


@pytest.mark.parametrize("check_vma", [True, False])
def test_clip_sum_in_shard_map_matches_single_device(check_vma):
    """With and without one example, which lies on one device, the sum differs by the threshold."""
    say = None if check_vma else P()
    grad_fns = [GRADIENTS[method](dot, specs=say) for method in ("vmap", "ghost")]

    def sums(is_padding, x):
        w = jnp.zeros(16)
        own = [fn(w, x, is_padding=is_padding).grads for fn in grad_fns]
        for scope in (scopes.tree(), scopes.leaf()):
            options = {"scope": scope, "is_padding": is_padding, "specs": P("x")}
            own.append(per_example.clip_sum(x, 1.0, **options).grads)
        return lax.psum(jnp.stack(own), "x")

    def all_but(examples, x):
        every = jax.vmap(sums, (0, None))
        return on_devices(every, (P(None, "x"), P("x")), P(), check_vma)(examples, x)

    found = np.asarray(all_but(np.stack([np.arange(16) == k for k in (-1, 3)]), X))
    expected = per_example.clip_sum(X, 1.0).grads
    for each, without in zip(*found, strict=True):
        np.testing.assert_allclose(each, expected, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(np.linalg.norm(each - without), 1, rtol=1e-5)


@pytest.mark.parametrize("check_vma", [True, False])
def test_noisy_aggregate_of_sharded_examples_raises(check_vma):
    thresholds = (1.0, per_example.quantile_threshold(count_noise=1.0))
    for tx in (
        optaxclip.per_example_clip_and_aggregate(threshold, 1.0, 0) for threshold in thresholds
    ):
        run = on_devices(lambda x, tx=tx: tx.update(x, tx.init(x[0])), P("x"), P(), check_vma)
        with pytest.raises(ValueError, match=r"along \['x'\].*psum.*noisy_mean"):
            jax.eval_shape(run, X)


def test_noisy_aggregate_of_replicated_examples_matches_single_device():
    tx = optaxclip.per_example_clip_and_aggregate(1.0, 1.0, 0)

    def update(x):
        return tx.update(x, tx.init(x[0]))[0]

    np.testing.assert_allclose(on_devices(update, P(), P(), True)(X), update(X), rtol=1e-5)

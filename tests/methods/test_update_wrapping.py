"""Clips of updates and of attention's weights in Flax, and thresholds that are injected."""

import flax.linen
import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import optaxclip
from optaxclip import monitor

pytestmark = pytest.mark.usefixtures("standard_promotion")

STABLE = optaxclip.scale_by_stable_adam()
LOGITS = np.float32([1.0, 8.0])


def kernels(path, leaf):
    del leaf
    return optaxclip.Heads(-2) if path.endswith("kernel") else None


def both(rate=0.0):
    clip = optaxclip.clip_attention_logits(2.0, heads=kernels)
    return optax.chain(STABLE, optax.scale(-rate), clip)


@pytest.mark.slow
def test_nnx_optimizer_passes_max_logits():
    model = nnx.LinearGeneral(3, (2, 4), rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, both(), wrt=nnx.Param)
    before = np.array(model.kernel[...])

    @nnx.jit
    def step(model, optimizer):
        grads = nnx.grad(lambda model: jnp.sum(model(jnp.ones((1, 3)))))(model)
        optimizer.update(model, grads, max_logits=LOGITS)

    step(model, optimizer)
    expected = before * np.array([1, 0.5])[:, None]
    np.testing.assert_allclose(model.kernel[...], expected, rtol=1e-5)
    infos = monitor.read(optimizer)
    keys = ["opt_state/0/clip/scale_by_stable_adam", "opt_state/2/clip_attention_logits"]
    assert list(infos) == keys
    assert list(infos[keys[0]].names) == ["bias", "kernel"]
    assert list(infos[keys[1]].names) == ["kernel"]


class Projection(flax.linen.Module):
    @flax.linen.compact
    def __call__(self, x):
        y = flax.linen.DenseGeneral((2, 4), name="query")(x)
        self.sow("intermediates", "max_logits", jnp.max(y, axis=(0, 2)))
        return y


class Linen(flax.linen.Module):
    @flax.linen.compact
    def __call__(self, x):
        return Projection(name="attention")(x)


@pytest.mark.slow
def test_max_logits_accept_linen_intermediates():
    x, model = jnp.ones((2, 3)), Linen()
    params = model.init(jax.random.key(0), x)["params"]
    _, sown = model.apply({"params": params}, x, mutable="intermediates")
    clip = optaxclip.clip_attention_logits(0.5, heads=kernels)
    zeros = jax.tree.map(jnp.zeros_like, params)
    logits = sown["intermediates"]
    _, state = clip.update(zeros, clip.init(params), params, max_logits=logits)
    assert list(state.info.names) == ["attention/query/kernel"]
    np.testing.assert_array_equal(state.info.norm, [jnp.max(logits["attention"]["max_logits"][0])])


@pytest.mark.slow
def test_thresholds_of_logits_may_be_injected_and_scheduled():
    params = {"kernel": jnp.ones((1, 2, 2))}
    zeros, factory = jax.tree.map(jnp.zeros_like, params), optaxclip.clip_attention_logits
    schedule = optax.linear_schedule(8.0, 0.5, 1)
    injected = optax.inject_hyperparams(factory, static_args=("heads",))
    for tx in (factory(schedule, heads=kernels), injected(tau=schedule, heads=kernels)):
        state, found = tx.init(params), []
        for _ in range(2):
            updates, state = tx.update(zeros, state, params, max_logits=LOGITS)
            found.append(1 + np.asarray(updates["kernel"])[0, :, 0])
        np.testing.assert_allclose(found, [[1, 1], [0.5**0.5, 0.25]], rtol=1e-5)

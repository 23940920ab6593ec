"""Where a factory builds the optimizer: EasyDeL's (eformer) and Levanter's."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optaxclip
from optaxclip import monitor

RNG = np.random.default_rng(0)
PARAMS = {"w": jnp.asarray(RNG.normal(size=(4, 3)), jnp.float32), "b": jnp.zeros(3)}
X, Y = (jnp.asarray(RNG.normal(size=(16, n)), jnp.float32) for n in (4, 3))
THRESHOLD, STEPS = 0.05, 20


def losses_with(tx):
    @jax.jit
    def step(params, state):
        def loss_fn(params):
            return jnp.mean((X @ params["w"] + params["b"] - Y) ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    params, state, losses = PARAMS, tx.init(PARAMS), []
    for _ in range(STEPS):
        params, state, loss = step(params, state)
        losses.append(float(loss))
    return losses, state


def by_eformer(imported, threshold):
    module = imported("eformer.optimizers")
    tx, _ = module.OptimizerFactory.create(
        "adamw",
        scheduler_config=module.SchedulerConfig(learning_rate=0.01, steps=100),
        optimizer_config=module.AdamWConfig(),
        clip_grad=threshold,
    )
    return tx


def by_levanter(imported, threshold):
    module = imported("levanter.optim")
    return module.AdamConfig(learning_rate=0.01, max_grad_norm=threshold).build(100)


@pytest.mark.parametrize("build", [by_eformer, by_levanter])
def test_optimizer_factories_train_like_with_optax_clip(imported, monkeypatch, build):
    expected, _ = losses_with(build(imported, THRESHOLD))
    unclipped, _ = losses_with(build(imported, 1e9))
    assert abs(expected[-1] / unclipped[-1] - 1) > 1e-4
    monkeypatch.setattr(optax, "clip_by_global_norm", optaxclip.clip_by_global_norm)
    losses, state = losses_with(build(imported, THRESHOLD))
    np.testing.assert_allclose(losses, expected, rtol=4e-7)
    (info,) = monitor.read(state).values()
    assert info.num_clipped == STEPS

"""In brax's PPO: inside of `pmap`, behind a mean over the devices."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import optaxclip

THRESHOLD = 0.05


def _replicated(tree, devices):
    sharding = NamedSharding(Mesh(devices, "i"), PartitionSpec("i"))
    return jax.tree.map(
        lambda x: jax.device_put(jnp.stack([jnp.asarray(x)] * len(devices)), sharding), tree
    )


@pytest.fixture
def losses_of(imported, monkeypatch):
    """What PPO logs of its losses, with a clip in the place of Optax's."""
    ppo, envs = imported("brax.training.agents.ppo.train"), imported("brax.envs")
    # Newer JAX has it no longer, and brax 0.14 calls it.
    monkeypatch.setattr(jax, "device_put_replicated", _replicated, raising=False)

    def losses(clip, threshold=THRESHOLD):
        logged = []
        with monkeypatch.context() as patch:
            patch.setattr(optax, "clip_by_global_norm", clip)
            ppo.train(
                envs.get_environment("fast"),
                num_timesteps=1024,
                episode_length=16,
                num_envs=16,
                unroll_length=4,
                batch_size=16,
                num_minibatches=2,
                num_updates_per_batch=2,
                num_evals=3,
                learning_rate=0.01,
                max_grad_norm=threshold,
                max_devices_per_host=2,
                seed=0,
                progress_fn=lambda step, metrics: logged.append(metrics),
            )
        return [of["training/total_loss"] for of in logged if "training/total_loss" in of]

    return losses


# It compiles whole episodes.
@pytest.mark.slow
def test_brax_trains_like_with_optax_clip(losses_of):
    expected = losses_of(optax.clip_by_global_norm)
    unclipped = losses_of(optax.clip_by_global_norm, threshold=1e9)
    assert abs(expected[-1] - unclipped[-1]) > 0.1

    def averaged(threshold):
        return optaxclip.clip_by_global_norm(threshold, specs=PartitionSpec())

    np.testing.assert_allclose(losses_of(averaged), expected, rtol=1e-4)


@pytest.mark.slow
def test_brax_without_specs_raises_with_remedy(losses_of):
    with pytest.raises(ValueError, match=r"specs=P\(\)|PartitionSpec\(\)"):
        losses_of(optaxclip.clip_by_global_norm)


@pytest.mark.parametrize("clip", [optax.clip_by_global_norm, optaxclip.clip_by_global_norm])
def test_brax_averages_gradients_before_clipping(imported, clip):
    gradients = imported("brax.training.gradients")
    specs = {"specs": PartitionSpec()} if clip is optaxclip.clip_by_global_norm else {}
    tx = optax.chain(clip(1.0, **specs), optax.sgd(1.0))

    def loss_fn(params, x):
        return jnp.sum(params * x)

    step = gradients.gradient_update_fn(loss_fn, tx, pmap_axis_name="i")
    xs = jnp.array([[30.0, 0.0], [0.0, 40.0]])
    params, state = jnp.zeros((2, 2)), jax.tree.map(lambda x: jnp.stack([x] * 2), tx.init(xs[0]))
    _, params, _ = jax.pmap(
        lambda params, x, state: step(params, x, optimizer_state=state), axis_name="i"
    )(params, xs, state)
    # The mean of both is [15, 20], of norm 25.
    np.testing.assert_allclose(params, [[-0.6, -0.8]] * 2, rtol=1e-6)

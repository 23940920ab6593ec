"""In Levanter's own `Trainer`, with the config that the page shows: a step whose loss is NaN."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import shown_code

import optaxclip
from optaxclip import monitor

STEPS, BAD = 5, 2


@pytest.fixture(scope="module")
def config(imported):
    """The page's class; Levanter takes its name once."""
    optim = imported("levanter.optim")
    block = shown_code.block_with("docs/trainers.md", "class AdamZClip")
    names = {"optax": optax, "optaxclip": optaxclip, "dataclass": dataclasses.dataclass}
    names |= {"AdamConfig": optim.AdamConfig, "OptimizerConfig": optim.OptimizerConfig}
    return shown_code.run(block, "docs/trainers.md", **names)["AdamZClip"]


def losses_of(imported, config, folder, crash_on_nan):
    """The losses, what was logged after each step, and the last state."""
    hax, checkpoint = imported("haliax"), imported("levanter.checkpoint")
    trainers, tracker = imported("levanter.trainer"), imported("levanter.tracker")
    inputs, outputs, batch = hax.Axis("in", 3), hax.Axis("out", 2), hax.Axis("batch", 8)

    def loss_fn(model, x, is_bad, key=None):
        return hax.mean(model(x) ** 2) * jnp.where(is_bad, jnp.nan, 1.0)

    trainer = trainers.Trainer(
        trainers.TrainerConfig(
            id="run",
            num_train_steps=STEPS,
            train_batch_size=batch.size,
            tracker=tracker.NoopConfig(),
            checkpointer=checkpoint.CheckpointerConfig(base_path=str(folder)),
            crash_on_nan=crash_on_nan,
            require_accelerator=False,
            log_dir=folder,
        ),
        config(learning_rate=1e-2).build(STEPS),
        loss_fn,
        add_default_hooks=False,
    )
    losses, logged = [], []
    with trainer:
        trainer.add_hook(lambda step: logged.append(monitor.scalars(step.opt_state)))
        key = jax.random.key(0)
        state = trainer.initial_state(
            key, model_init=lambda: hax.nn.Linear.init(inputs, outputs, key=key)
        )
        for i in range(STEPS):
            x = hax.random.normal(jax.random.key(i), (batch, inputs))
            step = trainer.train_step(state, x, jnp.asarray(i == BAD))
            losses.append(step.loss)
            state = step.state
    return losses, logged, state


def test_levanter_stops_at_nan_loss_despite_skip(imported, config, tmp_path):
    with pytest.raises(RuntimeError, match="Loss is NaN"):
        losses_of(imported, config, tmp_path, crash_on_nan=True)


def test_levanter_continues_with_skip_nonfinite(imported, config, tmp_path):
    losses, logged, state = losses_of(imported, config, tmp_path, crash_on_nan=False)
    assert np.isnan(losses).tolist() == [i == BAD for i in range(STEPS)]
    skipped = [of_step["skip_nonfinite/num_skipped"] for of_step in logged]
    assert skipped == [0, 0, 1, 1, 1]
    assert logged[-1]["zclip/num_nonfinite"] == 0
    assert monitor.step_status(state.opt_state) == "ok"
    learning_rate = state.opt_state.inner_state[1].hyperparams["learning_rate"]
    assert float(learning_rate) > 0

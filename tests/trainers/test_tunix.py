"""In tunix's `PeftTrainer`: LoRA over four devices, against Optax's clip, and with a resume."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import optaxclip
from optaxclip import monitor

THRESHOLD, STEPS = 0.01, 8


class Trainers:
    """What the tests need of tunix."""

    def __init__(self, imported):
        self.sft = imported("tunix.sft.peft_trainer")
        self.toys = imported("tunix.tests.test_common")
        devices = np.array(jax.devices()[:4]).reshape(2, 2)
        self.mesh = jax.sharding.Mesh(devices, ("fsdp", "tp"))

    def data(self):
        tokens = np.arange(128, dtype=np.int32).reshape(-1, 4, 16)
        inputs = [self.sft.TrainingInput(input_tokens=x, input_mask=x * 0 + 1) for x in tokens]
        return inputs * STEPS

    def trainer(self, tx, steps, folder=None, **options):
        config = self.sft.TrainingConfig(
            eval_every_n_steps=100, max_steps=steps, checkpoint_root_directory=folder, **options
        )
        toy = self.toys.ToyTransformer(config=self.toys.ModelConfig(), rngs=nnx.Rngs(0))
        model = self.toys.get_lora_model(toy, mesh=self.mesh)
        return self.sft.PeftTrainer(model, tx, config).with_gen_model_input_fn(
            lambda x: {
                "input_tokens": x.input_tokens,
                "input_mask": x.input_mask,
                "positions": jnp.arange(x.input_tokens.shape[1]),
                "attention_mask": jnp.ones_like(x.input_tokens),
            }
        )

    def train(self, tx, steps=STEPS, folder=None):
        """The losses of the steps that this call has made, and the trainer."""
        trainer, losses = self.trainer(tx, steps, folder), []
        trainer.training_hooks = Losses(losses)
        with self.mesh:
            trainer.train(self.data())
        return losses, trainer


class Losses:
    """Hooks that keep the losses."""

    def __init__(self, losses):
        self.losses = losses

    def on_train_step_end(self, trainer, step, loss):
        self.losses.append(float(loss))

    def __getattr__(self, name):
        return lambda *args, **keywords: None


@pytest.fixture(scope="module")
def tunix(imported):
    return Trainers(imported)


def chain(clip):
    return optax.chain(clip, optax.sgd(1.0, momentum=0.9))


@pytest.fixture(scope="module")
def of_optax(tunix):
    return tunix.train(chain(optax.clip_by_global_norm(THRESHOLD)))[0]


@pytest.mark.parametrize("record", [True, False])
def test_tunix_trains_like_with_optax_clip(tunix, of_optax, record):
    losses, trainer = tunix.train(chain(optaxclip.clip_by_global_norm(THRESHOLD, record=record)))
    np.testing.assert_allclose(losses, of_optax, rtol=4e-7)
    unclipped, _ = tunix.train(chain(optaxclip.clip_by_global_norm(np.inf)), steps=2)
    assert abs(losses[1] / unclipped[1] - 1) > 1e-5
    if record:
        (info,) = monitor.read(trainer.optimizer).values()
        assert info.num_clipped == STEPS


def test_tunix_resumes_run_with_clip_state(tunix, tmp_path):
    def tx():
        return chain(optaxclip.autoclip(50.0, window=4))

    whole, _ = tunix.train(tx())
    folder = str(tmp_path / "resumed")
    first, _ = tunix.train(tx(), STEPS // 2, folder)
    second, trainer = tunix.train(tx(), STEPS, folder)
    assert len(second) == STEPS - STEPS // 2
    np.testing.assert_allclose(first + second, whole, rtol=4e-7)
    assert trainer.optimizer.opt_state[0].steps == STEPS


def test_tunix_resumes_optax_run_without_record(tunix, of_optax, tmp_path):
    folder = str(tmp_path / "optax")
    tunix.train(chain(optax.clip_by_global_norm(THRESHOLD)), STEPS // 2, folder)
    ours = chain(optaxclip.clip_by_global_norm(THRESHOLD, record=False))
    losses, _ = tunix.train(ours, STEPS, folder)
    np.testing.assert_allclose(losses, of_optax[STEPS // 2 :], rtol=4e-7)


@pytest.mark.parametrize("by_tunix", [True, False])
def test_tunix_survives_nan_in_single_microbatch(tunix, by_tunix):
    """Its own accumulation is `optax.MultiSteps`, in 0.1.7; around ours there is a skip."""
    tx, options = chain(optaxclip.clip_by_global_norm(THRESHOLD)), {}
    if by_tunix:
        tx, options = optaxclip.skip_nonfinite(tx), {"gradient_accumulation_steps": 2}
    else:
        tx = optaxclip.skip_nonfinite(optax.MultiSteps(tx, 2).gradient_transformation())
    trainer, weights = tunix.trainer(tx, STEPS, **options), []
    loss_of_tunix, bad = trainer.loss_fn, 127

    def loss_fn(model, input_tokens, input_mask, positions, attention_mask):
        loss = loss_of_tunix(model, input_tokens, input_mask, positions, attention_mask)
        return loss * jnp.where(jnp.all(input_tokens == bad), jnp.nan, 1.0)

    class Weights(Losses):
        def on_train_step_end(self, trainer, step, loss):
            weights.append(jax.device_get(jax.tree.leaves(nnx.state(trainer.model, nnx.LoRAParam))))

    trainer = trainer.with_loss_fn(loss_fn)
    trainer.training_hooks = Weights([])
    data = tunix.data()
    data[3] = tunix.sft.TrainingInput(
        input_tokens=np.full((4, 16), bad), input_mask=data[3].input_mask
    )
    with tunix.mesh:
        trainer.train(data)
    moved = [
        any(np.any(x != y) for x, y in zip(*pair, strict=True))
        for pair in itertools.pairwise(weights)
    ]
    assert all(np.isfinite(x).all() for x in weights[-1])
    if by_tunix:
        assert not any(moved)
        assert monitor.step_status(trainer.optimizer, STEPS - 1) == "roll back"
    else:
        assert any(moved[-3:])
        assert monitor.step_status(trainer.optimizer) == "ok"

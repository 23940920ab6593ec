"""In Keras on JAX: in `fit`, and in a loop of one's own."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import shown_code

import optaxclip
from optaxclip import monitor

THRESHOLD, EPOCHS = 0.05, 20
X = np.random.default_rng(0).normal(size=(32, 5)).astype(np.float32)
Y = X @ np.random.default_rng(1).normal(size=(5, 1)).astype(np.float32)


@pytest.fixture
def keras(imported):
    module = imported("keras")
    if module.backend.backend() != "jax":
        pytest.skip(f"keras was imported with the backend {module.backend.backend()}")
    return module


@pytest.fixture
def model(keras):
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(8, activation="relu"), keras.layers.Dense(1)]
    return keras.Sequential([keras.Input((5,)), *layers])


def losses_of_fit(model, optimizer):
    model.compile(optimizer=optimizer, loss="mse")
    return model.fit(X, Y, batch_size=32, epochs=EPOCHS, verbose=0).history["loss"]


def with_clip(keras, clip):
    """An optimizer that clips what it is given, as `fit` gives it."""

    class Adam(keras.optimizers.Adam):
        def apply(self, grads, trainable_variables=None):
            grads, _ = clip.update(list(grads), None)
            return super().apply(grads, trainable_variables)

    return Adam(0.01)


def test_keras_fit_matches_global_clipnorm(keras, model):
    start = model.get_weights()
    runs = {}
    for name, optimizer in {
        "keras": keras.optimizers.Adam(0.01, global_clipnorm=THRESHOLD),
        "ours": with_clip(keras, optaxclip.clip_by_global_norm(THRESHOLD, record=False)),
        "without": keras.optimizers.Adam(0.01),
    }.items():
        model.set_weights(start)
        runs[name] = losses_of_fit(model, optimizer)
    np.testing.assert_allclose(runs["ours"], runs["keras"], rtol=4e-7)
    assert abs(runs["ours"][-1] / runs["without"][-1] - 1) > 1e-3


def test_keras_fit_accepts_clips_without_record(keras, model):
    clip = optaxclip.clip_by_group_norm(
        {"kernel": THRESHOLD, "bias": THRESHOLD}, ["kernel", "bias"] * 2, record=False
    )
    losses = losses_of_fit(model, with_clip(keras, clip))
    assert losses[-1] < 0.95 * losses[0]


def test_keras_custom_loop_logs_metrics(keras, model):
    tx = optax.chain(optaxclip.zclip(warmup_steps=3, max_norm=THRESHOLD), optax.adam(0.01))
    params = [variable.value for variable in model.trainable_variables]

    def loss_fn(params):
        predicted, _ = model.stateless_call(params, [], X, training=True)
        return jnp.mean((predicted - Y) ** 2)

    @jax.jit
    def step(params, opt_state):
        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        logs = {"loss": loss, "grad_norm": optax.tree.norm(grads)}
        return optax.apply_updates(params, updates), opt_state, logs | monitor.metrics(opt_state)

    opt_state, logs = tx.init(params), []
    for _ in range(EPOCHS):
        params, opt_state, of_step = step(params, opt_state)
        logs.append(of_step)
    norms = [key for key in logs[0] if key.endswith("/norm")]
    assert len(norms) == 1
    for of_step in logs:
        np.testing.assert_allclose(of_step[norms[0]], of_step["grad_norm"], rtol=1e-6)
    assert logs[-1]["loss"] < 0.95 * logs[0]["loss"]


def test_keras_fit_stores_rule_state_in_variables(keras, model, tmp_path):
    block = shown_code.block_with("docs/trainers.md", "def clip_state")
    shown = shown_code.run(block, "docs/trainers.md", keras=keras, jax=jax, optaxclip=optaxclip)
    make = shown["Adam"]
    make.clip = optaxclip.zclip(warmup_steps=3, max_norm=THRESHOLD)
    start, optimizer = model.get_weights(), make(0.01)
    losses = losses_of_fit(model, optimizer)
    (info,) = monitor.read(optimizer.clip_state()).values()
    assert optimizer.clip_state().steps == EPOCHS
    assert info.num_clipped > 0
    assert np.isfinite(info.threshold)

    model.save(tmp_path / "model.keras")
    restored = keras.models.load_model(tmp_path / "model.keras", {"Adam": make})
    jax.tree.map(
        np.testing.assert_array_equal,
        restored.optimizer.clip_state(),
        optimizer.clip_state(),
    )

    # The same by hand, with the state in Python's hands.
    model.set_weights(start)
    clip, by_hand = make.clip, keras.optimizers.Adam(0.01)
    params = [variable.value for variable in model.trainable_variables]
    by_hand.build(model.trainable_variables)
    variables, state = [x.value for x in by_hand.variables], clip.init(params)

    def loss_fn(params):
        return jnp.mean((model.stateless_call(params, [], X, training=True)[0] - Y) ** 2)

    @jax.jit
    def step(params, variables, state):
        loss, grads = jax.value_and_grad(loss_fn)(params)
        grads, state = clip.update(grads, state)
        return loss, *by_hand.stateless_apply(variables, grads, params), state

    expected = []
    for _ in range(EPOCHS):
        loss, params, variables, state = step(params, variables, state)
        expected.append(float(loss))
    np.testing.assert_allclose(losses, expected, rtol=1e-5)

"""How trainers that cannot be installed here use a transformation, line by line as in theirs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from flax.training.train_state import TrainState

import optaxclip
from optaxclip import monitor, scopes, thresholds

THRESHOLD = 0.5
RNG = np.random.default_rng(0)
PARAMS = {
    "encoder": {"kernel": jnp.asarray(RNG.normal(size=(4, 3)), jnp.float32), "bias": jnp.zeros(3)},
    "head": {"kernel": jnp.asarray(RNG.normal(size=(3, 2)), jnp.float32)},
}
GRADS = jax.tree.map(lambda x: 3.0 * jnp.ones_like(x), PARAMS)
clips = pytest.mark.parametrize(
    "make",
    [
        optax.clip_by_global_norm,
        optaxclip.clip_by_global_norm,
        functools.partial(optaxclip.clip_by_global_norm, record=False),
    ],
    ids=["optax", "ours", "without record"],
)


def norm_of(tree):
    return float(optax.tree.norm(tree))


def assert_close(tree, other, rtol=1e-6):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=rtol), tree, other)


# MaxText: src/maxtext/utils/maxtext_utils.py, apply_gradient_clipping.
OVERWRITE_WITH_GRADIENT = "_overwrite_with_gradient"


def apply_gradient_clipping(raw_grads, state, clip):
    if OVERWRITE_WITH_GRADIENT in raw_grads:
        fp8_stats = raw_grads.pop(OVERWRITE_WITH_GRADIENT)
        grads, _ = clip.update(raw_grads, state, None)
        grads[OVERWRITE_WITH_GRADIENT] = fp8_stats
        raw_grads[OVERWRITE_WITH_GRADIENT] = fp8_stats
    else:
        grads, _ = clip.update(raw_grads, state, None)
    return grads


@pytest.mark.parametrize("has_fp8", [False, True])
def test_clip_accepts_maxtext_train_state(has_fp8):
    state = TrainState.create(apply_fn=None, params=PARAMS, tx=optax.adamw(1e-3))
    stats = {OVERWRITE_WITH_GRADIENT: {"amax": jnp.full(16, 448.0)}} if has_fp8 else {}

    @jax.jit
    def train_step(state, grads):
        grads = {**grads, **stats}
        ours = optaxclip.clip_by_global_norm(THRESHOLD, record=False)
        clipped = apply_gradient_clipping(grads, state, ours)
        without_state = apply_gradient_clipping(grads, None, ours)
        expected = apply_gradient_clipping(grads, state, optax.clip_by_global_norm(THRESHOLD))
        new_state = state.apply_gradients(grads={name: clipped[name] for name in PARAMS})
        return new_state, clipped, without_state, expected

    new_state, clipped, without_state, expected = train_step(state, GRADS)
    assert_close(clipped, expected)
    assert_close(without_state, expected)
    assert new_state.step == 1
    assert jax.tree.structure(new_state) == jax.tree.structure(state)
    if has_fp8:
        stats_left = clipped[OVERWRITE_WITH_GRADIENT]
        np.testing.assert_array_equal(stats_left["amax"], stats[OVERWRITE_WITH_GRADIENT]["amax"])


def test_skip_above_accepts_maxtext_loss_and_norm():
    """src/maxtext/trainers/pre_train/train.py, train_step with skip_step_on_spikes."""
    spikes = thresholds.window(6.0, 8, ddof=1, min_std=0.0, warmup_steps=3)
    inner = optax.chain(optaxclip.clip_by_global_norm(THRESHOLD), optax.sgd(1.0, momentum=0.9))
    tx = optaxclip.skip_above(inner, spikes, loss_threshold=spikes, known_norm="grad_norm")
    state = TrainState.create(apply_fn=None, params=PARAMS, tx=tx)

    @jax.jit
    def train_step(state, grads, loss):
        grad_norm = optax.tree.norm(grads)
        updates, opt_state = state.tx.update(
            grads, state.opt_state, state.params, loss=loss, grad_norm=grad_norm
        )
        params = optax.apply_updates(state.params, updates)
        metrics = {"learning/grad_norm": grad_norm, **monitor.metrics(opt_state, "learning/")}
        return state.replace(step=state.step + 1, params=params, opt_state=opt_state), metrics

    skipped = []
    for step in range(8):
        size, loss = (100.0, 2.0) if step == 5 else (1.0 + 0.01 * step, 2.0 - 0.1 * step)
        loss = 50.0 if step == 6 else loss
        before = state
        state, metrics = train_step(state, optax.tree.scale(size, GRADS), loss)
        assert all(jnp.shape(value) == () for value in metrics.values())
        assert metrics["learning/skip_above/norm"] == metrics["learning/grad_norm"]
        skipped.append(int(metrics["learning/skip_above/num_skipped"]))
        if step in (5, 6):
            assert_close(state.params, before.params, rtol=0)
    assert skipped == [0, 0, 0, 0, 0, 1, 2, 2]


def test_maxtext_nnx_optimizer_keeps_rule_state():
    """src/maxtext/common/train_state_nnx.py and train_step, as it is by default (`pure_nnx`)."""

    class TrainStateNNX(nnx.Module):
        def __init__(self, model, optimizer):
            self.model = model
            self.optimizer = optimizer

        def apply_gradients(self, grads, **kwargs):
            self.optimizer.update(self.model, grads, **kwargs)

    spikes = thresholds.window(6.0, 8, ddof=1, min_std=0.0, warmup_steps=3)
    base_opt = optax.sgd(0.01, momentum=0.9)
    base_opt = optaxclip.skip_above(base_opt, spikes, loss_threshold=spikes, known_norm="grad_norm")
    tx = optax.chain(optaxclip.zclip(warmup_steps=3), base_opt)
    model = NnxModel()
    graphdef, state = nnx.split(TrainStateNNX(model, nnx.Optimizer(model, tx, wrt=nnx.Param)))

    @jax.jit
    def train_step(state, x):
        state = nnx.merge(graphdef, state)

        def loss_fn(model):
            return jnp.mean(model.head(model.encoder(x)) ** 2)

        loss, grads = nnx.value_and_grad(loss_fn)(state.model)
        grad_norm = optax.tree.norm(grads)
        state.apply_gradients(grads, loss=loss, grad_norm=grad_norm)
        scalar_metrics = {"learning/loss": loss, "learning/grad_norm": grad_norm}
        scalar_metrics.update(monitor.metrics(state.optimizer, "learning/"))
        return nnx.state(state, nnx.Not(nnx.Intermediate)), scalar_metrics

    logged = []
    for step in range(8):
        state, metrics = train_step(state, jnp.full((2, 4), np.nan if step == 6 else 1.0))
        assert all(jnp.shape(value) == () for value in metrics.values())
        norms = metrics["learning/zclip/norm"], metrics["learning/grad_norm"]
        np.testing.assert_allclose(*norms, rtol=1e-6)
        logged.append(metrics)
    skipped = [int(metrics["learning/skip_above/num_skipped"]) for metrics in logged]
    assert skipped == [0] * 6 + [1] * 2
    assert np.isinf(logged[0]["learning/zclip/threshold"])
    assert np.isfinite(logged[-1]["learning/zclip/threshold"])
    assert np.isfinite(logged[-1]["learning/loss"])


def test_metrics_read_nanodo_multi_steps_state():
    """nanodo/optimizer.py, get_optimizer, and nanodo/train.py, _train_step."""

    @jax.jit
    def train_step(state, grads):
        updates, new_opt_state = state.tx.update(grads, state.opt_state, state.params)
        new_params = optax.apply_updates(state.params, updates)
        new_state = state.replace(
            step=state.opt_state.gradient_step + 1, params=new_params, opt_state=new_opt_state
        )
        return new_state, monitor.metrics(new_opt_state, "grads/")

    def run(make):
        tx = make(optax.chain(optaxclip.clip_by_global_norm(THRESHOLD), optax.adam(0.1)))
        state = TrainState.create(apply_fn=None, params=PARAMS, tx=tx)
        with jax.numpy_dtype_promotion("standard"):
            for step in range(8):
                size = np.nan if step == 3 else 1.0
                state, metrics = train_step(state, optax.tree.scale(size, GRADS))
        return state, metrics

    steps, guard = optax.MultiSteps, optax.skip_not_finite
    lost, _ = run(lambda chain: steps(chain, 1))
    assert np.isnan(norm_of(lost.params))
    state, metrics = run(lambda chain: steps(chain, 2, should_skip_update_fn=guard))
    assert state.opt_state.gradient_step == 3  # of seven microbatches
    assert np.isfinite(norm_of(state.params))
    np.testing.assert_allclose(metrics["grads/clip_by_global_norm/norm"], norm_of(GRADS), 1e-6)
    with pytest.raises(AttributeError, match=r"SkipState.*gradient_step"):
        run(lambda chain: optaxclip.skip_nonfinite(steps(chain, 2).gradient_transformation()))


@clips
def test_masked_clip_supports_big_vision_freezing(make):
    """big_vision/optax.py, make: frozen leaves neither count in the norm nor move."""
    frozen = {"encoder": {"kernel": True, "bias": False}, "head": {"kernel": False}}
    trained = jax.tree.map(lambda x: not x, frozen)
    tx = optax.chain(
        optax.masked(make(THRESHOLD), trained),
        optax.masked(optax.scale_by_adam(), trained),
        optax.scale(1e-3),
        optax.add_decayed_weights(1e-4, trained),
        optax.masked(optax.set_to_zero(), frozen),
        optax.scale(-1.0),
    )

    @jax.jit
    def step(grads, state):
        clipped, _ = optax.masked(make(THRESHOLD), trained).update(grads, state[0], PARAMS)
        return clipped, *tx.update(grads, state, PARAMS)

    with jax.numpy_dtype_promotion("standard"):
        clipped, updates, state = step(GRADS, tx.init(PARAMS))
    np.testing.assert_array_equal(updates["encoder"]["kernel"], 0)
    counted = [clipped["encoder"]["bias"], clipped["head"]["kernel"]]
    np.testing.assert_allclose(norm_of(counted), THRESHOLD, rtol=1e-6)
    np.testing.assert_array_equal(clipped["encoder"]["kernel"], GRADS["encoder"]["kernel"])
    assert jax.tree.structure(state) == jax.tree.structure(tx.init(PARAMS))


@clips
def test_clip_keeps_flax_boxes(make):
    class Model(linen.Module):
        @linen.compact
        def __call__(self, x):
            init = linen.with_partitioning(linen.initializers.ones, ("in", "out"))
            return linen.Dense(2, kernel_init=init)(x)

    params = Model().init(jax.random.key(0), jnp.ones((1, 3)))
    tx = optax.chain(make(THRESHOLD), optax.sgd(1.0))
    grads = jax.tree.map(lambda x: 3.0 * jnp.ones_like(x), params)
    updates, _ = jax.jit(tx.update)(grads, tx.init(params), params)
    assert jax.tree.structure(updates) == jax.tree.structure(params)
    assert isinstance(updates["params"]["Dense_0"]["kernel"], linen.Partitioned)
    np.testing.assert_allclose(norm_of(updates), THRESHOLD, rtol=1e-6)


# t5x: t5x/optimizers.py, OptaxStatePartitionRules, with the states that are needed here.
RULES = {
    optax.EmptyState: lambda state, axes: optax.EmptyState(),
    optax.TraceState: lambda state, axes: optax.TraceState(trace=axes),
    optax.ScaleByScheduleState: lambda state, axes: optax.ScaleByScheduleState(count=None),
}


def is_optax_state(x):
    is_named_tuple = isinstance(x, tuple) and hasattr(x, "_asdict") and hasattr(x, "_fields")
    return is_named_tuple and type(x).__name__.endswith("State")


def derive_optax_logical_axes(state, axes, rules):
    flattened, treedef = jax.tree.flatten(state, is_leaf=is_optax_state)
    for x in flattened:
        if type(x) not in rules:
            raise ValueError(f"Encountered unregistered optax state type {type(x).__name__}")
    return jax.tree.unflatten(treedef, [rules[type(x)](x, axes) for x in flattened])


def test_t5x_rules_handle_clip_state():
    def chain(clip):
        return optax.chain(clip, optax.trace(0.9), optax.scale_by_schedule(lambda count: 1.0))

    axes = jax.tree.map(lambda x: ("embed",) * x.ndim, PARAMS)
    expected = derive_optax_logical_axes(
        chain(optax.clip_by_global_norm(THRESHOLD)).init(PARAMS), axes, RULES
    )
    without = chain(optaxclip.clip_by_global_norm(THRESHOLD, record=False)).init(PARAMS)
    assert derive_optax_logical_axes(without, axes, RULES) == expected
    state = chain(optaxclip.clip_by_group_norm(THRESHOLD, {"encoder": "a", "head": "b"})).init(
        PARAMS
    )
    with pytest.raises(ValueError, match="unregistered optax state type ClipState"):
        derive_optax_logical_axes(state, axes, RULES)
    # The line that t5x needs.
    ours = {optaxclip.ClipState: lambda state, axes: jax.tree.map(lambda x: None, state)}
    found = derive_optax_logical_axes(state, axes, RULES | ours)
    assert found[1:] == expected[1:]
    assert jax.tree.leaves(found[0]) == []


@clips
def test_clip_supports_purejaxrl_vmap_over_scans(make):
    """jax.vmap over seeds, of a train function that is a scan of scans."""
    tx = optax.chain(make(THRESHOLD), optax.sgd(0.1))

    def train(key):
        params = {"w": jax.random.normal(key, (3,))}

        def minibatch(carry, key):
            params, state = carry
            x = jax.random.normal(key, (8, 3))
            loss, grads = jax.value_and_grad(lambda p: jnp.mean((x @ p["w"] - 1.0) ** 2))(params)
            updates, state = tx.update(grads, state, params)
            return (optax.apply_updates(params, updates), state), loss

        def epoch(carry, key):
            return jax.lax.scan(minibatch, carry, jax.random.split(key, 4))

        carry = (params, tx.init(params))
        (params, _), losses = jax.lax.scan(epoch, carry, jax.random.split(key, 5))
        return params, losses

    keys = jax.random.split(jax.random.key(0), 3)
    params, losses = jax.jit(jax.vmap(train))(keys)
    for i, key in enumerate(keys):
        of_one = jax.jit(train)(key)
        assert_close((params["w"][i], losses[i]), (of_one[0]["w"], of_one[1]), rtol=1e-4)
    assert jnp.mean(losses[:, -1]) < jnp.mean(losses[:, 0])


class LinenModel(linen.Module):
    @linen.compact
    def __call__(self, x):
        return linen.Dense(2, name="head")(linen.Dense(3, name="encoder")(x))


class NnxModel(nnx.Module):
    def __init__(self):
        self.encoder = nnx.Linear(4, 3, rngs=nnx.Rngs(0))
        self.head = nnx.Linear(3, 2, rngs=nnx.Rngs(1))


def by_layer(path, leaf):
    return "head" if "head" in path else "encoder"


@pytest.mark.parametrize(
    "make",
    [
        functools.partial(optaxclip.autoclip, 50.0, 4),
        functools.partial(
            optaxclip.clip_by, scopes.group(by_layer), thresholds.zscore(warmup_steps=2)
        ),
    ],
)
def test_state_transfers_from_linen_to_nnx(make):
    """The memory of a clip is by the names of its groups, not by the tree of the parameters."""
    tx = make()
    linen_params = LinenModel().init(jax.random.key(0), jnp.ones((1, 4)))
    nnx_params = nnx.state(NnxModel(), nnx.Param)
    step = jax.jit(tx.update)

    def gradients(params, size):
        return jax.tree.map(lambda x: size * jnp.ones_like(x), params)

    sizes, state = (1.0, 1.3, 0.8, 1.1, 9.0, 1.2), tx.init(linen_params)
    for size in sizes[:4]:
        _, state = step(gradients(linen_params, size), state)
    nnx_state = jax.tree.unflatten(
        jax.tree.structure(tx.init(nnx_params)), jax.tree.leaves(jax.device_get(state))
    )
    for size in sizes[4:]:
        _, state = step(gradients(linen_params, size), state)
        updates, nnx_state = step(gradients(nnx_params, size), nnx_state)
        assert_close(jax.tree.leaves(nnx_state), jax.tree.leaves(state))
    assert norm_of(updates) > 0
    assert jnp.any(state.info.num_clipped > 0)

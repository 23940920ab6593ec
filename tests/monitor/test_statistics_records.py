"""Records of statistics: what they refuse, log, and keep through checkpoints and wrappers."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint
import pytest
from flax import nnx, serialization

import optaxclip
from optaxclip import monitor, scopes

PARAMS = {"body": jnp.ones((2, 3)), "head": jnp.ones(2)}
GRADS = {"body": jnp.zeros((2, 3)).at[1, 0].set(4.0), "head": jnp.array([3.0, 0.0])}
LAYERS = scopes.leaf(stacked={"body": 1, "head": 0})


def after(tx, *steps):
    state = tx.init(PARAMS)
    for grads in steps:
        state = jax.jit(tx.update)(grads, state, PARAMS)[1]
    return state


def test_parameters_that_are_missing():
    tx = monitor.record(3, stats=("norm", "cosine_param", "ratio"), name="mine")
    needed = re.escape("mine: the statistics ['cosine_param', 'ratio'] need the parameters; pass")
    with pytest.raises(ValueError, match=f"^{needed}"):
        tx.update(GRADS, tx.init(PARAMS))
    for stat in ("cosine_param", "param_norm", "ratio"):
        with pytest.raises(ValueError, match=rf"^record: the statistics \['{stat}'\] need"):
            monitor.record(3, stats=stat).update(GRADS, monitor.record(3, stats=stat).init(PARAMS))
    with pytest.raises(ValueError, match="mine: params must match the updates; leaf 'head'"):
        tx.update(GRADS, tx.init(PARAMS), {"body": PARAMS["body"]})


def test_the_state_of_another_record():
    state = monitor.record(3, stats="max").init(PARAMS)
    said = re.escape("holds the statistics ['max'], and this record keeps ['norm']. If it is from")
    with pytest.raises(ValueError, match=f"^record: .*{said}"):
        monitor.record(3).update(GRADS, state)


def test_history_chooses_a_statistic():
    state = after(monitor.record(3, stats=("max", "norm")), GRADS)
    np.testing.assert_array_equal(monitor.history(state), [5.0])
    np.testing.assert_array_equal(monitor.history(state, stat="max"), [4.0])
    state = after(monitor.record(3, stats=("max", "mean_abs")), GRADS)
    said = r"stat must be one of \['max', 'mean_abs'\], which the record keeps; got "
    with pytest.raises(ValueError, match=said + "None$"):
        monitor.history(state)
    with pytest.raises(ValueError, match=said + r"'mean_ab'; did you mean 'mean_abs'\?"):
        monitor.history(state, stat="mean_ab")


@pytest.mark.slow
def test_a_log_has_the_last_step():
    stats = ("norm", "share", "zero_fraction")
    labels = scopes.group({"body": "body", "head": "head"})
    tx = optax.chain(
        monitor.record(3, stats=stats),
        monitor.record(3, scope=labels, stats=stats, name="parts"),
        monitor.record(3, scope=LAYERS, stats=stats, name="layers"),
        optaxclip.clip_by_global_norm(1.0),
    )
    start = tx.init(PARAMS)
    names = list(monitor.scalars(start))
    state = after(tx, jax.tree.map(lambda x: 2 * x, GRADS), GRADS)
    found = monitor.scalars(state)
    assert list(found) == names
    expected = {
        "record/norm": 5.0,
        "record/zero_fraction": 6 / 8,
        "record/share": 1.0,
        "record/steps": 2.0,
        "parts/norm/body": 4.0,
        "parts/norm/head": 3.0,
        "parts/zero_fraction/body": 5 / 6,
        "parts/zero_fraction/head": 0.5,
        "parts/share/body": 16 / 25,
        "parts/share/head": 9 / 25,
        "parts/steps": 2.0,
        "layers/norm": 4.0,
        "layers/zero_fraction": 1.0,
        "layers/share": 16 / 25,
        "layers/steps": 2.0,
        "clip_by_global_norm/norm": 5.0,
    }
    of_clip = [name for name in found if name.startswith("clip") and name not in expected]
    assert {name: found[name] for name in found if name not in of_clip} == pytest.approx(expected)
    inside = jax.jit(monitor.metrics)(state)
    assert {name: float(x) for name, x in inside.items()} == pytest.approx(found)
    # A leaf that is missing is no number of the log; a gradient that is not finite is.
    state = after(tx, GRADS | {"head": None})
    assert monitor.scalars(state)["layers/norm"] == 4.0
    state = after(tx, GRADS | {"head": jnp.full(2, jnp.inf)})
    assert monitor.scalars(state)["layers/norm"] == np.inf


def test_states_under_vmap():
    tx = monitor.record(2, scope=LAYERS, stats=("max", "share"))
    sizes = jnp.array([1.0, 3.0, 2.0])
    step = jax.vmap(lambda x: tx.update(jax.tree.map(lambda g: g * x, GRADS), tx.init(PARAMS))[1])
    states = jax.jit(step)(sizes)
    assert monitor.scalars(states)["record/max"] == 12.0
    assert jax.jit(monitor.metrics)(states)["record/max"] == 12.0


def test_a_checkpoint_of_orbax_goes_on(tmp_path):
    tx = monitor.record(3, scope=LAYERS, stats=("max", "cosine_param"))
    state = after(tx, GRADS, GRADS)
    with orbax.checkpoint.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "state", tx.init(PARAMS))
    update = jax.jit(tx.update)
    found, expected = (update(GRADS, each, PARAMS)[1] for each in (restored, state))
    for stat in ("max", "cosine_param"):
        histories = [monitor.history(each, stat=stat) for each in (found, expected)]
        assert histories[0].shape == (3, 3)
        np.testing.assert_array_equal(*histories)


def test_names_that_flax_and_optax_do_not_keep():
    stats = ("max", "norm", "share")
    tx = optax.chain(monitor.record(3, scope=LAYERS, stats=stats), optax.sgd(0.1))
    state = after(tx, GRADS, GRADS)
    mapped = optax.tree_map_params(tx, lambda x: x, state)
    restored = serialization.from_bytes(state, serialization.to_bytes(state))
    for each in (mapped, serialization.to_state_dict(state), restored):
        np.testing.assert_array_equal(
            monitor.history(each, stat="max"), monitor.history(state, stat="max")
        )
        assert monitor.scalars(each) == monitor.scalars(state)
    after_a_step = jax.jit(tx.update)(GRADS, mapped, PARAMS)[1]
    assert monitor.history_names(after_a_step) == ("body/0", "body/1", "head")


def test_in_an_nnx_optimizer():
    model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    tx = optax.chain(monitor.record(3, scope=scopes.leaf(), stats=("max", "ratio")), optax.sgd(0.1))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    grads = jax.tree.map(lambda x: 2 * jnp.ones_like(x), nnx.state(model, nnx.Param))
    optimizer.update(model, grads)
    for each in (optimizer, nnx.state(optimizer)):
        np.testing.assert_array_equal(monitor.history(each, stat="max"), [[2.0, 2.0]])
        assert monitor.scalars(each)["record/max"] == 2.0
    assert monitor.history_names(optimizer) == ("bias", "kernel")


@pytest.mark.slow
def test_what_tuning_reads_are_still_norms():
    tx = monitor.record(200, stats=("max", "norm"))
    steps = np.exp(0.2 * np.random.default_rng(0).normal(size=200)).astype(np.float32)
    steps[150] = 50.0
    state = jax.lax.scan(
        lambda state, x: tx.update({"w": x[None]}, state)[::-1], tx.init({"w": jnp.ones(1)}), steps
    )[0]
    assert optaxclip.tuning.suggest(monitor.history(state)).spikes.tolist() == [150]


@pytest.mark.by_day(1)
@pytest.mark.parametrize("scope", [scopes.leaf(), scopes.axes(0)], ids=["leaf", "axes"])
def test_a_bad_leaf_is_the_worst_and_a_missing_one_is_not_there(scope):
    stats = ("norm", "max", "mean_abs", "share", "ratio", "cosine_param")
    tx = monitor.record(2, scope=scope, stats=stats)
    bad = {"body": GRADS["body"].at[0, 1].set(jnp.nan), "head": GRADS["head"]}
    state = after(tx, bad)
    found = monitor.metrics(state)
    assert all(jnp.isnan(found[f"record/{stat}"]) for stat in stats)
    np.testing.assert_equal(monitor.scalars(state), {k: float(x) for k, x in found.items()})
    missing = after(tx, {"body": None, "head": GRADS["head"]})
    assert monitor.scalars(missing)["record/max"] == 3
    assert np.isnan(monitor.history(missing, stat="max")[0, 0])
    assert np.isnan(monitor.scalars(after(tx, {"body": None, "head": None}))["record/max"])

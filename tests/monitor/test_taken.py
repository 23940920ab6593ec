"""Whether a step was taken, as the compiled step is told."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.serialization import to_state_dict
from flax.training.train_state import TrainState
from jax.sharding import PartitionSpec as P

import optaxclip
from optaxclip import monitor, scale_loss, skip_above, skip_nonfinite, thresholds

pytestmark = pytest.mark.usefixtures("standard_promotion")

PARAMS = {"a": jnp.ones(2), "b": jnp.ones(1)}
LOSSES = [1.0, 1.0, 1.0, 1.0, 1.0, 9.0, 1.0, 1.0, 1.0]
NORMS = [1.0, np.nan, np.nan, 1.0, 5.0, 1.0, 5.0, 5.0, 1.0]
"""The gradient of `a`; that of `b` is infinite where `a` is NaN."""


def sgd():
    return optax.sgd(0.1, momentum=0.9)


def by_loss():
    return skip_above(sgd(), jnp.inf, loss_threshold=thresholds.constant(2.0))


def for_parts():
    return optax.partition(
        {"a": skip_above(sgd(), 4.0), "b": skip_nonfinite(sgd())}, {"a": "a", "b": "b"}
    )


def left_out(inner):
    return optax.MultiSteps(inner, 2, should_skip_update_fn=optax.skip_not_finite)


# What is skipped of NORMS and LOSSES, whose steps are 0 to 8.
CASES = {
    "nonfinite": (lambda: skip_nonfinite(sgd()), {1, 2}),
    "that gives up": (lambda: skip_nonfinite(sgd(), 1), {1}),
    "above": (lambda: skip_above(sgd(), 4.0), {1, 2, 4, 6, 7}),
    "above, taken after all": (lambda: skip_above(sgd(), 4.0, 1), {1, 2, 4, 6}),
    "by the loss": (by_loss, {1, 2, 5}),
    "in another": (lambda: skip_above(skip_nonfinite(sgd()), 4.0), {1, 2, 4, 6, 7}),
    "around another": (
        lambda: skip_nonfinite(optax.chain(skip_above(sgd(), 4.0))),
        {1, 2, 4, 6, 7},
    ),
    "the inner by the loss": (lambda: skip_above(by_loss(), 4.0), {1, 2, 4, 5, 6, 7}),
    "chain": (lambda: optax.chain(optaxclip.zclip(), skip_above(sgd(), 4.0)), {1, 2, 4, 6, 7}),
    "masked": (lambda: optax.masked(skip_nonfinite(sgd()), {"a": False, "b": True}), {1, 2}),
    "partition": (for_parts, {1, 2, 4, 6, 7}),
    "hyperparameters": (
        lambda: optax.inject_hyperparams(lambda threshold: skip_above(sgd(), threshold))(
            threshold=4.0
        ),
        {1, 2, 4, 6, 7},
    ),
    "around MultiSteps": (
        lambda: skip_above(optax.MultiSteps(sgd(), 2).gradient_transformation(), 4.0),
        {1, 2, 4, 6, 7},
    ),
    # The batches are 0 and 3, 4 and 5, 6 and 7, with means of 1, 3 and 5.
    "in MultiSteps": (
        lambda: skip_nonfinite(optax.MultiSteps(skip_above(sgd(), 4.0), 2)),
        {1, 2, 7},
    ),
    "in MultiSteps that leaves out": (lambda: left_out(skip_above(sgd(), 4.0)), {1, 2, 7}),
    "MultiSteps that leaves out": (lambda: left_out(sgd()), {1, 2}),
    "scale_loss": (lambda: scale_loss(skip_above(sgd(), 4.0), initial=1.0), {1, 2, 4, 6, 7}),
    "in apply_if_finite": (
        lambda: optax.apply_if_finite(skip_above(sgd(), 4.0), 3),
        {1, 2, 4, 6, 7},
    ),
}
TRANSFORMATIONS = {name: make() for name, (make, _) in CASES.items()}


def gradients():
    norms = np.float32(NORMS)
    bad = np.where(np.isnan(norms), np.inf, 0.0).astype(np.float32)
    return {"a": np.stack([norms, 0 * norms], axis=1), "b": bad[:, None]}


def flags_of_steps(tx, grads, losses):
    """Whether each step was taken, and whether the parameters moved."""

    def step(carry, row):
        params, state = carry
        grads, loss = row
        updates, state = tx.update(grads, state, params, value=loss)
        moved = jnp.any(updates["a"] != 0)
        return (optax.apply_updates(params, updates), state), (
            monitor.step_was_applied(state),
            moved,
        )

    return jax.lax.scan(step, (PARAMS, tx.init(PARAMS)), (grads, losses))[1]


def test_step_was_applied_reports_skips_in_scan():
    @jax.jit
    def run(grads, losses):
        return {name: flags_of_steps(tx, grads, losses)[0] for name, tx in TRANSFORMATIONS.items()}

    for name, flags in run(gradients(), np.float32(LOSSES)).items():
        assert (flags.dtype, flags.shape) == (bool, (9,))
        assert {*np.flatnonzero(~flags).tolist()} == CASES[name][1], name


def test_step_was_applied_agrees_with_updates_under_vmap():
    scales = np.float32([1.0, 0.1, 10.0])
    grads = jax.tree.map(lambda x: scales.reshape(3, *[1] * x.ndim) * x, gradients())
    tx = TRANSFORMATIONS["above, taken after all"]
    run = jax.jit(jax.vmap(lambda grads: flags_of_steps(tx, grads, np.float32(LOSSES))))
    taken, moved = run(grads)
    np.testing.assert_array_equal(taken, moved)
    assert taken.sum(axis=1).tolist() == [5, 7, 3]
    states = jax.jit(jax.vmap(lambda grads: tx.update(grads, tx.init(PARAMS))[1]))(
        jax.tree.map(lambda x: x[:, 4], grads)
    )
    assert monitor.step_was_applied(states).tolist() == [False, True, False]


def test_step_was_applied_works_in_shard_map():
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    tx = skip_nonfinite(sgd())

    def step(grads):
        taken = monitor.step_was_applied(tx.update(grads, tx.init(grads))[1])
        return taken, jnp.where(taken, grads, 0)

    run = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=P("x"), out_specs=(P(), P("x"))))
    for bad, expected in ((jnp.nan, False), (1.0, True)):
        taken, kept = run(jnp.ones(8).at[5].set(bad))
        assert taken == expected
        assert jnp.all(kept == expected)


def test_step_was_applied_returns_true_before_first_step():
    for name in ("nonfinite", "partition", "in MultiSteps that leaves out"):
        assert monitor.step_was_applied(TRANSFORMATIONS[name].init(PARAMS)), name
    flag = jnp.array(False)
    own = optax.MultiSteps(
        skip_nonfinite(sgd()), 2, should_skip_update_fn=lambda *_: (flag, {"large": flag})
    )
    assert monitor.step_was_applied(own.init(PARAMS))
    own = optax.MultiSteps(skip_nonfinite(sgd()), 2, should_skip_update_fn=lambda *_: (flag, flag))
    assert monitor.step_was_applied(own.init(PARAMS))


@pytest.mark.slow
def test_step_was_applied_works_with_flax():
    tx = skip_nonfinite(optax.MultiSteps(skip_above(sgd(), 4.0), 2))
    state, expected = tx.init(PARAMS), []
    update = jax.jit(tx.update)
    for i in (0, 1, 6, 7, 4):
        _, state = update(jax.tree.map(lambda x, i=i: x[i], gradients()), state, PARAMS)
        expected.append(bool(monitor.step_was_applied(state)))
        assert monitor.step_was_applied(to_state_dict(state)) == expected[-1]
    assert expected == [True, False, True, True, False]
    train_state = TrainState.create(apply_fn=None, params=PARAMS, tx=tx)
    assert monitor.step_was_applied(train_state.replace(opt_state=state)) == expected[-1]
    model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, by):
        optimizer.update(model, jax.tree.map(lambda x: by * x, nnx.state(model, nnx.Param)))
        return monitor.step_was_applied(optimizer), monitor.step_was_applied(nnx.state(optimizer))

    assert [step(model, optimizer, by) for by in (1.0, jnp.nan, 99.0)] == [
        (True, True),
        (False, False),
        (False, False),
    ]


def test_step_was_applied_without_skip_raises():
    for tx in (optaxclip.clip_by_global_norm(1.0), sgd(), optax.apply_if_finite(sgd(), 3)):
        with pytest.raises(
            ValueError,
            match=r"^monitor\.step_was_applied: opt_state must contain a skip wrapper, got a "
            r"pytree of type \w+",
        ):
            monitor.step_was_applied(tx.init(PARAMS))
    with pytest.raises(
        ValueError, match=r"type dict with the leaves 'a', 'b'; wrap the optimizer in skip_"
    ):
        monitor.step_was_applied(PARAMS)

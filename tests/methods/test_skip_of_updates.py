"""Skips that judge the step which the optimizer would take."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from optaxclip import monitor, skip_above, thresholds

pytestmark = pytest.mark.usefixtures("standard_promotion")


PARAMS = {"b": jnp.zeros(2), "w": jnp.zeros((3, 2))}
STEPS = 12


def gradients():
    """Gradients of one size, of which two are longer and one is NaN; `b` begins at step 5."""
    rng = np.random.default_rng(0)
    steps = {x: rng.normal(size=(STEPS, *p.shape)).astype(np.float32) for x, p in PARAMS.items()}
    steps["b"][:5] = 0
    steps["w"][3] *= 1e3
    steps["w"][8, 1, 0] = np.nan
    return steps


OPTIMIZERS = {
    "adam": optax.adam(0.1),
    "momentum": optax.sgd(0.1, momentum=0.9),
    "lion": optax.lion(0.1),
}


# The threshold, and how many of the steps are skipped.
CASES = {"adam": (0.265, 1), "momentum": (2.0, 2), "lion": (0.265, 7)}


def by_hand(inner, threshold):
    """The same with the norm of the updates taken by hand."""

    def step(carry, grads):
        params, state = carry
        updates, new = inner.update(grads, state, params)
        norm = optax.tree.norm(updates)
        skip = ~(norm <= threshold)
        updates, state = jax.tree.map(
            lambda x, y: jnp.where(skip, x, y),
            (jax.tree.map(jnp.zeros_like, updates), state),
            (updates, new),
        )
        return (optax.apply_updates(params, updates), state), (norm, skip)

    return jax.lax.scan(step, (PARAMS, inner.init(PARAMS)), gradients())


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_skip_above_checks_updates_of_optimizer(name):
    inner, (threshold, skipped) = OPTIMIZERS[name], CASES[name]
    tx = skip_above(inner, threshold, None, check="updates")

    def step(carry, grads):
        params, state = carry
        updates, state = tx.update(grads, state, params)
        found = (state.info.norm, state.info.factor == 0)
        return (optax.apply_updates(params, updates), state), found

    @jax.jit
    def both():
        ours = jax.lax.scan(step, (PARAMS, tx.init(PARAMS)), gradients())
        return ours, by_hand(inner, threshold)

    ((params, state), found), ((expected, inner_state), (norms, skips)) = both()
    np.testing.assert_allclose(found[0], norms, rtol=1e-6)
    np.testing.assert_array_equal(found[1], skips)
    assert bool(skips[8])
    assert int(skips.sum()) == skipped
    pairs = ((params, expected), (state.inner_state, inner_state))
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6), *zip(*pairs, strict=True)
    )


def test_bad_leaves_names_leaf_with_long_update():
    tx = skip_above(optax.adam(1.0), 1.7, check="updates")
    grads = {"b": jnp.full(2, 1e3), "w": jnp.full((3, 2), 1e-3)}
    alone, state = tx.update(grads | {"w": jnp.zeros((3, 2))}, tx.init(PARAMS), PARAMS)
    # Adam's first step is as long for a small gradient as for a large one.
    np.testing.assert_allclose(optax.tree.norm(alone), 2**0.5, rtol=1e-4)
    _, state = tx.update({"b": jnp.zeros(2), "w": grads["w"]}, state, PARAMS)
    assert (int(state.num_skipped), monitor.bad_leaves(state)) == (1, ("w",))


def test_skip_above_rule_learns_from_update_norms():
    rule = thresholds.ema(0.5, 1.5, record="accepted", patience=None)
    tx = skip_above(optax.sgd(0.1), rule, None, check="updates")
    state = tx.init(PARAMS)
    for size in (1.0, 1.0, 100.0, 1.0):
        _, state = tx.update(jax.tree.map(lambda x, n=size: jnp.full_like(x, n), PARAMS), state)
        np.testing.assert_allclose(state.info.norm, 0.1 * size * 8**0.5, rtol=1e-6)
    assert int(state.num_skipped) == 1
    np.testing.assert_allclose(state.info.threshold, 1.5 * 0.1 * 8**0.5, rtol=1e-6)


def test_skip_above_rejects_unknown_judge():
    with pytest.raises(
        ValueError, match=r"^check must be one of \['gradients', 'updates'\], got 'grad"
    ):
        skip_above(optax.sgd(0.1), 1.0, check="grads")
    with pytest.raises(
        ValueError,
        match=r"known_norm='grad_norm' cannot be combined with check='updates'; use check=",
    ):
        skip_above(optax.sgd(0.1), 1.0, check="updates", known_norm="grad_norm")


HIDING = {"lion": optax.lion(0.1), "sign": optax.sign_sgd(0.1), "rprop": optax.rprop(0.1)}


@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_skip_of_updates_rejects_nonfinite_gradients(bad):
    """Lion and others make finite updates of an infinite gradient, and keep it in their state."""
    good = {"b": jnp.ones(2), "w": jnp.full((3, 2), -1.0)}
    wrong = good | {"w": good["w"].at[1, 0].set(bad)}

    @jax.jit
    def run(good, wrong):
        found = {}
        for name, inner in HIDING.items():
            tx = skip_above(inner, 1e3, check="updates")
            _, before = tx.update(good, tx.init(PARAMS), PARAMS)
            updates, after = tx.update(wrong, before, PARAMS)
            found[name] = updates, before.inner_state, after
        return found

    for updates, inner_state, state in run(good, wrong).values():
        assert all(not np.any(x) for x in jax.tree.leaves(updates))
        jax.tree.map(np.testing.assert_array_equal, state.inner_state, inner_state)
        assert (int(state.num_skipped), int(state.info.num_nonfinite)) == (1, 1)
        assert monitor.bad_leaves(state) == ("w",)


def test_skip_of_updates_refuses_accumulators():
    adam, apply_every = optax.adam(0.1), optax.apply_every(2)
    multi_steps = optax.MultiSteps(adam, 2).gradient_transformation()
    order = r"use optax\.MultiSteps\(skip_above\(optimizer, \.\.\.\), k\)$"
    for inner in (multi_steps, optax.chain(optax.clip(1.0), multi_steps)):
        with pytest.raises(ValueError, match=f"MultiStepsState.*{order}"):
            skip_above(inner, 1.0, check="updates").init(PARAMS)
        skip_above(inner, 1.0).init(PARAMS)
    order = r"use optax\.chain\(skip_above\(optimizer, \.\.\.\), optax\.apply_every\(k\)\)$"
    with pytest.raises(ValueError, match=f"ApplyEvery.*{order}"):
        skip_above(optax.chain(adam, apply_every), 1.0, check="updates").init(PARAMS)


def test_skip_of_updates_recovers_in_accumulators():
    """The orders of wrappers that the messages name."""
    skip = skip_above(optax.sgd(1.0), 10.0, None, check="updates")
    steps = optax.MultiSteps(skip, 2).gradient_transformation()
    for tx in (steps, optax.chain(skip, optax.apply_every(2))):
        state, moved = tx.init(PARAMS), []
        update = jax.jit(tx.update)
        for size in (1.0, 1e3, 1.0, 1.0, 1.0, 1.0):
            updates, state = update(jax.tree.map(lambda x, n=size: x + n, PARAMS), state, PARAMS)
            moved.append(bool(updates["b"][0] != 0))
        assert moved[4:] == [False, True]

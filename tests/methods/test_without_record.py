"""`record=False`: equal to Optax's clip up to rounding, for thresholds without memory."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cases import slow_unless
from flax.training.train_state import TrainState
from methods_table import GRADS, METHODS, PARAMS, assert_same, label, random_tree

import optaxclip
from optaxclip import scopes, thresholds

# What wraps an optimizer, or is one, keeps more than a record.
KEEPS_MORE = {"scale_by_stable_adam", "clip_by_second_moment", "skip_above", "skip_above_loss"}
KEEPS_MORE |= {"scale_loss", "skip_nonfinite"}
REMEMBERS = [name for name, m in METHODS.items() if m.has_memory or m.counts]
WITHOUT = [name for name in METHODS if name not in (*REMEMBERS, *KEEPS_MORE)]


def foreign_state():
    return TrainState.create(apply_fn=None, params=PARAMS, tx=optax.adam(1e-3))


@pytest.mark.slow
@pytest.mark.parametrize("name", slow_unless("clip_by_global_norm".__eq__, WITHOUT))
def test_record_false_keeps_updates_and_returns_state(name):
    with_record, without = METHODS[name].make(), METHODS[name].make(record=False)
    assert without.init(PARAMS) == optax.EmptyState()
    for grads in (GRADS, random_tree(3), jax.tree.map(lambda x: x.at[0].set(jnp.nan), GRADS)):
        expected, _ = with_record.update(grads, with_record.init(PARAMS), PARAMS)
        assert_same(without.update(grads, None, PARAMS)[0], expected)
    for state in (optax.EmptyState(), None, foreign_state(), "anything"):
        updates, returned = without.update(grads, state, PARAMS)
        assert returned is state
        assert_same(updates, expected)
    step = jax.jit(lambda grads, state: without.update(grads, state, PARAMS))
    expected, _ = with_record.update(GRADS, with_record.init(PARAMS), PARAMS)
    updates, state = step(GRADS, foreign_state())
    assert_same(updates, expected)
    assert_same(state.opt_state, foreign_state().opt_state)


@pytest.mark.parametrize("name", REMEMBERS)
def test_a_threshold_that_remembers_refuses_by_name(name):
    own = METHODS[name].factory.__name__.lstrip("_")
    own = {"clip_scheduled": "clip", "norm_scheduled": "clip_by_norm"}.get(own, own)
    own = own if hasattr(optaxclip, own) else "clip_by"
    wrong = (TypeError, "'record'") if name in KEEPS_MORE else (ValueError, "record=False")
    with pytest.raises(wrong[0], match=rf"^{own}\b.*{wrong[1]}"):
        METHODS[name].make(record=False)


def test_stateless_transformations_have_record_argument():
    public = (getattr(optaxclip, name) for name in dir(optaxclip))
    made = [fn for fn in public if inspect.isfunction(fn)]
    without = {fn.__name__ for fn in made if "record" not in inspect.signature(fn).parameters}
    pure = {"clip_tree"} | {fn for fn in without if fn.startswith("per_example")}
    assert without - pure == KEEPS_MORE - {"skip_above_loss"}


def test_record_false_rejects_adaptive_rules_and_schedules():
    threshold_values = {"matrix": 1.0, "vector": thresholds.zscore()}
    with pytest.raises(
        ValueError,
        match=(
            r"^clip_by: record=False cannot be "
            r"combined with a threshold that depends on earlier steps"
        ),
    ):
        optaxclip.clip_by(scopes.group(label), threshold_values, record=False)
    with pytest.raises(
        ValueError,
        match=(
            r"^mine: record=False cannot be "
            r"combined with a threshold that depends on earlier steps"
        ),
    ):
        optaxclip.clip_by_global_norm(optax.constant_schedule(1.0), record=False, name="mine")


def test_thresholds_may_be_traced():
    @jax.jit
    def norm_of_clipped(threshold):
        clip = optaxclip.clip_by_global_norm(threshold, record=False)
        return optax.tree.norm(clip.update(GRADS, None)[0])

    np.testing.assert_allclose(norm_of_clipped(0.5), 0.5, rtol=1e-6)


# Optax's Adam relies on implicit promotion.
@jax.numpy_dtype_promotion("standard")
def test_record_false_accepts_optax_checkpoint():
    theirs = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3))
    ours = optax.chain(optaxclip.clip_by_global_norm(1.0, record=False), optax.adam(1e-3))
    step, their_step = jax.jit(ours.update), jax.jit(theirs.update)
    _, trained = their_step(GRADS, theirs.init(PARAMS), PARAMS)
    assert jax.tree.structure(ours.init(PARAMS)) == jax.tree.structure(trained)
    updates, state = step(GRADS, trained, PARAMS)
    expected, _ = their_step(GRADS, trained, PARAMS)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6), updates, expected)
    assert optax.tree.get(state, "count") == 2

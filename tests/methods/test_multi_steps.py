"""Skips with `optax.MultiSteps`, which keeps a NaN in its sum for ever."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cases import slow_unless

import optaxclip
from optaxclip import monitor

PARAMS = {"b": jnp.zeros(1), "w": jnp.array([1.0, -2.0])}
BAD, NUMBER = 3, 9


def chain(**options):
    return optax.chain(optaxclip.clip_by_global_norm(1.0, **options), optax.adam(0.1))


def microbatches(bad_entry):
    rng = np.random.default_rng(0)
    trees = [{"b": rng.normal(size=1), "w": rng.normal(size=2)} for _ in range(NUMBER)]
    trees[BAD]["w"][1] = bad_entry
    return [jax.tree.map(jnp.float32, tree) for tree in trees]


def run(tx, grads):
    """The parameters and the states after each microbatch."""
    with jax.numpy_dtype_promotion("standard"):  # which MultiSteps needs
        update, params, state, seen = jax.jit(tx.update), PARAMS, tx.init(PARAMS), []
        for tree in grads:
            updates, state = update(tree, state, params)
            params = optax.apply_updates(params, updates)
            seen.append((params, state))
    return seen


def around(inner, k):
    return optaxclip.skip_nonfinite(optax.MultiSteps(inner, k).gradient_transformation())


def left_out(inner, k):
    return optax.MultiSteps(inner, k, should_skip_update_fn=optax.skip_not_finite)


@pytest.mark.by_day(1)
@pytest.mark.parametrize(
    ("make", "k", "bad_entry"),
    slow_unless(
        lambda make, k, bad_entry: k == 2 and np.isnan(bad_entry),
        itertools.product([around, left_out], [1, 2], [np.nan, np.inf]),
    ),
)
def test_nonfinite_microbatch_leaves_multi_steps_unchanged(make, k, bad_entry):
    grads = microbatches(bad_entry)
    expected = run(optax.MultiSteps(chain(), k), grads[:BAD] + grads[BAD + 1 :])
    expected.insert(BAD, expected[BAD - 1])
    seen = run(make(chain(), k), grads)
    for (params, state), (wanted, inner) in zip(seen, expected, strict=True):
        jax.tree.map(np.testing.assert_array_equal, params, wanted)
        (of_clip,) = (v for k, v in monitor.read(state).items() if "clip_by_global_norm" in k)
        np.testing.assert_array_equal(of_clip.norm, inner.inner_opt_state[0].info.norm)
    last = seen[-1][1]
    if make is around:
        verdicts = [monitor.step_status(state) for _, state in seen]
        assert verdicts == ["ok"] * BAD + ["skipped"] + ["ok"] * (NUMBER - BAD - 1)
        assert monitor.bad_leaves(last) == ("w",)
        assert last.num_skipped == 1
    else:
        assert [int(state.skip_state["num_not_finite"]) for _, state in seen].index(1) == BAD
        with pytest.raises(ValueError, match="opt_state contains no skip wrapper; wrap"):
            monitor.step_status(last)


WRONG = {
    "no skip": chain,
    "skip": lambda: optaxclip.skip_nonfinite(chain()),
    "apply_if_finite": lambda: optax.apply_if_finite(chain(), 100),
    "zero": lambda: chain(nonfinite="zero"),
}


@pytest.mark.by_day(1)
@pytest.mark.parametrize(
    ("name", "k"),
    slow_unless(
        lambda name, k: (name, k) in [("skip", 2), ("no skip", 1)],
        itertools.product(WRONG, [1, 2]),
    ),
)
def test_nan_persists_with_transformations_inside_multi_steps(name, k):
    """What the pages say of it: if Optax mends it, they can say less."""
    seen = run(optax.MultiSteps(WRONG[name](), k), microbatches(np.nan))
    params, state = seen[-1]
    assert np.isnan(state.acc_grads["w"][1])
    if name == "no skip":
        assert np.isnan(params["w"]).all()
        return
    assert np.isfinite(params["w"]).all()
    if name == "zero":  # what is left of Adam's moments moves the weights
        assert monitor.read(state)["inner_opt_state/0/clip_by_global_norm"].num_nonfinite >= 3
        return
    jax.tree.map(np.testing.assert_array_equal, params, seen[BAD - 1][0])
    if name == "skip":
        verdict = monitor.step_status(state, roll_back_after=3)
        assert verdict == "roll back"  # so a loop that asks comes to know


@pytest.mark.by_day(1)
@pytest.mark.parametrize("make", [around, left_out])
def test_a_threshold_inside_judges_the_mean(make):
    grads = microbatches(np.nan)
    grads[5] = jax.tree.map(lambda x: 100.0 * x, grads[5])
    seen = run(make(optaxclip.skip_above(chain(), 10.0), 2), grads)
    verdicts = [monitor.step_status(state) for _, state in seen]
    # The means are those of 0 and 1, 2 and 4, 5 and 6, 7 and 8.
    of_bad = "skipped" if make is around else "ok"
    assert verdicts == ["ok"] * BAD + [of_bad, "ok", "ok", "skipped", "skipped", "ok"]
    jax.tree.map(np.testing.assert_array_equal, seen[7][0], seen[4][0])
    assert not np.array_equal(seen[8][0]["w"], seen[7][0]["w"])

"""`events`: what became of each of the last steps, and of which leaf."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint
import pytest
from cases import slow_unless
from flax import serialization
from methods_table import compilations

import optaxclip
from optaxclip import monitor, scopes, thresholds
from optaxclip.transforms.skip import skip_above, skip_nonfinite

PARAMS = {"b": jnp.zeros(1), "v": jnp.zeros(2), "w": jnp.zeros(2)}
NAN = np.nan


def grads(b, w, v=0.0):
    return {"b": jnp.full(1, b), "v": jnp.array([v, 0.0]), "w": jnp.array([0.0, w])}


STEPS = [grads(1.0, 0.5), grads(3.0, 4.0), grads(NAN, 9.0), grads(5.0, 0.0), grads(2.0, np.inf)]
STACKED = jax.tree.map(lambda *leaves: jnp.stack(leaves), *STEPS)
CLIP = "clip_by_global_norm"


def clip(threshold=2.0, **options):
    return optaxclip.clip_by_global_norm(threshold, **options)


def run(tx, steps=STEPS, **extra):
    """All steps in one program; the updates and the last state."""

    @jax.jit
    def whole(steps):
        def step(state, grads):
            return tx.update(grads, state, PARAMS, **extra)[::-1]

        return jax.lax.scan(step, tx.init(PARAMS), steps)

    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *steps)
    state, updates = whole(stacked)
    return updates, state


def assert_columns(found, **expected):
    for field, column in expected.items():
        if isinstance(column[0], str):
            assert found[field].tolist() == column, field
        else:
            np.testing.assert_allclose(found[field], column, rtol=1e-6, err_msg=field)


def test_events_record_steps_of_tree_clip():
    updates, state = run(monitor.events(clip()))
    expected, of_inner = run(clip())
    jax.tree.map(np.testing.assert_array_equal, (updates, state.inner_state), (expected, of_inner))
    found = monitor.history(state)
    assert found.dtype.names == monitor.history_names(state)
    assert found.dtype.names == ("step", "verdict", "norm", "threshold", "factor", "worst")
    assert_columns(
        found,
        step=[0, 1, 2, 3, 4],
        verdict=["taken", "clipped", "not finite", "clipped", "not finite"],
        norm=[np.sqrt(1.25), 5.0, NAN, 5.0, np.inf],
        threshold=[2.0] * 5,
        factor=[1.0, 0.4, NAN, 0.4, NAN],
        worst=["b", "w", "b", "b", "w"],
    )
    assert (found["step"].dtype, found["norm"].dtype) == (np.int64, np.float32)
    for field in found.dtype.names:
        np.testing.assert_array_equal(monitor.history(state, stat=field), found[field])


def test_events_keep_last_steps():
    _, state = run(monitor.events(clip(), 2))
    assert_columns(monitor.history(state), step=[3, 4], norm=[5.0, np.inf], worst=["b", "w"])
    # After more steps than can be counted the places of the rows still follow one another.
    tx = monitor.events(clip(), 3)
    state, update = tx.init(PARAMS)._replace(steps=jnp.int32(2**31 - 2)), jax.jit(tx.update)
    for size in (1.0, 2.0, 3.0, 4.0):
        _, state = update(grads(size, 0.0), state)
    np.testing.assert_array_equal(monitor.history(state, stat="norm"), [2, 3, 4])
    start = monitor.history(monitor.events(clip()).init(PARAMS))
    assert start.shape == (0,)
    assert start.dtype.names == monitor.history_names(state)


def test_events_combine_skip_and_inner_clip():
    inner = optax.chain(clip(), optax.sgd(0.1, momentum=0.9))
    tx = optax.chain(monitor.record(9), monitor.events(skip_above(inner, 4.5)))
    updates, state = run(tx, STEPS[:3])
    assert jax.tree.all(jax.tree.map(lambda x: (x[1:] == 0).all(), updates))
    updates, state = run(tx, [STEPS[i] for i in (0, 2, 3)] + [grads(2.0, 3.0), grads(0.0, 0.0)])
    found = monitor.history(state, "events")
    assert_columns(
        found,
        verdict=["taken", "skipped", "skipped", "clipped", "taken"],
        norm=[np.sqrt(1.25), NAN, 5.0, np.sqrt(13.0), 0.0],
        threshold=[4.5] * 5,
        factor=[1.0, 0.0, 0.0, 1.0, 1.0],
        worst=["b", "b", "b", "w", "b"],
        **{
            f"{CLIP}/norm": [np.sqrt(1.25), NAN, NAN, np.sqrt(13.0), 0.0],
            f"{CLIP}/threshold": [2.0, NAN, NAN, 2.0, 2.0],
            f"{CLIP}/factor": [1.0, NAN, NAN, 2 / np.sqrt(13.0), 1.0],
            f"{CLIP}/worst": ["b", "", "", "w", "b"],
        },
    )
    np.testing.assert_array_equal(monitor.history(state, "record"), found["norm"])
    numbers = monitor.scalars(state)
    assert numbers["skip_above/num_skipped"] == 2
    assert next(iter(monitor.read(state))) == "1/inner_state/skip_above"


def test_events_name_worst_leaf_or_label():
    labels = {"b": "low", "v": "low", "w": "high"}
    inner = optax.chain(
        optaxclip.clip_by_norm({"b": 1.0, "v": 8.0, "w": 6.0}),
        optaxclip.clip_by_group_norm(2.5, labels),
        optaxclip.clip_by(scopes.unit(), 2.0, name="units"),
    )
    _, state = run(monitor.events(inner), [grads(3.0, 9.0, 7.0), grads(0.5, 9.0, 7.0), STEPS[2]])
    assert not len(state.names)
    found = monitor.history(state)
    assert_columns(
        found,
        verdict=["clipped", "clipped", "not finite"],
        worst=["b", "w", "b"],
        norm=[3.0, 9.0, NAN],
        threshold=[1.0, 6.0, 1.0],
        **{"clip_by_group_norm/worst": ["low", "low", "low"], "units/worst": ["w", "w", "b"]},
    )


def test_events_measure_worst_leaf_for_tree_clip():
    both = optax.chain(optaxclip.clip_by_norm({"b": 1.0, "v": 8.0, "w": 6.0}), clip())
    _, state = run(monitor.events(both), [grads(3.0, 7.0)])
    assert_columns(monitor.history(state), worst=["b"], **{f"{CLIP}/worst": ["w"]})


def test_events_report_clipped_if_any_leaf_exceeds():
    _, state = run(monitor.events(optaxclip.clip_by_norm(2.0)), [grads(1.0, 1.0), grads(3.0, 1.0)])
    assert_columns(monitor.history(state), verdict=["taken", "clipped"], worst=["b", "b"])


def test_events_accept_empty_tree():
    tx = monitor.events(clip())
    assert monitor.history(tx.init({})).shape == (0,)
    _, state = tx.update({}, tx.init({}))
    assert monitor.history(state, stat="norm").tolist() == [0.0]


def test_events_number_clips_with_equal_names():
    state = monitor.events(optax.chain(clip(), clip(1.0))).init(PARAMS)
    names = [x for x in monitor.history_names(state) if x.endswith("/norm")]
    assert names == [f"{CLIP}_1/norm"]


def test_events_record_losses_and_nested_skips():
    inner = skip_above(optax.sgd(0.1), 4.0, loss_threshold=thresholds.constant(2.0), name="inner")
    tx = monitor.events(skip_nonfinite(inner, max_consecutive=1))

    def step(state, x):
        return tx.update(grads(x[0], 0.0), state, PARAMS, value=x[1])[1], None

    steps = [(1.0, 1.0), (1.0, 3.0), (5.0, 1.0), (NAN, 1.0), (NAN, 1.0), (1.0, NAN), (1.0, 1.0)]
    state = jax.jit(lambda xs: jax.lax.scan(step, tx.init(PARAMS), xs)[0])(jnp.array(steps))
    found = monitor.history(state)
    assert_columns(
        found,
        verdict=["taken", *["skipped"] * 5, "taken"],
        **{
            "inner/loss": [1.0, 3.0, 1.0, NAN, 1.0, NAN, 1.0],
            "inner/loss_threshold": [2.0, 2.0, 2.0, NAN, 2.0, 2.0, 2.0],
            "inner/norm": [1.0, 1.0, 5.0, NAN, NAN, 1.0, 1.0],
            "inner/factor": [1.0, 0.0, 0.0, NAN, 0.0, 0.0, 1.0],
        },
    )


def test_events_record_independent_skips_in_partition():
    parts = {"bad": skip_nonfinite(optax.sgd(0.1)), "good": skip_above(optax.sgd(0.1), 9.0)}
    tx = monitor.events(optax.partition(parts, {"b": "bad", "v": "good", "w": "good"}))
    _, state = run(tx, [grads(NAN, 3.0, 4.0)])
    found = monitor.history(state)
    assert_columns(
        found, verdict=["skipped"], **{"skip_above/norm": [5.0], "skip_above/factor": [1.0]}
    )


def test_events_report_step_applied_after_maximum_skips():
    tx = monitor.events(skip_nonfinite(optax.sgd(0.1), max_consecutive=1))
    _, state = run(tx, [STEPS[2], STEPS[2], STEPS[0]])
    assert_columns(monitor.history(state), verdict=["skipped", "not finite", "taken"])


def test_events_report_masked_elements_as_nonfinite():
    _, state = run(monitor.events(clip(nonfinite="mask")), STEPS[1:3])
    assert_columns(monitor.history(state), verdict=["clipped", "not finite"], norm=[5.0, 9.0])


@pytest.mark.parametrize("place", slow_unless("around".__eq__, ["inside", "around"]))
def test_events_work_with_multi_steps(place):
    chain = optax.chain(clip(), optax.sgd(0.1))
    with jax.numpy_dtype_promotion("standard"):
        if place == "inside":
            tx = optax.MultiSteps(monitor.events(chain), 2).gradient_transformation()
        else:
            sums = optax.MultiSteps(chain, 2).gradient_transformation()
            tx = monitor.events(skip_nonfinite(sums))
        steps = [grads(1.0, 2.0), grads(3.0, 4.0), grads(0.0, 1.0), grads(1.0, 1.0)]
        found = monitor.history(run(tx, steps)[1])
    if place == "inside":
        assert_columns(found, step=[0, 1], norm=[np.sqrt(13), np.sqrt(1.25)], worst=["w", "w"])
    else:
        front = f"{CLIP}/"
        assert_columns(
            found,
            step=[0, 1, 2, 3],
            verdict=["taken", "clipped", "taken", "taken"],
            **{front + "norm": [NAN, np.sqrt(13), NAN, np.sqrt(1.25)]},
        )


def test_events_name_no_worst_leaf_without_floats():
    for inner in (clip(), optaxclip.clip_by_norm(1.0)):
        tx = monitor.events(inner)
        with pytest.warns(UserWarning, match="no floating-point leaves to clip"):
            state = tx.update({"n": jnp.arange(2)}, tx.init({"n": jnp.arange(2)}))[1]
        assert monitor.history(state)[["norm", "worst"]].tolist() == [(0.0, "")]


@pytest.mark.slow
def test_events_accept_late_and_missing_leaves():
    tx = monitor.events(clip())
    state = tx.init(PARAMS | {"a": None, "b": jnp.zeros(1)})
    for each in (grads(3.0, 1.0) | {"a": None}, {**grads(1.0, 2.0), "b": None, "a": jnp.ones(1)}):
        state = jax.jit(tx.update)(each, state)[1]
    state = tx.update({"a": 9 * jnp.ones(1), "b": None, "v": None, "w": None}, state)[1]
    assert_columns(monitor.history(state), worst=["b", "w", "a"])


@pytest.mark.slow
def test_events_compile_once_and_support_vmap():
    tx = monitor.events(skip_nonfinite(optax.chain(clip(), optax.sgd(0.1, momentum=0.9))), 3)
    step = jax.jit(tx.update, donate_argnums=1)
    with compilations() as compiled:
        state = tx.init(PARAMS)
        _, state = step(STEPS[0], state, PARAMS)
        before = len(compiled)
        for each in STEPS:
            _, state = step(each, state, PARAMS)
        assert len(compiled) == before
    states = jax.jit(jax.vmap(lambda x: tx.update(x, tx.init(PARAMS), PARAMS)[1]))(STACKED)
    with pytest.raises(
        ValueError, match="history: opt_state must be a single state, but contains 5 states"
    ):
        monitor.history(states)
    worst = [monitor.history(jax.tree.map(lambda x, i=i: x[i], states))["worst"] for i in range(5)]
    assert [each.item() for each in worst] == ["b", "w", "b", "b", "w"]
    with pytest.raises(TypeError, match=r"monitor\.history cannot be called inside jit"):
        jax.jit(monitor.history)(state)


@pytest.mark.slow
def test_events_survive_checkpoints_and_lost_names(tmp_path):
    inner = optax.chain(optaxclip.clip_by_norm(1.0), optax.sgd(0.1, momentum=0.9))
    tx = monitor.events(skip_nonfinite(inner))
    _, state = run(tx)
    with orbax.checkpoint.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "state", tx.init(PARAMS))
    mapped = optax.tree_map_params(tx, lambda x: x, state)
    after = [jax.jit(tx.update)(STEPS[1], x, PARAMS)[1] for x in (state, restored, mapped)]
    expected, *found = map(monitor.history, after)
    for field in expected.dtype.names:
        for each in found:
            np.testing.assert_array_equal(each[field], expected[field])
    for each in (serialization.to_state_dict(state), mapped):
        np.testing.assert_array_equal(monitor.history(each, stat="norm"), expected["norm"][:5])
        with pytest.raises(ValueError, match=r"names are missing from .* pass the nnx\.Optimizer"):
            monitor.history(each)


def test_events_inside_scale_loss_record_unscaled_norms():
    tx = monitor.events(optaxclip.scale_loss(optax.chain(clip(), optax.sgd(0.1))))
    state = tx.init(PARAMS)
    for each in STEPS[1:4]:
        scale = monitor.loss_scale(state)
        scaled = jax.tree.map(lambda x, scale=scale: x * scale, each)
        _, state = jax.jit(tx.update)(scaled, state)
    found = monitor.history(state)
    assert_columns(
        found,
        verdict=["clipped", "skipped", "clipped"],
        norm=[5.0, NAN, 5.0],
        worst=["w", "b", "b"],
        **{f"{CLIP}/factor": [0.4, NAN, 0.4]},
    )


WRONG = {
    "no clip": (
        lambda: optax.adam(0.1),
        r"^events: inner contains no clipping stage or skip wrapper .*use monitor\.events",
    ),
    "no record": (lambda: clip(record=False), "record=False"),
    "a skip of sums": (
        lambda: optax.MultiSteps(skip_nonfinite(optax.sgd(0.1)), 2).gradient_transformation(),
        r"must not contain a skip wrapper inside optax\.MultiSteps; use skip",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_events_without_recorded_clip_raise(case):
    make, said = WRONG[case]
    tx = monitor.events(make())
    with pytest.raises(ValueError, match=said):
        tx.init(PARAMS)


def test_events_reject_foreign_state_and_unknown_stat():
    tx, state = monitor.events(clip()), monitor.events(clip(), 5).init(PARAMS)
    said = re.escape("must have shape (1000, 1, 3), but has shape (5, 1, 3); use the same window")
    with pytest.raises(ValueError, match=said):
        tx.update(STEPS[0], state)
    with pytest.raises(ValueError, match="to add events to a running optimizer"):
        tx.update(STEPS[0], clip().init(PARAMS))
    said = r"stat must be one of \['step', .*'worst'\], got 'norms'; did you mean 'no"
    with pytest.raises(ValueError, match=said):
        monitor.history(state, stat="norms")
    with pytest.raises(ValueError, match=r"stat must be one of \['step', .*'worst'\], got 3$"):
        monitor.history(state, stat=3)
    lost = serialization.to_state_dict(state._replace(steps=jnp.int32(1), flags=state.flags + 1))
    with pytest.raises(ValueError, match=r"names are missing from the events of clip because"):
        monitor.history(lost)


@pytest.mark.slow
def test_events_norm_argument_selects_worst_leaf():
    large, many = {"b": jnp.full(1, 3.0)}, {"v": jnp.full(2, 2.5), "w": jnp.zeros(2)}
    worst = {}
    for norm in ("l2", "linf"):
        tx = monitor.events(optaxclip.clip_by(scopes.tree(), 1.0, norm=norm), norm=norm)
        worst[norm] = monitor.history(tx.update(large | many, tx.init(PARAMS))[1])["worst"].item()
    assert worst == {"l2": "v", "linf": "b"}

"""Logs of the steps since an earlier state: `since=` of `metrics`, `scalars`, `json_line`."""

import functools
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import optaxclip
from optaxclip import monitor

GRADS = {"b": jnp.array([2.0]), "w": jnp.array([3.0, 4.0])}
LARGE = jax.tree.map(lambda x: 10 * x, GRADS)
BAD = GRADS | {"b": jnp.array([jnp.nan])}
LABELS = {"b": "low", "w": "high"}
COUNTED = ("num_clipped", "clipped_fraction", "num_nonfinite", "num_skipped", "steps")


@functools.cache
def chain():
    clips = (
        monitor.record(3, scope=optaxclip.scopes.leaf()),
        optaxclip.clip_by_group_norm(6.0, LABELS),
        optaxclip.clip_by_norm(3.0),
    )
    inner = optax.chain(optaxclip.clip_by_global_norm(6.0), optax.sgd(0.1, momentum=0.9))
    return optax.chain(*clips, optaxclip.skip_nonfinite(inner))


def states(tx, *steps):
    """The state before the first step and after each."""
    found = [tx.init(GRADS)]
    for grads in steps:
        found.append(jitted(tx)(grads, found[-1], GRADS)[1])
    return found


@functools.cache
def jitted(tx):
    return jax.jit(tx.update)


def counted(numbers):
    """Those that `since` changes."""
    return {x: number for x, number in numbers.items() if re.search("|".join(COUNTED), x)}


@pytest.mark.by_day(1)
@pytest.mark.parametrize("kept", ["state", "counts"])
def test_since_counts_steps_after_earlier_state(kept):
    tx = chain()
    every = states(tx, LARGE, LARGE, BAD, GRADS, BAD, LARGE, GRADS, GRADS, GRADS)
    earlier, state = every[3], every[-1]
    since = earlier if kept == "state" else monitor.counts(earlier)
    plain, found = monitor.scalars(state), monitor.scalars(state, since=since)
    assert list(found) == list(plain)
    assert found | counted(plain) == plain
    assert found["record/steps"] == found["clip_by_norm/steps"] == 6
    assert found["clip_by_group_norm/steps"] == 6
    assert found["clip_by_group_norm/num_clipped/high"] == 1
    assert found["clip_by_group_norm/num_clipped/low"] == 1
    assert found["clip_by_group_norm/clipped_fraction/high"] == pytest.approx(1 / 6)
    assert found["clip_by_group_norm/num_nonfinite/low"] == 1
    assert found["clip_by_norm/num_clipped"] == 6  # of `w`; of `b` one
    assert found["clip_by_norm/clipped_fraction"] == 1
    assert found["skip_nonfinite/num_skipped"] == found["skip_nonfinite/num_nonfinite"] == 1
    assert found["clip_by_global_norm/steps"] == 5  # the skip left one out
    inside = jax.jit(lambda state, since: monitor.metrics(state, since=since))(state, since)
    assert sorted(inside) == sorted(found)
    np.testing.assert_allclose([*map(float, map(inside.get, found))], [*found.values()], rtol=1e-6)
    line = json.loads(monitor.json_line(state, since=since, step=9))
    assert line["clip_by_norm/steps"] == 6
    assert line["step"] == 9


def test_counts_under_jit_match_eager_counts():
    state = chain().init(GRADS)
    found = jax.jit(monitor.counts)(state)
    jax.tree.map(np.testing.assert_array_equal, found, monitor.counts(state))


def test_since_initial_state_changes_nothing():
    first, *_, state = states(chain(), LARGE, BAD, GRADS)
    assert monitor.scalars(state, since=first) == monitor.scalars(state)
    assert monitor.scalars(first, since=first) == monitor.scalars(first)


def test_since_accepts_same_or_later_state():
    every = states(chain(), LARGE, LARGE, GRADS)
    same = monitor.scalars(every[2], since=every[2])
    assert not any(counted(same).values())
    back = monitor.scalars(every[1], since=every[3])
    assert back["clip_by_global_norm/steps"] == -2
    assert back["clip_by_group_norm/num_clipped/high"] == -1
    assert np.isnan(back["clip_by_global_norm/clipped_fraction"])
    assert np.isnan(back["clip_by_group_norm/clipped_fraction/high"])
    inside = jax.jit(lambda x, y: monitor.metrics(x, since=y))(every[1], every[3])
    np.testing.assert_equal(back, {x: float(inside[x]) for x in back})


def test_since_works_under_vmap_and_scan():
    tx, sizes = optaxclip.clip_by_global_norm(1.0), jnp.array([[0.5, 2.0], [2.0, 2.0], [0.5, 3.0]])

    @jax.jit
    def run(sizes):
        def step(state, x):
            new = tx.update(x * jnp.ones(1), state)[1]
            return new, monitor.metrics(new, since=state)

        start = jax.vmap(lambda _: tx.init(jnp.ones(1)))(sizes[0])
        earlier, _ = jax.vmap(step)(start, sizes[0])
        state, log = jax.lax.scan(jax.vmap(step), start, sizes)
        return monitor.metrics(state, since=earlier), log

    found, log = run(sizes)
    assert found["clip_by_global_norm/steps"] == 2
    assert found["clip_by_global_norm/num_clipped"] == 2
    assert found["clip_by_global_norm/clipped_fraction"] == 1
    np.testing.assert_array_equal(log["clip_by_global_norm/clipped_fraction"], sizes > 1)


def test_since_rejects_donated_states():
    tx = optaxclip.clip_by_global_norm(6.0)
    step = jax.jit(tx.update, donate_argnums=1)
    _, state = step(LARGE, tx.init(GRADS))
    earlier, gone = monitor.counts(state), state
    _, state = step(GRADS, state)
    assert monitor.scalars(state, since=earlier)["clip_by_global_norm/num_clipped"] == 0.0
    for function in (monitor.scalars, monitor.metrics):
        for each in (gone, gone._replace(steps=jnp.int32(1))):  # or if only some are deleted
            with pytest.raises(
                ValueError,
                match=r"since contains arrays that were donated to a later step; call monitor\.co",
            ):
                function(state, since=each)


def test_counts_survive_in_place_optimizer_updates():
    model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optaxclip.clip_by_global_norm(0.1), wrt=nnx.Param)
    grads = jax.tree.map(jnp.ones_like, nnx.state(model, nnx.Param))
    optimizer.update(model, grads)
    earlier = monitor.counts(optimizer)
    optimizer.update(model, jax.tree.map(jnp.zeros_like, grads))
    found = monitor.scalars(optimizer, since=earlier)
    assert found["clip_by_global_norm/steps"] == 1
    assert found["clip_by_global_norm/num_clipped"] == 0


CLIP = optaxclip.clip_by_norm(1.0)
OTHERS = {
    "of another name": (optaxclip.clip_by_norm(1.0, name="mine").init(GRADS), "'mine'"),
    "of other leaves": (CLIP.init({"w": jnp.ones(2)}), r"'num_clipped': \(1,\)"),
    "of more clips": (optax.chain(CLIP, CLIP).init(GRADS), "'clip_by_norm_1'"),
    "without a record": (GRADS, "got a pytree of type dict with the leaves 'b', 'w'"),
    "numbers of a log": (
        monitor.scalars(CLIP.init(GRADS)),
        "got a pytree of type dict with the leaves",
    ),
    "a number": (3.0, "got a pytree of type float"),
}


@pytest.mark.parametrize("case", OTHERS)
def test_since_rejects_state_of_other_optimizer(case):
    since, said = OTHERS[case]
    for function in (monitor.scalars, monitor.metrics):
        with pytest.raises(ValueError, match=rf"since must be an earlier state of .*{said}"):
            function(CLIP.init(GRADS), since=since)


@pytest.mark.slow
def test_clipped_norm_reports_norm_after_clipping():
    def numbers(tx, grads):
        found = monitor.scalars(jax.jit(tx.update)(grads, tx.init(GRADS))[1])
        return [x for name, x in found.items() if name.endswith("clipped_norm")]

    clip, inf = optaxclip.clip_by_global_norm, jnp.array([jnp.inf])
    assert numbers(clip(9.0), GRADS) == pytest.approx([np.sqrt(29.0)])
    assert numbers(clip(2.0), GRADS) == pytest.approx([2.0])
    with pytest.warns(UserWarning, match="max_norm is 0"):
        assert numbers(clip(0.0), GRADS) == [0.0]
    assert numbers(clip(2.0, nonfinite="zero"), GRADS | {"b": inf}) == [0.0]
    assert np.isnan(numbers(clip(2.0), GRADS | {"b": inf})).all()
    assert numbers(optaxclip.normalize_by_global_norm(8.0), GRADS) == pytest.approx([8.0])
    # Of leaves and units that of the worst; of a step that is skipped nothing.
    assert numbers(optaxclip.clip_by_norm(2.5), GRADS) == pytest.approx([2.5])
    assert numbers(optaxclip.clip_by_norm(3.5, axes=0), GRADS) == pytest.approx([3.5])
    skip = optaxclip.skip_above(optax.sgd(0.1), 1.0)
    assert numbers(skip, GRADS) == numbers(skip, BAD) == [0.0]

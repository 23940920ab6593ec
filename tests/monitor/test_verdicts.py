"""Which leaves made a step be skipped, and what the host's loop is told."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import optaxclip
from optaxclip import monitor, norms, scopes, skip_above, skip_nonfinite

NAN, INF = jnp.nan, jnp.inf
NAMES = ["a", "b/0", "c"]


def grads(a=3.0, b=4.0, c=0.0):
    return {"a": jnp.array([a, 0.0]), "b": [jnp.array([b]), None], "c": jnp.zeros(8).at[0].set(c)}


GRADS = grads()


def stack(*trees):
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


# The norm 5 is below the threshold, and what each step is skipped for.
STEPS = {
    "none": (grads(), ()),
    "NaN": (grads(a=NAN), ("a",)),
    "infinite": (grads(b=-INF), ("b/0",)),
    "two": (grads(b=NAN, c=INF), ("b/0", "c")),
    "beside a large one": (grads(a=1e9, c=NAN), ("c",)),
    "large": (grads(c=100.0), ("c",)),
    "two large": (grads(a=70.0, c=100.0), ("a", "c")),
    "all together": (grads(a=5.9, b=5.0, c=5.5), ("a",)),
    "overflowing": (grads(a=3e38), ("a",)),
}


@pytest.mark.by_day(1)
@pytest.mark.parametrize("norm", ["l2", "l1", "linf", norms.lp(3)], ids=["l2", "l1", "linf", "l3"])
def test_bad_leaves_names_leaves_of_skipped_step(norm):
    tx = skip_above(optax.sgd(1.0), 7.5 if norm == "l1" else 5.95, norm=norm)
    trees = stack(*(tree for tree, _ in STEPS.values()))
    run = jax.jit(jax.vmap(lambda tree: tx.update(tree, tx.init(GRADS))[1]))
    states = run(trees)
    assert list(states.leaves) == NAMES
    for i, (name, (_, expected)) in enumerate(STEPS.items()):
        if name == "all together" and norm == "linf":
            expected = ()  # no entry is above the threshold
        assert monitor.bad_leaves(jax.tree.map(lambda x, i=i: x[i], states)) == expected, name
    assert monitor.bad_leaves(states) == ("a", "b/0", "c")


def test_step_status_reports_step_applied_after_skips():
    both = {NAN: skip_nonfinite(optax.sgd(1.0), 1), 9.0: skip_above(optax.sgd(1.0), 6.0, 1)}

    @jax.jit
    def run():
        found = []
        for size, tx in both.items():
            state = tx.update(grads(a=size), tx.init(GRADS))[1]
            found += [state, tx.update(grads(b=size), state)[1]]
        return found

    assert [monitor.step_status(state) for state in run()] == [
        "skipped",
        "roll back",
        "skipped",
        "ok",
    ]
    assert [monitor.bad_leaves(state) for state in run()] == [("a",)] * 4


@pytest.mark.slow
def test_bad_leaves_persist_until_next_skip():
    tx = optax.chain(skip_above(optax.sgd(1.0), 6.0, loss_threshold=1.0), optax.scale(1.0))
    state, seen = tx.init(GRADS), []
    update = jax.jit(tx.update)
    before = jax.tree.map(jax.typeof, state)
    for tree, loss in (
        (grads(), 0.0),
        (grads(a=NAN), 0.0),
        (grads(), 0.0),
        (grads() | {"c": None}, 0.0),
        (grads(a=9.0) | {"c": None}, 0.0),
        (grads(b=INF), NAN),
        (grads(), 2.0),
    ):
        _, state = update(tree, state, GRADS, value=loss)
        seen.append(monitor.bad_leaves(state))
    assert seen == [(), ("a",), ("a",), ("a",), ("a",), ("b/0",), ()]
    assert jax.tree.map(jax.typeof, state) == before
    tx = skip_above(optax.sgd(1.0), 6.0, known_norm="grad_norm")
    state = jax.jit(tx.update)(grads(a=NAN), tx.init(GRADS), grad_norm=NAN)[1]
    assert monitor.bad_leaves(state) == ()  # of a norm that is given no leaf is known


@pytest.mark.slow
def test_bad_leaves_names_nonfinite_groups():
    bad = {"a": jnp.array([NAN, 1.0]), "m": jnp.ones((2, 2)).at[0, 1].set(INF), "v": jnp.ones(2)}
    chains = {
        "leaf": (optaxclip.clip_by_norm(1.0), ("a", "m")),
        "zero": (optaxclip.clip_by_norm(np.inf, nonfinite="zero"), ("a", "m")),
        "unit": (optaxclip.adaptive_grad_clip(0.1), ("a", "m")),
        "layers": (optaxclip.clip_by(scopes.leaf(stacked=1), 1.0), ("a/0", "m/0")),
        "labels": (optaxclip.clip_by(scopes.muon(), 1.0), ("adam", "muon")),
    }

    @jax.jit
    def states(bad):
        txs = {name: optax.chain(clip) for name, (clip, _) in chains.items()}
        return {name: tx.update(bad, tx.init(bad), bad)[1] for name, tx in txs.items()}

    for name, state in states(bad).items():
        assert monitor.bad_leaves(state) == chains[name][1], name
    with pytest.raises(
        ValueError,
        match=r"contains neither a skip wrapper nor a stage that clips each leaf; wrap",
    ):
        monitor.bad_leaves(optaxclip.clip_by_global_norm(1.0).init(bad))
    probe = optax.chain(optaxclip.clip_by_norm(np.inf), optaxclip.clip_by_global_norm(1.0))
    assert monitor.bad_leaves(jax.jit(probe.update)(bad, probe.init(bad))[1]) == ("a", "m")


def test_bad_leaves_works_in_shard_map():
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    specs = {"a": P(), "b": P(), "c": P("x")}
    tx = skip_above(optax.sgd(1.0), 6.0, specs=specs)
    update = jax.shard_map(
        tx.update, mesh=mesh, in_specs=(specs, P()), out_specs=(specs, P()), check_vma=False
    )
    for tree, expected in ((grads(c=NAN), ("c",)), (grads(c=50.0), ("c",)), (grads(a=8.0), ("a",))):
        assert monitor.bad_leaves(jax.jit(update)(tree, tx.init(GRADS))[1]) == expected


OK, BAD, HIGH = grads(), grads(a=NAN), grads(a=50.0)
RUNS = {
    "in a row": (
        lambda: skip_above(optax.sgd(1.0), 6.0),
        [OK, HIGH, BAD, HIGH, OK, BAD],
        ["ok", "skipped", "skipped", "roll back", "ok", "skipped"],
    ),
    "let through": (
        lambda: skip_nonfinite(optax.sgd(1.0), 2),
        [BAD, BAD, BAD, OK],
        ["skipped", "skipped", "roll back", "ok"],
    ),
    "let through, but finite": (
        lambda: skip_above(optax.sgd(1.0), 6.0, 1),
        [HIGH, HIGH, HIGH],
        ["skipped", "ok", "skipped"],
    ),
    "one in another": (
        lambda: skip_above(optax.chain(skip_nonfinite(optax.sgd(1.0))), 6.0),
        [HIGH, BAD, OK],
        ["skipped", "skipped", "ok"],
    ),
}


@pytest.mark.by_day(1)
@pytest.mark.parametrize("name", RUNS)
def test_step_status_follows_skips_in_run(name):
    make, trees, expected = RUNS[name]
    tx = make()
    update, state, seen = jax.jit(tx.update), tx.init(GRADS), []
    assert monitor.step_status(state) == "ok"
    for tree in trees:
        _, state = update(tree, state)
        seen.append(monitor.step_status(state, roll_back_after=3))
    assert seen == expected


def test_step_status_considers_losses_and_vmapped_states():
    tx = skip_above(optax.sgd(1.0), 6.0, loss_threshold=1.0)
    run = jax.jit(jax.vmap(lambda loss: tx.update(OK, tx.init(GRADS), value=loss)[1]))
    assert monitor.step_status(run(jnp.array([0.0, -5.0]))) == "ok"
    assert monitor.step_status(run(jnp.array([0.0, NAN]))) == "skipped"
    assert monitor.step_status(run(jnp.array([0.0, 2.0])), 1) == "roll back"
    # The longest row of skipped steps counts, not those of all states together.
    assert monitor.step_status(run(jnp.array([2.0, 2.0])), 2) == "skipped"
    state = tx.init(GRADS)
    kept = [state._replace(consecutive=jnp.int32(count)) for count in (9, 10)]
    assert [*map(monitor.step_status, kept)] == ["skipped", "roll back"]
    # The loss alone was not finite when the step was taken after all.
    info = state.loss.info._replace(norm=jnp.float32(NAN))
    lost = state._replace(loss=state.loss._replace(info=info))
    assert monitor.step_status(lost) == "roll back"
    assert monitor.step_status(stack(state, lost)) == "roll back"  # if one of the two is lost


def test_step_status_errors_explain_remedy():
    state = skip_nonfinite(optax.sgd(1.0)).init(GRADS)
    of_tree = optaxclip.clip_by_global_norm(1.0).init(GRADS)
    with pytest.raises(
        ValueError,
        match=r"contains neither a skip wrapper nor a stage that clips each leaf; wrap",
    ):
        monitor.bad_leaves(of_tree)
    assert monitor.bad_leaves((of_tree, state)) == ()
    for function in (monitor.bad_leaves, monitor.step_status):
        with pytest.raises(TypeError, match=r"inside jit.* contains tracers.*pass the state that"):
            jax.jit(lambda state, function=function: function(state) and 0)(state)
    with pytest.raises(
        ValueError,
        match=r"^opt_state contains no skip wrapper; wrap the optimizer in skip_nonfinite",
    ):
        monitor.step_status(of_tree)
    for wrong in (0, -1, 1.5, "a"):
        with pytest.raises((TypeError, ValueError), match="roll_back_after must be an int >="):
            monitor.step_status(state, wrong)

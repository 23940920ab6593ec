"""The study of methods: what its faults do, what it finds, and that it goes on where it stopped."""

import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optaxclip
from benchmarks.research import curves
from benchmarks.research.study import (
    cell,
    faults,
    methods,
    optimizers,
    plan,
    results,
    running,
    tables,
)
from benchmarks.research.study.plan import Cell, Effort, Found
from benchmarks.research.study.task import Task

# Research, which no user runs.
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("as_users")]

TINY = Effort(steps=8, every=2, seeds=2, tuning=1, chunk=4)
LINE = np.linspace(-1.0, 1.0, 8, dtype=np.float32)


def a_line(noise=None):
    """To learn `2 x` from eight points; scrambled, their order is turned."""

    def batch(params, key, is_bad):
        x = jax.random.permutation(key, jnp.asarray(LINE))
        return {"x": x, "y": jnp.where(is_bad, -2.0 * x, 2.0 * x)}

    def losses(params, batch):
        hidden = batch["x"][:, None] * params["up"] + params["bias"]
        return (jnp.sum(hidden * params["head"], -1) - batch["y"]) ** 2

    def held_out(params):
        return losses(params, {"x": jnp.asarray(LINE) / 2, "y": jnp.asarray(LINE)}).mean()

    def initial(key):
        up = 0.1 * jax.random.normal(key, (1, 4))
        return {"up": up, "bias": jnp.zeros(4), "head": jnp.ones(4)}

    return Task(initial, batch, losses, held_out, 8, "squares", ("adamw", "sgd"), noise)


def drawn(name, steps=400, seed=0):
    number = jnp.int32(faults.NUMBERS[name])
    run = jax.jit(faults.draw, static_argnums=2)
    return jax.tree.map(np.asarray, run(number, jax.random.key(seed), steps))


def test_faults_have_documented_effects():
    none, spike, tails, nan, jump, stretch = map(drawn, faults.FAULTS)
    assert not none.is_scrambled.any()
    assert not none.is_nan.any()
    assert (none.factor == 1).all()
    assert none.onset == -1
    assert np.flatnonzero(spike.factor == 100).size == 2 == np.sum(spike.factor != 1)
    assert 0.05 < tails.is_scrambled.mean() < 0.15
    assert tails.onset == -1
    assert nan.is_nan.sum() == 4
    assert nan.onset == np.argmax(nan.is_nan)
    assert (jump.factor == np.repeat([1.0, 10.0], 200)).all()
    assert jump.onset == 200
    assert np.flatnonzero(stretch.is_scrambled).tolist() == list(range(200, 240))
    for of_one in (spike, jump):
        assert not of_one.is_scrambled.any()
        assert not of_one.is_nan.any()
    for run in (none, spike, jump):
        assert (run.rate == 1).all()
        assert (run.scale == 1).all()
    first = {int(drawn("spike", seed=seed).onset) for seed in range(8)}
    assert len(first) > 4
    assert all(50 <= step < 150 for step in first)


def test_watched_counts_changed_steps():
    stage = methods.count_changes(optaxclip.clip_by_global_norm(1.0))
    state, update = stage.init(jnp.zeros(2)), jax.jit(stage.update)
    for grads in ([0.1, 0.0], [3.0, 0.0], [jnp.nan, 0.0], [0.0, 2.0]):
        _, state = update(jnp.array(grads), state)
    # The NaN poisons its neighbour: that step is changed too.
    assert methods.get_num_changed(state) == 3


def test_edge_selects_largest_nearly_best_learning_rate():
    rates = np.array([0.1, 0.2, 0.4, 0.8])
    assert plan.find_edge(rates, np.array([2.0, 1.0, 1.04, 3.0]), start=2.0) == 0.4
    assert plan.find_edge(rates, np.array([2.0, 1.0, 1.06, 3.0]), start=2.0) == 0.2


def test_lost_run_counts_as_untrained():
    held_out = np.array(
        [[3.0, 2.0, 1.0, 1.0, 1.0], [3.0, 2.0, 1.0, np.nan, np.nan], [3.0, 1, 4, 4, 4]]
    )
    assert plan.is_lost(held_out).tolist() == [False, True, True]
    assert plan.get_final_losses(held_out).tolist() == [1.0, 3.0, 3.0]


@pytest.mark.parametrize("noise", [None, 0.5])
def test_study_cell_matches_manual_loop(noise):
    task, of = a_line(noise), Cell("line", "sgd", "constant (best)")
    method = tables.select_methods(noise is not None, "sgd")[of.method]
    runner = running.Runner(task, "sgd", method, TINY)
    names = ("none", "jump", "stretch")
    outcome, seconds = runner([0.1] * 3, names, [5] * 3, 0.5)
    assert seconds > 0
    for i, (held_out, norms) in enumerate(by_hand(task, names)):
        np.testing.assert_allclose(outcome.held_out[i], held_out, rtol=2e-4, err_msg=names[i])
        np.testing.assert_allclose(outcome.norms[i], norms, rtol=2e-4, err_msg=names[i])
    assert outcome.onset.tolist() == [-1, 4, 4]


def by_hand(task, names):
    """The losses and norms of runs of `TINY` with these faults, without the cell's program."""
    numbers = jnp.array([list(faults.FAULTS).index(name) for name in names])
    begin = cell.build_begin(task, TINY.steps)(jnp.full(len(names), 5), numbers)
    parts = optimizers.build_optimizer("sgd", jnp.float32(0.1), TINY.steps)
    if task.noise is None:
        clip = optaxclip.clip_by_global_norm(0.5)
    else:
        clip = optaxclip.per_example_clip_and_aggregate(0.5, task.noise, begin.noise[0])
    tx, held_out_of = optax.chain(clip, parts.direction, parts.finish), jax.jit(task.held_out)

    @jax.jit
    def step(params, state, key, is_scrambled, factor):
        batch = task.batch(params, key, is_scrambled)

        def loss_of(params, batch):
            return factor * task.losses(params, batch).mean()

        if task.noise is None:
            grads = jax.grad(loss_of)(params, batch)
        else:
            singles = jax.tree.map(lambda x: x[:, None], batch)
            grads = jax.vmap(jax.grad(loss_of), (None, 0))(params, singles)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, optax.tree.norm(grads)

    for run in range(len(names)):
        params, keys, of_run = jax.tree.map(
            lambda x, run=run: x[run], (begin.params, begin.keys, begin.faults)
        )
        state, held_out, norms = tx.init(params), [held_out_of(params)], []
        for i in range(TINY.steps):
            of_step = keys[i], of_run.is_scrambled[i], of_run.factor[i]
            params, state, norm = step(params, state, *of_step)
            norms.append(norm)
            if i % TINY.every == TINY.every - 1:
                held_out.append(held_out_of(params))
        yield held_out, norms


def test_microbatch_rejection_saves_run_from_nan():
    method = methods.METHODS["microbatches"]
    runner = running.Runner(a_line(), "sgd", method, TINY)
    plain = running.Runner(a_line(), "sgd", methods.METHODS["none"], TINY)
    args = [0.1] * 2, ("none", "nan"), [3, 3], 0.0
    (guarded, _), (lost, _) = runner(*args), plain(*args)
    np.testing.assert_allclose(guarded.held_out[0], lost.held_out[0], rtol=1e-5)
    assert plan.is_lost(lost.held_out).tolist() == [False, True]
    assert plan.is_lost(guarded.held_out).tolist() == [False, False]
    assert guarded.changed.tolist() == [-1, -1]


@pytest.mark.parametrize(
    ("optimizer", "name"),
    [(of, name) for of in ("adamw", "sgd", "muon") for name in tables.select_methods(False, of)],
)
def test_study_methods_run_with_finite_losses(optimizer, name):
    method = tables.select_methods(False, optimizer)[name]
    outcome, _ = running.Runner(a_line(), optimizer, method, TINY)([0.01], ["none"], [0], 1.0)
    assert np.isfinite(outcome.held_out).all()


def test_study_resumes_after_interruption(tmp_path):
    path = tmp_path / "study.jsonl"
    found = Found(0.1, {0.1: 1.0}, 2.0, 3.0)
    whole, half = Cell("line", "sgd", "none"), Cell("line", "sgd", "ZClip")
    rows = [{**whole._asdict(), "seed": i} for i in range(plan.count_runs(whole, TINY))]
    batches = plan.BatchCell(16, "AGC")
    rows += [{**batches._asdict(), "seed": i} for i in range(plan.count_runs(batches, TINY))]
    study = results.Results(path, TINY)
    study.add([{"pair": ["line", "sgd"], "found": found._asdict()}, *rows])
    study.add([{**half._asdict(), "seed": 0}])
    with path.open("a") as file:
        file.write('{"task": "li')
    again = results.Results(path, TINY)
    assert again.done == {whole, batches}
    assert again.found["line", "sgd"].suggested == 3.0
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines[0]["settings"]["steps"] == TINY.steps
    assert lines[0]["versions"]["jax"]
    assert lines[2:] == rows
    with pytest.raises(ValueError, match=r"--out: .* other settings"):
        results.Results(path, TINY._replace(steps=9))


CALM = [3.0, 2.5, 2.0, 2.0, 2.0]
LOSSES = np.array(
    [
        [*CALM, 4.0, 4.0, 3.0, 2.0, 2.0, 2.0, 2.0],
        [*CALM, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0],
        [*CALM, 4.0, 4.0, 4.0, 4.0, 4.0, 4.0, 4.0],
    ]
)


def test_steps_to_recover_count_from_bad_step():
    steps = curves.count_recovery_steps(LOSSES[[0, 0, 0]], np.array([50, 53, 40]), every=10)
    assert steps.tolist() == [60.0, 57.0, 70.0]
    # With a margin of 0.4 the mean of 3, 2 and 2 is low enough.
    steps = curves.count_recovery_steps(LOSSES[[0, 0, 0]], np.array([50, 53, 30]), 10, 0.4)
    assert steps.tolist() == [50.0, 47.0, 70.0]


def test_steps_to_recover_ignore_nonfinite_losses():
    lost, was_lost = LOSSES[1].copy(), LOSSES[1].copy()
    lost[6:], was_lost[4:] = math.nan, math.nan
    steps = curves.count_recovery_steps(np.stack([lost, was_lost]), 50, every=10)
    assert steps.tolist() == [math.inf, math.inf]
    skipped = np.array([*CALM, math.nan, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0])
    assert curves.count_recovery_steps(skipped, 50, every=10) == 40.0


@pytest.mark.parametrize("onset", [29, 120])
def test_steps_to_recover_require_losses_around_onset(onset):
    with pytest.raises(ValueError, match=rf"onset must leave 3 .*, got \[{onset}\] for 12"):
        curves.count_recovery_steps(LOSSES, onset, every=10)

"""The benchmarks that compare whole runs: tiny ones run, and what they count is what they say."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.research import bad_stretch, cotangents, curves, hyperball
from benchmarks.research.text_model import Size
from optaxclip import thresholds

# Research, which no user runs.
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("as_users")]

SIZE = Size(width=8, heads=2, layers=2, context=8, batch=4, held_out=4)
RUNS = bad_stretch.Effort(
    steps=80, bad=(48, 64), every=4, save_every=8, roll_back_after=3, past=16, seeds=2, size=SIZE
)


def test_steps_to_a_loss():
    losses = np.array([[3.0, 2.0, 1.0, 1.5], [3.0, 2.5, 2.4, 2.2]])
    assert hyperball.steps_to(np.array([1.6, 1.6]), losses, every=20) == [40.0, math.inf]


CALM = [3.0, 2.5, 2.0, 2.0, 2.0]
LOSSES = np.array(
    [
        [*CALM, 4.0, 4.0, 3.0, 2.0, 2.0, 2.0, 2.0],
        [*CALM, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0],
        [*CALM, 4.0, 4.0, 4.0, 4.0, 4.0, 4.0, 4.0],
    ]
)


def test_steps_to_recover_count_from_each_run_s_own_bad_step():
    steps = curves.steps_to_recover(LOSSES[[0, 0, 0]], np.array([50, 53, 40]), every=10)
    assert steps.tolist() == [60.0, 57.0, 70.0]
    # With a margin of 0.4 the mean of 3, 2 and 2 is low enough.
    steps = curves.steps_to_recover(LOSSES[[0, 0, 0]], np.array([50, 53, 30]), 10, 0.4)
    assert steps.tolist() == [50.0, 47.0, 70.0]


def test_what_is_not_finite_is_not_back():
    lost, was_lost = LOSSES[1].copy(), LOSSES[1].copy()
    lost[6:], was_lost[4:] = math.nan, math.nan
    steps = curves.steps_to_recover(np.stack([lost, was_lost]), 50, every=10)
    assert steps.tolist() == [math.inf, math.inf]
    skipped = np.array([*CALM, math.nan, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0])
    assert curves.steps_to_recover(skipped, 50, every=10) == 40.0


@pytest.mark.parametrize("onset", [29, 120])
def test_recovery_needs_losses_before_and_after(onset):
    with pytest.raises(ValueError, match=rf"onset must leave 3 .*, got \[{onset}\] for 12"):
        curves.steps_to_recover(LOSSES, onset, every=10)


def test_hyperball_beside_others(monkeypatch, capsys):
    tiny = hyperball.Effort(4, 2, (3e-3, 1e-2), (100, 101), (0, 1), 2, SIZE)
    ways = {name: hyperball.WAYS[name] for name in ("AdamW", "MuonH")}
    monkeypatch.setattr(hyperball, "QUICK", tiny)
    monkeypatch.setattr(hyperball, "WAYS", ways)
    hyperball.main(["--quick"])
    rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines() if " ± " in line]
    assert [row[0].removeprefix("| ") for row in rows] == list(ways)
    for row in rows:
        assert float(row[1]) in tiny.rates
        assert 0 < float(row[2].split(" ± ")[0]) < 10
        assert float(row[4]) > 0


def test_a_roll_back_undoes_what_bad_data_did(monkeypatch):
    # In so short a run losses fall all the time, and the spread of many would hide the noise.
    rule = functools.partial(thresholds.window, 4.0, 16, record="accepted")
    monkeypatch.setattr(bad_stretch, "_rule", rule)
    names = ("nothing", "skip and roll back")
    found = bad_stretch.compare(RUNS, {name: bad_stretch.GUARDS[name] for name in names})
    plain, rolled_back = found["nothing"]
    assert plain.shape == (len(bad_stretch.KINDS), RUNS.seeds, RUNS.steps // RUNS.every)
    assert not rolled_back.any()
    begin = RUNS.bad[0] // RUNS.every
    for of_kind in plain[1:]:  # the same run, but for the stretch
        np.testing.assert_array_equal(of_kind[:, :begin], plain[0][:, :begin])
        assert np.all(of_kind[:, begin:] != plain[0][:, begin:])
    guarded, rolled_back = found["skip and roll back"]
    noise = bad_stretch.KINDS.index("noise")
    assert not rolled_back[0].any()
    assert np.all(rolled_back[noise] > 0)
    # At the end of the stretch the one has learned noise, the other has not.
    end = RUNS.bad[1] // RUNS.every - 1
    assert np.all(guarded[noise][:, end] < plain[noise][:, end])


@pytest.mark.parametrize("name", ["adding", pytest.param("text", marks=pytest.mark.slow)])
def test_what_comes_back_is_clipped_at_each_step(name):
    effort = cotangents.Effort(6, 8, 4, 3)
    task = cotangents.TASKS[name](effort)

    def losses(way, limit):
        run = cotangents.trainer(task, cotangents.WAYS[way], effort)
        return run(jnp.float32(limit), jnp.float32(0.3), 0)

    plain = jax.jit(lambda: losses("no clip", math.inf))()
    assert plain.shape == (effort.steps,)
    for way in ("global norm", "states by norm", "inputs by value"):
        off, on = jax.jit(lambda: jax.vmap(lambda x: losses(way, x))(jnp.array([1e9, 1e-4])))()  # noqa: B023
        np.testing.assert_allclose(off, plain, rtol=1e-4)
        np.testing.assert_allclose(on[0], plain[0], rtol=1e-4)
        assert abs(on[-1] - plain[-1]) > 1e-3 * plain[-1], way


def test_a_run_that_is_lost_counts_as_infinite():
    losses = np.ones((2, 20))
    losses[1, -1] = np.nan
    np.testing.assert_array_equal(cotangents.finals(losses), [1.0, np.inf])

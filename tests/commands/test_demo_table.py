"""What the demo says of its runs: the cells of its table, the notes below it, and lost steps."""

import re

import numpy as np
import pytest

from optaxclip.commands import demo

task = pytest.importorskip("optaxclip.commands.demo_task")


def history_of(norm, limit):
    """That of a run which is lost where its norm is not finite."""
    norm = np.asarray(norm)
    return task.History(norm, norm, norm > 1, np.broadcast_to(limit, norm.shape), [], [])


def test_a_run_that_is_lost_says_what_happened():
    lost = [30.0, 1.0, np.nan, np.nan]
    said = demo.notes(
        {
            "none": history_of(lost, np.nan),
            "ema": history_of(lost * 30, 42.0),
            "median": history_of(lost, np.inf),
            "norm": history_of([np.inf, 1.0], 0.15),
            "zclip": history_of(np.ones(26), 1.0),
        }
    )
    assert said == [
        "ema: lost at step 3, after raw norms up to 30, with a limit of 42",
        "median: lost at step 3, after raw norms up to 30",
        "norm: lost at step 1",
    ]


def test_a_step_is_lost_where_its_loss_or_its_norm_is_not_finite():
    history = history_of(np.ones(4), np.nan)
    lost = history._replace(loss=np.array([1, np.nan, 1, np.nan]), norm=np.array([1, 1, np.inf, 1]))
    assert lost.nonfinite.tolist() == [1, 2, 3]
    assert history.nonfinite.tolist() == []


def test_a_clip_changed_something_where_an_entry_differs_and_has_the_limit_of_all_leaves():
    tree = {"a": np.float32([1, np.nan]), "b": np.ones(2, np.float32)}
    assert not task._differ(tree, tree)
    assert task._differ(tree, tree | {"b": np.float32([1, 2])})
    assert task._limit_of(demo.METHODS["global_norm"]().init(tree)) == np.inf
    for name in ("none", "norm"):
        assert np.isnan(task._limit_of(demo.METHODS[name]().init(tree)))


def test_a_warm_up_that_is_not_over_is_said():
    (said,) = demo.notes({"none": history_of(np.ones(9), 1.0), "zclip": history_of(np.ones(25), 1)})
    assert said.startswith("zclip: its warm-up of 25 steps, without a limit of its own, is not ove")
    assert said.endswith("over after 25 steps; pass --steps 100")


def test_cells_of_the_table(capsys):
    def of(*norms, limit=np.nan, held_out=(3.0, 1.5)):
        return history_of(norms, limit)._replace(held_out=np.array(held_out))

    demo.print_table(
        {
            "none": of(2.0, 9.0, 3.0, 4.0),
            "ema": of(np.inf, np.inf),
            "agc": of(30.0, 1.0, np.nan, np.nan, held_out=(2.0, np.nan)),
            "zclip": of(1.0, 1.0, 1.0, limit=[np.inf, 3.0, 0.25]),
        }
    )
    rows = [re.split(r" {2,}", line.strip()) for line in capsys.readouterr().out.splitlines()]
    assert [row for row in rows if row[0] in ("none", "ema", "agc", "zclip")] == [
        ["none", "1.5", "1.5", "9", "100%", "0"],
        ["ema", "per leaf", "1.5", "1.5", "not finite", "100%", "2, first 1"],
        ["agc", "0.01", "diverged", "2", "30", "25%", "2, first 3"],
        ["zclip", "0.25", "1.5", "1.5", "1", "0%", "0"],
    ]

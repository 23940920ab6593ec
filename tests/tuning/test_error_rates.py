"""How often `suggest` is wrong, over many kinds of norms: a part of `benchmarks.suggesting`."""

import numpy as np
import pytest

from benchmarks import suggesting

RUNS = pytest.mark.parametrize(
    ("runs", "lengths"), [(2, [300]), pytest.param(20, [100, 300, 1000], marks=pytest.mark.slow)]
)
FIRST = 20_000


@RUNS
def test_norms_without_a_trend_are_stationary_and_their_spikes_are_found(runs, lengths):
    """Of these runs 2 in 100 may be wrong, of ordinary norms one in 300."""
    seeds = range(FIRST, FIRST + runs)
    for n in lengths:
        found = {
            name: suggesting.without_trend(draw, n, seeds)
            for name, draw in suggesting.JUDGED_ON.items()
        }
        mean = suggesting.Wrong(*np.mean([*found.values()], axis=0))
        assert mean.stepped + mean.drifting <= 0.02, found
        assert mean.no_constant <= 0.02, found
        assert mean.for_spikes <= 1 / 300, found
        assert mean.missed <= 0.002, found


@RUNS
def test_levels_that_move_are_seen_to_move(runs, lengths):
    del lengths
    seeds = range(FIRST, FIRST + runs // 2)
    found = {
        (name, noise): suggesting.seen(move, suggesting.NOISES[noise], 200, seeds)
        for name, move in suggesting.MOVES.items()
        for noise in suggesting.NOISES
    }
    assert np.mean([*found.values()]) >= 0.95, found

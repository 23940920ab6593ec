"""Doubts and verdicts, at both sides of the bounds at which they begin."""

import numpy as np

import optaxclip.tuning.doubts as doubts
import optaxclip.tuning.spread as spreads

FLAT = np.linspace(1.0, 0.5, 100)  # one norm is within a thousandth of the largest


def judged(
    norms=FLAT, rise=1.0, fall=1.0, far=2.0, warmup=0, times=7.9, threshold=None, level=None
):
    """Judges norms whose level rises and falls by factors, and a threshold above the lowest one."""
    moves = np.append(np.linspace(0, np.log(rise), 50), np.log(rise / fall) * np.ones(50))
    level = moves if level is None else level
    none = np.zeros(100, bool)
    threshold = FLAT.max() if threshold is None else threshold
    ends = np.log(threshold / times), np.log(threshold)
    shape = spreads.Shape(level, *ends, 0.1, none, warmup, "drifting", np.log(far))
    found = doubts.judged_threshold(norms, shape, threshold)
    return found.verdict, " ".join(found.doubts)


def test_where_doubts_begin():
    """Factors of 20 and 13, a tenth within a thousandth of the largest norm, 100 norms."""
    for calm in ({}, {"rise": 19.9}, {"fall": 19.9}, {"far": 12.9}):
        assert judged(**calm) == ("constant", "")
    assert judged(fall=20.1) == ("adaptive", judged(fall=20.1)[1])
    assert "falls by a factor of 20.1: no threshold" in judged(fall=20.1)[1]
    for lost, said in (
        ({"rise": 20.1}, "rises by a factor of 20.1"),
        ({"far": 13.1}, "one in 300 ordinary norms is 13.1 times its level"),
    ):
        verdict, doubt = judged(**lost)
        assert verdict == "none"
        assert said in doubt
    # The level may fall in the warm-up as it likes.
    assert judged(fall=1e3, warmup=50) == ("constant", "")
    assert judged(fall=1e3, warmup=49)[0] == "adaptive"
    for place, size, is_doubted in (10, 0.9991, False), (11, 0.9991, True), (11, 0.9989, False):
        norms = np.append(np.full(place, size), FLAT[place:])
        norms[0] = 1.0
        assert ("many norms equal the largest, 1:" in judged(norms)[1]) == is_doubted
    assert "only 99 norms; record 100" in judged(level=np.zeros(99))[1]


def test_a_threshold_fits_a_level_that_moves_if_it_clips_a_twentieth_and_all_at_8_times_the_level():
    assert judged(times=7.9) == judged(threshold=FLAT[5]) == ("constant", "")
    assert judged(times=8.1) == judged(threshold=FLAT[6]) == ("adaptive", "")

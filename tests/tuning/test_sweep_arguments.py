"""What a sweep takes; `test_messages.py` has what it refuses."""

import sys

import jax
import numpy as np
import pytest
from messages_of_data import swept

import optaxclip.tuning.sweeping as sweeping


def test_a_loss_may_be_a_number_of_python_and_each_step_is_reported_once():
    done = []
    step = lambda params, _, threshold: (params, 2.0, 0.0 * threshold)  # noqa: E731
    result = swept([1.0], 53, step, progress=done.append)
    np.testing.assert_array_equal(result.loss, np.full((1, 53), 2.0))
    assert done == [18, 18, 17]
    # No rule can learn from norms of zero.
    assert np.isnan(result.unchosen_threshold)
    assert "to choose" not in str(result)


def test_a_terminal_shows_no_bar_to_those_who_want_none(capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    for progress, is_shown in (False, False), (True, True):
        with sweeping._reporter(progress, 3) as report:
            report(1)
        assert bool(capsys.readouterr().err) == is_shown


@pytest.mark.slow
def test_counts_may_be_ints_of_numpy():
    of_numpy = {"steps": np.int64(5), "seeds": np.int32(2), "parallel": np.uint8(1)}
    result = swept([1.0], **of_numpy)
    np.testing.assert_array_equal(result.loss, swept([1.0], 5, seeds=2, parallel=1).loss)


def test_an_int_is_a_key():
    found, expected = (swept([1.0], key=key).loss for key in (0, jax.random.key(0)))
    np.testing.assert_array_equal(found, expected)

"""The picture of the noise scale: where the batch is too small."""

import numpy as np
import pytest

from optaxclip import plots

Figure = pytest.importorskip("matplotlib.figure").Figure


def drawn(*args, **options):
    ax = plots.noise_scale_over_steps(*args, ax=Figure().subplots(), **options)
    return ax, {line.get_label(): line for line in ax.lines}


def test_the_scale_and_the_batch_size():
    ax, lines = drawn([np.nan, 10.0, np.inf, 40.0, -1.0], 32, steps=range(5, 10))
    assert (ax.get_yscale(), ax.get_xlabel(), ax.get_ylabel()) == ("log", "step", "batch size")
    assert list(lines) == ["noise scale", "batch size 32"]
    np.testing.assert_array_equal(
        lines["noise scale"].get_ydata(), [np.nan, 10, np.nan, 40, np.nan]
    )
    np.testing.assert_array_equal(lines["noise scale"].get_xdata(), range(5, 10))
    np.testing.assert_array_equal(lines["batch size 32"].get_ydata(), [32] * 5)
    assert [part.get_label() for part in ax.collections] == ["batch too small"]


def test_a_batch_size_for_each_step_and_one_that_is_large_enough():
    ax, lines = drawn([8.0, 16.0], [16, 32])
    np.testing.assert_array_equal(lines["batch size"].get_ydata(), [16, 32])
    assert not ax.collections
    assert not drawn([8.0, 32.0], [16, 32])[0].collections  # as large as the scale is enough


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (([], 32), "scales must have at least one entry"),
        (([[1.0]], 32), "scales must have one axis"),
        (([1.0, 2.0], [1, 2, 3]), "batch_size must be one, or one for each of 2 scales"),
        (([1.0], 0), "batch_size must be above 0"),
        (([1.0, 2.0], [32, 0]), "batch_size must be above 0"),
        (([1.0], np.nan), "batch_size must be above 0"),
        (([1.0], 32, [1, 2]), "steps must have one entry for each of 1 scales"),
    ],
)
def test_bad_input(args, message):
    with pytest.raises(ValueError, match=message):
        plots.noise_scale_over_steps(*args)

"""The recipe for TensorBoard stores histograms that TensorBoard reads."""

import pytest
import shown_code

from optaxclip import monitor

LOGS = "docs/recipes/logs.md"


def left_by(marker):
    """What the recipe with this call leaves behind."""
    (block,) = (block for block in shown_code.blocks(LOGS) if marker in block)
    return shown_code.run(block, LOGS)


@pytest.mark.slow
def test_tensorboard_recipe_stores_histogram_counts():
    name = "tensorboard.backend.event_processing.event_accumulator"
    reader = pytest.importorskip(name)
    pytest.importorskip("tensorboardX")
    left = left_by("add_histogram_raw")
    events = reader.EventAccumulator(left["folder"], {reader.HISTOGRAMS: 0})  # 0: all
    events.Reload()
    rows = events.Histograms("histogram/w")
    assert [row.step for row in rows] == [0, 5, 10, 15]
    (found,) = monitor.histograms(left["opt_state"]).values()
    counts, edges = found.list_by_exponent()
    assert found.step == 15
    shown = rows[-1].histogram_value
    assert (shown.bucket, shown.bucket_limit) == (counts.tolist(), edges[1:].tolist())
    assert (shown.min, shown.max, shown.num) == (edges[0], edges[-1], 3)

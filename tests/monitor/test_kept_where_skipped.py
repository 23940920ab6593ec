"""The page on what a skipped step must keep: a NaN batch ruins each program without the flag."""

import re

import numpy as np
import pytest
import shown_code
from cases import slow_unless
from test_site import skip_without_packages

PAGE = "docs/recipes/skipped.md"
BLOCKS = dict(zip(("nnx", "linen", "average"), shown_code.blocks(PAGE), strict=True))
BAD = 20
"""The step with the NaN batch, but where weights are averaged."""


@pytest.mark.slow
@pytest.mark.parametrize("name", slow_unless("average".__eq__, BLOCKS))
def test_recipes_fail_without_step_flag(name):
    block = BLOCKS[name]
    skip_without_packages(block)
    kept = np.asarray(shown_code.run(block, PAGE)["losses"])
    without, count = re.subn(r"monitor\.step_was_applied\(\S+\)", "True", block)
    assert count == 1
    ruined = np.asarray(shown_code.run(without, PAGE)["losses"])
    np.testing.assert_array_equal(kept[:BAD], ruined[:BAD])
    assert kept[-1] < kept[0] / 50
    if name == "average":  # of 200 batches the second half is bad
        assert np.all(kept[100:] == kept[99])
        assert ruined[-1] > 3 * kept[-1]
    else:
        assert np.all(np.isnan(ruined[BAD:]))
        assert np.all(np.isfinite(kept[BAD + 1 :]))

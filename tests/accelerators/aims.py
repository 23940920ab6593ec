"""What a clip may add to a step, beside Optax's."""

from typing import Any

OURS, THEIRS = "optaxclip", "Optax"
DTYPES = ["float32", "bfloat16"]
METHODS = ["global_norm", "zclip", "autoclip", "block_rms", "adagc", "agc"]
WITH_HISTORY = {"zclip", "autoclip", "adagc"}
# In reads of the gradients; AGC reads each leaf before any changes, and the parameters.
MORE_MOVED, MOVED_BY_AGC, MORE_IN_FAST_MEMORY, MOVED_BY_ALL = 0.02, 2.05, 0.35, 1.05
MORE_TEMPORARY = 0.01
# A ratio that is 1.00 in two digits.
EQUAL = 1.005
KERNELS, KERNELS_WITH_HISTORY, KERNELS_OF_ALL, KERNELS_OF_DEVICES = 4, 8, 12, 6


def assert_as_cheap(method: str, ours: Any, theirs: Any) -> None:
    """One read, no branch, no memory, as Optax's."""
    least = MOVED_BY_AGC if method == "agc" else 0
    assert ours.moved <= max(theirs.moved + MORE_MOVED, least)
    assert ours.temporary <= theirs.temporary + MORE_TEMPORARY
    assert_no_branch(ours)


def assert_no_branch(ours: Any) -> None:
    """At a branch or a loop a GPU's host waits, and what it takes leaves a TPU's fast memory."""
    assert (ours.counts.branches, ours.counts.loops) == (0, 0)

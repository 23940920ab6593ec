"""Lists the tasks of the study."""

from collections.abc import Callable

from benchmarks.research.study import digits, policy, text
from benchmarks.research.study.task import Task

TASKS: dict[str, Callable[[], Task]] = {
    "lstm": text.build_lstm,
    "transformer": text.build_transformer,
    "conv": digits.build_conv,
    "policy": policy.build_policy,
    "private": digits.build_private,
}
"""Cached functions that read the data of their tasks on demand."""

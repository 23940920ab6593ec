"""Lists the tasks of the study."""

from collections.abc import Callable

from benchmarks.research.study import digits, policy, text
from benchmarks.research.study.task import Task

TASKS: dict[str, Callable[[], Task]] = {
    "lstm": text.lstm,
    "transformer": text.transformer,
    "conv": digits.conv,
    "policy": policy.policy,
    "private": digits.private,
}
"""Cached functions that read the data of their tasks on demand."""

"""The tasks of the study, by name."""

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
"""Functions, as the data of each are read when it is asked for; each reads them once."""

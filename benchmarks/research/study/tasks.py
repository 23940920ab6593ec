"""The tasks of the study, by name."""

from collections.abc import Callable

from benchmarks.research.study import digits, policy, text, unseen
from benchmarks.research.study.task import Task

TASKS: dict[str, Callable[[], Task]] = {
    "lstm": text.lstm,
    "transformer": text.transformer,
    "conv": digits.conv,
    "policy": policy.policy,
    "private": digits.private,
}
"""Functions, as the data of each are read when it is asked for; each reads them once."""
UNSEEN: dict[str, Callable[[], Task]] = {
    "vit": unseen.vit,
    "gru": unseen.gru,
    "decoder": unseen.decoder,
    "autoencoder": unseen.autoencoder,
}
"""Those that guards are judged by; the study of methods leaves them out."""
ALL = TASKS | UNSEEN

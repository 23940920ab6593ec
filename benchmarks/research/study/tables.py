"""Selects the methods for tasks and optimizers."""

from benchmarks.research.study.methods import METHODS, PRIVATE, WITH_MUON, Method


def select_methods(is_private: bool, optimizer: str) -> dict[str, Method]:
    """Returns the methods for a task and an optimizer by name."""
    if is_private:
        return PRIVATE
    if optimizer == "muon":
        return {name: METHODS[name] for name in WITH_MUON}
    return {name: x for name, x in METHODS.items() if not x.only or optimizer in x.only}

"""Limit rules: what the norm of a group may be at this step.

A rule is a `Threshold`, an `(init, update)` pair over the norms of the groups. It never sees which
scope they come from, so a rule written once serves the whole tree, each leaf and each label:

  def update(norms, state, param_norms):
      limits = ...                      # a pytree like norms
      return Limits(trigger=limits, target=limits), state
"""

from optaxclip._types import Limits, Threshold
from optaxclip.thresholds.fixed import constant, given, relative_to_params, schedule

__all__ = [
    "Limits",
    "Threshold",
    "constant",
    "given",
    "relative_to_params",
    "schedule",
]

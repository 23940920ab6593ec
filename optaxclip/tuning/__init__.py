"""Chooses a threshold from recorded norms, from a log, or by training.

To get a suggestion from norms that `optaxclip.monitor.record` recorded, or from a log, use::

  print(optaxclip.tuning.suggest(optaxclip.monitor.history(opt_state)))
  print(optaxclip.tuning.suggest(optaxclip.tuning.read_log("trainer_state.json")))
"""

from optaxclip.tuning._read_log import read_log as read_log
from optaxclip.tuning._suggest import Alternative as Alternative
from optaxclip.tuning._suggest import Suggestion as Suggestion
from optaxclip.tuning._suggest import suggest as suggest
from optaxclip.tuning._sweep import SweepResult as SweepResult
from optaxclip.tuning._sweep import sweep as sweep

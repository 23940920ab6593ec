"""Functions to choose a threshold from a log, from recorded norms or by training.

You can use `suggest` for norms from `optaxclip.monitor.record` or from a log, for example::

  print(optaxclip.tuning.suggest(optaxclip.monitor.history(opt_state)))
  print(optaxclip.tuning.suggest(optaxclip.tuning.read_log("trainer_state.json")))
"""

from optaxclip.tuning._read_log import read_log as read_log
from optaxclip.tuning._suggest import Alternative as Alternative
from optaxclip.tuning._suggest import Suggestion as Suggestion
from optaxclip.tuning._suggest import suggest as suggest
from optaxclip.tuning._sweep import SweepResult as SweepResult
from optaxclip.tuning._sweep import sweep as sweep

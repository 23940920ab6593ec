"""Finding the limit: suggest one from recorded norms, or try many in one compiled program.

norms = optaxclip.monitor.history(opt_state)          # of a run with optaxclip.monitor.record
suggestion = optaxclip.tuning.suggest(norms)
print(suggestion)
"""

from optaxclip.tuning.suggesting import Alternative as Alternative
from optaxclip.tuning.suggesting import Suggestion as Suggestion
from optaxclip.tuning.suggesting import suggest as suggest
from optaxclip.tuning.sweeping import SweepResult as SweepResult
from optaxclip.tuning.sweeping import sweep as sweep

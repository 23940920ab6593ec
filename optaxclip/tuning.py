"""Finding the limit: suggest one from recorded norms, or try many in one compiled program.

norms = optaxclip.monitor.history(opt_state)          # of a run with optaxclip.monitor.record
suggestion = optaxclip.tuning.suggest(norms)
print(suggestion)
"""

from optaxclip._suggest import Alternative as Alternative
from optaxclip._suggest import Suggestion as Suggestion
from optaxclip._suggest import suggest as suggest
from optaxclip._sweep import SweepResult as SweepResult
from optaxclip._sweep import sweep as sweep

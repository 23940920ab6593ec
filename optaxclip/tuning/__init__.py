"""Finding a threshold: `suggest` one from recorded norms, or try many in one compiled program.

`suggest` takes the norms that `optaxclip.monitor.record` kept::

  norms = optaxclip.monitor.history(opt_state)
  print(optaxclip.tuning.suggest(norms))

`sweep` trains with several thresholds, and names the largest one that is as good as the best.
"""

from optaxclip.tuning.suggesting import Alternative as Alternative
from optaxclip.tuning.suggesting import Suggestion as Suggestion
from optaxclip.tuning.suggesting import suggest as suggest
from optaxclip.tuning.sweeping import SweepResult as SweepResult
from optaxclip.tuning.sweeping import sweep as sweep

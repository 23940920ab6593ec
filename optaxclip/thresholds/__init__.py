"""Threshold rules, which compute the maximum norm of each group on each step.

A rule is a `ThresholdRule`, a pair of functions `(init, update)`. Any rule works with any scope,
because it receives the norms of all groups in one array::

  def update(norms, state, param_norms):
      thresholds = ...                      # an array with the shape of norms
      return Thresholds(trigger=thresholds, target=thresholds), state

  rule                          | threshold of a group
  ------------------------------|------------------------------------------------------------
  `constant(threshold)`         | a number
  `schedule(fn)`                | a function of the step count
  `relative_to_params(ratio)`   | a fraction of the norm of its parameters
  `zscore()`                    | the moving mean of its norms plus standard deviations (ZClip)
  `ema()`                       | a multiple of the moving average of its norms
  `adagc()`                     | a small multiple of the average of its clipped norms (AdaGC)
  `percentile()`                | a percentile of its most recent norms (AutoClip)
  `window()`                    | the mean of its most recent norms plus standard deviations
  `median()`                    | a multiple of the median of its most recent norms
  `quantile()`                  | adapted until a target fraction of its norms is below it
  `log_tracker()`               | the mean logarithm of its norms plus standard deviations
  `mean_over_rms()`             | the mean of its norms divided by their root mean square

Use `adaptive` to make a rule from your own statistic, and `fixed` for an array of thresholds.
"""

from optaxclip.thresholds._adaptive import AdaptiveState as AdaptiveState
from optaxclip.thresholds._adaptive import adaptive as adaptive
from optaxclip.thresholds._averages import ema as ema
from optaxclip.thresholds._averages import mean_over_rms as mean_over_rms
from optaxclip.thresholds._averages import zscore as zscore
from optaxclip.thresholds._constant import constant as constant
from optaxclip.thresholds._constant import fixed as fixed
from optaxclip.thresholds._constant import relative_to_params as relative_to_params
from optaxclip.thresholds._constant import schedule as schedule
from optaxclip.thresholds._feedback import adagc as adagc
from optaxclip.thresholds._feedback import log_tracker as log_tracker
from optaxclip.thresholds._feedback import quantile as quantile
from optaxclip.thresholds._window import median as median
from optaxclip.thresholds._window import percentile as percentile
from optaxclip.thresholds._window import window as window

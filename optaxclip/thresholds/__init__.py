"""Threshold rules, which compute the maximum norm of the groups at a step.

A rule is a `ThresholdRule`, a pair of functions `(init, update)`. All rules work with all scopes,
because they receive the norms of all groups as one array::

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
  `adagc()`                     | a small multiple of this average (AdaGC)
  `percentile()`                | a percentile of its last norms (AutoClip)
  `window()`                    | the mean of its last norms plus standard deviations
  `median()`                    | a multiple of the median of its last norms
  `quantile()`                  | adapted until a target fraction of its norms is below it
  `log_tracker()`               | the mean of the logarithms of its norms plus deviations
  `mean_over_rms()`             | the mean of its norms divided by their root mean square

Use `adaptive` to make a rule from another statistic, and `fixed` for an array of thresholds.
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

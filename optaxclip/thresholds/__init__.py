"""Threshold rules: the largest norm that a group may have at this step.

A rule is a `ThresholdRule`, a pair of functions `(init, update)` of the norms of all groups. It works
for any scope, because the norms come in one array whatever the groups are:

  def update(norms, state, param_norms):
      thresholds = ...                      # an array like norms
      return Thresholds(trigger=thresholds, target=thresholds), state

  rule                          | the threshold of a group's norm
  ------------------------------|--------------------------------------------------------
  `constant(threshold)`             | a number
  `schedule(fn)`                | a number for each step
  `relative_to_params(ratio)`   | a share of its parameters' norm
  `zscore()`                    | the moving mean of its norms plus deviations (ZClip)
  `ema()`                       | a multiple of their moving average
  `adagc()`                     | a little above their moving average (AdaGC)
  `percentile()`                | a percentile of its last norms (AutoClip)
  `window()`                    | the mean of its last norms plus deviations
  `median()`                    | a multiple of the median of its last norms
  `quantile()`                  | moves until a chosen share of its norms is below
  `log_tracker()`               | the mean of the norms' logarithms plus deviations
  `mean_over_rms()`             | the mean of its norms over their root mean square

`adaptive` makes a rule from another statistic, and `given` makes one from thresholds that you have.
"""

from optaxclip.thresholds.adaptive import AdaptiveState as AdaptiveState
from optaxclip.thresholds.adaptive import adaptive as adaptive
from optaxclip.thresholds.averages import ema as ema
from optaxclip.thresholds.averages import mean_over_rms as mean_over_rms
from optaxclip.thresholds.averages import zscore as zscore
from optaxclip.thresholds.constant import constant as constant
from optaxclip.thresholds.constant import fixed as fixed
from optaxclip.thresholds.constant import relative_to_params as relative_to_params
from optaxclip.thresholds.constant import schedule as schedule
from optaxclip.thresholds.feedback import adagc as adagc
from optaxclip.thresholds.feedback import log_tracker as log_tracker
from optaxclip.thresholds.feedback import quantile as quantile
from optaxclip.thresholds.window import median as median
from optaxclip.thresholds.window import percentile as percentile
from optaxclip.thresholds.window import window as window

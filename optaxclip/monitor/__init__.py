"""Reads, logs and records the behavior of clips and skips from the optimizer's state.

Clips and skips keep a record of their last step in their own state. This state can be inside
`chain`, `masked`, `partition`, `MultiSteps`, `apply_if_finite`, `inject_hyperparams`, a Flax
`TrainState`, an `nnx.Optimizer`, lists or dicts. (`clip`, `clip_by_value` and
`clip_by_second_moment` have no norm and keep no record.) For logging, `metrics` converts the
records to a flat dict of numbers inside the compiled step, `scalars` returns the same numbers as
floats on the host, and `json_line` writes them as a line of JSON::

  for name, value in monitor.scalars(opt_state).items():
      writer.add_scalar(name, value, step)              # TensorBoard
  wandb.log(monitor.scalars(opt_state), step)           # Weights & Biases

With `since=`, fractions and counts cover only the steps after an earlier state. `events` records
the outcome of the last steps, so you can find a bad batch. `histogram` counts elements by
magnitude, and `dtype_fit` shows which number format can represent them. After a skipped step,
`bad_leaves` returns the names of the leaves that caused it, and `step_status` shows on the
host whether training should continue. Inside the compiled step, `step_was_applied` shows whether
other state must also remain unchanged. `loss_scale` is the factor by which a step multiplies its
loss. `noise_scale` uses the gradients of microbatches to check whether the batch is too small.
"""

from optaxclip.monitor._events import EventsState as EventsState
from optaxclip.monitor._events import events as events
from optaxclip.monitor._histogram import DtypeFit as DtypeFit
from optaxclip.monitor._histogram import Histogram as Histogram
from optaxclip.monitor._histogram import HistogramState as HistogramState
from optaxclip.monitor._histogram import dtype_fit as dtype_fit
from optaxclip.monitor._histogram import histogram as histogram
from optaxclip.monitor._histogram import histograms as histograms
from optaxclip.monitor._history import history as history
from optaxclip.monitor._history import history_names as history_names
from optaxclip.monitor._metrics import json_line as json_line
from optaxclip.monitor._metrics import metrics as metrics
from optaxclip.monitor._metrics import read as read
from optaxclip.monitor._metrics import scalars as scalars
from optaxclip.monitor._noise_scale import NoiseScaleState as NoiseScaleState
from optaxclip.monitor._noise_scale import noise_scale as noise_scale
from optaxclip.monitor._record import RecordState as RecordState
from optaxclip.monitor._record import record as record
from optaxclip.monitor._step_status import bad_leaves as bad_leaves
from optaxclip.monitor._step_status import loss_scale as loss_scale
from optaxclip.monitor._step_status import step_status as step_status
from optaxclip.monitor._step_status import step_was_applied as step_was_applied
from optaxclip.monitor._summary import counts as counts

"""What the clips did: read it from the optimizer's state, log it, keep a history of norms.

Every clip and every skip keeps a record of its last step in its own state, wherever that is held:
in `chain`, `masked`, `partition`, `MultiSteps`, `apply_if_finite`, `inject_hyperparams`, a Flax
`TrainState`, an `nnx.Optimizer`, lists, dicts. (`clip`, `clip_by_value` and
`clip_by_second_moment` have no norm and keep no record.) For a log, `metrics` turns the records
into a flat dict of numbers inside of the compiled step, `scalars` gives the same numbers as floats
on the host, and `json_line` writes them as a line of JSON::

  for name, value in monitor.scalars(opt_state).items():
      writer.add_scalar(name, value, step)              # TensorBoard
  wandb.log(monitor.scalars(opt_state), step)           # Weights & Biases

With `since=`, shares and counts are of the steps after an earlier state. `events` keeps what became
of each of the last steps, so that a bad batch can be found. `histogram` counts entries by their
size, and `dtype_fit` says which number format holds them. After a step that was skipped,
`bad_leaves` names the leaves that caused it, and `verdict` tells the host whether to go on; inside
of the compiled step `taken` tells what else must stay as it was. `loss_scale` is the number by
which a step multiplies its loss. `noise_scale` tells from the gradients of microbatches whether the
batch is too small.
"""

from optaxclip.monitor._dtype_fit import DtypeFit as DtypeFit
from optaxclip.monitor._dtype_fit import dtype_fit as dtype_fit
from optaxclip.monitor._events import EventsState as EventsState
from optaxclip.monitor._events import events as events
from optaxclip.monitor._histogram import Histogram as Histogram
from optaxclip.monitor._histogram import HistogramState as HistogramState
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

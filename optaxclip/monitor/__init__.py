"""Records, logs, and checks the behavior of clipping stages and skip wrappers.

Clipping stages and skip wrappers record their most recent step in the optimizer state. The
functions find these records inside `chain`, `masked`, `partition`, `MultiSteps`, `apply_if_finite`,
`inject_hyperparams`, a Flax `TrainState`, an `nnx.Optimizer`, lists, and dicts. (`clip`,
`clip_by_value`, and `clip_by_second_moment` compute no norm and keep no record.) To log the
records, call `metrics` inside the compiled step, or `scalars` or `json_line` on the host::

  for name, value in monitor.scalars(opt_state).items():
      writer.add_scalar(name, value, step)              # TensorBoard
  wandb.log(monitor.scalars(opt_state), step)           # Weights & Biases

To find a bad batch, record the outcomes of recent steps with `events`. After a skipped step,
`bad_leaves` returns the names of the leaves that caused it, and `step_status` shows on the host
whether to return to a checkpoint. Inside the compiled step, `step_was_applied` shows whether other
state, such as BatchNorm statistics, must also keep its old value.

`histogram` counts elements by size, and `dtype_fit` shows which number format can represent them.
`noise_scale` estimates from the gradients of microbatches whether the batch is too small.
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

"""Accumulates gradients over microbatches, and clips or rejects individual microbatches."""

from optaxclip.accumulate.gradients import Accumulated as Accumulated
from optaxclip.accumulate.gradients import ValueAndGrad as ValueAndGrad
from optaxclip.accumulate.gradients import value_and_grad as value_and_grad
from optaxclip.accumulate.microbatch import AccumulateState as AccumulateState
from optaxclip.monitor._noise_scale import NoiseSums as NoiseSums

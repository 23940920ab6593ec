"""Gradients of a batch, a microbatch at a time, each judged before it is added up."""

from optaxclip.accumulate.gradients import ValueAndGrad as ValueAndGrad
from optaxclip.accumulate.gradients import value_and_grad as value_and_grad
from optaxclip.accumulate.loop import Accumulated as Accumulated
from optaxclip.accumulate.rejection import AccumulateState as AccumulateState
from optaxclip.monitor._noise_scale import NoiseSums as NoiseSums

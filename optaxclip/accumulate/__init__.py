"""Gradients of a batch, a microbatch at a time, each judged before it is added up."""

from optaxclip.accumulate.gradients import ValueAndGrad as ValueAndGrad
from optaxclip.accumulate.gradients import value_and_grad as value_and_grad
from optaxclip.accumulate.judging import AccumulateState as AccumulateState
from optaxclip.accumulate.means import Accumulated as Accumulated
from optaxclip.monitor.noise import NoiseSums as NoiseSums

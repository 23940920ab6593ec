"""Per-example clipping, the basis of private training (DP-SGD).

Each example of a batch is clipped by any scope and response, and the results are summed. `clip_sum`
takes gradients with an axis of examples. `clipped_grad` computes these gradients one microbatch at
a time, or with `method="ghost"` does without them. `per_example_clip_and_aggregate` is the first
stage of an Optax chain. `grad_norms` says which example has a large gradient. `noisy_mean` makes a
private gradient from a sum.

  from optaxclip import per_example, scopes

  per_example.clip_sum(grads, 1.0)                                      # Abadi et al., 2016
  per_example.clip_sum(grads, 1.0, scope=scopes.leaf(), split="size")   # McMahan et al., 2017
  per_example.clip_sum(grads, 1.0, response="auto_s")                   # Bu et al., 2022

No example ever contributes more than the threshold. How private a run is depends on the noise
multiplier, the share of the data in a batch, and the number of steps; an accountant such as
`dp_accounting` computes it::

  import dp_accounting
  from dp_accounting import pld

  def epsilon(noise_multiplier, sampling_probability, steps, delta):
      step = dp_accounting.PoissonSampledDpEvent(
          sampling_probability, dp_accounting.GaussianDpEvent(noise_multiplier))
      accountant = pld.PLDAccountant().compose(step, steps)
      return accountant.get_epsilon(delta)

It is right if each example enters each batch independently with that probability, and wrong for
shuffled data. Pad batches of varying size to one shape, and mark the padding by `is_padding`.
"""

from optaxclip.per_example._aggregate import PerExampleState as PerExampleState
from optaxclip.per_example._clip_sum import PerExampleResult as PerExampleResult
from optaxclip.per_example._clip_sum import clip_sum as clip_sum
from optaxclip.per_example._clipped_grad import ClippedGrad as ClippedGrad
from optaxclip.per_example._clipped_grad import clipped_grad as clipped_grad
from optaxclip.per_example._grad_norms import GradNorms as GradNorms
from optaxclip.per_example._grad_norms import explain as explain
from optaxclip.per_example._grad_norms import grad_norms as grad_norms
from optaxclip.per_example._noise import noisy_mean as noisy_mean
from optaxclip.per_example._quantile import QuantileThreshold as QuantileThreshold
from optaxclip.per_example._quantile import adjust_noise_multiplier as adjust_noise_multiplier
from optaxclip.per_example._quantile import quantile_threshold as quantile_threshold

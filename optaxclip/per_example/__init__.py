"""Per-example clipping, the basis of private training (DP-SGD).

`clip_sum` clips gradients with a leading example axis and sums them. `clipped_grad` computes these
gradients in microbatches, or avoids them with `method="ghost"`. `per_example_clip_and_aggregate` is
the first stage of an Optax chain. `grad_norms` computes the gradient norms of all examples.
`noisy_mean` computes a private gradient from a sum.

  from optaxclip import per_example, scopes

  per_example.clip_sum(grads, 1.0)                                      # Abadi et al., 2016
  per_example.clip_sum(grads, 1.0, scope=scopes.leaf(), split="size")   # McMahan et al., 2017
  per_example.clip_sum(grads, 1.0, response="auto_s")                   # Bu et al., 2022

The contribution of an example never exceeds the threshold. The privacy of a run depends on the
noise multiplier, the fraction of the data in a batch, and the number of steps. An accountant such
as `dp_accounting` computes it (see `docs/recipes/precision.md`), under the assumption that batches
include examples independently with the same probability. Pad batches of varying size to a fixed
shape, and mark the padding with `is_padding`.
"""

from optaxclip.per_example._aggregate import PerExampleState as PerExampleState
from optaxclip.per_example._batched_clip import PerExampleResult as PerExampleResult
from optaxclip.per_example._clip_sum import clip_sum as clip_sum
from optaxclip.per_example._clipped_grad import ClippedGrad as ClippedGrad
from optaxclip.per_example._clipped_grad import clipped_grad as clipped_grad
from optaxclip.per_example._grad_norms import GradNorms as GradNorms
from optaxclip.per_example._grad_norms import explain as explain
from optaxclip.per_example._grad_norms import grad_norms as grad_norms
from optaxclip.per_example._noise import QuantileThreshold as QuantileThreshold
from optaxclip.per_example._noise import adjust_noise_multiplier as adjust_noise_multiplier
from optaxclip.per_example._noise import noisy_mean as noisy_mean
from optaxclip.per_example._noise import quantile_threshold as quantile_threshold

"""Adapts a threshold to a quantile of the norms of examples, with a private count."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.core import Tracer

from optaxclip._base.numerics import scale_by_exp
from optaxclip._base.types import ArrayLike
from optaxclip._base.validation import check_bool, validate_call
from optaxclip.thresholds._adaptive import cast_to_float32, check_minimum, check_range


class QuantileThreshold(NamedTuple):
    """The rule of `quantile_threshold`, with the arguments as fields."""

    target: Any
    learning_rate: Any
    init_threshold: Any
    count_noise: Any
    geometric: bool
    min_threshold: Any
    max_threshold: Any

    def init(self) -> Array:
        """Returns the threshold of the first step, float32[]."""
        lower, upper = cast_to_float32(self.min_threshold), cast_to_float32(self.max_threshold)
        return jnp.clip(cast_to_float32(self.init_threshold), lower, upper)

    def update(
        self,
        threshold: Array,
        num_unclipped: ArrayLike,
        num_examples: ArrayLike,
        key: Array | None = None,
        *,
        batch_size: ArrayLike,
    ) -> Array:
        """Returns the threshold after a batch.

        Args:
          threshold: float32[], the threshold with which the batch was clipped.
          num_unclipped: The number of examples at or below the threshold, from `PerExampleResult`.
          num_examples: The number of examples of the batch, without padding.
          key: A key for the noise on the count. It can be None if `count_noise` is the number 0.
          batch_size: The number by which the count is divided, as in `noisy_mean`. With Poisson
            sampling, use the expected number, because the true number is not private.

        Raises:
          ValueError: If there is no key for the noise.
        """
        # Another example changes this difference by 1/2, but would change the count by 1.
        count = cast_to_float32(num_unclipped) - cast_to_float32(num_examples) / 2
        if key is not None:
            noise = jax.random.normal(key, (), jnp.float32)  # f32[]
            count = count + cast_to_float32(self.count_noise) * noise
        elif isinstance(self.count_noise, Tracer) or self.count_noise != 0:
            raise ValueError(
                f"key must be given for a count_noise of {self.count_noise!r}, got None"
            )
        fraction = jnp.clip(count / jnp.maximum(cast_to_float32(batch_size), 1) + 0.5, 0, 1)
        step = -cast_to_float32(self.learning_rate) * (fraction - cast_to_float32(self.target))
        moved = scale_by_exp(threshold, step) if self.geometric else threshold + step
        lower, upper = cast_to_float32(self.min_threshold), cast_to_float32(self.max_threshold)
        return jnp.clip(moved, lower, upper)


@validate_call()
def quantile_threshold(
    target: ArrayLike = 0.5,
    learning_rate: ArrayLike = 0.2,
    init_threshold: ArrayLike = 0.1,
    *,
    count_noise: ArrayLike = 0.0,
    geometric: bool = True,
    min_threshold: ArrayLike = 0.0,
    max_threshold: ArrayLike = float("inf"),
) -> QuantileThreshold:
    """Adapts the threshold until the target fraction of examples is at or below it.

    After every batch, the threshold is multiplied by `exp(-learning_rate * (fraction - target))`.
    To compute `fraction`, examples at or below the threshold add `+1/2` to a count, all other
    examples add `-1/2`, and padding adds nothing. The count changes by at most 1/2 if an example is
    added or removed, and by at most 1 if an example is replaced. Noise is added to the count, which
    is then divided by the batch size. `fraction` is this quotient plus 1/2, clipped to `[0, 1]`.
    Note that the count also uses privacy budget, so the noise on the sum of the gradients must be
    larger. `adjust_noise_multiplier` computes this noise, and `per_example_clip_and_aggregate` adds
    it.

    Source: Andrew, Thakkar, McMahan and Ramaswamy, 2019, Differentially private learning with
    adaptive clipping, arXiv 1905.03871.

    Args:
      target: The target fraction, from 0 to 1.
      learning_rate: The step size of the threshold.
      init_threshold: The threshold of the first step.
      count_noise: The standard deviation of the noise on the count. The paper uses a twentieth of
        the number of examples in a batch.
      geometric: If True (the default), the threshold is multiplied by the factor above. If False,
        the exponent of the factor is added to the threshold.
      min_threshold: The minimum threshold. With `geometric`, an `init_threshold` of 0 stays 0.
        Other thresholds stay positive and finite, within the normal numbers of float32.
      max_threshold: The maximum threshold.

    Returns:
      A rule with `init() -> threshold` and
      `update(threshold, num_unclipped, num_examples, key, batch_size=...) -> threshold`.

    Raises:
      ValueError: If an option is out of its range.
      TypeError: If `geometric` is not a bool, or if another option is not a number.

    Example:
      >>> import jax.numpy as jnp
      >>> from optaxclip import per_example
      >>> rule = per_example.quantile_threshold(init_threshold=1.0)
      >>> grads, threshold = jnp.array([0.2, 0.6, 1.0, 2.0]), rule.init()
      >>> for _ in range(2):
      ...     result = per_example.clip_sum(grads, threshold)
      ...     threshold = rule.update(threshold, result.num_unclipped, 4, batch_size=4)
      ...     print(result.num_unclipped, threshold)
      3 0.951229
      2 0.951229
    """
    return QuantileThreshold(
        check_range(target, 0, 1, "target"),
        check_minimum(learning_rate, 0, "learning_rate"),
        check_minimum(init_threshold, 0, "init_threshold"),
        check_minimum(count_noise, 0, "count_noise"),
        check_bool(geometric, "geometric"),
        check_minimum(min_threshold, 0, "min_threshold"),
        check_minimum(max_threshold, 0, "max_threshold"),
    )


def adjust_noise_multiplier(noise_multiplier: ArrayLike, count_noise: ArrayLike) -> Array:
    """Returns the noise multiplier of the sum if a noisy count of examples is also released.

    The multiplier is `(noise_multiplier**-2 - (2 * count_noise)**-2) ** -0.5`. Releasing the sum
    with it, and the count with `count_noise`, is as private as releasing only the sum with
    `noise_multiplier`. The factor is 2 because an added example changes the count of
    `quantile_threshold` by at most 1/2, but changes the sum by one threshold. A replaced example
    doubles both changes.

    Source: Andrew et al., 2019, arXiv 1905.03871, theorem 1.

    Args:
      noise_multiplier: The multiplier that is passed to the accountant.
      count_noise: The standard deviation of the noise on the count.

    Returns:
      The multiplier, float32[]. It is infinite if a traced `noise_multiplier` is not below
      `2 * count_noise`.

    Raises:
      ValueError: If `noise_multiplier` is not below `2 * count_noise`, unless it is 0.

    Example:
      >>> from optaxclip import per_example
      >>> print(per_example.adjust_noise_multiplier(1.0, 5.0))
      1.0050378
    """
    noise_multiplier = check_minimum(noise_multiplier, 0, "noise_multiplier")
    count_noise = check_minimum(count_noise, 0, "count_noise")
    sum_noise, doubled = cast_to_float32(noise_multiplier), 2 * cast_to_float32(count_noise)
    is_possible = (sum_noise == 0) | (sum_noise < doubled)
    if not isinstance(is_possible, Tracer) and not is_possible:
        raise ValueError(
            f"noise_multiplier must be below 2 * count_noise, got {noise_multiplier!r} with "
            f"count_noise={count_noise!r}; increase count_noise, because the count alone would "
            "exceed the privacy budget"
        )
    # The smallest denominator avoids NaN from 0 / 0 if there is no noise on the count.
    ratio = jnp.where(is_possible & (sum_noise > 0), sum_noise / jnp.maximum(doubled, 1e-37), 0)
    return jnp.where(is_possible, sum_noise / jnp.sqrt(1 - jnp.square(ratio)), jnp.inf)

"""A threshold that follows a quantile of the examples' norms, with noise on the count for privacy."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.core import Tracer

from optaxclip._base.numerics import scale_by_exp
from optaxclip._base.types import ArrayLike
from optaxclip._base.validation import check_bool, validate_call
from optaxclip.thresholds.adaptive import cast_to_float32, check_minimum, check_range


class QuantileThreshold(NamedTuple):
    """The rule that `quantile_threshold` returns; its fields are the arguments."""

    target: Any
    learning_rate: Any
    init_threshold: Any
    count_noise: Any
    geometric: bool
    min_threshold: Any
    max_threshold: Any

    def init(self) -> Array:
        """The threshold at the first step, float32[]."""
        return jnp.clip(cast_to_float32(self.init_threshold), *self._range())

    def update(
        self,
        threshold: Array,
        num_unclipped: ArrayLike,
        num_examples: ArrayLike,
        key: Array | None = None,
        *,
        batch_size: ArrayLike,
    ) -> Array:
        """The threshold after a batch.

        Args:
          threshold: float32[], the threshold that the batch was clipped with.
          num_unclipped: how many examples of the batch were at or below the threshold, from
            `PerExampleResult`.
          num_examples: how many examples the batch has, without padding.
          key: a key for the noise on the count; None only if `count_noise` is the number 0.
          batch_size: the number that the count is divided by, as in `noisy_mean`. Under Poisson
            sampling pass the expected number, because the true number is not private.

        Raises:
          ValueError: if there is no key for the noise.
        """
        # Not the count itself, which one more example changes by 1.
        count = cast_to_float32(num_unclipped) - cast_to_float32(num_examples) / 2
        if key is not None:
            count = count + cast_to_float32(self.count_noise) * jax.random.normal(
                key, (), jnp.float32
            )
        elif isinstance(self.count_noise, Tracer) or self.count_noise != 0:
            raise ValueError(f"key must be given for a count_noise of {self.count_noise!r}")
        share = jnp.clip(count / jnp.maximum(cast_to_float32(batch_size), 1) + 0.5, 0, 1)
        step = -cast_to_float32(self.learning_rate) * (share - cast_to_float32(self.target))
        moved = scale_by_exp(threshold, step) if self.geometric else threshold + step
        return jnp.clip(moved, *self._range())

    def _range(self) -> tuple[Array, Array]:
        return cast_to_float32(self.min_threshold), cast_to_float32(self.max_threshold)


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
    """A threshold that moves until the wanted share of examples is at or below it.

    Source: Andrew, Thakkar, McMahan and Ramaswamy, 2019, Differentially private learning with
    adaptive clipping, arXiv 1905.03871. After each batch the threshold is multiplied by
    `exp(-learning_rate * (share - target))`. In the count for the `share`, an example at or below
    the threshold adds `+1/2`, and any other example `-1/2`; padding adds nothing. So the count changes
    by at most 1/2 if a batch has one example more or less, and by at most 1 if an example is
    replaced. Noise is added to the count, which is then divided by the batch size; `share` is the
    quotient plus 1/2, clipped to `[0, 1]`. The count costs privacy too, so the noise on the sum of
    gradients must be larger: `adjust_noise_multiplier` computes how large, and
    `per_example_clip_and_aggregate` adds it.

    Args:
      target: the wanted share, from 0 to 1.
      learning_rate: how fast the threshold moves.
      init_threshold: the threshold at the first step.
      count_noise: the standard deviation of the noise on the count; the paper takes a twentieth of
        the examples in a batch.
      geometric: whether each batch multiplies the threshold by that factor; if False, it adds the
        factor's exponent to the threshold.
      min_threshold: the smallest threshold. With `geometric`, an `init_threshold` of 0 stays 0, and any other
        threshold stays above 0 and finite, within the normal numbers of float32.
      max_threshold: the largest threshold.

    Returns:
      A rule with `init() -> threshold` and
      `update(threshold, num_unclipped, num_examples, key, batch_size=...) -> threshold`.

    Raises:
      ValueError: if an option is out of its range.
      TypeError: if `geometric` is neither True nor False, or another option is not a number.

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
    """The noise multiplier of the sum, if a noisy count of examples is released too.

    It is `(noise_multiplier**-2 - (2 * count_noise)**-2) ** -0.5`. To release the sum with it, and
    the count with `count_noise`, is as private as to release the sum alone with `noise_multiplier`.
    The factor is 2 because one more example changes the count of `quantile_threshold` by at most 1/2,
    where it changes the sum by one threshold. To replace an example changes both twice as much.

    Source: Andrew et al., 2019, arXiv 1905.03871, theorem 1.

    Args:
      noise_multiplier: the multiplier that is passed to the accountant.
      count_noise: the standard deviation of the noise on the count.

    Returns:
      float32[]; infinite if a traced `noise_multiplier` is not below `2 * count_noise`.

    Raises:
      ValueError: if `noise_multiplier` is not below `2 * count_noise`, unless it is 0.

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
            f"noise_multiplier must be below 2 * count_noise, because otherwise the count alone "
            f"costs too much privacy; got {noise_multiplier!r} with count_noise={count_noise!r}"
        )
    ratio = jnp.where(is_possible & (sum_noise > 0), sum_noise / jnp.maximum(doubled, 1e-37), 0)
    return jnp.where(is_possible, sum_noise / jnp.sqrt(1 - jnp.square(ratio)), jnp.inf)

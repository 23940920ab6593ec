"""Adds Gaussian noise to sums of clipped examples, and adapts thresholds from noisy counts."""

import zlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer

import optaxclip._backend.meshes as meshes
from optaxclip._base.numerics import scale_by_exp, split_complex
from optaxclip._base.trees import flatten
from optaxclip._base.types import ArrayLike, PyTree
from optaxclip._base.validation import check_bool, short_repr, validate_call, warn
from optaxclip.per_example._batched_clip import PerExampleResult, sum_dtype
from optaxclip.thresholds._adaptive import cast_to_float32, check_minimum, check_range

_CHANGES = {"add_or_remove_one": 1, "replace_special": 1, "replace_one": 2}


def sensitivity_factor(relation: Any) -> int:
    """Returns the change of the sum between neighboring datasets, in thresholds."""
    name = getattr(relation, "name", relation)
    name = name.lower() if isinstance(name, str) else name
    if name not in _CHANGES:
        raise ValueError(f"relation must be one of {list(_CHANGES)}, got {relation!r}")
    return _CHANGES[name]


def noisy_mean(
    result: PerExampleResult,
    noise_multiplier: ArrayLike,
    key: Array | None,
    batch_size: ArrayLike,
    *,
    relation: Any = "add_or_remove_one",
) -> PyTree:
    """Computes a private gradient by adding noise to a sum and dividing by the batch size.

    Gaussian noise is drawn and added in float32 or wider. Its standard deviation is
    `noise_multiplier` times the sensitivity, which is the bound in `result`, or twice that bound if
    neighboring datasets differ by a replaced example. Pass the sum over all microbatches because
    noise must only be added once. Note that JAX's random generators are not cryptographic.

    Inside `shard_map`, pass the sum over all devices,
    `result._replace(grads=jax.lax.psum(result.grads, "x"))`, and use the same key on all devices.
    However, if the devices have different parts of the sum, for example after `psum_scatter`, use
    different keys, such as `jax.random.fold_in(key, jax.lax.axis_index("x"))`.

    Source: Abadi et al., 2016, arXiv 1607.00133.

    Args:
      result: The result of `clipped_grad` or `clip_sum` for the whole batch.
      noise_multiplier: The ratio of the noise's standard deviation to the sensitivity, as used by
        accountants. If it is 0, the result is not private.
      key: A key from `jax.random`, which must be new on every step because equal noise on two steps
        cancels in their difference. It can be None if `noise_multiplier` is the number 0.
      batch_size: The divisor of the sum, at least 1. For Poisson sampling, use the expected number
        of examples because the actual number is not private.
      relation: The relation between neighboring datasets, as in `ClippedGrad.sensitivity`.

    Returns:
      The tree of the sum, in float32 or wider. Integer and `float0` leaves are returned unchanged.

    Raises:
      ValueError: If an argument is out of range. If there is noise, also raised if the key or the
        bound is missing, or if devices have different parts of the sum but the same key.
      TypeError: If an argument has the wrong type.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from optaxclip import per_example
      >>> result = per_example.clip_sum({"w": jnp.array([[3.0, 4.0], [0.3, 0.4]])}, 1.0)
      >>> mean = per_example.noisy_mean(result, 1.1, jax.random.key(0), batch_size=2)
      >>> print(mean["w"].shape, mean["w"].dtype)
      (2,) float32
    """
    if not isinstance(result, PerExampleResult):
        raise TypeError(
            "result must be a PerExampleResult from clipped_grad or clip_sum, got "
            f"{short_repr(result)}"
        )
    noise_multiplier = check_minimum(noise_multiplier, 0, "noise_multiplier")
    batch_size = check_minimum(batch_size, 1, "batch_size")
    change = sensitivity_factor(relation)
    flat = flatten(result.grads, "result.grads")
    leaves = map(jnp.asarray, flat.inexact_leaves())
    leaves = [leaf.astype(sum_dtype(leaf.dtype)) for leaf in leaves]
    if not is_zero(noise_multiplier):
        if result.bound is None:
            raise ValueError(
                "result.bound is required to add noise; pass the result of clipped_grad or clip_sum"
            )
        factors = {"noise_multiplier": noise_multiplier, "result.bound": result.bound}
        for argument, number in factors.items():
            # Noise can only hide bounded contributions.
            if not isinstance(number, Tracer) and np.isinf(number):
                raise ValueError(f"{argument} must be finite if noise is added, got {number}")
        bound = jnp.asarray(result.bound)
        std = cast_to_float32(noise_multiplier).astype(bound.dtype) * (change * bound)  # f32[]
        leaves = add_noise(leaves, flat.names(), _check_key(key, leaves), std)
    size = cast_to_float32(batch_size)
    return flat.unflatten([leaf / size.astype(leaf.dtype) for leaf in leaves])


def _check_key(key: Any, leaves: list[Array]) -> Array:
    """Checks a key, and that parts of a sum on different devices get different noise."""
    if not is_key(key):
        raise (ValueError if key is None else TypeError)(
            f"key must be a single JAX PRNG key, got {short_repr(key)}; pass a new key on every "
            "step, or noise_multiplier=0"
        )
    axes = meshes.tree_varying_axes(leaves) - meshes.varying_axes(key)
    if axes:
        raise ValueError(
            "key must differ between devices with different sums, but is the same along "
            f"{sorted(axes)}; use jax.lax.psum(result.grads, ...), or jax.random.fold_in(key, "
            "jax.lax.axis_index(...)) if the sum is sharded across devices"
        )
    return jnp.asarray(key)


def add_noise(leaves: list[Array], names: list[str], key: Array, std: Array) -> list[Array]:
    """Adds independent Gaussian noise to all elements, and to both parts of complex elements."""
    warn_of_shared_noise(leaves, key)
    # `split` requires a positive number, even if there are no leaves.
    keys = jax.random.split(key, max(len(leaves), 1))
    noisy = []
    for leaf, name, leaf_key in zip(leaves, names, keys, strict=False):
        # The noise depends on the leaf name so that the stages of `optax.partition`, which have
        # different leaves, can share a key.
        named_key = jax.random.fold_in(leaf_key, np.uint32(zlib.crc32(name.encode())))
        parts = split_complex(leaf)  # [...] for the real part, or both parts
        noisy_parts = [
            part + std.astype(part.dtype) * jax.random.normal(part_key, part.shape, part.dtype)
            for part, part_key in zip(parts, jax.random.split(named_key, len(parts)), strict=True)
        ]
        noisy.append(jax.lax.complex(*noisy_parts) if len(parts) > 1 else noisy_parts[0])
    return noisy


def warn_of_shared_noise(leaves: list[Any], key: Any) -> None:
    """Warns if `vmap` batches the leaves but not the key because they would share their noise."""
    traced = [x for x in leaves if isinstance(x, Tracer)]
    if key is not None and traced:
        _with_key(traced, key)


# An identity that detects whether `vmap` batches the leaves and the key.
@jax.custom_batching.custom_vmap
def _with_key(leaves: list[Array], key: Array) -> list[Array]:
    del key
    return leaves


@_with_key.def_vmap
def _(size: int, is_batched: list[Any], leaves: list[Array], key: Array) -> Any:
    del key
    are_leaves_batched, is_key_batched = is_batched
    if size > 1 and any(are_leaves_batched) and not is_key_batched:
        warn(
            f"key is the same for all {size} elements of a vmap, so the noise cancels in their "
            "differences. Also map over jax.random.split(key, number), and create the "
            "transformation from the mapped key"
        )
    return leaves, are_leaves_batched


def is_zero(number: Any) -> bool:
    """Returns `True` if a number is known to be 0."""
    return not isinstance(number, Tracer) and float(number) == 0


def is_key(key: Any) -> bool:
    """Returns `True` for a single key from `jax.random`, typed or untyped."""
    dtype, rank = getattr(key, "dtype", None), np.ndim(key)
    is_typed = dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)
    return (is_typed and rank == 0) or (dtype == jnp.uint32 and rank == 1)


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
        """Returns the initial threshold, float32[]."""
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
        """Returns the threshold for the next batch.

        Args:
          threshold: float32[], the threshold with which this batch was clipped.
          num_unclipped: The number of examples at or below the threshold, from `PerExampleResult`.
          num_examples: The number of examples in the batch, without padding.
          key: A key for the noise on the count. It can be None if `count_noise` is the number 0.
          batch_size: The divisor of the count, as in `noisy_mean`.

        Raises:
          ValueError: If the key is missing although `count_noise` is not 0.
        """
        # An additional example changes this difference by 1/2, but would change the count by 1.
        count = cast_to_float32(num_unclipped) - cast_to_float32(num_examples) / 2
        if key is not None:
            noise = jax.random.normal(key, (), jnp.float32)  # f32[]
            count = count + cast_to_float32(self.count_noise) * noise
        elif isinstance(self.count_noise, Tracer) or self.count_noise != 0:
            raise ValueError(
                f"key is required unless count_noise is 0, but it is {self.count_noise!r}; pass a "
                "PRNG key"
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
    examples add `-1/2`, and padding adds nothing. Adding or removing an example changes the count
    by at most 1/2, and replacing an example changes it by at most 1. Noise is added to the count,
    which is then divided by the batch size. `fraction` is this quotient plus 1/2, clipped to `[0,
    1]`.

    The count also uses privacy budget, so the sum of the gradients requires more noise (see
    `adjust_noise_multiplier`). `per_example_clip_and_aggregate` adds it automatically.

    Source: Andrew, Thakkar, McMahan, and Ramaswamy, 2019, arXiv 1905.03871.

    Args:
      target: The target fraction, from 0 to 1.
      learning_rate: The step size of the threshold.
      init_threshold: The initial threshold.
      count_noise: The standard deviation of the noise on the count. The paper uses one twentieth of
        the number of examples in a batch.
      geometric: If True (the default), the threshold is multiplied as above. If False, the exponent
        is added to the threshold.
      min_threshold: The minimum threshold. If it is 0 and `geometric` is True, an `init_threshold`
        of 0 stays 0, and positive thresholds stay positive.
      max_threshold: The maximum threshold.

    Returns:
      A rule with `init() -> threshold` and `update(threshold, num_unclipped, num_examples, key,
      batch_size=...) -> threshold`.

    Raises:
      ValueError: If an option is out of range.
      TypeError: If `geometric` is not a bool, or if an option is not a number.

    Example:
      >>> import jax.numpy as jnp
      >>> from optaxclip import per_example
      >>> rule = per_example.quantile_threshold(init_threshold=1.0)
      >>> result = per_example.clip_sum(jnp.array([0.2, 0.6, 1.0, 2.0]), rule.init())
      >>> print(rule.update(rule.init(), result.num_unclipped, 4, batch_size=4))
      0.951229
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
    with this multiplier and the count with `count_noise` is as private as releasing only the sum
    with `noise_multiplier` (Andrew et al., 2019, arXiv 1905.03871, theorem 1). The factor is 2
    because an added example changes the count by at most 1/2 (see `quantile_threshold`).

    Args:
      noise_multiplier: The multiplier that is passed to the accountant.
      count_noise: The standard deviation of the noise on the count.

    Returns:
      The multiplier, float32[], which is infinite if a traced `noise_multiplier` is too large.

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
            f"noise_multiplier must be less than 2 * count_noise, got {noise_multiplier!r} with "
            f"count_noise={count_noise!r}; increase count_noise"
        )
    # The minimum denominator avoids 0 / 0 if there is no noise on the count.
    ratio = jnp.where(is_possible & (sum_noise > 0), sum_noise / jnp.maximum(doubled, 1e-37), 0)
    return jnp.where(is_possible, sum_noise / jnp.sqrt(1 - jnp.square(ratio)), jnp.inf)

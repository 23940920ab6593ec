"""Adds Gaussian noise to sums of clipped examples."""

import zlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer

import optaxclip._backend.meshes as meshes
from optaxclip._base.numerics import split_complex
from optaxclip._base.trees import flatten
from optaxclip._base.types import ArrayLike, PyTree
from optaxclip._base.validation import short_repr, warn
from optaxclip.per_example._batched_clip import sum_dtype
from optaxclip.per_example._clip_sum import PerExampleResult, sensitivity_factor
from optaxclip.thresholds._adaptive import cast_to_float32, check_minimum


def noisy_mean(
    result: PerExampleResult,
    noise_multiplier: ArrayLike,
    key: Array | None,
    batch_size: ArrayLike,
    *,
    relation: Any = "add_or_remove_one",
) -> PyTree:
    """Computes the private gradient: the sum of clipped examples plus noise, over the batch size.

    The noise is Gaussian. Its standard deviation, for all elements of the sum, is
    `noise_multiplier` times the sensitivity. The sensitivity is the bound in `result`, or twice
    that bound if neighboring data sets differ by a replaced example. The sum is divided by
    `batch_size` after the noise is added. Noise of that size on the mean would be too large by a
    factor of `batch_size`. A mean of noisy microbatches would have too little noise if the noise
    were divided between them.

    The noise is drawn and added in float32 or wider. Note that the random generators of JAX are not
    cryptographic.

    Inside `shard_map`, sum over the devices first and pass the same key on all of them:
    `noisy_mean(result._replace(grads=jax.lax.psum(result.grads, "x")), ...)`. If the devices have
    parts of the sum, for example after `psum_scatter`, they need different keys, such as
    `jax.random.fold_in(key, jax.lax.axis_index("x"))`. With one key, all parts would get the same
    noise.

    Source: Abadi et al., 2016, Deep learning with differential privacy, arXiv 1607.00133.

    Args:
      result: The result of `clipped_grad` or `clip_sum` for the whole batch.
      noise_multiplier: The ratio of the standard deviation of the noise to the sensitivity, which
        the accountant requires (see `optaxclip.per_example`). Note that 0 means no noise, which is
        not private.
      key: A key from `jax.random`, which must be new in every step. If two steps have the same
        noise, it cancels in their difference. Pass the key to compiled functions as an argument. It
        can be None if `noise_multiplier` is the number 0.
      batch_size: The number of examples by which the sum is divided, at least 1. With Poisson
        sampling, use the expected number, because the true number is not private.
      relation: The relation between neighboring data sets, as in `ClippedGrad.sensitivity`.

    Returns:
      The tree of the sum, in float32 or wider. `None`, and integer and `float0` leaves, which are
      zeros, are returned unchanged.

    Raises:
      ValueError: If the noise multiplier is negative, NaN or infinite, if the batch size is less
        than 1, or if the relation is unknown. With noise, also if there is no key, or if the result
        has no bound or an infinite bound. Finally, if devices have different parts of the sum, but
        the same key.
      TypeError: If `result` is not a `PerExampleResult`, if `noise_multiplier` or `batch_size` is
        not a number, or if `key` is not a key.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from optaxclip import per_example
      >>> grads = {"w": jnp.array([[3.0, 4.0], [0.3, 0.4]])}
      >>> result = per_example.clip_sum(grads, 1.0)
      >>> print(per_example.noisy_mean(result, 0, None, batch_size=2)["w"].tolist())
      [0.45, 0.6]
      >>> mean = per_example.noisy_mean(result, 1.1, jax.random.key(0), batch_size=2)
      >>> print(mean["w"].shape, mean["w"].dtype)
      (2,) float32
    """
    if not isinstance(result, PerExampleResult):
        raise TypeError(
            "result must be the PerExampleResult of clipped_grad or clip_sum, which contains the "
            f"bound for the noise, got {short_repr(result)}"
        )
    noise_multiplier = check_minimum(noise_multiplier, 0, "noise_multiplier")
    batch_size = check_minimum(batch_size, 1, "batch_size")
    change = sensitivity_factor(relation)
    flat = flatten(result.grads, "result.grads")
    leaves = [jnp.asarray(leaf) for leaf in flat.inexact_leaves()]
    leaves = [leaf.astype(sum_dtype(leaf.dtype)) for leaf in leaves]
    if not is_zero(noise_multiplier):
        if result.bound is None:
            raise ValueError(
                "result.bound must be the threshold of the contribution of an example, which "
                "defines the size of the noise, got None; use the result of clipped_grad or "
                "clip_sum"
            )
        _check_finite(noise_multiplier, "noise_multiplier")
        _check_finite(result.bound, "result.bound")
        bound = jnp.asarray(result.bound)
        std = cast_to_float32(noise_multiplier).astype(bound.dtype) * (change * bound)  # f32[]
        leaves = add_noise(leaves, flat.names(), _check_key(key, leaves), std)
    size = cast_to_float32(batch_size)
    return flat.unflatten([leaf / size.astype(leaf.dtype) for leaf in leaves])


def _check_finite(number: Any, argument: str) -> None:
    if not isinstance(number, Tracer) and np.isinf(number):
        raise ValueError(
            f"{argument} must be finite for noise, got {number}; noise can hide an example only if "
            "its contribution is bounded"
        )


def _check_key(key: Any, leaves: list[Array]) -> Array:
    """Checks a key, and that parts of a sum on different devices get different noise."""
    if not is_key(key):
        raise (ValueError if key is None else TypeError)(
            "key must be one key from jax.random, a new one for each step (or None if "
            f"noise_multiplier is the number 0), got {short_repr(key)}"
        )
    axes = meshes.tree_varying_axes(leaves) - meshes.varying_axes(key)
    if axes:
        raise ValueError(
            f"key must differ between devices if the sum does, but the sum differs along "
            f"{sorted(axes)} and key does not; use jax.lax.psum(result.grads, ...) first, or, if "
            "the devices have parts of the sum, jax.random.fold_in(key, jax.lax.axis_index())"
        )
    return jnp.asarray(key)


def add_noise(leaves: list[Array], names: list[str], key: Array, std: Array) -> list[Array]:
    """Adds independent Gaussian noise to all elements, and to both parts of complex elements.

    The noise depends on the names of the leaves. Therefore, the stages of `optax.partition`, which
    have different leaves, get different noise for equal keys.
    """
    warn_of_shared_noise(leaves, key)
    keys = jax.random.split(key, max(len(leaves), 1))
    # Every leaf has its own key, and complex leaves have one key per part.
    noisy = []
    # Without leaves, there is still one key, because `split` requires a positive number.
    for leaf, name, leaf_key in zip(leaves, names, keys, strict=False):
        named_key = jax.random.fold_in(leaf_key, np.uint32(zlib.crc32(name.encode())))
        parts = split_complex(leaf)  # [...] for the real part, or both parts
        noisy_parts = [
            part + std.astype(part.dtype) * jax.random.normal(part_key, part.shape, part.dtype)
            for part, part_key in zip(parts, jax.random.split(named_key, len(parts)), strict=True)
        ]
        noisy.append(jax.lax.complex(*noisy_parts) if len(parts) > 1 else noisy_parts[0])
    return noisy


def warn_of_shared_noise(leaves: list[Any], key: Any) -> None:
    """Warns if leaves are batched by `vmap` but the key is not, because they share their noise."""
    traced = [x for x in leaves if isinstance(x, Tracer)]
    if key is not None and traced:
        _with_key(traced, key)


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
            f"key is the same for all {size} elements of a vmap. They get the same noise, which "
            "cancels in their differences. Use jax.vmap over jax.random.split(key, number) too, "
            "and create the transformation from these keys"
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

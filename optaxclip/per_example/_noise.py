"""Gaussian noise on a sum of clipped examples, and the noisy mean."""

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
from optaxclip.thresholds.adaptive import cast_to_float32, check_minimum


def noisy_mean(
    result: PerExampleResult,
    noise_multiplier: ArrayLike,
    key: Array | None,
    batch_size: ArrayLike,
    *,
    relation: Any = "add_or_remove_one",
) -> PyTree:
    """The private gradient: the sum of clipped examples, plus noise, divided by the batch size.

    The noise is Gaussian. Its standard deviation, on every entry of the sum, is `noise_multiplier`
    times the sensitivity, which is the bound in `result` (twice that bound, if neighbours differ by
    the replacement of an example). The sum is divided by `batch_size` only afterwards: noise of
    that size on the mean would be `batch_size` times too large, and a mean of noisy microbatches
    would have too little noise if each of them got its share.

    Noise is drawn and added in float32 or wider. JAX's random generators are not cryptographic.

    Inside `shard_map` sum over the devices first, and pass the same key on all of them:
    `noisy_mean(result._replace(grads=jax.lax.psum(result.grads, "x")), ...)`. If each device keeps
    a part of the sum, as after `psum_scatter`, each needs a key of its own, such as
    `jax.random.fold_in(key, jax.lax.axis_index("x"))`: with one key, all parts get the same noise.

    Source: Abadi et al., 2016, Deep learning with differential privacy, arXiv 1607.00133.

    Args:
      result: what `clipped_grad` or `clip_sum` returned for the whole batch.
      noise_multiplier: the ratio of the noise's standard deviation to the sensitivity. The
        accountant needs it (see `optaxclip.per_example`). 0 gives the mean without noise, which is
        not private.
      key: one key from `jax.random`, a new one at each step: if two steps have the same noise, it
        cancels in their difference. Pass the key to a compiled function as an argument. It may be
        None if `noise_multiplier` is the number 0.
      batch_size: the number of examples that the sum is divided by, at least 1. Under Poisson
        sampling pass the expected number, because the true number is not private.
      relation: how two neighbouring data sets differ, as in the method `sensitivity` of what
        `clipped_grad` returns.

    Returns:
      The tree of the sum, in float32 or wider. Integer and `float0` leaves, which are zeros, and
      `None` stay as they are.

    Raises:
      ValueError: for a noise multiplier that is negative, NaN or infinite, a batch size below 1, or
        another relation; for noise without a key; for a result without a bound, or whose bound is
        infinite; and for parts of a sum on several devices with a single key.
      TypeError: if `result` is not a `PerExampleResult`, `noise_multiplier` or `batch_size` is not
        a number, or `key` is not a key.

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
            "result must be the PerExampleResult that clipped_grad and clip_sum return, whose "
            f"bound says how much noise there must be; got {short_repr(result)}"
        )
    noise_multiplier = check_minimum(noise_multiplier, 0, "noise_multiplier")
    batch_size = check_minimum(batch_size, 1, "batch_size")
    change = sensitivity_factor(relation)
    flat = flatten(result.grads, "result.grads")
    leaves = [jnp.asarray(leaf) for leaf in flat.inexact_leaves()]
    leaves = [leaf.astype(sum_dtype(leaf.dtype)) for leaf in leaves]
    if not is_zero(noise_multiplier):
        _check_bounded(noise_multiplier, "noise_multiplier")
        bound = jnp.asarray(_check_bound(result.bound))
        std = cast_to_float32(noise_multiplier).astype(bound.dtype) * (change * bound)
        leaves = add_noise(leaves, flat.names(), _check_key(key, leaves), std)
    size = cast_to_float32(batch_size)
    return flat.unflatten([leaf / size.astype(leaf.dtype) for leaf in leaves])


def add_noise(leaves: list[Array], names: list[str], key: Array, std: Array) -> list[Array]:
    """The leaves with independent Gaussian noise on all entries, and on both parts if complex.

    Noise depends on the leaves' names, so that stages of `optax.partition`, which have different
    leaves, get different noise from equal keys.
    """
    warn_of_shared_noise(leaves, key)
    keys = jax.random.split(key, max(len(leaves), 1))
    noisy = []
    for leaf, name, leaf_key in zip(leaves, names, keys, strict=False):
        named_key = jax.random.fold_in(leaf_key, np.uint32(zlib.crc32(name.encode())))
        parts = split_complex(leaf)
        noisy_parts = [
            part + std.astype(part.dtype) * jax.random.normal(part_key, part.shape, part.dtype)
            for part, part_key in zip(parts, jax.random.split(named_key, len(parts)), strict=True)
        ]
        noisy.append(jax.lax.complex(*noisy_parts) if len(parts) > 1 else noisy_parts[0])
    return noisy


def warn_of_shared_noise(leaves: list[Any], key: Any) -> None:
    """Warns under `vmap` if arrays have its axis and the key has not: all would get one noise."""
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
    flags, of_key = is_batched
    if size > 1 and any(flags) and not of_key:
        warn(
            f"key is the same for all {size} elements of a vmap, so that all get the same noise, "
            "which cancels in their differences. Pass a key for each: jax.vmap over "
            "jax.random.split(key, number) too, and make the transformation from it"
        )
    return leaves, flags


def is_zero(number: Any) -> bool:
    """Whether a number is known to be 0."""
    return not isinstance(number, Tracer) and float(number) == 0


def is_key(key: Any) -> bool:
    """Whether a value is one key from `jax.random`, of either kind."""
    dtype, rank = getattr(key, "dtype", None), np.ndim(key)
    is_typed = dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)
    return (is_typed and rank == 0) or (dtype == jnp.uint32 and rank == 1)


def _check_bound(bound: Any) -> Any:
    if bound is None:
        raise ValueError(
            "result.bound must be the threshold of one example's contribution, from which the size of "
            "the noise follows, got None: pass on what clipped_grad or clip_sum returned"
        )
    _check_bounded(bound, "result.bound")
    return bound


def _check_bounded(number: Any, argument: str) -> None:
    if not isinstance(number, Tracer) and np.isinf(number):
        raise ValueError(
            f"{argument} must be finite for noise, got {number}: no noise hides an example without "
            "a threshold"
        )


def _check_key(key: Any, leaves: list[Array]) -> Array:
    """The key, checked; different parts of a sum must not get the same noise."""
    if not is_key(key):
        raise (ValueError if key is None else TypeError)(
            "key must be one key from jax.random, a new one at each step (None only if "
            f"noise_multiplier is the number 0), got {short_repr(key)}"
        )
    split = meshes.tree_varying_axes(leaves) - meshes.varying_axes(key)
    if split:
        raise ValueError(
            f"the sum differs over the devices along {sorted(split)}, and key is the same on all "
            "of them. jax.lax.psum(result.grads, ...) first; or, if each device keeps a part of "
            "the sum, give each a key of its own by jax.random.fold_in(key, jax.lax.axis_index())"
        )
    return jnp.asarray(key)

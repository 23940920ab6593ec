"""Clipping of the singular values of matrices."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Unpack, get_args

import jax
import jax.numpy as jnp
from jax import Array, lax

import optaxclip._border.devices as devices
from optaxclip._base.arguments import check_choice, check_int
from optaxclip._base.numerics import accumulation_dtype, match_weak_type, static_size_or_none
from optaxclip._base.trees import is_sparse
from optaxclip._base.types import ClipState, PyTree
from optaxclip._border.crossing import Transformation
from optaxclip._engine.clip import make_clip
from optaxclip._engine.measure import ScaledNorms
from optaxclip._engine.options import Options, TransformOptions, clip_factory
from optaxclip._engine.plan import Plan
from optaxclip._engine.respond import Multiplier
from optaxclip._engine.step import ClipMethod
from optaxclip.methods.moments import wide_dtype
from optaxclip.methods.singular_values import (
    RESPONSES,
    GramForm,
    Mode,
    clip_matrix,
    estimate_largest,
)
from optaxclip.methods.updates import leaf_scope
from optaxclip.thresholds.fixed import ThresholdLike, check_threshold


@clip_factory(TransformOptions)
def clip_by_spectral_norm(
    threshold: ThresholdLike,
    mode: Mode = "soft",
    *,
    stacked: PyTree | Callable[[str, Array], int] | None = None,
    iterations: int = 10,
    **options: Unpack[TransformOptions],
) -> Transformation[ClipState]:
    """Clips the singular values of each matrix, in gradients or in an optimizer's updates.

    The singular vectors stay. With "soft" a singular value `s` becomes `s / sqrt(1 + (s / c)**2)`
    for the threshold `c`, which is always below `c`; with "hard" it becomes `min(s, c)`. With "hard", a
    matrix without singular values above `c` comes back bit for bit, and so may one whose largest is
    above `c` by less than the error below. Vectors and scalars are clipped by their L2 norm in the
    same way. A leaf with more than two axes counts as a matrix `[all but the last, last]`, which
    fits convolutions; along the leading axes that `stacked` counts, each index has a matrix of its
    own.

    Everything is computed by matrix products in float32 of full precision (float64 for 64-bit
    leaves), without a decomposition. The error, measured against NumPy's SVD, is below 1e-3 of the
    result's largest singular value if the matrix's largest is at most 1e4 times `c`, and below 5e-5
    if it is at most 100 times `c`. (In float32 the first becomes 2e-3 if half of 512 singular
    values are that large.)

    For a matrix `[m, n]` with `m <= n`, an iteration takes two products with `[m, n]` and four with
    `[m, m]`; at the end, "hard" takes two more with `[m, n]` and 29 with `[m, m]`. Each of Muon's 5
    iterations takes two products with `[m, n]` and one with `[m, m]`. On a CPU a square matrix
    takes about twice as long as with Muon (`optax.contrib.scale_by_muon`), with "hard" about three
    times as long, and with 5 iterations as long as with Muon (`benchmarks/spectral.py`).

    Source: SPECTRA, 2026, arXiv 2603.14315 (mlolab/llm-spectral-clipping); for the hard form
    NVIDIA-NeMo/Emerging-Optimizers; for thresholds that follow each layer, by a moving average or a
    quantile, arXiv 2605.11838.

    Args:
      threshold: the largest singular value that may stay: a number, a schedule, a rule from
        `optaxclip.thresholds`, which learns from the largest singular value of each matrix, or a
        dict from the name of each matrix to one of these.
      mode: "soft" or "hard".
      stacked: how many leading axes of each leaf stack separate tensors, as in
        `optaxclip.scopes.leaf`; with None no axis does.
      iterations: how many Newton-Schulz iterations to make; 10 are enough for singular values of
        1e4 times `c`, 5 for those of 100 times `c`. Static, also in `optax.inject_hyperparams`.
      **options: those that all transformations share, `optaxclip.TransformOptions`.

    Returns:
      A transformation with a `ClipState`. In its record, `norm` is the largest singular value as it
      is estimated, mostly at most 3 % and in one of a thousand matrices an eighth too low, and
      `factor` is what it was multiplied by. Its update returns a tree with the shapes, dtypes and
      weak types of the gradients. Under `jit` leaves may be split over devices.

    Raises:
      ValueError: for a threshold that is negative, NaN or not a scalar, an unknown mode or policy, or
        `iterations` below 1; when used, for leaves that are split inside of `shard_map` or `pmap`.
      TypeError: if the threshold is not a number; when used, if a leaf is sparse.

    Example:
      >>> import jax.numpy as jnp, optaxclip
      >>> grads = jnp.array([[3.0, 0.0, 0.0], [0.0, 4.0, 3.0]])  # singular values 5 and 3
      >>> tx = optaxclip.clip_by_spectral_norm(4.0, "hard")
      >>> updates, state = tx.update(grads, tx.init(grads))
      >>> print(updates)
      [[3.  0.  0. ]
       [0.  3.2 2.4]]
      >>> soft = optaxclip.clip_by_spectral_norm(1.0).update(grads, None)[0]
      >>> for row in soft.tolist():
      ...     print(row)
      [0.948683, 0.0, 0.0]
      [0.0, 0.784465, 0.588348]
    """
    mode = check_choice(mode, get_args(Mode), "mode")
    threshold, scope = check_threshold(threshold, "threshold"), leaf_scope(stacked)
    technique = _SingularValues(mode, check_int(iterations, 1, "iterations"))
    return make_clip(
        scope, threshold, Options.create(response=RESPONSES[mode], **options), technique
    )


@dataclasses.dataclass(frozen=True)
class _SingularValues(ClipMethod):
    """Measures the largest singular value of each matrix, and replaces all by their new values."""

    names_leaves = True

    mode: Mode
    iterations: int

    def compute_norms(self, leaves: list[Any], plan: Plan, options: Options) -> ScaledNorms:
        """The largest singular values of all matrices."""
        _check_unsharded(leaves, plan, options.name)
        axes = plan.grouping.axes
        norms = [
            _largest_singular_values(x, x.ndim - len(own))
            for x, own in zip(leaves, axes, strict=True)
        ]
        arrays = [
            norms[group.leaf_indices[0]] if group.leaf_indices else jnp.full(group.shape, jnp.nan)
            for group in plan.grouping.groups
        ]
        return ScaledNorms.from_value(plan.pack(arrays), 1.0)

    def leaf_operands(self, by: Multiplier, threshold_values: Array) -> Sequence[Array]:
        """The numbers for matrices that are not finite, and the thresholds of the others."""
        return by.ratio, threshold_values

    def apply(self, leaf: Any, columns: Array, axes: tuple[int, ...], options: Options) -> Any:
        """The leaf with the singular values of its matrices clipped."""
        del options
        ratios, thresholds = columns
        return _clip_leaf(leaf, thresholds, ratios, leaf.ndim - len(axes), self)


def _check_unsharded(leaves: list[Any], plan: Plan, transformation: str) -> None:
    """Refuses leaves whose singular values cannot be computed."""
    for i, (leaf, name) in enumerate(zip(leaves, plan.leaf_names, strict=True)):
        of_leaf = f"{transformation}: leaf '{name}' of shape {leaf.shape}"
        if is_sparse(leaf):
            raise TypeError(f"{of_leaf} is sparse; pass leaf.todense()")
        axes = plan.placement.axes_of(i)
        if axes and devices.manual_axes():
            raise ValueError(
                f"{of_leaf} is split over the devices along {sorted(axes)}, and singular values "
                "need the whole matrix; clip outside of shard_map or pmap, or gather the leaf "
                "(jax.lax.all_gather)"
            )


# Both are compiled functions of their own, so that they are traced once for leaves of one shape.
@functools.partial(jax.jit, static_argnames="stack")
def _largest_singular_values(x: Array, stack: int) -> Array:
    """The largest singular value of each matrix of a leaf; not finite if an entry is not."""
    axes, real = tuple(range(stack, x.ndim)), accumulation_dtype(x.dtype)
    finite = jnp.isfinite(x)
    bad = ~jnp.all(finite, axes)
    if static_size_or_none(x.size) == 0:
        return jnp.zeros(bad.shape, real)
    norm = _vmap_over_stack(stack, lambda matrix: estimate_largest(GramForm.create(matrix)))(
        _matrices(x, stack)
    )
    # Not the maximum of entries that are not finite: split over devices it loses a NaN.
    worst = jnp.where(jnp.any(jnp.isnan(x), axes), jnp.nan, jnp.inf).astype(real)
    # A finite norm that is too large for the dtype becomes the dtype's largest number.
    return jnp.where(bad, worst, jnp.minimum(norm, jnp.finfo(real).max))


@functools.partial(jax.jit, static_argnames=("stack", "by"))
def _clip_leaf(
    x: Array, thresholds: Array, ratios: Array, stack: int, by: _SingularValues
) -> Array:
    """The leaf with the singular values of its matrices clipped."""
    if static_size_or_none(x.size) == 0:
        return x
    clip_one = functools.partial(clip_matrix, mode=by.mode, iterations=by.iterations)
    thresholds = thresholds.astype(accumulation_dtype(x.dtype))
    result = (
        _vmap_over_stack(stack, clip_one)(_matrices(x, stack), thresholds)
        .reshape(x.shape)
        .astype(x.dtype)
    )
    bad = ~jnp.all(jnp.isfinite(x), tuple(range(stack, x.ndim)))
    instead = jnp.where(bad, ratios, 0).astype(x.dtype)
    bad, instead = (
        lax.expand_dims(each, range(stack, x.ndim)) if x.ndim > stack else each
        for each in (bad, instead)
    )
    return match_weak_type(jnp.where(bad, instead, result), x)


def _matrices(x: Array, stack: int) -> Array:
    """The matrices of a leaf, `[*stack, rows, columns]`, in float32 or wider.

    Vectors and scalars become matrices with one row. Entries that are not finite become 0.
    """
    wide = jnp.where(jnp.isfinite(x), x, jnp.zeros_like(x)).astype(wide_dtype(x.dtype))
    *front, last = x.shape[stack:] or (1,)
    return wide.reshape(*x.shape[:stack], math.prod(front), last)


def _vmap_over_stack(stack: int, fn: Callable[..., Array]) -> Callable[..., Array]:
    """`fn` of one matrix, made to work on all matrices behind `stack` leading axes."""
    return functools.reduce(lambda fn, _: jax.vmap(fn), range(stack), fn)

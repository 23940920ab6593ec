"""Clips the singular values of a matrix by matrix products alone.

Let `X` have the singular values `s`, and let `c` be the threshold. Then `[X, c I]` has the singular
values `sqrt(s**2 + c**2)`, none of them below `c`. Newton-Schulz iterations turn it into `[W, C]`,
whose rows are orthogonal to each other and of length 1. `W` and `C` have the singular vectors of
`X`; the singular values of `W` are the sines `s / sqrt(s**2 + c**2)`, those of `C` the cosines
`c / sqrt(s**2 + c**2)`. So `c W` is the soft clip. If `s >= c`, the sine is at least the cosine, so
`W` divided by the larger of the two is the hard clip: `min(s, c) / c = sine / max(sine, cosine)`,
where `max**2 = (1 + |sine**2 - cosine**2|) / 2`.

If singular values are 1e4 times the threshold, the eigenvalues of `I + X X' / c**2` span a wider range
than float32 has digits for. The method still works in float32, because it neither inverts such a
matrix nor takes its root.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, Unpack, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

import optaxclip._backend.meshes as meshes
from optaxclip._backend.global_view import Transformation
from optaxclip._base.numerics import (
    accumulation_dtype,
    divide_by_pow2,
    divide_no_nan,
    floor_pow2,
    match_weak_type,
    safe_sqrt,
    static_size_or_none,
)
from optaxclip._base.trees import is_sparse
from optaxclip._base.types import ClipState, PyTree
from optaxclip._base.validation import check_choice, check_int, validate_call
from optaxclip._engine.clip import ClipMethod, make_clip
from optaxclip._engine.measure import ScaledNorms
from optaxclip._engine.options import Options, TransformOptions, document_options
from optaxclip._engine.plan import Plan
from optaxclip._engine.scale import Multiplier
from optaxclip.responses import Response, clip, smooth
from optaxclip.thresholds.constant import ThresholdLike, check_threshold
from optaxclip.transforms.norm_clips import leaf_scope
from optaxclip.transforms.second_moment import wide_dtype

Mode = Literal["soft", "hard"]


class GramForm(NamedTuple):
    """A matrix, transposed if it is tall, and scaled so that products neither overflow nor vanish.

    Attributes:
      rows: `[m, n]` with `m <= n` (unless sizes are symbolic), the entries divided by `unit`.
      gram: `[m, m]`, the products of the rows.
      unit: `[]`, a power of two near the largest modulus.
    """

    rows: Array
    gram: Array
    unit: Array

    @classmethod
    def create(cls, x: Array) -> "GramForm":
        """Prepares a finite matrix `[rows, columns]`, float32 or wider."""
        top = jnp.max(jnp.maximum(jnp.abs(x.real), jnp.abs(x.imag)), initial=0)
        unit = lax.stop_gradient(floor_pow2(top))
        rows = divide_by_pow2(x.T if _is_tall(x) else x, unit)
        return cls(rows, _matrix_product(rows, rows.T.conj()), unit)


def estimate_largest(prepared: GramForm) -> Array:
    """An estimate of the largest singular value, `[]`, from the Gram matrix.

    It is never above the true value, and exact for one row. Of random matrices 95 in 100 are at
    most 3 % below it, one in a thousand is an eighth.
    """
    if static_size_or_none(prepared.gram.shape[0]) == 1:
        return prepared.unit * safe_sqrt(prepared.gram[0, 0].real)
    return prepared.unit * safe_sqrt(_estimate_largest_eigenvalue(prepared.gram))


def clip_matrix(x: Array, threshold: Array, *, mode: Mode, iterations: int) -> Array:
    """A finite matrix `[rows, columns]` with its singular values clipped; float32 or wider.

    With the mode "soft", `s` becomes `s / sqrt(1 + (s / threshold)**2)`, with "hard", `min(s, threshold)`.
    Each of the iterations takes two steps on one Gram matrix.
    """
    prepared = GramForm.create(x)
    is_open = jnp.isinf(threshold)
    threshold = jnp.where(is_open, 1, threshold)
    if static_size_or_none(prepared.gram.shape[0]) == 1:
        row, is_kept = _clip_row(prepared, threshold, mode)
        return jnp.where(is_open | is_kept, x, row.T if _is_tall(x) else row)
    top, scaled = _bound_largest(prepared.gram), divide_by_pow2(threshold, prepared.unit)
    # The iterations cannot reach a smaller threshold; a larger one changes no digit.
    c = jnp.clip(scaled, 1e-7 * (1 + top), 1e6 * (1 + top))
    bound = lax.stop_gradient(1.001 * jnp.sqrt(jnp.square(top) + jnp.square(c)))
    eye = jnp.eye(prepared.gram.shape[0], dtype=prepared.gram.dtype)
    bound, share = bound.astype(eye.dtype), (c / bound).astype(eye.dtype)
    low = lax.stop_gradient(c / bound.real)
    sines, cosines = _orthogonal((prepared.rows / bound, eye * share), low, iterations)
    keep = is_open
    if mode == "hard":
        signed = _matrix_product(sines, sines.T.conj()) - _matrix_product(cosines, cosines.T.conj())
        (signs,) = _orthogonal((signed,), jnp.full_like(c, _LOWEST_SIGN), _SIGN_ITERATIONS)
        sines = _matrix_product(_root_of_larger(_matrix_product(signed, signs), eye), sines)
        # For each singular value the sign matrix has an eigenvalue: 1 if it is above the threshold, -1
        # if it is below, and a number near 0 if it is at the threshold.
        keep |= _estimate_largest_eigenvalue(eye + signs) < _MOST_SIGN
    # In the units of `prepared` a threshold may underflow.
    result = jnp.minimum(threshold, c * prepared.unit).astype(sines.dtype) * sines
    return jnp.where(keep, x, result.T if _is_tall(x) else result)


_POWERS = 20
"""How many power iterations to take."""

_LOWEST_SIGN, _SIGN_ITERATIONS = 1e-3, 5
"""A singular value within this share of the threshold ends between its old value and the threshold."""

_MOST_SIGN = 1.02
"""If no eigenvalue of `eye + signs` reaches this, no singular value clearly exceeds the threshold."""

_MOST = 0.99 * 3**0.5
"""The largest scale of a step; with 3**0.5 rounding could change the sign of a singular value 1."""

_ROOT = np.polynomial.Chebyshev.interpolate(lambda a: ((1 + a) / 2) ** -0.5, 7, [0, 1])
_ROOT = _ROOT.convert(kind=np.polynomial.Polynomial).coef[::-1]
"""`1 / sqrt((1 + a) / 2)` for `a` in `[0, 1]` to 1e-6, the highest power first."""

RESPONSES: dict[str, Response] = {"soft": smooth, "hard": clip}
"""For each mode, the function from a singular value to its new value."""


def _is_tall(x: Array) -> bool:
    rows, columns = (static_size_or_none(size) for size in x.shape)
    return rows is not None and columns is not None and rows > columns


def _clip_row(prepared: GramForm, threshold: Array, mode: Mode) -> tuple[Array, Array]:
    """A clipped matrix of one row, whose singular value is its length, and whether it stays."""
    rows, gram, unit = prepared
    length, scaled = safe_sqrt(gram[0, 0].real), divide_by_pow2(threshold, unit)
    # A smaller threshold, which may underflow, changes no digit of a row of length 1.
    c = jnp.maximum(scaled, 1e-9 * length)
    new = RESPONSES[mode](length, c, c)
    unit = jnp.where(c == scaled, unit, threshold / jnp.where(c > 0, c, 1))
    row = rows * divide_no_nan(new, length, 1).astype(rows.dtype) * unit.astype(rows.dtype)
    return row, new == length


def _orthogonal(blocks: tuple[Array, ...], low: Array, iterations: int) -> tuple[Array, ...]:
    """The nearest matrix whose rows are orthogonal and of length 1.

    Its blocks `[m, n]` lie side by side. The singular values are from `low` to 1.
    """
    eye = jnp.eye(blocks[0].shape[0], dtype=blocks[0].dtype)

    def step(state: tuple[tuple[Array, ...], Array], _: None) -> tuple[Any, None]:
        blocks, low = state
        gram = functools.reduce(
            jnp.add, (_matrix_product(block, block.T.conj()) for block in blocks)
        )
        (a1, b1), low = _cubic(low)
        (a2, b2), low = _cubic(low)
        # Two products give (a1 + b1 t) (a2 + b2 t (a1 + b1 t)**2), where t is the Gram matrix.
        cube = [a1**3, 3 * a1**2 * b1, 3 * a1 * b1**2, b1**3]
        k = [a1 * a2, b1 * a2 + b2 * cube[0], *(b2 * x for x in cube[1:])]
        k = [x.astype(gram.dtype) for x in k]
        square = _matrix_product(gram, gram)
        by = k[0] * eye + k[1] * gram
        by = by + _matrix_product(square, k[2] * eye + k[3] * gram + k[4] * square)
        return (tuple(_matrix_product(by, block) for block in blocks), low), None

    return lax.scan(step, (blocks, low), length=iterations)[0][0]


def _cubic(low: Array) -> tuple[tuple[Array, Array], Array]:
    """The best step `x -> x (a + b x**2)` for singular values from `low` to 1, and the new `low`.

    Source: Chen and Chow, 2014, A stable scaling of Newton-Schulz iterations.
    """
    scale = jnp.minimum(jnp.sqrt(3 / (1 + low + jnp.square(low))), _MOST)
    a, b = 1.5 * scale, -0.5 * scale**3
    new = jnp.minimum(low * (a + b * jnp.square(low)), a + b)
    return (a, b), jnp.minimum(new, 1)


def _root_of_larger(absolute: Array, eye: Array) -> Array:
    """The inverse root of `(1 + absolute) / 2`, for eigenvalues in `[0, 1]`."""
    coefficients = [jnp.asarray(x).astype(eye.dtype) for x in _ROOT]
    root = eye * coefficients[0]
    for coefficient in coefficients[1:]:
        root = _matrix_product(root, absolute) + eye * coefficient
    return root


def _bound_largest(gram: Array) -> Array:
    """An upper bound of the largest singular value."""
    gram = lax.stop_gradient(gram)
    sums = jnp.max(jnp.sum(jnp.abs(gram), 1), initial=0)
    return jnp.sqrt(jnp.minimum(sums, jnp.sqrt(_squares(gram))))


def _squares(x: Array) -> Array:
    return jnp.sum(jnp.square(x.real) + jnp.square(x.imag))


def _estimate_largest_eigenvalue(matrix: Array) -> Array:
    """An estimate from below, by power iteration, for a matrix without negative eigenvalues."""
    fixed = lax.stop_gradient(matrix)

    def power_step(vector: Array) -> Array:
        vector = _matrix_product(fixed, vector)
        length = safe_sqrt(_squares(vector))
        return vector / jnp.where(length > 0, length, 1).astype(vector.dtype)

    # The longest row is usually near the eigenvector, but may be orthogonal to it. So a vector
    # without structure is added, which is not orthogonal to it.
    lengths = jnp.diagonal(fixed).real
    longest = (lengths == jnp.max(lengths, initial=0)).astype(matrix.dtype)
    squares = jnp.square(jnp.arange(matrix.shape[0])).astype(lengths.dtype)
    start = power_step(longest) + power_step(jnp.cos(squares).astype(matrix.dtype))
    end = lax.fori_loop(0, _POWERS, lambda _, vector: power_step(vector), start)
    return safe_sqrt(_squares(_matrix_product(matrix, end)))


def _matrix_product(x: Array, y: Array) -> Array:
    # Accelerators by default multiply with fewer digits than float32 has.
    return jnp.matmul(x, y, precision=lax.Precision.HIGHEST)


@validate_call(transformation=True)
@document_options(TransformOptions)
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
        if axes and meshes.manual_axes():
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

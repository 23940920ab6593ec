"""Clips single entries, by their own past or by the past of their leaf's largest entry.

These are the stages that SPAM and Stable-SPAM put in front of Adam. Stable-SPAM is::

  optax.chain(clip_by_moving_max(), normalize_by_norm_history(), optax.scale_by_adam())

Both papers also reset Adam's moments; this library does not.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Unpack

import jax
import jax.numpy as jnp
from jax import Array, lax

import optaxclip.norms as norms
import optaxclip.thresholds as thresholds
from optaxclip._base.arguments import checked_int, checked_name, makes_transformation
from optaxclip._base.numerics import entries, multiply, root_of_positive, safe_sqrt, select
from optaxclip._base.states import check_state, increased, registered_state
from optaxclip._base.trees import flatten, is_sparse, with_data
from optaxclip._base.types import ArrayLike, ClipState, PyTree
from optaxclip._border.crossing import Transformation, global_view, transformation
from optaxclip._border.entries import sums_of_stored
from optaxclip._engine.clip import stage
from optaxclip._engine.options import Options, ScaleOptions, takes
from optaxclip._engine.respond import Multiplier
from optaxclip._engine.step import Technique
from optaxclip.methods.elementwise import clamp_leaf
from optaxclip.methods.moments import NamedMoments, dense, zero_moments
from optaxclip.methods.updates import leaves_apart
from optaxclip.thresholds.base import FLOOR, at_least, within
from optaxclip.thresholds.checks import checked_limit


@registered_state
class SecondMomentState(NamedTuple):
    """State of `clip_by_second_moment`.

    Attributes:
      steps: int32[], steps so far.
      moments: the moving averages of the entries' squares, a pytree like the parameters; float32
        (float64 for 64-bit leaves), and None in place of leaves that are not clipped.
    """

    NEEDS_OPTIMIZER = True

    steps: Array
    moments: PyTree


@takes(ScaleOptions)
def clip_by_moving_max(
    *,
    decay: ArrayLike = 0.999,
    stacked: PyTree | Callable[[str, Array], int] | None = None,
    floor: float = FLOOR,
    **options: Unpack[ScaleOptions],
) -> Transformation[ClipState]:
    """Shrinks the entries of a leaf that exceed the moving average of its largest entries.

    The average is debiased, and this step counts in it. Only entries above the average are changed:
    they are multiplied by the average and divided by the leaf's largest modulus.

    Source: Huang et al., 2025, Stable-SPAM's AdaClip, arXiv 2502.17055. In the published code a NaN
    stays in the average for ever; here a modulus that is not finite is never recorded. At each
    reset of Adam's moments, that code also restarts its count of steps, but not the average, which
    switches clipping off for a long time; here neither is reset.

    Args:
      decay: the decay of the average.
      stacked: how many leading axes of each leaf stack separate tensors, as in
        `optaxclip.scopes.leaf`; with None no axis does.
      floor: smaller moduli are not recorded, and no limit is smaller.
      **options: those that all transformations share, `optaxclip.ScaleOptions`.

    Returns:
      A transformation with a `ClipState`, in which `norm` is the largest modulus of each leaf. Its
      update returns a tree with the shapes, dtypes and weak types of the gradients.

    Example:
      >>> import jax.numpy as jnp, optaxclip
      >>> tx = optaxclip.clip_by_moving_max(decay=0.5)
      >>> state = tx.init(jnp.zeros(3))
      >>> for largest in (1.0, 1.0, 4.0):
      ...     updates, state = tx.update(jnp.array([largest, -3.0, 0.5]) / 2, state)
      >>> print(updates, state.info.limit)
      [ 1.78571 -1.5      0.25   ] [1.78571]
    """
    rule = thresholds.ema(decay, 1.0, debias=True, inclusive=True, floor=floor, patience=None)
    checked = Options.checked(norm="linf", **options)
    return stage(leaves_apart(stacked), rule, checked, _OnlyAbove())


@dataclasses.dataclass(frozen=True)
class _OnlyAbove(Technique):
    """Shrinks only the entries of a group that are above its limit."""

    def columns(self, by: Multiplier, limits: Array) -> Sequence[Array]:
        """The fields of the multiplier, and the modulus above which entries are multiplied.

        In a group that is not finite, all entries are multiplied, so that modulus is -1.
        """
        return (*by, select(by.ratio > 0, limits, -1))

    def scaled(self, leaf: Any, columns: Array, axes: tuple[int, ...], options: Options) -> Any:
        """The changed leaf; of a `BCOO`, all summands of an entry above the limit are changed."""
        if not is_sparse(leaf) or leaf.unique_indices:
            return super().scaled(leaf, columns, axes, options)
        power, ratio, limit = columns
        is_at_most = jnp.abs(sums_of_stored(leaf, limit.dtype)) <= limit
        by: Any = [jnp.broadcast_to(x, is_at_most.shape) for x in (power, ratio)]
        by.append(jnp.where(is_at_most, jnp.inf, -1).astype(limit.dtype))
        return with_data(leaf, super().scaled(leaf.data, by, (), options))


@makes_transformation()
def clip_by_second_moment(
    *,
    threshold: ArrayLike = 5000.0,
    decay: ArrayLike = 0.999,
    warmup_steps: int = 20,
    reset_every: int | None = None,
    name: str = "clip_by_second_moment",
) -> Transformation[SecondMomentState]:
    """Clips each entry to a multiple of the root of its own second moment.

    Let `v` be the moving average of an entry's squares before this step. If
    `|g|**2 > threshold * v`, the entry's modulus becomes `sqrt(threshold * v)`, and the clipped
    entry counts in `v`. NaN stays NaN, and infinite entries become their bounds.

    Source: Huang et al., 2025, SPAM, arXiv 2501.06842. In SPAM an entry that was always zero, such
    as one in the row of a word that has not come yet, is kept at zero until the next reset; here
    entries with `v = 0` are left alone, and entries that are not finite never count in `v`. As in
    the paper, `v` is not debiased, so clipping is stricter in the first steps.

    Squares may leave the range of float32. If entries stay below about `1e-19 / sqrt(1 - decay)`,
    `v` is 0 and nothing is clipped, not even a spike. Entries above 1.3e19 count in `v` as 1.3e19,
    so no bound is above `1.3e19 * sqrt(threshold)`, and entries above that are clipped at every
    step after the warm-up. With 64-bit leaves the range is that of float64.

    Args:
      threshold: the largest ratio of an entry's square to its second moment.
      decay: the decay of the second moment; use `b2` of the Adam that follows.
      warmup_steps: nothing is clipped in this many steps at the beginning and after each reset.
        Steps that are not finite count too.
      reset_every: after how many steps `v` is set to zero, as SPAM does every 500 steps with Adam's
        moments; with None it never is. Static, also in `optax.inject_hyperparams`.
      name: the name in messages.

    Returns:
      A transformation with a `SecondMomentState`, which holds one array for each leaf. Its update
      returns a tree with the shapes, dtypes and weak types of the gradients. Like `clip` it does
      not record what was clipped.

    Raises:
      ValueError: if an option is out of its range; when used, for updates with leaves that were not
        in the parameters at `init`.
      TypeError: if an option is not a number; when used, if a leaf is sparse.

    Example:
      >>> import jax.numpy as jnp, optaxclip
      >>> tx = optaxclip.clip_by_second_moment(threshold=4.0, decay=0.5, warmup_steps=2)
      >>> state = tx.init(jnp.zeros(2))
      >>> for spike in (1.0, 1.0, 1.0, 10.0):
      ...     updates, state = tx.update(jnp.array([spike, 0.5]), state)
      >>> print(updates)
      [1.870829 0.5     ]
    """
    settings = _MomentSettings(
        checked_limit(threshold, "threshold", off="math.inf"),
        within(decay, 0, 1, "decay"),
        at_least(warmup_steps, 0, "warmup_steps"),
    )
    period = (
        None if reset_every is None else min(checked_int(reset_every, 1, "reset_every"), 2**31 - 1)
    )

    checked_name(name)

    def init(params: PyTree) -> SecondMomentState:
        flat = dense(flatten(params, "params"), name)
        return SecondMomentState(jnp.zeros((), jnp.int32), zero_moments(flat, real=True))

    def update(
        updates: PyTree, state: Any, params: PyTree | None = None, **extra_args: Any
    ) -> tuple[PyTree, SecondMomentState]:
        del params, extra_args
        flat = dense(flatten(updates, "updates"), name)
        check_state(state, SecondMomentState, name, updates=updates)
        old = NamedMoments.of(state.moments)
        unknown = sorted(set(flat.names()) - set(old.names))
        if unknown:
            raise ValueError(
                f"{name}: the updates have the leaves {unknown}, which the params passed to init "
                "did not have"
            )
        leaves, moments = flat.measured_leaves(), old.of_leaves(flat, name)
        clipped, count, moments = _clamped(settings, leaves, moments, state.steps, period=period)
        return flat.rebuild(clipped), SecondMomentState(count, old.replaced(flat, moments))

    return transformation(init, update)


class _MomentSettings(NamedTuple):
    threshold: Any
    decay: Any
    warmup_steps: Any


@global_view(out_like=("leaves", "count", "moments"))
def _clamped(
    settings: _MomentSettings,
    leaves: list[Any],
    moments: list[Array],
    count: Array,
    *,
    period: int | None,
) -> tuple[list[Any], Array, list[Array]]:
    step = count
    if period is not None:
        step = count % period
        moments = [jnp.where(step == 0, 0, v) for v in moments]
    is_active = step >= settings.warmup_steps
    rows = zip(leaves, moments, strict=True)
    pairs = [_clamped_by(*row, settings.threshold, settings.decay, is_active) for row in rows]
    clipped, moments = ([pair[k] for pair in pairs] for k in range(2))
    return clipped, increased(count, period=period or 1), moments


# A compiled function of its own, so that it is traced once for leaves of one shape.
@jax.jit
def _clamped_by(
    leaf: Any, moment: Array, threshold: Any, decay: Any, is_active: Array
) -> tuple[Any, Array]:
    """A leaf, clipped by its average, and the average after this step."""
    clipped = clamp_leaf(leaf, None, _bound(moment, threshold, is_active))
    return clipped, _moved(moment, decay, leaf, clipped)


def _bound(moment: Array, threshold: Any, is_active: Array) -> Array:
    threshold = jnp.asarray(threshold).astype(moment.dtype)
    is_limited = lax.ne(threshold, threshold.dtype.type(jnp.inf))
    # An infinite threshold becomes 1: a product with infinity would have the derivative NaN.
    # A negative threshold acts as 0.
    of_threshold = safe_sqrt(lax.max(select(is_limited, threshold, 1), threshold.dtype.type(0)))
    is_positive, root = root_of_positive(moment)
    is_bound = lax.bitwise_and(is_positive, lax.bitwise_and(is_active, is_limited))
    return select(is_bound, multiply(root, of_threshold), jnp.inf)


def _moved(moment: Array, decay: Any, leaf: Any, clipped: Any) -> Array:
    """The average after the square of the clipped entry, if the incoming entry was finite."""
    square = norms.l2.map(entries(jnp.asarray(clipped), moment.dtype))
    # Half of the largest number: if the decay is 1/2, XLA for a GPU (JAX 0.10.2) adds both numbers
    # before it multiplies them, and their sum must not be infinite.
    square = lax.min(square, jnp.finfo(moment.dtype).max / 2)
    decay = jnp.asarray(decay).astype(moment.dtype)
    moved = lax.add(multiply(moment, decay), multiply(square, 1 - decay))
    return lax.select(jnp.isfinite(leaf), moved, moment)

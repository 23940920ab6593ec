"""Transformations that clip or normalize gradients by their norms."""

from collections.abc import Callable, Sequence
from typing import Unpack

from jax import Array

import optaxclip.responses as responses
import optaxclip.scopes as scopes
import optaxclip.thresholds as thresholds
from optaxclip._backend.global_view import Transformation
from optaxclip._base.types import ArrayLike, ClipState, PyTree
from optaxclip._base.validation import check_static, validate_call
from optaxclip._engine.clip import clip_by
from optaxclip._engine.options import ClipOptions, NormOptions, RescaleOptions, document_options
from optaxclip.thresholds._adaptive import DEFAULT_FLOOR
from optaxclip.thresholds._constant import (
    ScalarOrSchedule,
    ThresholdLike,
    check_threshold,
    relative,
)


@validate_call(
    transformation=True, one_shot_call='clip_tree(grads, 1.0, scope=scopes.leaf(), norm="rms")'
)
@document_options(RescaleOptions)
def clip_by_block_rms(
    threshold: ScalarOrSchedule,
    *,
    stacked: PyTree | Callable[[str, Array], int] | None = None,
    **options: Unpack[RescaleOptions],
) -> Transformation[ClipState]:
    """Clips leaves by the root mean square of their elements.

    Adafactor clips its updates this way, with a threshold of 1. For other optimizers that divide
    gradients by the root of the second moment, clip after `scale_by_...` and before the learning
    rate. `scale_by_stable_adam` instead uses the root mean square of the gradient without momentum.

    Source: Shazeer and Stern, 2018, arXiv 1804.04235.

    Args:
      threshold: The maximum root mean square of a leaf.
      stacked: The number of leading axes that stack layers, as in `optaxclip.scopes.leaf`.
      **options: Options that can be used with any transformation. See `optaxclip.RescaleOptions`.

    Example:
      >>> import jax.numpy as jnp, optaxclip
      >>> tx = optaxclip.clip_by_block_rms(1.0)
      >>> print(tx.update(jnp.array([7.0, 1.0]), None)[0])
      [1.4 0.2]
    """
    # Check thresholds before `clip_by` so that error messages contain the name of this argument.
    rule = check_threshold(threshold, "threshold")
    return clip_by(leaf_scope(stacked), rule, norm="rms", **options)


def leaf_scope(stacked: PyTree | Callable[[str, Array], int] | None) -> scopes.Scope:
    """Returns the scope `leaf(stacked)`, or `leaf(0)` if `stacked` is None."""
    # The default is None because `optax.inject_hyperparams` would trace a default of 0.
    check_static(stacked, "stacked")
    return scopes.leaf(0 if stacked is None else stacked)


@validate_call(transformation=True, one_shot_call="ops.clip_by_norm(grads, 1.0)")
@document_options(NormOptions)
def clip_by_norm(
    max_norm: ScalarOrSchedule,
    axes: int | Sequence[int] | None = None,
    **options: Unpack[NormOptions],
) -> Transformation[ClipState]:
    """Clips leaves by their norms.

    Args:
      max_norm: The maximum norm of a leaf.
      axes: The axes over which norms are computed. Defaults to all axes.
      **options: Options that can be used with any transformation. See `optaxclip.NormOptions`.

    Example:
      >>> import jax.numpy as jnp, optaxclip
      >>> tx = optaxclip.clip_by_norm(4.0)
      >>> grads = {"w": jnp.array([-3.0, 4.0]), "b": jnp.array([1.0])}
      >>> updates, state = tx.update(grads, tx.init(grads))
      >>> print(updates["w"], updates["b"], state.info.num_clipped)
      [-2.4  3.2] [1.] [0 1]
    """
    check_static(axes, "axes")
    scope = scopes.leaf() if axes is None else scopes.axes(axes)
    return clip_by(scope, check_threshold(max_norm, "max_norm"), **options)


@validate_call(transformation=True, one_shot_call="ops.clip_by_global_norm(grads, 1.0)")
@document_options(ClipOptions)
def clip_by_global_norm(
    max_norm: ScalarOrSchedule, *, eps: float | None = None, **options: Unpack[ClipOptions]
) -> Transformation[ClipState]:
    """Clips the gradients by their global norm, which preserves their direction.

    If you use Muon, use the scope `optaxclip.scopes.muon` instead. Otherwise, the gradients of the
    large matrices that Muon updates would dominate the norm and shrink the gradients passed to
    Adam, although Muon's updates do not depend on the scale of its gradients (see `docs/muon.md`).

    Source: Pascanu, Mikolov, and Bengio, 2013, arXiv 1211.5063.

    Args:
      max_norm: The maximum global norm.
      eps: A number to add to the norm in the factor `max_norm / (norm + eps)`. Use 1e-6 to match
        PyTorch, as described in `optaxclip.responses.clip_with_eps`. Defaults to None (no number).
      **options: Options that can be used with any transformation. See `optaxclip.ClipOptions`.

    Example:
      >>> import jax.numpy as jnp, optaxclip
      >>> tx = optaxclip.clip_by_global_norm(1.0)
      >>> grads = {"w": jnp.array([3.0, 0.0]), "b": jnp.array([4.0])}
      >>> updates, state = tx.update(grads, tx.init(grads))
      >>> print(updates["w"], updates["b"], state.info.norm)
      [0.6 0. ] [0.8] 5.0
    """
    response = "clip" if eps is None else responses.clip_with_eps(eps)
    threshold = check_threshold(max_norm, "max_norm")
    return clip_by(scopes.tree(), threshold, response=response, **options)


@validate_call(
    transformation=True,
    one_shot_call="clip_tree(grads, thresholds.relative_to_params(0.01), scope=scopes.unit(), "
    "params=params)",
)
@document_options(NormOptions)
def adaptive_grad_clip(
    clipping: ScalarOrSchedule,
    eps: float = 1e-3,
    axis: int | Sequence[int] | Callable[[str, Array], int | Sequence[int] | None] | None = None,
    **options: Unpack[NormOptions],
) -> Transformation[ClipState]:
    """Clips the gradients of units relative to the norms of their parameters (AGC).

    A unit is the set of parameters that produce one output. Its threshold is `clipping * max(norm
    of the unit's parameters, eps)`, so you must pass `params` to `update`.

    The default `axis` is correct for the layouts `[in, out]` and `[height, width, in, out]` of
    Flax, Haiku, and Keras. For other layouts, it silently uses the wrong units, for example one
    unit per input for Equinox (`[out, in]`), and one unit per input-output pair for 1D convolutions
    (`[width, in, out]`). `docs/recipes/wrappers.md` shows how to pass `axis` for them.

    The authors do not clip the gradients of the last layer. Use `optax.masked` to exclude them.

    Source: Brock, De, Smith, and Simonyan, 2021, arXiv 2102.06171.

    Args:
      clipping: The maximum ratio of gradient norm to parameter norm.
      eps: The minimum parameter norm to use in the threshold.
      axis: The axes over which the norms of units are computed, or a function
        `(path, leaf) -> axes`. If None, or if the function returns None, the axes depend on the
        rank of the leaf, as in `optaxclip.scopes.unit`.
      **options: Options that can be used with any transformation. See `optaxclip.NormOptions`.

    Raises:
      ValueError: If the threshold is negative, NaN, or not a scalar. Also raised by `update` if
        `params` is missing, or if a leaf with at least 6 axes requires `axis`.

    Example:
      >>> import jax.numpy as jnp, optaxclip
      >>> params = jnp.array([[3.0, 0.0], [4.0, 0.0]])
      >>> grads = jnp.array([[0.3, 0.3], [0.4, 0.4]])
      >>> tx = optaxclip.adaptive_grad_clip(0.01)
      >>> print(tx.update(grads, tx.init(params), params)[0])
      [[3.e-02 6.e-06]
       [4.e-02 8.e-06]]
    """
    check_static(axis, "axis")
    # Error messages contain the name `clipping`, unlike those of `thresholds.relative_to_params`.
    return clip_by(scopes.unit(axis), relative(clipping, eps, "clipping"), **options)


@validate_call(
    transformation=True, one_shot_call="clip_tree(grads, 1.0, scope=scopes.group(labels))"
)
@document_options(NormOptions)
def clip_by_group_norm(
    max_norm: ThresholdLike,
    labels: PyTree | Callable[[str, Array], str],
    **options: Unpack[NormOptions],
) -> Transformation[ClipState]:
    """Clips groups of leaves by their norms.

    Args:
      max_norm: The maximum norm of a group: a number, a schedule, or a rule from
        `optaxclip.thresholds`, or a dict that maps labels to any of these.
      labels: The labels of the groups, as in `optaxclip.scopes.group`: a pytree prefix of the
        parameters, a function `(path, leaf) -> label`, or a function `params -> labels`.
      **options: Options that can be used with any transformation. See `optaxclip.NormOptions`.

    Example:
      >>> import jax.numpy as jnp, optaxclip
      >>> labels = lambda path, leaf: "bias" if path.endswith("b") else "weight"
      >>> tx = optaxclip.clip_by_group_norm({"weight": 1.0, "bias": 0.1}, labels)
      >>> grads = {"w": jnp.array([3.0, 4.0]), "b": jnp.array([0.05])}
      >>> updates, state = tx.update(grads, tx.init(grads))
      >>> print(updates["w"].round(3), updates["b"])
      [0.6 0.8] [0.05]
      >>> print(list(state.info.names), state.info.norm)
      ['bias', 'weight'] [0.05 5.  ]
    """
    return clip_by(scopes.group(labels), check_threshold(max_norm, "max_norm"), **options)


@validate_call(
    transformation=True,
    one_shot_call='clip_tree(grads, 1.0, scope=scopes.tree(), response="normalize")',
)
@document_options(RescaleOptions)
def normalize_by_global_norm(
    norm: ScalarOrSchedule = 1.0,
    *,
    known_norm: str | None = None,
    **options: Unpack[RescaleOptions],
) -> Transformation[ClipState]:
    """Scales the gradients to an L2 norm of `norm`, unless they are zero.

    Args:
      norm: The target norm.
      known_norm: The name of an extra argument of `update` that contains the norm of the gradients,
        as in `optaxclip.clip_by`.
      **options: Options that can be used with any transformation. See `optaxclip.RescaleOptions`.

    Example:
      >>> import jax.numpy as jnp, optaxclip
      >>> tx = optaxclip.normalize_by_global_norm(10.0)
      >>> print(tx.update(jnp.array([3.0, 4.0]), None)[0])
      [6. 8.]
    """
    threshold = check_threshold(norm, "norm")
    return clip_by(scopes.tree(), threshold, response="normalize", known_norm=known_norm, **options)


@validate_call(transformation=True)
@document_options(NormOptions)
def normalize_by_norm_history(
    *,
    mean_decay: ArrayLike = 0.7,
    square_decay: ArrayLike = 0.9,
    eps: ArrayLike = 1e-8,
    stacked: PyTree | Callable[[str, Array], int] | None = None,
    floor: float = DEFAULT_FLOOR,
    **options: Unpack[NormOptions],
) -> Transformation[ClipState]:
    """Scales leaves to the ratio of the mean of their norms to the root mean square of their norms.

    Both means are moving averages that include the current norm. The new norm is about 1, and
    smaller after a sudden increase in the norm. Because the scale of the gradients is lost, use
    this transformation with optimizers that do not depend on it, such as Adam, Lion, and Muon. For
    groups other than leaves, use `clip_by` with `thresholds.mean_over_rms()` and
    `response="normalize"`.

    Non-finite norms are never recorded. In the published code (TianjinYellow/StableSPAM), they
    remain in the averages forever.

    Source: Huang et al., 2025, Stable-SPAM's AdaGN, arXiv 2502.17055, later GradientStabilizer.

    Args:
      mean_decay: The decay of the mean.
      square_decay: The decay of the mean square, which should not be below `mean_decay`.
      eps: A number to add to the root mean square.
      stacked: The number of leading axes that stack layers, as in `optaxclip.scopes.leaf`.
      floor: A lower bound on the new norm. Norms below it are not recorded.
      **options: Options that can be used with any transformation. See `optaxclip.NormOptions`.

    Example:
      >>> import jax.numpy as jnp, optaxclip
      >>> tx = optaxclip.normalize_by_norm_history()
      >>> state = tx.init(jnp.zeros(1))
      >>> for norm in (1.0, 1.2, 0.8, 1.0, 5.0):
      ...     updates, state = tx.update(jnp.array([norm]), state)
      >>> print(updates)
      [0.92795]
    """
    rule = thresholds.mean_over_rms(mean_decay, square_decay, eps, floor=floor)
    return clip_by(leaf_scope(stacked), rule, response="normalize", **options)

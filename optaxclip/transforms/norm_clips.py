"""Transformations that clip or normalize norms with a given threshold."""

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
    """Clips the leaves by the root mean square of their elements.

    Adafactor clips its updates like this with a threshold of 1, after dividing the gradient by the
    root of its second moment. For other optimizers with this division, insert the clipping after
    `scale_by_...` and before the learning rate. Note that `scale_by_stable_adam` clips by the root
    mean square of the gradient without momentum.

    Source: Shazeer and Stern, 2018, arXiv 1804.04235.

    Args:
      threshold: The maximum root mean square of a leaf.
      stacked: The number of leading axes of the leaves that stack separate tensors, as in
        `optaxclip.scopes.leaf`. Defaults to 0.
      **options: The options shared by all transformations. See `optaxclip.RescaleOptions`.

    Example:
      >>> import jax.numpy as jnp, optax, optaxclip
      >>> clip = optaxclip.clip_by_block_rms(1.0)
      >>> print(clip.update(jnp.array([7.0, 1.0]), None)[0])
      [1.4 0.2]
      >>> tx = optax.chain(optax.scale_by_adam(), clip, optax.scale_by_learning_rate(1e-3))
    """
    # Thresholds are checked before `clip_by` so messages use the name of the argument.
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
    """Clips the leaves by their own norms.

    Args:
      max_norm: The maximum norm of a leaf.
      axes: The axes over which the norms are computed. By default, all axes are used.
      **options: The options shared by all transformations. See `optaxclip.NormOptions`.

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
    threshold = check_threshold(max_norm, "max_norm")
    return clip_by(scope, threshold, **options)


@validate_call(transformation=True, one_shot_call="ops.clip_by_global_norm(grads, 1.0)")
@document_options(ClipOptions)
def clip_by_global_norm(
    max_norm: ScalarOrSchedule, *, eps: float | None = None, **options: Unpack[ClipOptions]
) -> Transformation[ClipState]:
    """Clips the gradients by their global norm, which preserves their direction.

    If you use Muon, use the scope `optaxclip.scopes.muon` instead (see `docs/muon.md`). Otherwise,
    the gradients of the large matrices that Muon updates determine how much the gradients for Adam
    are clipped. However, Muon's updates do not depend on the scale of its gradients.

    Source: Pascanu, Mikolov and Bengio, 2013, arXiv 1211.5063.

    Args:
      max_norm: The maximum global norm.
      eps: A number to add to the norm. The factor is then `max_norm / (norm + eps)` if this is
        below 1. With 1e-6, it is exactly the factor of PyTorch, see
        `optaxclip.responses.clip_with_eps`. By default, no number is added.
      **options: The options shared by all transformations. See `optaxclip.ClipOptions`.

    Raises:
      ValueError: If the threshold is negative, NaN or not a scalar, if a name is unknown, or if
        `eps` is negative or not a Python number.
      TypeError: If the threshold is not a number.

    Example:
      >>> import jax.numpy as jnp, optaxclip
      >>> tx = optaxclip.clip_by_global_norm(1.0)
      >>> grads = {"w": jnp.array([3.0, 0.0]), "b": jnp.array([4.0])}
      >>> updates, state = tx.update(grads, tx.init(grads))
      >>> print(updates["w"], updates["b"], state.info.norm)
      [0.6 0. ] [0.8] 5.0
    """
    threshold = check_threshold(max_norm, "max_norm")
    return clip_by(
        scopes.tree(),
        threshold,
        # A number in the denominator belongs to the response, because the threshold is unchanged.
        response="clip" if eps is None else responses.clip_with_eps(eps),
        **options,
    )


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

    A unit contains all parameters of one output, see `optaxclip.scopes.unit`. Its threshold is
    `clipping * max(norm of the unit's parameters, eps)`. Note that the update requires `params`.

    The default of `axis` is correct for the layouts `[in, out]` and `[height, width, in, out]` of
    Flax, Haiku and Keras. Note that it silently uses wrong units for other layouts. For example, it
    uses one unit per input if the output axis is first (`[out, in]`), as in Equinox. For 1D
    convolutions (`[width, in, out]`), it uses one unit per pair of input and output. Use `axis` for
    these layouts, as shown in `docs/recipes/wrappers.md`.

    The authors do not clip the parameters of the last layer. Use `optax.masked` to exclude them.

    Source: Brock, De, Smith and Simonyan, 2021, arXiv 2102.06171.

    Args:
      clipping: The maximum ratio of gradient norm to parameter norm.
      eps: A lower bound on the parameter norm.
      axis: The axes over which the norm of a unit is computed, or `fn(path, leaf) -> axes`. If it
        is None or returns None, the axes depend on the rank of the leaf, as in
        `optaxclip.scopes.unit`.
      **options: The options shared by all transformations. See `optaxclip.NormOptions`.

    Raises:
      ValueError: If the threshold is negative, NaN or not a scalar. Also raised by `update` if
        `params` is missing, or if a leaf has rank 6 or more and there is no `axis`.

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
    # Unlike `thresholds.relative_to_params`, messages use the name `clipping`.
    threshold = relative(clipping, eps, "clipping")
    scope = scopes.unit(axis)
    return clip_by(scope, threshold, **options)


@validate_call(
    transformation=True, one_shot_call="clip_tree(grads, 1.0, scope=scopes.group(labels))"
)
@document_options(NormOptions)
def clip_by_group_norm(
    max_norm: ThresholdLike,
    labels: PyTree | Callable[[str, Array], str],
    **options: Unpack[NormOptions],
) -> Transformation[ClipState]:
    """Clips groups of leaves by the norms of the groups.

    Args:
      max_norm: The maximum norm of a group: a number, a schedule, or a rule from
        `optaxclip.thresholds`. It can also be a dict from labels to these.
      labels: A pytree prefix of the parameters with strings as leaves, a function
        `fn(path, leaf) -> label`, where the path is a string such as `encoder/0/kernel`, or a
        function `fn(params) -> labels`, as in `optax.partition`.
      **options: The options shared by all transformations. See `optaxclip.NormOptions`.

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
    threshold = check_threshold(max_norm, "max_norm")
    scope = scopes.group(labels)
    return clip_by(scope, threshold, **options)


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
      norm: The norm of the updates.
      known_norm: The name of an extra argument of the update with the norm of the gradients, as in
        `optaxclip.clip_by`.
      **options: The options shared by all transformations. See `optaxclip.RescaleOptions`.

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
    """Scales the L2 norms of leaves to the mean of their past norms over their root mean square.

    Both means are moving averages that include the current norm. No threshold is needed, because
    the new norm is about 1, and smaller after a jump of the norm. Since the scale of the gradient
    is lost, use it with optimizers that do not depend on this scale, such as Adam, Lion and Muon.
    For other groups than leaves, use `clip_by`, for example
    `clip_by(scopes.tree(), thresholds.mean_over_rms(), response="normalize")`.

    Non-finite norms are never recorded. However, they stay in the averages forever in the published
    code (TianjinYellow/StableSPAM).

    Source: Huang et al., 2025, Stable-SPAM's AdaGN, arXiv 2502.17055, later GradientStabilizer.

    Args:
      mean_decay: The decay of the mean.
      square_decay: The decay of the mean square. It should not be below `mean_decay`. Defaults to
        0.9, as in the published code.
      eps: A number to add to the root mean square.
      stacked: The number of leading axes of the leaves that stack separate tensors, as in
        `optaxclip.scopes.leaf`. Defaults to 0.
      floor: The lower bound on the new norms. Smaller norms are not recorded.
      **options: The options shared by all transformations. See `optaxclip.NormOptions`.

    Example:
      >>> import jax.numpy as jnp, optaxclip
      >>> tx = optaxclip.normalize_by_norm_history()
      >>> state = tx.init(jnp.zeros(1))
      >>> for norm in (1.0, 1.2, 0.8, 1.0, 5.0):
      ...     updates, state = tx.update(jnp.array([norm]), state)
      >>> print(updates)
      [0.92795]
    """
    return clip_by(
        leaf_scope(stacked),
        thresholds.mean_over_rms(mean_decay, square_decay, eps, floor=floor),
        response="normalize",
        **options,
    )

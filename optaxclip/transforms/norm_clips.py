"""Clips of updates, to be put after an optimizer or after its division by a second moment."""

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
from optaxclip.thresholds.adaptive import DEFAULT_FLOOR
from optaxclip.thresholds.constant import ScalarOrSchedule, ThresholdLike, check_threshold, relative


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
    """Clips each leaf by the root mean square of its entries.

    Adafactor clips its update in this way, with a threshold of 1, after dividing the gradient by
    the root of its second moment. With any other optimizer that divides like this, put the clip
    after its `scale_by_...` and before the learning rate. (`scale_by_stable_adam` clips by the root
    mean square of the gradient without its momentum.)

    Source: Shazeer and Stern, 2018, arXiv 1804.04235.

    Args:
      threshold: the largest root mean square of a leaf.
      stacked: how many leading axes of each leaf stack separate tensors, as in
        `optaxclip.scopes.leaf`; with None no axis does.
      **options: those that all transformations share, `optaxclip.RescaleOptions`.

    Example:
      >>> import jax.numpy as jnp, optax, optaxclip
      >>> clip = optaxclip.clip_by_block_rms(1.0)
      >>> print(clip.update(jnp.array([7.0, 1.0]), None)[0])
      [1.4 0.2]
      >>> tx = optax.chain(optax.scale_by_adam(), clip, optax.scale_by_learning_rate(1e-3))
    """
    rule = check_threshold(threshold, "threshold")
    return clip_by(leaf_scope(stacked), rule, norm="rms", **options)


def leaf_scope(stacked: PyTree | Callable[[str, Array], int] | None) -> scopes.Scope:
    """The scope `leaf(stacked)`; None means 0, because `optax.inject_hyperparams` traces a 0."""
    check_static(stacked, "stacked")
    return scopes.leaf(0 if stacked is None else stacked)


@validate_call(transformation=True, one_shot_call="ops.clip_by_norm(grads, 1.0)")
@document_options(NormOptions)
def clip_by_norm(
    max_norm: ScalarOrSchedule,
    axes: int | Sequence[int] | None = None,
    **options: Unpack[NormOptions],
) -> Transformation[ClipState]:
    """Clips each leaf by its own norm.

    Args:
      max_norm: the largest norm of a leaf.
      axes: the axes over which a norm is taken; all if None.
      **options: those that all transformations share, `optaxclip.NormOptions`.

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
    """Clips the whole tree by its norm, so that the gradient keeps its direction.

    Beside Muon, use `optaxclip.scopes.muon` instead (`docs/muon.md`): with one norm for all leaves,
    the gradients of Muon's large matrices would decide how far Adam's are clipped, although Muon's
    updates do not depend on the scale of its gradients.

    Source: Pascanu, Mikolov and Bengio, 2013, arXiv 1211.5063.

    Args:
      max_norm: the largest norm of the tree.
      eps: if given, the factor is `max_norm / (norm + eps)` if that is below 1. With 1e-6 it is
        PyTorch's factor to the last digit; see `optaxclip.responses.clip_with_eps`.
      **options: those that all transformations share, `optaxclip.ClipOptions`.

    Raises:
      ValueError: for a threshold that is negative, NaN or not a scalar, an unknown name, or an `eps`
        that is negative or not a Python number.
      TypeError: if the threshold is not a number.

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
    """Clips each unit's gradient by the norm of the unit's weights: AGC.

    A unit is all weights that lead into one output (see `optaxclip.scopes.unit`). Its threshold is
    `clipping * max(norm of the unit's weights, eps)`. The update needs `params`.

    The default for `axis` finds the units of `[in, out]` and `[height, width, in, out]`, as in
    Flax, Haiku and Keras. For other layouts it takes wrong units without an error: if the output
    comes first, as in Equinox (`[out, in]`), one for each *input*; for convolutions over one
    dimension (`[width, in, out]`), one for each pair of input and output. Pass `axis` for these
    (`docs/recipes/wrappers.md` shows how).

    Source: Brock, De, Smith and Simonyan, 2021, arXiv 2102.06171. The authors do not clip the last
    layer's weights: wrap this transformation in `optax.masked` to leave them out.

    Args:
      clipping: the largest ratio of gradient norm to weight norm.
      eps: a floor under the weight norm.
      axis: the axes over which a unit's norm is taken, or `fn(path, leaf) -> axes`; if it is None,
        or returns None, they depend on the leaf's rank, as in `optaxclip.scopes.unit`.
      **options: those that all transformations share, `optaxclip.NormOptions`.

    Raises:
      ValueError: for a threshold that is negative, NaN or an array with axes; when used, without
        `params`, or for a leaf of rank 6 or more without `axis`.

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
    """Clips each group of leaves by the norm of the group.

    Args:
      max_norm: the largest norm of a group: a number, a schedule, or a rule from
        `optaxclip.thresholds`; or a dict with one of these for each label.
      labels: a pytree prefix of the parameters with strings for leaves, or
        `fn(path, leaf) -> label`, where the path is text such as `encoder/0/kernel`; or
        `fn(params) -> labels`, as `optax.partition` takes it.
      **options: those that all transformations share, `optaxclip.NormOptions`.

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
    """Scales the whole tree so that its L2 norm becomes `norm`; a tree of zeros stays zeros.

    Args:
      norm: the norm of every update.
      known_norm: the name of an extra argument of the update that holds the norm of the incoming
        tree, as in `optaxclip.clip_by`.
      **options: those that all transformations share, `optaxclip.RescaleOptions`.

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
    """Brings each leaf's L2 norm to the mean of its norms so far over their root mean square.

    Both means are moving averages, and the norm of the step counts in them. There is no threshold to
    choose: the new norm is about 1, and smaller after a jump of the norm. The scale of the gradient
    is lost, so use it with optimizers whose updates do not depend on that scale: Adam, Lion, Muon.
    For other groups than leaves use, for example,
    `clip_by(scopes.tree(), thresholds.mean_over_rms(), response="normalize")`.

    Source: Huang et al., 2025, Stable-SPAM's AdaGN, arXiv 2502.17055, later GradientStabilizer
    (published code, TianjinYellow/StableSPAM). Here a norm that is not finite is never recorded;
    in the published code it stays in the averages for ever.

    Args:
      mean_decay: the decay of the mean.
      square_decay: the decay of the mean square; it is 0.9 in the published code, and should not be
        below `mean_decay`.
      eps: added to the root mean square.
      stacked: how many leading axes of each leaf stack separate tensors, as in
        `optaxclip.scopes.leaf`; with None no axis does.
      floor: smaller norms are not recorded, and no new norm is smaller.
      **options: those that all transformations share, `optaxclip.NormOptions`.

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

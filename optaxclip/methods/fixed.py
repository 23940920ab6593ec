"""The methods whose threshold the user gives, under the names that Optax and the papers use.

Every threshold may be a number, a scalar array of any dtype (traced or not) or a schedule.
`optax.inject_hyperparams` works with all of them; its `static_args` must hold `axes`, `axis`, and
arguments that are functions but not schedules (labels).
"""

from collections.abc import Callable, Sequence
from typing import Unpack

from jax import Array

import optaxclip.responses as responses
import optaxclip.scopes as scopes
from optaxclip._base.arguments import check_static
from optaxclip._base.types import ClipState, PyTree
from optaxclip._border.crossing import Transformation
from optaxclip._engine.clip import clip_by
from optaxclip._engine.options import ClipOptions, NormOptions, clip_factory
from optaxclip.thresholds.fixed import ScalarOrSchedule, ThresholdLike, check_threshold, relative


@clip_factory(
    NormOptions, equivalent="clip_by(scopes.leaf(), 1.0)", once="ops.clip_by_norm(grads, 1.0)"
)
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


@clip_factory(
    ClipOptions,
    equivalent="clip_by(scopes.tree(), 1.0)",
    once="ops.clip_by_global_norm(grads, 1.0)",
)
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


@clip_factory(
    NormOptions,
    equivalent="clip_by(scopes.unit(), thresholds.relative_to_params(0.01))",
    once="clip_tree(grads, thresholds.relative_to_params(0.01), scope=scopes.unit(), "
    "params=params)",
)
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


@clip_factory(
    NormOptions,
    equivalent="clip_by(scopes.group(labels), 1.0)",
    once="clip_tree(grads, 1.0, scope=scopes.group(labels))",
)
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

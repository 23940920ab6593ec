"""Transformations that bring every norm to its target, even small norms."""

from collections.abc import Callable
from typing import Unpack

from jax import Array

import optaxclip.scopes as scopes
import optaxclip.thresholds as thresholds
from optaxclip._base.types import ArrayLike, ClipState, PyTree
from optaxclip._border.crossing import Transformation
from optaxclip._engine.clip import clip_by
from optaxclip._engine.options import NormOptions, RescaleOptions, clip_factory
from optaxclip.methods.updates import leaf_scope
from optaxclip.thresholds.base import DEFAULT_FLOOR
from optaxclip.thresholds.fixed import ScalarOrSchedule, check_threshold


@clip_factory(
    RescaleOptions,
    equivalent='clip_by(scopes.tree(), 1.0, response="normalize")',
    once='clip_tree(grads, 1.0, scope=scopes.tree(), response="normalize")',
)
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


@clip_factory(
    NormOptions,
    equivalent='clip_by(scopes.leaf(), thresholds.mean_over_rms(), response="normalize")',
)
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

"""Clips of updates, to be put after an optimizer or after its division by a second moment."""

from collections.abc import Callable
from typing import Unpack

from jax import Array

import optaxclip.scopes as scopes
from optaxclip._base.arguments import refuse_arrays
from optaxclip._base.types import ClipState, PyTree
from optaxclip._border.crossing import Transformation
from optaxclip._engine.clip import clip_by
from optaxclip._engine.options import ScaleOptions, takes
from optaxclip.thresholds.fixed import ScalarOrSchedule, as_limit


@takes(
    ScaleOptions,
    parts='clip_by(scopes.leaf(), 1.0, norm="rms")',
    once='clip_tree(grads, 1.0, scope=scopes.leaf(), norm="rms")',
)
def clip_by_block_rms(
    threshold: ScalarOrSchedule,
    *,
    stacked: PyTree | Callable[[str, Array], int] | None = None,
    **options: Unpack[ScaleOptions],
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
      **options: those that all transformations share, `optaxclip.ScaleOptions`.

    Example:
      >>> import jax.numpy as jnp, optax, optaxclip
      >>> clip = optaxclip.clip_by_block_rms(1.0)
      >>> print(clip.update(jnp.array([7.0, 1.0]), None)[0])
      [1.4 0.2]
      >>> tx = optax.chain(optax.scale_by_adam(), clip, optax.scale_by_learning_rate(1e-3))
    """
    rule = as_limit(threshold, "threshold")
    return clip_by(leaves_apart(stacked), rule, norm="rms", **options)


def leaves_apart(stacked: PyTree | Callable[[str, Array], int] | None) -> scopes.Scope:
    """The scope `leaf(stacked)`; None means 0, because `optax.inject_hyperparams` traces a 0."""
    refuse_arrays(stacked, "stacked")
    return scopes.leaf(0 if stacked is None else stacked)

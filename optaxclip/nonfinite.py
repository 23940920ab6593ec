"""Policies: what a group becomes if its norm is not finite.

  policy    | the group becomes | use it for
  ----------|-----------|--------------------------------------------------------------
  `"nan"`   | all NaN   | failing loudly, and for `optax.apply_if_finite` around the chain
  `"zero"`  | all 0     | going on without this group's gradient (Adam's moments still decay)
  `"mask"`  | bad entries 0, the rest clipped by its own norm | a few bad entries
  `"error"` | a `checkify` error that names the leaves | debugging

"error" needs two lines of `checkify` around a step that is compiled; without them JAX refuses to
compile it::

  error, out = jax.jit(checkify.checkify(step))(*args)
  error.throw()

"nan" and "zero" change all entries of the group, even finite ones.
"""

from typing import get_args

import jax.numpy as jnp
from jax import Array
from jax.experimental import checkify

from optaxclip._base.types import NonFinite
from optaxclip._base.validation import check_choice


def check_policy(policy: str) -> NonFinite:
    """`policy`, checked to be one of the policies."""
    return check_choice(policy, get_args(NonFinite), "nonfinite")


def checkify_finite(bad: Array, name: str, leaves: list[str]) -> None:
    """Reports a group that is not finite to `checkify`.

    Args:
      bad: bool, any shape: whether the group is not finite, or which groups of an array are not.
      name: the transformation's name.
      leaves: the names of the group's leaves.
    """
    fine = ~jnp.any(bad)
    text = f"{name}: the gradient norm is not finite; leaves: {', '.join(leaves)}"
    # Without `checkify`, JAX 0.10.2 raises its own error when it compiles the check, and no code of
    # ours can change that message. But the traceback shows the next line, with its comment.
    checkify.check(fine, text)  # error, out = jit(checkify.checkify(step))(*args); error.throw()

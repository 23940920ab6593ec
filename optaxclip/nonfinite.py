"""Policies for groups with a non-finite norm.

  policy    | the group becomes | use it for
  ----------|-----------|--------------------------------------------------------------
  `"nan"`   | all NaN   | failing visibly, and for `optax.apply_if_finite` around the chain
  `"zero"`  | all 0     | continuing without the gradient (Adam's moments still decay)
  `"mask"`  | non-finite elements 0, the others clipped by their norm | a few non-finite elements
  `"error"` | a `checkify` error with the names of the leaves | debugging

The policy "error" requires two lines of `checkify` around a compiled step. Without them, JAX does
not compile the step::

  error, out = jax.jit(checkify.checkify(step))(*args)
  error.throw()

"nan" and "zero" change all elements of the group, also the finite ones.
"""

from typing import get_args

import jax.numpy as jnp
from jax import Array
from jax.experimental import checkify

from optaxclip._base.types import NonFinite
from optaxclip._base.validation import check_choice


def check_policy(policy: str) -> NonFinite:
    """Checks that `policy` is one of the policies."""
    return check_choice(policy, get_args(NonFinite), "nonfinite")


def checkify_finite(bad: Array, name: str, leaves: list[str]) -> None:
    """Reports a non-finite group to `checkify`.

    Args:
      bad: Flags of the non-finite groups, of any shape.
      name: The name of the transformation.
      leaves: The names of the leaves of the group.
    """
    good = ~jnp.any(bad)
    text = f"{name}: the gradient norm is not finite; leaves: {', '.join(leaves)}"
    # Without `checkify`, JAX raises its own error when it compiles the check (as of JAX 0.10.2),
    # and the message cannot be changed. The traceback shows the next line with its comment.
    checkify.check(good, text)  # error, out = jit(checkify.checkify(step))(*args); error.throw()

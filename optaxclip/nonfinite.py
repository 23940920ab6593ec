"""Policies for groups with a non-finite norm.

  policy    | effect on the group             | purpose
  ----------|---------------------------------|---------------------------------------------------
  `"nan"`   | sets all elements to NaN        | makes failures visible, also to a skip wrapper
  `"zero"`  | sets all elements to 0          | ignores the gradient (Adam's moments still decay)
  `"mask"`  | sets non-finite elements to 0 and clips the result | ignores the non-finite elements
  `"error"` | reports the names of its leaves | helps with debugging

The policy "error" reports errors through `checkify`. Under `jit`, you must transform the step,
because JAX does not compile it otherwise::

  error, out = jax.jit(checkify.checkify(step))(*args)
  error.throw()
"""

from typing import get_args

import jax.numpy as jnp
from jax import Array
from jax.experimental import checkify

from optaxclip._base.types import NonFinite
from optaxclip._base.validation import check_choice


def check_policy(policy: str) -> NonFinite:
    """Checks that the policy is known and returns it."""
    return check_choice(policy, get_args(NonFinite), "nonfinite")


def checkify_finite(bad: Array, name: str, leaves: list[str]) -> None:
    """Reports non-finite groups with these leaves to `checkify`. `bad` has any shape."""
    good = ~jnp.any(bad)
    names = ", ".join(leaves)
    text = f"{name}: the gradient norm is NaN or infinite for the leaves {names}"
    # Without `checkify`, JAX raises its own error when it compiles the check (as of JAX 0.10.2).
    # That message cannot be changed, but the traceback shows the next line with its comment.
    checkify.check(good, text)  # error, out = jit(checkify.checkify(step))(*args); error.throw()

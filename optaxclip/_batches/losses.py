"""What a user's loss returns, checked."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Array

from optaxclip._base.numerics import is_real
from optaxclip._base.types import PyTree
from optaxclip._batches.modules import call_loss


def loss_and_aux(
    loss_fn: Callable[..., Any],
    args: list[Any],
    keywords: dict[str, Any],
    *,
    has_aux: bool,
    description: str,
) -> tuple[Array, PyTree]:
    """The loss, `[]`, which messages describe by `of`, and aux; None without `has_aux`."""
    found: Any = call_loss(loss_fn, args, keywords)
    if has_aux and not (isinstance(found, tuple) and len(found) == 2):
        raise TypeError(f"with has_aux loss_fn must return (loss, aux), got {found!r:.80}")
    value: Any = found[0] if has_aux else found
    if not is_real(value):
        hint = "; pass has_aux=True" if isinstance(value, tuple) else ""
        raise TypeError(f"loss_fn must return a real loss, got {value!r:.80}{hint}")
    if jnp.shape(value) != ():
        raise ValueError(
            f"loss_fn must return a scalar, {description}; got {describe_array(value)}"
        )
    if not jnp.issubdtype(jnp.result_type(value), jnp.floating):
        raise TypeError(f"loss_fn must return a real float, got {describe_array(value)}")
    return jnp.asarray(value), found[1] if has_aux else None


def describe_array(value: Any) -> str:
    """The shape and dtype of an array, for a message."""
    return f"shape {jnp.shape(value)} and dtype {jnp.result_type(value)}"

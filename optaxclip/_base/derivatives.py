"""Custom derivative rules that are valid inside loops."""

from collections.abc import Callable
from typing import Any, TypeVar

import jax

Result = TypeVar("Result")


def custom_jvp(
    *, nondiff_argnums: tuple[int, ...] = ()
) -> Callable[[Callable[..., Result]], "jax.custom_jvp[Result]"]:
    """Decorates a function like `jax.custom_jvp`, with a rule that is valid inside loops.

    When JAX differentiates a `scan` in reverse mode, it moves loop-invariant operations out of the
    loop, and replaces the remaining `jax.custom_jvp` functions by their operations (as of JAX
    0.10.2). A second derivative then differentiates these operations without the rule, and is often
    wrongly 0. However, JAX does not replace functions inside `jax.checkpoint`. A policy that saves
    all values recomputes nothing and does not change the compiled program.

    Note that a rule must call the decorated function.
    """

    def decorate(fn: Callable[..., Result]) -> "jax.custom_jvp[Result]":
        with_rule = jax.custom_jvp(fn, nondiff_argnums)
        decorated: Any = jax.checkpoint(
            with_rule,
            prevent_cse=False,
            policy=jax.checkpoint_policies.everything_saveable,
            static_argnums=nondiff_argnums,
        )
        decorated.defjvp = with_rule.defjvp
        return decorated

    return decorate

"""Functions with derivatives of their own, which JAX uses inside loops too."""

from collections.abc import Callable
from typing import Any, ParamSpec, Protocol, TypeVar

import jax

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result", covariant=True)


class CustomJvp(Protocol[Arguments, Result]):
    """A function with a derivative of its own; arguments go by position."""

    def __call__(self, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        """What the function returns."""
        ...

    def defjvp(self, rule: Callable[..., Any]) -> Callable[..., Any]:
        """Defines the derivative, as `defjvp` of `jax.custom_jvp` does."""
        ...


def custom_jvp(
    *, nondiff_argnums: tuple[int, ...] = ()
) -> Callable[[Callable[Arguments, Result]], CustomJvp[Arguments, Result]]:
    """`jax.custom_jvp`, whose rule is not lost where a loop is differentiated a second time.

    When JAX (0.10.2) differentiates a `scan` in reverse mode, it moves out of the loop what is the
    same in all steps, and replaces each `custom_jvp` function in what is left by the operations
    inside. A second derivative is then that of these operations: wrong, and often 0, where a rule
    is needed. JAX leaves a function inside of `jax.checkpoint` as it is. With a policy that saves
    all values, `jax.checkpoint` repeats nothing, and the compiled program is the same.

    A rule has to call the decorated function, not what is inside.

    Args:
      nondiff_argnums: the positions of arguments that are not differentiated, which are hashable.
    """

    def decorate(fn: Callable[Arguments, Result]) -> CustomJvp[Arguments, Result]:
        ruled = jax.custom_jvp(fn, nondiff_argnums)
        kept: Any = jax.checkpoint(
            ruled,
            prevent_cse=False,
            policy=jax.checkpoint_policies.everything_saveable,
            static_argnums=nondiff_argnums,
        )
        kept.defjvp = ruled.defjvp
        return kept

    return decorate

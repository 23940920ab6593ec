"""Functions with derivatives of their own, which JAX uses inside loops too."""

from collections.abc import Callable
from typing import Any, ParamSpec, Protocol, TypeVar

import jax

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result", covariant=True)


class CustomJvp(Protocol[Arguments, Result]):
    """A function with a derivative of its own; it is called with positional arguments."""

    def __call__(self, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        """Calls the function."""
        ...

    def defjvp(self, rule: Callable[..., Any]) -> Callable[..., Any]:
        """Defines the derivative, as `defjvp` of `jax.custom_jvp` does."""
        ...


def custom_jvp(
    *, nondiff_argnums: tuple[int, ...] = ()
) -> Callable[[Callable[Arguments, Result]], CustomJvp[Arguments, Result]]:
    """`jax.custom_jvp` with a rule that is not lost if a loop is differentiated a second time.

    When JAX (0.10.2) differentiates a `scan` in reverse mode, it moves out of the loop what is the
    same in all steps, and replaces each `jax.custom_jvp` function in the rest by the operations
    inside of it. A second derivative is then the derivative of these operations, which is wrong,
    and often 0, if the rule is needed. JAX does not replace functions inside of `jax.checkpoint`.
    With a policy that saves all values, it repeats nothing, and the compiled program is the same.

    A rule has to call the decorated function, not the undecorated one.
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

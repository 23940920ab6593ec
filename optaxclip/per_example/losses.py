"""A loss of one example, as a function of its measured parameters and of the example."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from optaxclip._base.trees import FlatTree, flatten
from optaxclip._base.types import PyTree
from optaxclip._batches.cutting import number_of_examples
from optaxclip._batches.roles import Roles


@dataclasses.dataclass(frozen=True, eq=False)
class Loss:
    """A user's loss and the arguments of one call.

    Attributes:
      loss_fn: the loss of one example.
      has_aux: whether the loss has an auxiliary output.
      roles: the arguments.
      keywords: arguments that are the same for every example.
      params: the parameters.
    """

    loss_fn: Callable[..., Any]
    has_aux: bool
    roles: Roles
    keywords: dict[str, Any]
    params: FlatTree

    @classmethod
    def of(
        cls, loss_fn: Callable[..., Any], has_aux: bool, roles: Roles, keywords: dict[str, Any]
    ) -> "Loss":
        """The loss with the arguments of a call."""
        return cls(loss_fn, has_aux, roles, keywords, flatten(roles.params, "params"))

    @property
    def examples(self) -> int:
        """The number of examples."""
        return number_of_examples(flatten(self.roles.batch, "the batch"), "the batch")

    def __call__(self, measured: list[Any], example: tuple[Any, ...]) -> Any:
        """Returns the loss of one example: a scalar, or with `has_aux` a pair.

        Raises:
          TypeError: if the loss does not return a pair in spite of `has_aux`.
          ValueError: if the loss is not a scalar.
        """
        args = self.roles.with_values(self.params.rebuild(measured), example)
        found: Any = self.loss_fn(*args, **self.keywords)
        if self.has_aux and not (isinstance(found, tuple) and len(found) == 2):
            raise TypeError(f"with has_aux loss_fn must return (loss, aux), got {found!r:.80}")
        value: Any = found[0] if self.has_aux else found
        shape = jnp.shape(value)
        if shape != ():
            raise ValueError(
                f"loss_fn must return a scalar, the loss of one example, got shape {shape}. It is "
                "called with one example, without the axis of examples: sum over the other axes"
            )
        return found

    def split(self, found: Any) -> tuple[Any, PyTree]:
        """The losses and the auxiliary outputs, from what the loss returned for all examples."""
        return found if self.has_aux else (found, None)

    def value_and_grad(
        self, measured: list[Any], example: tuple[Any, ...]
    ) -> tuple[Any, list[Any]]:
        """What the loss returns for one example, and its gradient."""
        return jax.value_and_grad(self, has_aux=self.has_aux)(measured, example)

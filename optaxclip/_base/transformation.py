"""An Optax transformation whose state has a known type."""

from typing import Any, Generic, Protocol, TypeVar

import optax

from optaxclip._base.types import PyTree

State = TypeVar("State", covariant=True)


class Init(Protocol[State]):
    """`init(params) -> state`."""

    def __call__(self, params: PyTree) -> State:
        """The state before the first step."""
        ...


class Update(Protocol[State]):
    """`update(updates, state, params, **extra_args) -> (updates, state)`."""

    def __call__(
        self, updates: PyTree, state: Any, params: PyTree | None = None, **extra_args: Any
    ) -> tuple[Any, State]:
        """One step."""
        ...


class Transformation(optax.GradientTransformationExtraArgs, Generic[State]):
    """As Optax's own, which says of its state no more than that it is some pytree.

    With it an editor knows the fields of `state` after `updates, state = tx.update(...)`.
    """

    # A field of a named tuple is never assigned, so it may be narrower than the parent's.
    init: Init[State]  # pyright: ignore[reportIncompatibleVariableOverride]
    update: Update[State]  # pyright: ignore[reportIncompatibleVariableOverride]

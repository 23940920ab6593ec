"""Optax transformations whose state is typed, and that take arrays in any memory."""

import functools
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

import optax

import optaxclip._border.devices as devices
from optaxclip._base.states import refuse_state_as_updates
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
    """Optax's transformation with the type of its state, which Optax only calls a pytree.

    So an editor knows the fields of `state` after `updates, state = tx.update(...)`.
    """

    # A field of a named tuple is never assigned, so it may be narrower than the parent's.
    init: Init[State]  # pyright: ignore[reportIncompatibleVariableOverride]
    update: Update[State]  # pyright: ignore[reportIncompatibleVariableOverride]


def transformation(init: Init[State], update: Update[State]) -> Transformation[State]:
    """A transformation from its two functions, whose states and arrays may lie anywhere.

    Arrays in other memories are moved to the device's memory for the step, because JAX does not
    compute with arrays in different memories; results are moved back to where the arrays were.
    """

    @functools.wraps(init)
    def init_on_mesh(params: PyTree) -> State:
        return devices.typed_like(init(params), params)

    @functools.wraps(update)
    def update_on_device(
        updates: PyTree, state: Any, params: PyTree | None = None, **extra_args: Any
    ) -> tuple[Any, State]:
        arguments, back = devices.brought(updates, state, params, extra_args)
        new_updates, new_state = back(*update(*arguments[:3], **arguments[3]))
        return new_updates, new_state

    of_state: Any = Transformation(init_on_mesh, update_on_device)  # pyright: ignore[reportArgumentType]
    return of_state


def stateless(update: Callable[..., Any]) -> Transformation[Any]:
    """A transformation without a state: its update takes any state and returns it as it is.

    Args:
      update: `update(updates, params, **extra_args) -> updates`.
    """

    def init(params: PyTree) -> optax.EmptyState:
        del params
        return optax.EmptyState()

    def handing_back(
        updates: PyTree, state: Any, params: PyTree | None = None, **extra_args: Any
    ) -> tuple[Any, Any]:
        refuse_state_as_updates(updates, optax.EmptyState, "update")
        return update(updates, params, **extra_args), state

    return transformation(init, handing_back)

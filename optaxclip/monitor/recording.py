"""The norms of the last steps, kept on the device."""

from typing import Any, NamedTuple, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import optaxclip.scopes as scopes
from optaxclip._base.arguments import check_state, checked_int
from optaxclip._base.counters import increased
from optaxclip._base.names import Names
from optaxclip._base.numerics import narrowed, promoted, safe_divide
from optaxclip._base.transformation import Transformation, transformation
from optaxclip._base.trees import FlatTree, flatten
from optaxclip._base.types import PyTree
from optaxclip._engine.checks import matching_params
from optaxclip._engine.clip import groups_of
from optaxclip._engine.options import Options, PlaceOptions, takes
from optaxclip._engine.step import norms_of
from optaxclip.monitor.states import find, name_of, to_host, unboxed
from optaxclip.norms import Norm
from optaxclip.thresholds.losses import loss_among


class RecordState(NamedTuple):
    """State of `record`.

    Attributes:
      steps: int32[], steps so far.
      name: the transformation's name, as a tuple of one.
      names: the norms' names in order.
      ring: float32[window] or, per leaf, float32[window, leaves]; step n is in row `n % window`.
    """

    steps: Array
    name: Names
    names: Names
    ring: Array


@takes(PlaceOptions)
def record(
    window: int = 1000,
    per_leaf: bool = False,
    *,
    loss: bool = False,
    norm: str | Norm = "l2",
    ratio: bool = False,
    **options: Unpack[PlaceOptions],
) -> Transformation[RecordState]:
    """Keeps the norms, or losses, of the last steps on the device; updates pass through untouched.

    As the first stage of a chain it records the norms of the raw gradients, also those that are not
    finite; inside a skip it records only the steps that were taken. Nothing is sent to the host
    until `history` asks for it. It works under `jit`, in `scan` and under `vmap`.

    As the last stage of a chain, with `ratio=True`, it records how far each step moves the weights,
    as a share of their own norm; usual is about 1e-3. Spikes of this ratio come before spikes of
    the loss.

    Args:
      window: how many steps to keep.
      per_leaf: whether each leaf has a norm of its own (NaN where the leaf is None at a step); else
        the whole tree has one.
      loss: whether the loss is kept in place of norms: what the update is given as `value=`,
        or `loss=`.
      norm: the norm, as in `optaxclip.clip_by`.
      ratio: whether norms are divided by those of the parameters, which the update then needs. For
        parameters that are all zero the ratio is infinite, or 0 if nothing moves them.
      **options: those that all transformations share, `optaxclip.PlaceOptions`; by its name
        `history` chooses among several records.

    Returns:
      A transformation with a `RecordState`. Its update returns the updates as they are.

    Raises:
      ValueError: if `window` is less than 1, for an unknown norm, or for `loss` with `per_leaf` or
        `ratio`; when used, for `ratio` without `params`, or for a missing loss or one that is no
        scalar.
      TypeError: if `window` is not an int, or the loss no number.

    Example:
      >>> import jax.numpy as jnp, optax, optaxclip
      >>> tx = optax.chain(record(window=2), optaxclip.clip_by_global_norm(1.0))
      >>> state = tx.init(jnp.zeros(2))
      >>> for size in (1.0, 2.0, 3.0):
      ...     updates, state = tx.update(jnp.array([0.0, size]), state)
      >>> print(history(state))
      [2. 3.]
      >>> tx = optax.chain(optax.sgd(0.1), record(ratio=True))
      >>> params = jnp.full(2, 10.0)
      >>> _, state = tx.update(jnp.ones(2), tx.init(params), params)
      >>> print(history(state))
      [0.01]
    """
    window = checked_int(window, 1, "window")
    checked, scope = Options.checked(norm=norm, **options), scopes.tree()
    if per_leaf:
        scope = scopes.leaf()
    name = checked.name
    if loss and (per_leaf or ratio):
        raise ValueError(
            "loss cannot be kept with per_leaf or ratio: chain a second record for those"
        )

    def init(params: PyTree) -> RecordState:
        names = Names(("loss",)) if loss else scope(flatten(params, "params")).names
        ring = jnp.zeros((window, len(names)) if per_leaf else window, jnp.float32)
        return RecordState(jnp.zeros((), jnp.int32), Names((name,)), names, ring)

    def update(
        updates: PyTree, state: Any, params: PyTree | None = None, **extra_args: Any
    ) -> tuple[PyTree, RecordState]:
        state = init(updates) if state is None else state
        check_state(state, RecordState, name)
        if loss:
            now = loss_among(extra_args, name)
            steps, ring = _written(state.steps, state.ring, now, None)
            return updates, state._replace(steps=steps, ring=ring)
        flat = flatten(updates, "updates")
        known = (state.names, state.ring.shape[-1]) if per_leaf else ()
        groups = groups_of(flat, scope, checked, *known)
        norms = norms_of(flat, groups, checked.norm)
        of_weights = None
        if ratio:
            weights = _weights(flat, params, name)
            of_weights = norms_of(weights, groups_of(weights, scope, checked, *known), checked.norm)
        steps, ring = _written(state.steps, state.ring, norms, of_weights)
        return updates, state._replace(steps=steps, names=groups.grouping.names, ring=ring)

    return transformation(init, update)


def history(opt_state: PyTree, name: str | None = None) -> np.ndarray[Any, np.dtype[np.float32]]:
    """The norms that `record` kept, the oldest first.

    Args:
      opt_state: any pytree that holds the state, as in `read`.
      name: which record, if there are several: the `name=` that `record` was given.

    Returns:
      float32[steps], or float32[steps, leaves] of `record(per_leaf=True)`, with a column for each
      of `history_names`: all steps so far, or the last `window` of them. In NumPy, after one
      `jax.device_get`.

    Raises:
      ValueError: if no record has the name, or several have.
      TypeError: under `jit`, `vmap` or `grad`, where there are no numbers yet.

    Example:
      >>> import jax.numpy as jnp
      >>> tx = record(per_leaf=True)
      >>> grads = {"w": jnp.array([3.0, 4.0]), "b": jnp.array([2.0])}
      >>> _, state = tx.update(grads, tx.init(grads))
      >>> print(history_names(state), history(state))
      ('b', 'w') [[2. 5.]]
    """
    state = _only_record(opt_state, name)
    steps, ring = to_host((unboxed(state.steps), unboxed(state.ring)), "history")
    if np.ndim(steps):
        one = "jax.tree.map(lambda x: x[0], opt_state)"
        raise ValueError(f"history takes one state, got {steps.size} under vmap; pass {one}")
    # The oldest row of a full ring is the one to be written next.
    return np.roll(ring[:steps], -(steps % len(ring)), axis=0)


def history_names(opt_state: PyTree, name: str | None = None) -> tuple[str, ...]:
    """The names of the norms in `history`: those of the leaves, `("tree",)`, or `("loss",)`.

    Args:
      opt_state: as in `history`.
      name: as in `history`.

    Returns:
      A tuple with a name for each column of `history`.

    Raises:
      ValueError: if no record has the name, or several have.

    Example:
      >>> import jax.numpy as jnp
      >>> history_names(record(per_leaf=True).init({"w": jnp.zeros(2), "b": jnp.zeros(1)}))
      ('b', 'w')
    """
    state = _only_record(opt_state, name)
    if not state.names and unboxed(state.ring).size:
        raise ValueError(
            "the record has lost the names of its norms, which Flax and optax.tree_map_params do "
            "not keep: pass the nnx.Optimizer in place of its nnx.state, or the state after "
            "another step"
        )
    return tuple(state.names)


def _only_record(opt_state: PyTree, name: str | None) -> RecordState:
    records = find(opt_state, RecordState)
    fitting = [state for state in records.values() if name in (None, name_of(state))]
    if len(fitting) == 1:
        return fitting[0]
    which = "" if name is None else f" named {name!r}"
    raise ValueError(
        f"the state must hold one record{which}, it holds {len(fitting)}; all its records: "
        f"{list(records)}. Give each record its own name=, and history the one that you want"
    )


def _weights(flat: FlatTree, params: PyTree | None, name: str) -> FlatTree:
    if params is None:
        raise ValueError(
            f"{name}: ratio=True divides by the norms of the parameters; pass them: "
            "update(updates, state, params)"
        )
    return matching_params(flat, params, name)


@jax.jit
def _written(
    steps: Array, ring: Array, norms: Array, of_weights: Array | None
) -> tuple[Array, Array]:
    """The ring with one more row."""
    rows = len(ring)
    if of_weights is not None:
        norms, of_weights = promoted([norms, of_weights])
        norms = safe_divide(norms, of_weights, jnp.where(norms > 0, jnp.inf, norms))
    return increased(steps, period=rows), ring.at[steps % rows].set(narrowed(norms, ring.dtype))

"""Skips a step of an optimizer by a selection of old and new values.

The optimizer runs at every step, and its results are dropped after a skip. So norms in it share a
pass over the gradients with the skip, no device waits for a norm, and no branch copies the state.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.core import Tracer, eval_jaxpr

import optaxclip._backend.meshes as meshes
from optaxclip._backend.global_view import global_view
from optaxclip._base.numerics import match_weak_type, select
from optaxclip._base.programs import extract_piece, is_literal, last_uses
from optaxclip._base.types import PyTree

Step = Callable[..., tuple[PyTree, PyTree]]
"""From updates, a state and any other operands to new updates and a new state."""


def skip_step(
    skip: Array, step: Step, updates: PyTree, state: PyTree, *others: PyTree
) -> tuple[PyTree, PyTree]:
    """`step(updates, state, *others)`; zero updates and the old state where `skip` is True.

    Results have the dtypes and structure that the step gives them; PRNG keys and `float0` leaves
    among the new updates are returned unchanged.

    On a CPU, the step's own program goes on with the selected state instead of the new one. So XLA
    (JAX 0.10.2) computes, selects and stores a moment in one loop, in the memory of the old one.
    With selections after the step, it stores the new moments elsewhere, and selects in further
    loops: a skip around AdamW then adds 1.2 to 2 times the step's time, instead of 0.3 to 0.5.
    """
    operands = (updates, state, *others)
    leaves, treedef = jax.tree.flatten(operands)
    traced = {i: leaf for i, leaf in enumerate(leaves) if isinstance(leaf, Tracer)}
    if not meshes.is_being_staged([x for x in (skip, *traced.values()) if isinstance(x, Tracer)]):
        return select_results(skip, state, *step(*operands))

    def step_of(traced: dict[int, Array]) -> tuple[PyTree, PyTree]:
        return step(*treedef.unflatten([traced.get(i, leaf) for i, leaf in enumerate(leaves)]))

    program, results = jax.make_jaxpr(step_of, return_shape=True)(traced)
    if program.effects:
        # Errors of `checkify` and prints show what the step computes from its new state.
        return select_results(skip, state, *step(*operands))
    of_updates, of_state = map(jax.tree.structure, results)
    count, old = of_updates.num_leaves, of_state.flatten_up_to(state)

    def select_after(skip: Array, values: list[Array]) -> tuple[PyTree, PyTree]:
        outputs = eval_jaxpr(program.jaxpr, program.consts, *values)
        new = of_updates.unflatten(outputs[:count]), of_state.unflatten(outputs[count:])
        return select_results(skip, state, *new)

    def select_within(skip: Array, values: list[Array]) -> tuple[PyTree, PyTree]:
        outputs = _run_with_selected_state(skip, program, values, count, old)
        new_updates = tree_zero_where(skip, of_updates.unflatten(outputs[:count]))
        return new_updates, of_state.unflatten(outputs[count:])

    values = list(traced.values())
    return lax.platform_dependent(skip, values, cpu=select_within, default=select_after)


def select_results(
    skip: Array, state: PyTree, new_updates: PyTree, new_state: PyTree
) -> tuple[PyTree, PyTree]:
    """Zero updates and the old state where `skip` is True, else what the step gave."""
    return tree_zero_where(skip, new_updates), tree_where(skip, state, new_state)


def _run_with_selected_state(
    skip: Array, program: Any, values: list[Any], num_updates: int, state: list[Any]
) -> list[Any]:
    """The outputs of a program that goes on with leaves of `state` after a skip.

    The first outputs are updates, and the others are in the order of `state`.
    """
    jaxpr = program.jaxpr
    known = dict(zip(jaxpr.constvars, program.consts, strict=True))
    known |= dict(zip(jaxpr.invars, values, strict=True))
    pairs = list(zip(jaxpr.outvars[num_updates:], state, strict=True))
    computed = {v for eqn in jaxpr.eqns for v in eqn.outvars}
    old = {v: x for v, x in pairs if not is_literal(v) and v in computed and _has_type_of(v, x)}
    used_until, eqns = last_uses(jaxpr), []
    for number, eqn in enumerate(jaxpr.eqns):
        eqns.append(eqn)
        outputs = [v for v in eqn.outvars if v in old]
        if outputs or eqn is jaxpr.eqns[-1]:
            piece = extract_piece(eqns, number, used_until)
            known.update(zip(piece.outputs, piece.run(known), strict=True))
            known |= {v: _where(skip, old[v], known[v]) for v in outputs}
            eqns = []
    found = [v.val if is_literal(v) else known[v] for v in jaxpr.outvars]
    of_state = zip(pairs, found[num_updates:], strict=True)
    return [
        *found[:num_updates],
        *(
            y if not is_literal(v) and old.get(v) is x else _where_leaf(skip, x, y)
            for (v, x), y in of_state
        ),
    ]


def _has_type_of(variable: Any, x: Any) -> bool:
    """Whether a variable is an array of the type of `x`, with axes: scalars cost no loop."""
    return bool(jnp.ndim(x)) and not is_nonnumeric(x) and variable.aval == jax.typeof(x)


def tree_where(where: Array, old: PyTree, new: PyTree) -> PyTree:
    """`old` where `where` is True, else `new`, in the dtypes and structure of `new`."""
    return jax.tree.map(lambda y, x: _where_leaf(where, x, y), new, old)


def _where_leaf(where: Array, x: Any, y: Any) -> Any:
    if getattr(y, "dtype", None) == jax.dtypes.float0:
        return y
    return jnp.where(where, x, y) if is_nonnumeric(y) else _where(where, x, y)


def tree_zero_where(where: Array, tree: PyTree) -> PyTree:
    """Zeros where `where` is True, else the tree; PRNG keys and `float0` leaves stay."""
    return jax.tree.map(lambda x: x if is_nonnumeric(x) else _zero_where(where, x), tree)


# A compiled function of its own, so that it is traced once for leaves that are alike.
@jax.jit
def _zero_where(where: Array, x: Array) -> Array:
    return match_weak_type(select(where, 0, x), x)


@global_view(out_like="y")
def _where(where: Array, x: Array, y: Array) -> Array:
    chosen = lax.select(where, x.astype(y.dtype), y)
    # The weak type stays: if a state's type changed, the next step would be compiled again.
    return match_weak_type(chosen, x) if x.dtype == y.dtype else chosen


def is_nonnumeric(x: Any) -> bool:
    """Whether a leaf has no numbers to compute with: `float0` or a PRNG key."""
    dtype = getattr(x, "dtype", None)
    if dtype is None:
        return False
    return dtype == jax.dtypes.float0 or jnp.issubdtype(dtype, jax.dtypes.extended)

"""Skips a step of an optimizer by selecting between old and new values.

The optimizer runs on every step, and its results are discarded if the step is skipped. Therefore,
norms inside the optimizer can share a pass over the gradients with the check, no device waits for a
norm, and no branch copies the state.
"""

import functools
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
"""A function from updates, a state and optional operands to new updates and a new state."""


def skip_step(
    skip: Array, step: Step, updates: PyTree, state: PyTree, *extra: PyTree
) -> tuple[PyTree, PyTree]:
    """Runs `step`, and returns zero updates and the old state where `skip` is True.

    The results have the dtypes and structure of the step's results. PRNG keys and `float0` leaves
    of the updates are returned unchanged.

    On CPUs, the step continues with the selected state instead of the new state. XLA can then
    compute, select, and write a moment in a single loop, in the memory of the old moment (as of JAX
    0.10.2). Otherwise, it would need separate memory and additional loops, and skipping around
    AdamW would add 1.2 to 2 times the duration of the step, instead of 0.3 to 0.5 times.
    """
    operands = (updates, state, *extra)
    leaves, treedef = jax.tree.flatten(operands)
    traced = {i: leaf for i, leaf in enumerate(leaves) if isinstance(leaf, Tracer)}
    if not meshes.is_being_staged([x for x in (skip, *traced.values()) if isinstance(x, Tracer)]):
        return select_results(skip, state, *step(*operands))

    # Only traced leaves are inputs of the program. The remaining leaves are constants.
    program, results = jax.make_jaxpr(
        lambda traced: step(*treedef.unflatten([traced.get(i, x) for i, x in enumerate(leaves)])),
        return_shape=True,
    )(traced)
    if program.effects:
        # Errors of `checkify` and debug prints must show values of the new state.
        return select_results(skip, state, *step(*operands))
    of_updates, of_state = map(jax.tree.structure, results)
    count, old = of_updates.num_leaves, of_state.flatten_up_to(state)

    def run_program(
        skip: Array, values: list[Array], *, select_inside: bool
    ) -> tuple[PyTree, PyTree]:
        if select_inside:
            outputs = _run_with_selected_state(skip, program, values, count, old)
        else:
            outputs = eval_jaxpr(program.jaxpr, program.consts, *values)
        new_updates = of_updates.unflatten(outputs[:count])
        new_state = of_state.unflatten(outputs[count:])
        if select_inside:
            return tree_zero_where(skip, new_updates), new_state
        return select_results(skip, state, new_updates, new_state)

    on_cpu, default = (functools.partial(run_program, select_inside=x) for x in (True, False))
    return lax.platform_dependent(skip, list(traced.values()), cpu=on_cpu, default=default)


def select_results(
    skip: Array, state: PyTree, new_updates: PyTree, new_state: PyTree
) -> tuple[PyTree, PyTree]:
    """Returns zero updates and the old state where `skip` is True, and the new values otherwise."""
    return tree_zero_where(skip, new_updates), tree_where(skip, state, new_state)


def _run_with_selected_state(
    skip: Array, program: Any, values: list[Any], num_updates: int, state: list[Any]
) -> list[Any]:
    """Runs a program that continues with leaves of `state` if the step is skipped."""
    jaxpr = program.jaxpr
    known = dict(zip(jaxpr.constvars, program.consts, strict=True))
    known |= dict(zip(jaxpr.invars, values, strict=True))
    pairs = list(zip(jaxpr.outvars[num_updates:], state, strict=True))
    computed = {v for eqn in jaxpr.eqns for v in eqn.outvars}
    # Scalars are selected after the program, because a selection of a scalar needs no loop.
    arrays = [(v, x) for v, x in pairs if not is_literal(v) and jnp.ndim(x) > 0]
    arrays = [(v, x) for v, x in arrays if v in computed and not is_nonnumeric(x)]
    old = {v: x for v, x in arrays if v.aval == jax.typeof(x)}
    used_until, eqns = last_uses(jaxpr), []
    for number, eqn in enumerate(jaxpr.eqns):
        eqns.append(eqn)
        outputs = [v for v in eqn.outvars if v in old]
        # A piece ends at a leaf of the state, so later pieces use the selected leaf.
        if outputs or eqn is jaxpr.eqns[-1]:
            piece = extract_piece(eqns, number, used_until)
            known.update(zip(piece.outputs, piece.run(known), strict=True))
            known |= {v: _where(skip, old[v], known[v]) for v in outputs}
            eqns = []
    found = [v.val if is_literal(v) else known[v] for v in jaxpr.outvars]
    new_state = [
        y if not is_literal(v) and old.get(v) is x else _where_leaf(skip, x, y)
        for (v, x), y in zip(pairs, found[num_updates:], strict=True)
    ]
    return found[:num_updates] + new_state


def tree_where(where: Array, old: PyTree, new: PyTree) -> PyTree:
    """Selects `old` where `where` is True, in the dtypes and structure of `new`."""
    return jax.tree.map(lambda y, x: _where_leaf(where, x, y), new, old)


def _where_leaf(where: Array, x: Any, y: Any) -> Any:
    if getattr(y, "dtype", None) == jax.dtypes.float0:
        return y
    return jnp.where(where, x, y) if is_nonnumeric(y) else _where(where, x, y)


def tree_zero_where(where: Array, tree: PyTree) -> PyTree:
    """Sets leaves to 0 where `where` is True, except for PRNG keys and `float0` leaves."""
    return jax.tree.map(lambda x: x if is_nonnumeric(x) else _zero_where(where, x), tree)


# Jitted so that leaves with the same shape and dtype share one trace.
@jax.jit
def _zero_where(where: Array, x: Array) -> Array:
    return match_weak_type(select(where, 0, x), x)


@global_view(out_like="y")
def _where(where: Array, x: Array, y: Array) -> Array:
    chosen = lax.select(where, x.astype(y.dtype), y)
    # If the weak type of a state changed, JAX would compile the next step again.
    return match_weak_type(chosen, x) if x.dtype == y.dtype else chosen


def is_nonnumeric(x: Any) -> bool:
    """Returns `True` for `float0` leaves and PRNG keys, which do not support arithmetic."""
    dtype = getattr(x, "dtype", None)
    if dtype is None:
        return False
    return dtype == jax.dtypes.float0 or jnp.issubdtype(dtype, jax.dtypes.extended)

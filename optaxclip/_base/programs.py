"""Splits traced programs (jaxprs) into pieces that run in sequence."""

import functools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.extend.core as jex
from jax.core import eval_jaxpr


class Piece(NamedTuple):
    """A part of a program as a separate program, with its input and output variables."""

    inputs: list[Any]
    outputs: list[Any]
    program: jex.Jaxpr

    def run(self, known: dict[Any, Any]) -> list[Any]:
        """Returns the values of the outputs, given the values of the inputs."""
        return eval_jaxpr(self.program, (), *(known[v] for v in self.inputs))


def is_literal(atom: Any) -> bool:
    """Returns `True` if an operand is a constant inside the program."""
    return isinstance(atom, jex.Literal)


def variables(atoms: Iterable[Any]) -> list[Any]:
    """Returns the operands that are not constants."""
    return [atom for atom in atoms if not is_literal(atom)]


def last_uses(program: jex.Jaxpr) -> dict[Any, int]:
    """Returns the number of the last equation that uses a variable, for all variables."""
    uses = {v: i for i, eqn in enumerate(program.eqns) for v in variables(eqn.invars)}
    return uses | dict.fromkeys(variables(program.outvars), len(program.eqns))


def extract_piece(eqns: Sequence[Any], last: int, used_until: dict[Any, int]) -> Piece:
    """Makes a piece of equations up to number `last`, with outputs that later equations use."""
    defined = dict.fromkeys(v for eqn in eqns for v in eqn.outvars)
    used = dict.fromkeys(v for eqn in eqns for v in variables(eqn.invars))
    inputs = [v for v in used if v not in defined]
    outputs = [v for v in defined if used_until.get(v, -1) > last]
    return Piece(inputs, outputs, make_program(eqns, inputs, outputs))


def make_program(eqns: Sequence[Any], inputs: Sequence[Any], outputs: Sequence[Any]) -> jex.Jaxpr:
    """Makes a program from equations of an existing program."""
    effects: Any = frozenset().union(*(eqn.effects for eqn in eqns))
    lists = {"invars": list(inputs), "outvars": list(outputs), "eqns": list(eqns)}
    return _empty_program().replace(**lists, effects=effects)


# Traced, because the constructor requires debug info (as of JAX 0.10.2).
_empty_program = functools.cache(lambda: jax.make_jaxpr(lambda: ())().jaxpr)

"""Parts of traced programs, which can be run one after another."""

import functools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.extend.core as jex
from jax.core import eval_jaxpr


class Piece(NamedTuple):
    """Consecutive equations of a program as a program, and the variables that enter and leave."""

    inputs: list[Any]
    outputs: list[Any]
    program: jex.Jaxpr

    def run(self, known: dict[Any, Any]) -> list[Any]:
        """The values of the outputs, from those of the inputs."""
        return eval_jaxpr(self.program, (), *(known[v] for v in self.inputs))


def is_literal(atom: Any) -> bool:
    """Whether an operand is a constant inside of the program."""
    return isinstance(atom, jex.Literal)


def variables(atoms: Iterable[Any]) -> list[Any]:
    """The operands that are no constants."""
    return [atom for atom in atoms if not is_literal(atom)]


def last_uses(program: jex.Jaxpr) -> dict[Any, int]:
    """For each variable, the number of the last equation that uses it."""
    found = {v: i for i, eqn in enumerate(program.eqns) for v in variables(eqn.invars)}
    return found | dict.fromkeys(variables(program.outvars), len(program.eqns))


def extract_piece(eqns: Sequence[Any], last: int, used_until: dict[Any, int]) -> Piece:
    """The piece of these equations, of which `last` is the last number.

    Its outputs are the variables that later equations use, as `last_uses` shows.
    """
    defined = dict.fromkeys(v for eqn in eqns for v in eqn.outvars)
    used = dict.fromkeys(v for eqn in eqns for v in variables(eqn.invars))
    inputs = [v for v in used if v not in defined]
    outputs = [v for v in defined if used_until.get(v, -1) > last]
    return Piece(inputs, outputs, make_program(eqns, inputs, outputs))


def make_program(eqns: Sequence[Any], inputs: Sequence[Any], outputs: Sequence[Any]) -> jex.Jaxpr:
    """A program with some of the equations of another program."""
    effects: Any = frozenset().union(*(eqn.effects for eqn in eqns))
    lists = {"invars": list(inputs), "outvars": list(outputs), "eqns": list(eqns)}
    return _empty().replace(**lists, effects=effects)


@functools.cache
def _empty() -> jex.Jaxpr:
    """A traced program without equations; to construct one takes debug info (JAX 0.10.2)."""
    return jax.make_jaxpr(lambda: ())().jaxpr

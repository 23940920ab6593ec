"""References: which entries of which parameter a variable of a program holds."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.extend.core as jex
from jax import Array

import optaxclip.per_example.ghost.primitives as primitives
from optaxclip._base.programs import extract_piece, is_literal, last_uses
from optaxclip.per_example.ghost.primitives import Loop


class ReshapeOp(NamedTuple):
    """An equation that moves entries; `depth` loops around it slice the parameter."""

    depth: int
    eqn: Any
    output: int

    def apply(self, x: Array) -> Array:
        """The moved entries, with a leading axis for each loop that slices the parameter."""

        def apply_reshape(x: Array) -> Array:
            return primitives.move(self.eqn, x)[self.output]

        for _ in range(self.depth):
            apply_reshape = jax.vmap(apply_reshape)
        return apply_reshape(x)


class Interval(NamedTuple):
    """Where a parameter lies in a concatenation, along the axis of the concatenation."""

    axis: int
    start: int
    size: int


@dataclasses.dataclass(frozen=True)
class ParamSlice:
    """Says which entries of a parameter a variable holds.

    Attributes:
      leaf: the parameter's position.
      moves: how the entries were moved.
      loops: for each `scan` around, from the outermost, whether it slices the parameter.
      interval: where the entries lie in the variable, if that is a concatenation; otherwise None.
    """

    leaf: int
    moves: tuple[ReshapeOp, ...] = ()
    loops: tuple[bool, ...] = ()
    interval: Interval | None = None

    def apply(self, leaf: Array) -> Array:
        """The entries, from the parameter, with a leading axis for each loop that slices it."""
        for move in self.moves:
            leaf = move.apply(leaf)
        return leaf

    def follow_reshape(self, eqn: Any, output: int) -> "ParamSlice | None":
        """The reference of this equation's output; None if the entries cannot be followed."""
        if primitives.is_identity(eqn):
            return self
        interval = self.interval
        if interval is not None:
            axis = primitives.transpose_axis(eqn, interval.axis)
            if axis is None:
                return None
            interval = interval._replace(axis=axis)
        moves = (*self.moves, ReshapeOp(sum(self.loops), eqn, output))
        return dataclasses.replace(self, moves=moves, interval=interval)

    def place_inside_concatenate(self, axis: int, start: int, size: int) -> "ParamSlice | None":
        """The reference inside of a concatenation; None if it is inside of one already."""
        if self.interval is not None:
            return None
        return dataclasses.replace(self, interval=Interval(axis, start, size))

    def enter_scan(self, is_sliced: bool) -> "ParamSlice | None":
        """The reference inside of a loop."""
        interval = self.interval
        if interval is not None and is_sliced:
            if interval.axis == 0:
                return None
            interval = interval._replace(axis=interval.axis - 1)
        return dataclasses.replace(self, loops=(*self.loops, is_sliced), interval=interval)


References = tuple[ParamSlice, ...]
"""The references of a variable: several for a concatenation, none if it holds only data."""


@dataclasses.dataclass(frozen=True, eq=False)
class MatmulSite:
    """An operation in which parameters, the operand at `position`, meet data, inside of loops.

    In a checkpoint backpropagation would compute the data again.
    """

    kind: str
    eqn: Any
    position: int
    references: References
    lengths: tuple[int, ...]
    is_checkpointed: bool

    @property
    def data(self) -> Any:
        """The type of the data, without axes for loops."""
        return self.eqn.invars[1 - self.position].aval

    @property
    def output(self) -> Any:
        """The type of the output, without axes for loops."""
        return self.eqn.outvars[0].aval


@dataclasses.dataclass(frozen=True, eq=False)
class Step:
    """One equation, or several in a row (`run`) that parameters do not reach.

    An equation may have a program inside of it, or be a site.
    """

    eqn: Any
    inputs: Sequence[Any]
    outputs: Sequence[Any]
    run: jex.Jaxpr | None = None
    inner: "Program | None" = None
    site: MatmulSite | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """A program whose sites are known, those of inner programs too, in their order."""

    jaxpr: jex.Jaxpr
    consts: Sequence[Any]
    steps: list[Step]
    sites: list[MatmulSite]


class ParamTracker:
    """Finds the sites of a program on a mesh, and for each dense leaf the reason."""

    def __init__(self, dense: dict[int, str], mesh: Any) -> None:
        self.dense = dict(dense)
        self.mesh = mesh

    def program(
        self,
        jaxpr: jex.Jaxpr,
        consts: Sequence[Any],
        references: Sequence[References],
        lengths: tuple[int, ...] = (),
        is_checkpointed: bool = False,
    ) -> tuple[Program, list[References]]:
        """The program, with loops of these lengths around it, and the references of its outputs."""
        env: dict[Any, References] = dict(zip(jaxpr.invars, references, strict=True))
        steps: list[Step] = []
        sites: list[MatmulSite] = []
        param_free_eqns: list[Any] = []
        used_until = last_uses(jaxpr)

        def read_atom(atom: Any) -> References:
            found = () if is_literal(atom) else env.get(atom, ())
            return tuple(ref for ref in found if ref.leaf not in self.dense)

        for number, eqn in enumerate(jaxpr.eqns):
            refs = [read_atom(atom) for atom in eqn.invars]
            around = (lengths, is_checkpointed)
            step, outputs = None, [()] * len(eqn.outvars)
            if any(refs) and primitives.has_gradient(eqn):
                step, outputs = self._step(eqn, refs, *around)
            env.update(zip(eqn.outvars, outputs, strict=True))
            if step is None:
                param_free_eqns.append((number, eqn))
                continue
            steps += _run(param_free_eqns, used_until)
            param_free_eqns = []
            steps.append(step)
            sites += step.inner.sites if step.inner else [step.site] if step.site else []
        steps += _run(param_free_eqns, used_until)
        return Program(jaxpr, consts, steps, sites), [read_atom(atom) for atom in jaxpr.outvars]

    def mark_materialized(self, references: Sequence[ParamSlice], reason: str) -> None:
        """Makes the leaves of these references dense."""
        for reference in references:
            self.dense.setdefault(reference.leaf, reason)

    def _step(
        self, eqn: Any, refs: list[References], lengths: tuple[int, ...], is_checkpointed: bool
    ) -> tuple[Step | None, list[References]]:
        """The step of an equation that uses parameters, and the references of its outputs."""
        name, nothing = primitives.name_of(eqn), [()] * len(eqn.outvars)
        if primitives.is_reshape_like(eqn):
            rows = [
                [ref.follow_reshape(eqn, i) for ref in refs[0]] for i in range(len(eqn.outvars))
            ]
            return None, [self._propagate(refs[0], row, name) for row in rows]
        if name == primitives.CONCATENATE:
            axis, starts = primitives.concatenate_offsets(eqn)
            rows = zip(refs, starts, (v.aval.shape[axis] for v in eqn.invars), strict=True)
            placed = [
                (ref, ref.place_inside_concatenate(axis, *at)) for held, *at in rows for ref in held
            ]
            olds, news = zip(*placed, strict=True)
            return None, [self._propagate(olds, news, name)]
        if name in primitives.CALLS:
            program, outputs = self.program(*primitives.inner(eqn), refs, lengths, is_checkpointed)
            return Step(eqn, eqn.invars, eqn.outvars, inner=program), outputs
        if name in primitives.CHECKPOINTS:
            program, outputs = self.program(*primitives.inner(eqn), refs, lengths, True)
            self._check_outputs(outputs, name)
            return Step(eqn, eqn.invars, eqn.outvars, inner=program), nothing
        if name == primitives.SCAN:
            return self._loop(eqn, refs, lengths, is_checkpointed), nothing
        site = _site(eqn, refs, lengths, is_checkpointed)
        if site is not None and primitives.mesh_of(site.output) != self.mesh:
            self.mark_materialized(sum(refs, ()), "is used inside of 'auto_axes'")
            return None, nothing
        if site is None:
            self.mark_materialized(sum(refs, ()), f"is used by '{name}'")
            return None, nothing
        return Step(eqn, eqn.invars, eqn.outvars, site=site), nothing

    def _loop(
        self, eqn: Any, refs: list[References], lengths: tuple[int, ...], is_checkpointed: bool
    ) -> Step:
        loop = Loop.create(eqn)
        first, last = loop.num_consts, loop.num_consts + loop.num_carry
        for held in refs[first:last]:
            self.mark_materialized(held, f"is carried through '{primitives.SCAN}'")
        inside: list[References] = []
        for i, held in enumerate(refs):
            entered = [ref.enter_scan(i >= last) for ref in held]
            inside.append(self._propagate(held, entered, primitives.SCAN))
        within = (*lengths, loop.length)
        program, outputs = self.program(*primitives.inner(eqn), inside, within, is_checkpointed)
        self._check_outputs(outputs, primitives.SCAN)
        return Step(eqn, eqn.invars, eqn.outvars, inner=program)

    def _propagate(
        self, olds: References, news: Sequence[ParamSlice | None], name: str
    ) -> References:
        """The new references; a leaf that cannot be followed becomes dense."""
        rows = zip(olds, news, strict=True)
        self.mark_materialized([old for old, new in rows if new is None], f"is used by '{name}'")
        return tuple(new for new in news if new is not None)

    def _check_outputs(self, outputs: Sequence[References], name: str) -> None:
        for references in outputs:
            self.mark_materialized(references, f"is returned by '{name}'")


def _site(
    eqn: Any, refs: list[References], lengths: tuple[int, ...], is_checkpointed: bool
) -> MatmulSite | None:
    positions = [i for i, held in enumerate(refs) if held]
    if len(positions) != 1:
        return None
    position = positions[0]
    is_whole = all(ref.interval is None for ref in refs[position])
    if primitives.product(eqn, position) is not None:
        kind = primitives.DOT_GENERAL
    elif position == 0 and is_whole and primitives.drops_outside(eqn) is not None:
        kind = primitives.GATHER
    elif is_whole and primitives.is_convolution(eqn, position):
        kind = primitives.CONVOLUTION
    else:
        return None
    return MatmulSite(kind, eqn, position, refs[position], lengths, is_checkpointed)


def _run(numbered: list[tuple[int, Any]], used_until: dict[Any, int]) -> list[Step]:
    """One step for equations in a row; an empty list if there are none."""
    if not numbered:
        return []
    piece = extract_piece([eqn for _, eqn in numbered], numbered[-1][0], used_until)
    return [Step(None, piece.inputs, piece.outputs, piece.program)]


@jax.custom_vjp
def _tap(y: Array, z: Array) -> Array:
    """Returns `y`, and gives its cotangent to `z` too; unlike `y + z` it costs nothing."""
    del z
    return y


_tap.defvjp(lambda y, _: (y, None), lambda _, dy: (dy, dy))


def evaluate(
    program: Program, values: Sequence[Any], taps: Sequence[Array]
) -> tuple[list[Any], list[Any]]:
    """The program's outputs, and the data at each site.

    For each site there is a tap, an array like its output, with an axis for each loop around;
    derivatives with respect to it are the cotangents of the output.
    """
    jaxpr = program.jaxpr
    known = dict(zip(jaxpr.constvars, program.consts, strict=True))
    known |= dict(zip(jaxpr.invars, values, strict=True))
    data: list[Any] = []

    def read(atom: Any) -> Any:
        return atom.val if is_literal(atom) else known[atom]

    for step in program.steps:
        inputs = [read(atom) for atom in step.inputs]
        if step.site is not None:
            (output,) = primitives.apply(step.eqn, inputs)
            outputs = [_tap(output, taps[len(data)])]
            data.append(inputs[1 - step.site.position])
        elif step.inner is not None:
            inner_taps = taps[len(data) : len(data) + len(step.inner.sites)]
            outputs, found = _evaluate_inner(step.eqn, step.inner, inputs, inner_taps)
            data += found
        else:
            outputs = primitives.run(step.run, (), inputs)
        known.update(zip(step.outputs, outputs, strict=True))
    return [read(atom) for atom in jaxpr.outvars], data


def _evaluate_inner(
    eqn: Any, program: Program, values: list[Any], taps: Sequence[Array]
) -> tuple[list[Any], list[Any]]:
    if primitives.name_of(eqn) in primitives.CALLS:
        return evaluate(program, values, taps)
    if primitives.name_of(eqn) in primitives.CHECKPOINTS:
        fn = functools.partial(evaluate, program)
        return primitives.rebind_checkpoint(eqn, fn)(values, list(taps))
    loop = Loop.create(eqn)
    first, last = loop.num_consts, loop.num_consts + loop.num_carry

    def body(carry: list[Any], sliced: tuple[list[Any], list[Any]]) -> Any:
        operands, own_taps = sliced
        outputs, data = evaluate(program, [*values[:first], *carry, *operands], own_taps)
        return outputs[: loop.num_carry], (outputs[loop.num_carry :], data)

    sliced = (values[last:], list(taps))
    carry, (rest, data) = primitives.rebind_scan(eqn, body, values[first:last], sliced)
    return [*carry, *rest], data

"""Finds the sites of a program, which combine parameters with data, and evaluates it with taps."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.extend.core as jex
from jax import Array

import optaxclip.per_example._ghost_primitives as primitives
from optaxclip._base.programs import extract_piece, is_literal, last_uses
from optaxclip.per_example._ghost_primitives import Loop


class ReshapeOp(NamedTuple):
    """An equation that moves elements inside `depth` loops that slice the parameter."""

    depth: int
    eqn: Any
    output: int

    def apply(self, x: Array) -> Array:
        """Moves elements of an array `[*sliced loops, ...]`."""
        fn = functools.partial(primitives.move, self.eqn)
        for _ in range(self.depth):
            fn = jax.vmap(fn)
        return fn(x)[self.output]


class Interval(NamedTuple):
    """The interval of a parameter in a concatenation along an axis."""

    axis: int
    start: int
    size: int


@dataclasses.dataclass(frozen=True)
class ParamSlice:
    """A reference from a variable to elements of a parameter."""

    leaf: int  # The position of the parameter.
    moves: tuple[ReshapeOp, ...] = ()
    loops: tuple[bool, ...] = ()  # True for surrounding loops (outermost first) that slice it.
    interval: Interval | None = None  # The interval in a concatenation.

    def apply(self, leaf: Array) -> Array:
        """Returns the elements of the parameter, `[*sliced loops, ...]`."""
        for move in self.moves:
            leaf = move.apply(leaf)
        return leaf

    def follow_reshape(self, eqn: Any, output: int) -> "ParamSlice | None":
        """Returns the reference of an output, or None if its elements cannot be followed."""
        if eqn.primitive.name in primitives.IDENTITY_PRIMITIVES:
            return self
        interval = self.interval
        if interval is not None:
            # The interval of a concatenation can only be followed through a transpose.
            permutation = primitives.permutation(eqn)
            if permutation is None:
                return None
            interval = interval._replace(axis=permutation.index(interval.axis))
        moves = (*self.moves, ReshapeOp(sum(self.loops), eqn, output))
        return dataclasses.replace(self, moves=moves, interval=interval)

    def enter_scan(self, is_sliced: bool) -> "ParamSlice | None":
        """Returns the reference inside a loop, or None if the loop slices the interval."""
        interval = self.interval
        if interval is not None and is_sliced:
            if interval.axis == 0:
                return None
            # Slicing removes the leading axis.
            interval = interval._replace(axis=interval.axis - 1)
        return dataclasses.replace(self, loops=(*self.loops, is_sliced), interval=interval)


# The references of a variable: several for a concatenation, and none for data.
References = tuple[ParamSlice, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class MatmulSite:
    """An operation that combines parameters with data, possibly inside loops."""

    kind: str  # The name of the primitive.
    eqn: Any
    position: int  # The position of the operand with the parameters.
    references: References  # The references of this operand.
    lengths: tuple[int, ...]  # The lengths of the surrounding loops.
    is_checkpointed: bool  # Backpropagation recomputes the data inside checkpoints.

    @property
    def data(self) -> Any:
        """The type of the data, without loop axes."""
        return self.eqn.invars[1 - self.position].aval

    @property
    def output(self) -> Any:
        """The type of the output, without loop axes."""
        return self.eqn.outvars[0].aval


@dataclasses.dataclass(frozen=True, eq=False)
class Step:
    """A part of a program, with one of `run`, `inner` and `site`."""

    eqn: Any
    inputs: Sequence[Any]
    outputs: Sequence[Any]
    run: jex.Jaxpr | None = None  # A sequence of equations without parameters.
    inner: "Program | None" = None  # The program inside the equation.
    site: MatmulSite | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """A program with its sites, in order, including those of inner programs."""

    jaxpr: jex.Jaxpr
    consts: Sequence[Any]
    steps: list[Step]
    sites: list[MatmulSite]


@dataclasses.dataclass(eq=False)
class ParamTracker:
    """Finds the sites of a program on a mesh, and the parameters that must be materialized."""

    materialized: dict[int, str]  # The positions of these parameters, with a reason.
    mesh: Any

    def program(
        self,
        jaxpr: jex.Jaxpr,
        consts: Sequence[Any],
        references: Sequence[References],
        lengths: tuple[int, ...] = (),
        is_checkpointed: bool = False,
    ) -> tuple[Program, list[References]]:
        """Traces a program from the references of its inputs, and returns those of its outputs."""
        env: dict[Any, References] = dict(zip(jaxpr.invars, references, strict=True))
        steps: list[Step] = []
        sites: list[MatmulSite] = []
        param_free_eqns: list[tuple[int, Any]] = []
        used_until = last_uses(jaxpr)

        def read_references(atom: Any) -> References:
            references = () if is_literal(atom) else env.get(atom, ())
            return tuple(ref for ref in references if ref.leaf not in self.materialized)

        for number, eqn in enumerate(jaxpr.eqns):
            refs = [read_references(atom) for atom in eqn.invars]
            step, outputs = None, [()] * len(eqn.outvars)
            if any(refs) and primitives.has_gradient(eqn):
                step, outputs = self._make_step(eqn, refs, lengths, is_checkpointed)
            env.update(zip(eqn.outvars, outputs, strict=True))
            if step is None:
                param_free_eqns.append((number, eqn))
                continue
            steps += _merge_eqns(param_free_eqns, used_until)
            param_free_eqns = []
            steps.append(step)
            sites += step.inner.sites if step.inner else [step.site] if step.site else []
        steps += _merge_eqns(param_free_eqns, used_until)
        return Program(jaxpr, consts, steps, sites), list(map(read_references, jaxpr.outvars))

    def mark_materialized(self, references: Sequence[ParamSlice], reason: str) -> None:
        """Materializes the gradients of the parameters of these references."""
        for reference in references:
            self.materialized.setdefault(reference.leaf, reason)

    def _make_step(
        self, eqn: Any, refs: list[References], lengths: tuple[int, ...], is_checkpointed: bool
    ) -> tuple[Step | None, list[References]]:
        """Returns the step of an equation with parameters, and the references of its outputs."""
        name, no_references = eqn.primitive.name, [()] * len(eqn.outvars)
        if primitives.is_reshape_like(eqn):
            rows = (
                [ref.follow_reshape(eqn, i) for ref in refs[0]] for i, _ in enumerate(eqn.outvars)
            )
            return None, [self._propagate(refs[0], row, name) for row in rows]
        if name == primitives.CONCATENATE:
            axis, pieces = primitives.concatenated_intervals(eqn)
            rows = zip(refs, pieces, strict=True)
            intervals = [(ref, Interval(axis, *piece)) for own, piece in rows for ref in own]
            # References in nested concatenations are not followed.
            new_refs = [
                None if ref.interval else dataclasses.replace(ref, interval=interval)
                for ref, interval in intervals
            ]
            return None, [self._propagate([ref for ref, _ in intervals], new_refs, name)]
        if name in primitives.CALLS:
            program, outputs = self.program(*primitives.inner(eqn), refs, lengths, is_checkpointed)
            return Step(eqn, eqn.invars, eqn.outvars, inner=program), outputs
        if name in primitives.CHECKPOINTS:
            program, outputs = self.program(*primitives.inner(eqn), refs, lengths, True)
            self.mark_materialized(sum(outputs, ()), f"is returned by '{name}'")
            return Step(eqn, eqn.invars, eqn.outvars, inner=program), no_references
        if name == primitives.SCAN:
            return self._make_scan(eqn, refs, lengths, is_checkpointed), no_references
        site = _make_site(eqn, refs, lengths, is_checkpointed)
        if site is None:
            reason = f"is used by '{name}'"
        elif primitives.mesh_of(site.output) != self.mesh:
            reason = "is used inside 'auto_axes'"
        else:
            return Step(eqn, eqn.invars, eqn.outvars, site=site), no_references
        self.mark_materialized(sum(refs, ()), reason)
        return None, no_references

    def _make_scan(
        self, eqn: Any, refs: list[References], lengths: tuple[int, ...], is_checkpointed: bool
    ) -> Step:
        loop = Loop.create(eqn)
        first, last = loop.num_consts, loop.num_consts + loop.num_carry
        for carried in refs[first:last]:
            self.mark_materialized(carried, f"is carried through '{primitives.SCAN}'")
        inner_refs: list[References] = []
        for i, own in enumerate(refs):
            new_refs = [ref.enter_scan(i >= last) for ref in own]
            inner_refs.append(self._propagate(own, new_refs, primitives.SCAN))
        lengths = (*lengths, loop.length)
        inner = primitives.inner(eqn)
        program, outputs = self.program(*inner, inner_refs, lengths, is_checkpointed)
        self.mark_materialized(sum(outputs, ()), f"is returned by '{primitives.SCAN}'")
        return Step(eqn, eqn.invars, eqn.outvars, inner=program)

    def _propagate(
        self, old_refs: Sequence[ParamSlice], new_refs: Sequence[ParamSlice | None], name: str
    ) -> References:
        """Returns the new references, and materializes parameters that cannot be followed."""
        rows = zip(old_refs, new_refs, strict=True)
        self.mark_materialized([old for old, new in rows if new is None], f"is used by '{name}'")
        return tuple(new for new in new_refs if new is not None)


def _make_site(
    eqn: Any, refs: list[References], lengths: tuple[int, ...], is_checkpointed: bool
) -> MatmulSite | None:
    # A product of two parameters is not supported.
    positions = [i for i, own in enumerate(refs) if own]
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


def _merge_eqns(numbered: list[tuple[int, Any]], used_until: dict[Any, int]) -> list[Step]:
    if not numbered:
        return []
    piece = extract_piece([eqn for _, eqn in numbered], numbered[-1][0], used_until)
    return [Step(None, piece.inputs, piece.outputs, piece.program)]


@jax.custom_vjp
def _tap(y: Array, z: Array) -> Array:
    """Returns `y`, and also passes its cotangent to `z`, without computing `y + z`."""
    del z
    return y


_tap.defvjp(lambda y, _: (y, None), lambda _, dy: (dy, dy))


def evaluate(
    program: Program, values: Sequence[Any], taps: Sequence[Array]
) -> tuple[list[Any], list[Any]]:
    """Evaluates a program with taps `[*loops, *output]`, and returns its outputs and site data."""
    jaxpr = program.jaxpr
    env = dict(zip(jaxpr.constvars, program.consts, strict=True))
    env |= dict(zip(jaxpr.invars, values, strict=True))
    data: list[Any] = []

    def read(atom: Any) -> Any:
        return atom.val if is_literal(atom) else env[atom]

    for step in program.steps:
        inputs = [read(atom) for atom in step.inputs]
        if step.site is not None:
            (output,) = primitives.apply(step.eqn, inputs)
            outputs = [_tap(output, taps[len(data)])]
            data.append(inputs[1 - step.site.position])
        elif step.inner is not None:
            inner_taps = taps[len(data) : len(data) + len(step.inner.sites)]
            outputs, inner_data = _evaluate_inner(step.eqn, step.inner, inputs, inner_taps)
            data += inner_data
        else:
            assert step.run is not None
            outputs = primitives.eval_jaxpr(step.run, (), *inputs)
        env.update(zip(step.outputs, outputs, strict=True))
    return [read(atom) for atom in jaxpr.outvars], data


def _evaluate_inner(
    eqn: Any, program: Program, values: list[Any], taps: Sequence[Array]
) -> tuple[list[Any], list[Any]]:
    if eqn.primitive.name in primitives.CALLS:
        return evaluate(program, values, taps)
    if eqn.primitive.name in primitives.CHECKPOINTS:
        fn = functools.partial(evaluate, program)
        return primitives.rebind_checkpoint(eqn, fn)(values, list(taps))
    loop = Loop.create(eqn)
    first, last = loop.num_consts, loop.num_consts + loop.num_carry

    def body(carry: list[Any], sliced: tuple[list[Any], list[Any]]) -> Any:
        operands, inner_taps = sliced
        outputs, data = evaluate(program, [*values[:first], *carry, *operands], inner_taps)
        return outputs[: loop.num_carry], (outputs[loop.num_carry :], data)

    # [length, ...] -> [...] in the body, for operands and taps
    sliced = (values[last:], list(taps))
    # stacked: [length, ...], data: [length, *inner loops, ...]
    carry, (stacked, data) = primitives.rebind_scan(eqn, body, values[first:last], sliced)
    return [*carry, *stacked], data

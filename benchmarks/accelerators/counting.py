"""What a compiled step does, counted: bytes, kernels, branches, loops, collectives."""

import collections
import dataclasses
import re

from benchmarks.accelerators.hlo import Computation, Instruction, Module, parse

COLLECTIVES = re.compile(
    r"(all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter)(-start)?$"
)
# They name, or wait for, what others made.
NO_WORK = {
    *("parameter", "constant", "bitcast", "tuple", "get-tuple-element", "after-all"),
    *("partition-id", "replica-id", "opt-barrier", "domain", "add-dependency"),
}
# They move what their destination holds.
MOVES = {"copy-start", "slice-start"}
SLICES = {"slice", "dynamic-slice"}


@dataclasses.dataclass
class Counts:
    """Of one step, by default without what is only in the branches of a conditional."""

    read: float = 0
    written: float = 0
    kernels: int = 0
    branches: int = 0
    loops: int = 0
    collectives: collections.Counter = dataclasses.field(default_factory=collections.Counter)

    def __add__(self, other: "Counts") -> "Counts":
        return Counts(*(getattr(self, x) + getattr(other, x) for x in NAMES))

    def __sub__(self, other: "Counts") -> "Counts":
        minus = {x: getattr(self, x) - getattr(other, x) for x in NAMES[:-1]}
        collectives = collections.Counter(self.collectives)
        collectives.subtract(other.collectives)
        return Counts(**minus, collectives=collectives)

    def times(self, number: int) -> "Counts":
        """As often as a loop turns; the loops and branches in it are still as many."""
        return dataclasses.replace(
            self,
            read=self.read * number,
            written=self.written * number,
            kernels=self.kernels * number,
        )


NAMES = [field.name for field in dataclasses.fields(Counts)]


def count(
    text: str, in_loop: bool = False, turns: int = 1, cheapest_branches: bool = False
) -> Counts:
    """Of a compiled program, loops as often as they turn; or of one turn of its longest loop.

    Where the program does not say how often a loop turns, it is `turns`. With
    `cheapest_branches` a conditional counts as its branch that moves least.
    """
    module = parse(text, turns, cheapest_branches)
    if not in_loop:
        return _computation(module, module.entry)
    found = (x for x in module.entry.instructions.values() if x.opcode == "while")
    bodies = (module.computations[x.called] for x in found)
    return _computation(module, max(bodies, key=lambda body: len(body.instructions)))


def _computation(module: Module, computation: Computation) -> Counts:
    counts = Counts()
    for instruction in computation.instructions.values():
        counts += _instruction(module, computation, instruction)
    return counts


def _instruction(module: Module, inside: Computation, x: Instruction) -> Counts:
    if x.opcode in NO_WORK or x.opcode.endswith(("-done", "-update")):
        return Counts()
    if x.opcode == "conditional":
        return Counts(branches=1) + (_cheapest(module, x) if module.cheapest_branches else Counts())
    if x.opcode == "while":
        body = _computation(module, module.computations[x.called])
        return body.times(module.trips(x)) + Counts(loops=1)
    if x.opcode in {"call", "async-start"}:
        return _computation(module, module.computations[x.called])
    if x.opcode in MOVES:
        return _moved(inside, x)
    if 'custom_call_target="ConcatBitcast"' in x.rest:
        return Counts()
    read, written = _traffic(module, inside, x)
    found = COLLECTIVES.match(x.opcode)
    return Counts(read, written, 1, collectives=collections.Counter([found[1]] if found else []))


def _cheapest(module: Module, conditional: Instruction) -> Counts:
    """Of the branch that moves least."""
    each = [_computation(module, module.computations[name]) for name in conditional.branches]
    return min(each, key=lambda counts: counts.read + counts.written)


def _moved(inside: Computation, x: Instruction) -> Counts:
    """A copy between memories; the destination is the array that the operand is not."""
    done = next(
        y for y in inside.instructions.values() if y.operands == (x.name,) and "-done" in y.opcode
    )
    source = inside.instructions[x.operands[0]]
    size = done.size
    return Counts(
        read=0 if source.in_fast_memory else size, written=0 if done.in_fast_memory else size
    )


def _traffic(module: Module, inside: Computation, x: Instruction) -> tuple[float, float]:
    """The bytes of the distinct operands, and those of the result; of a slice, what it takes."""
    if x.opcode in SLICES:
        source = inside.operand(x.operands[0])
        return 0 if source.in_fast_memory else x.size, x.num_bytes
    operands = {}
    for place, name in enumerate(x.operands):
        operands.setdefault(inside.operand(name).name, []).append((place, inside.operand(name)))
    fused = module.computations[x.called] if x.opcode == "fusion" else None
    read = 0
    for uses in operands.values():
        place, operand = uses[0]
        part = _part_read(fused, place) if fused else None
        read += operand.num_bytes if part is None else min(part, operand.num_bytes)
    written = x.num_bytes
    if fused and (part := _part_written(fused)) is not None:
        written = min(part, written)
    return read, written


def _part_read(fused: Computation, place: int) -> int | None:
    """The bytes that a fusion reads of an operand, if it only takes slices of it."""
    parameter = next(
        x for x in fused.instructions.values() if x.opcode == "parameter" and x.number == place
    )
    uses = [x for x in fused.instructions.values() if parameter.name in x.operands]
    total = 0
    for use in uses:
        if use.opcode in SLICES and use.operands[0] == parameter.name:
            total += use.size
        elif use.opcode != "dynamic-update-slice" or use.operands[0] != parameter.name:
            return None
    return total


def _part_written(fused: Computation) -> int | None:
    """The bytes that a fusion writes, if it changes a slice of an operand in place."""
    root = fused.operand(fused.root.name)
    if root.opcode != "dynamic-update-slice":
        return None
    return fused.instructions[root.operands[1]].size

"""Counts bytes, kernels, branches, loops and collectives of a compiled program."""

import collections
import dataclasses
import re

from benchmarks.accelerators.hlo import Computation, Instruction, Module, parse

COLLECTIVES = re.compile(
    r"(all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter)(-start)?$"
)
# These instructions only alias results of other instructions or wait for them.
NO_WORK = {
    *("parameter", "constant", "bitcast", "tuple", "get-tuple-element", "after-all"),
    *("partition-id", "replica-id", "opt-barrier", "domain", "add-dependency"),
}
# These instructions move as many bytes as their destination has.
MOVES = {"copy-start", "slice-start"}
SLICES = {"slice", "dynamic-slice"}


@dataclasses.dataclass
class Counts:
    """The counts of one step, by default without the contents of conditional branches."""

    read: float = 0
    written: float = 0
    kernels: int = 0
    branches: int = 0
    loops: int = 0
    collectives: collections.Counter = dataclasses.field(default_factory=collections.Counter)

    def __add__(self, other: "Counts") -> "Counts":
        return Counts(*(getattr(self, x) + getattr(other, x) for x in FIELDS))

    def __sub__(self, other: "Counts") -> "Counts":
        minus = {x: getattr(self, x) - getattr(other, x) for x in FIELDS[:-1]}
        collectives = collections.Counter(self.collectives)
        collectives.subtract(other.collectives)
        return Counts(**minus, collectives=collectives)

    def scale(self, number: int) -> "Counts":
        """Multiplies the work of a loop body by its trip count, but not its loops and branches."""
        return dataclasses.replace(
            self,
            read=self.read * number,
            written=self.written * number,
            kernels=self.kernels * number,
        )


FIELDS = [field.name for field in dataclasses.fields(Counts)]


def count(
    text: str, in_loop: bool = False, trip_count: int = 1, cheapest_branches: bool = False
) -> Counts:
    """Counts the work of a compiled program.

    Args:
      text: The text of the compiled program.
      in_loop: If True, counts only one iteration of the longest loop.
      trip_count: The trip count of loops for which the program does not contain one.
      cheapest_branches: If True, adds the branch that moves the fewest bytes for conditionals.
    """
    module = parse(text, trip_count, cheapest_branches)
    if not in_loop:
        return _count_computation(module, module.entry)
    loops = (x for x in module.entry.instructions.values() if x.opcode == "while")
    bodies = (module.computations[x.called] for x in loops)
    return _count_computation(module, max(bodies, key=lambda body: len(body.instructions)))


def _count_computation(module: Module, computation: Computation) -> Counts:
    counts = Counts()
    for instruction in computation.instructions.values():
        counts += _count_instruction(module, computation, instruction)
    return counts


def _count_instruction(module: Module, computation: Computation, x: Instruction) -> Counts:
    if x.opcode in NO_WORK or x.opcode.endswith(("-done", "-update")):
        return Counts()
    if x.opcode == "conditional":
        branch = _count_cheapest_branch(module, x) if module.cheapest_branches else Counts()
        return Counts(branches=1) + branch
    if x.opcode == "while":
        body = _count_computation(module, module.computations[x.called])
        return body.scale(module.get_trip_count(x)) + Counts(loops=1)
    if x.opcode in {"call", "async-start"}:
        return _count_computation(module, module.computations[x.called])
    if x.opcode in MOVES:
        return _count_move(computation, x)
    if 'custom_call_target="ConcatBitcast"' in x.rest:
        return Counts()
    read, written = _count_traffic(module, computation, x)
    match = COLLECTIVES.match(x.opcode)
    return Counts(read, written, 1, collectives=collections.Counter([match[1]] if match else []))


def _count_cheapest_branch(module: Module, conditional: Instruction) -> Counts:
    """Returns the counts of the branch that moves the fewest bytes."""
    each = [_count_computation(module, module.computations[name]) for name in conditional.branches]
    return min(each, key=lambda counts: counts.read + counts.written)


def _count_move(computation: Computation, x: Instruction) -> Counts:
    """Counts a copy between memories."""
    done = next(
        y
        for y in computation.instructions.values()
        if y.operands == (x.name,) and "-done" in y.opcode
    )
    source = computation.instructions[x.operands[0]]
    size = done.size
    return Counts(
        read=0 if source.is_in_fast_memory else size, written=0 if done.is_in_fast_memory else size
    )


def _count_traffic(module: Module, computation: Computation, x: Instruction) -> tuple[float, float]:
    """Returns the bytes of distinct operands, or of their slices, and of the result."""
    if x.opcode in SLICES:
        source = computation.resolve_operand(x.operands[0])
        return 0 if source.is_in_fast_memory else x.size, x.num_bytes
    operands = {}
    for index, operand in enumerate(map(computation.resolve_operand, x.operands)):
        operands.setdefault(operand.name, (index, operand))
    fused = module.computations[x.called] if x.opcode == "fusion" else None
    read = 0
    for index, operand in operands.values():
        part = _count_sliced_read(fused, index) if fused else None
        read += operand.num_bytes if part is None else min(part, operand.num_bytes)
    written = x.num_bytes
    if fused and (part := _count_sliced_write(fused)) is not None:
        written = min(part, written)
    return read, written


def _count_sliced_read(fused: Computation, index: int) -> int | None:
    """Returns the bytes that a fusion reads from an operand if it only reads slices of it."""
    parameter = next(
        x for x in fused.instructions.values() if x.opcode == "parameter" and x.index == index
    )
    uses = [x for x in fused.instructions.values() if parameter.name in x.operands]
    total = 0
    for use in uses:
        if use.opcode in SLICES and use.operands[0] == parameter.name:
            total += use.size
        elif use.opcode != "dynamic-update-slice" or use.operands[0] != parameter.name:
            return None
    return total


def _count_sliced_write(fused: Computation) -> int | None:
    """Returns the bytes that a fusion writes if it updates a slice of an operand in place."""
    root = fused.resolve_operand(fused.root.name)
    if root.opcode != "dynamic-update-slice":
        return None
    return fused.instructions[root.operands[1]].size

"""Parses the HLO text of a compiled program."""

import dataclasses
import functools
import math
import re

ARRAY = re.compile(r"([a-z]\w*)\[([\d,]*)\](?:\{([^}]*)\})?")
CONDITION = re.compile(r"condition=(%[\w.-]+)")
CALLED = re.compile(r"(?:calls|to_apply|body)=(%[\w.-]+)")
BRANCHES = re.compile(
    r"(?:true_computation|false_computation|branch_computations)=(\{[^}]*\}|%[\w.-]+)"
)
TRIP_COUNT = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
NAMES = re.compile(r"%[\w.-]+")


@dataclasses.dataclass(frozen=True)
class Instruction:
    """An instruction of a computation."""

    name: str
    type: str
    opcode: str
    arguments: str
    rest: str

    @functools.cached_property
    def operands(self) -> tuple[str, ...]:
        """Returns the names of the operands."""
        return tuple(NAMES.findall(self.arguments))

    @functools.cached_property
    def size(self) -> int:
        """Returns the bytes of the result in any memory."""
        return sum(size for size, _ in self._arrays)

    @functools.cached_property
    def num_bytes(self) -> int:
        """Returns the bytes of the result in the main memory of the device."""
        return sum(size for size, fast in self._arrays if not fast)

    @functools.cached_property
    def is_in_fast_memory(self) -> bool:
        """Returns `True` if the result is in VMEM or another memory than the main memory."""
        return all(fast for _, fast in self._arrays)

    @property
    def _arrays(self) -> list[tuple[int, bool]]:
        return [
            (_count_item_bytes(dtype) * _count_elements(dims), "S(" in layout)
            for dtype, dims, layout in ARRAY.findall(self.type)
        ]

    @property
    def index(self) -> int:
        """Returns the index of a parameter."""
        return int(self.arguments)

    @property
    def called(self) -> str | None:
        """Returns the computation that a fusion, a call or a loop runs."""
        found = CALLED.search(self.rest)
        return found and found[1]

    @property
    def branches(self) -> list[str]:
        """Returns the branch computations of a conditional."""
        return [name for found in BRANCHES.findall(self.rest) for name in NAMES.findall(found)]

    @property
    def trip_count(self) -> int | None:
        """Returns the trip count of a loop if the compiler reports it."""
        found = TRIP_COUNT.search(self.rest)
        return int(found[1]) if found else None

    @property
    def condition(self) -> str | None:
        """Returns the condition computation of a loop."""
        found = CONDITION.search(self.rest)
        return found and found[1]


@dataclasses.dataclass(frozen=True)
class Computation:
    """The instructions of a computation by name, in order, and its root."""

    instructions: dict[str, Instruction]
    root: Instruction

    def resolve_operand(self, name: str) -> Instruction:
        """Returns the instruction that computes an operand, without bitcasts."""
        found = self.instructions[name]
        while found.opcode == "bitcast":
            found = self.instructions[found.operands[0]]
        return found


@dataclasses.dataclass(frozen=True)
class Module:
    """A compiled program."""

    computations: dict[str, Computation]
    entry: Computation
    default_trip_count: int
    cheapest_branches: bool

    def get_trip_count(self, loop: Instruction) -> int:
        """Returns the trip count of a loop, or `default_trip_count` if it is unknown.

        The TPU compiler does not report trip counts. Counted loops of JAX start at 0 and compare
        the counter with the trip count.
        """
        if loop.trip_count is not None:
            return loop.trip_count
        condition = self.computations[loop.condition]
        if condition.root.opcode == "compare" and "direction=LT" in condition.root.rest:
            threshold = condition.resolve_operand(condition.root.operands[1])
            if threshold.opcode == "constant":
                return int(threshold.arguments)
        return self.default_trip_count


def parse(text: str, default_trip_count: int, cheapest_branches: bool = False) -> Module:
    """Parses the result of `Compiled.as_text()`."""
    computations, entry, lines = {}, None, iter(text.splitlines())
    for line in lines:
        if not line.endswith("{") or line.startswith("HloModule"):
            continue
        name = NAMES.search(line)
        if name is None:
            continue
        body, root = {}, None
        for inner in lines:
            if inner.startswith("}"):
                break
            instruction = _parse_instruction(inner)
            body[instruction.name] = instruction
            root = instruction if inner.lstrip().startswith("ROOT ") else root
        computations[name[0]] = Computation(body, root)
        entry = computations[name[0]] if line.startswith("ENTRY") else entry
    return Module(computations, entry, default_trip_count, cheapest_branches)


def _parse_instruction(line: str) -> Instruction:
    left, right = line.split(" = ", 1)
    end = _find_closing(right, 0) + 1 if right.startswith("(") else right.index(" ")
    opening = right.index("(", end)
    closing = _find_closing(right, opening)
    opcode, arguments = right[end:opening].strip(), right[opening + 1 : closing]
    return Instruction(left.split()[-1], right[:end], opcode, arguments, right[closing + 1 :])


def _find_closing(text: str, start: int) -> int:
    depth = 0
    for index in range(start, len(text)):
        depth += {"(": 1, ")": -1}.get(text[index], 0)
        if not depth:
            return index
    raise ValueError(f"no closing parenthesis in {text[start : start + 80]!r}")


def _count_elements(dims: str) -> int:
    return math.prod(map(int, filter(None, dims.split(","))))


def _count_item_bytes(dtype: str) -> int:
    if dtype == "pred":
        return 1
    bits = re.search(r"\d+", dtype)
    return max(1, int(bits[0]) // 8) if bits else 0

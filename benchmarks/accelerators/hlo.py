"""XLA's text of a compiled program, as instructions in computations."""

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
TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
NAMES = re.compile(r"%[\w.-]+")


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a computation."""

    name: str
    type: str
    opcode: str
    arguments: str
    rest: str

    @functools.cached_property
    def operands(self) -> tuple[str, ...]:
        """The names of the operands."""
        return tuple(NAMES.findall(self.arguments))

    @functools.cached_property
    def size(self) -> int:
        """The bytes of the result, wherever it lies."""
        return sum(size for size, _ in self._arrays)

    @functools.cached_property
    def num_bytes(self) -> int:
        """The bytes of the result in the device's large memory."""
        return sum(size for size, fast in self._arrays if not fast)

    @functools.cached_property
    def in_fast_memory(self) -> bool:
        """Whether the result lies in a TPU's VMEM, or in another memory but the large one."""
        return all(fast for _, fast in self._arrays)

    @property
    def _arrays(self) -> list[tuple[int, bool]]:
        return [
            (_item_bytes(dtype) * _entries(dims), "S(" in layout)
            for dtype, dims, layout in ARRAY.findall(self.type)
        ]

    @property
    def number(self) -> int:
        """A parameter's place."""
        return int(self.arguments)

    @property
    def called(self) -> str | None:
        """The computation that a fusion, a call or a loop runs."""
        found = CALLED.search(self.rest)
        return found and found[1]

    @property
    def branches(self) -> list[str]:
        """The computations of which a conditional runs one."""
        return [name for found in BRANCHES.findall(self.rest) for name in NAMES.findall(found)]

    @property
    def trips(self) -> int | None:
        """How often a loop turns, where the compiler says it."""
        found = TRIPS.search(self.rest)
        return int(found[1]) if found else None

    @property
    def condition(self) -> str | None:
        """The computation that says whether a loop turns once more."""
        found = CONDITION.search(self.rest)
        return found and found[1]


@dataclasses.dataclass(frozen=True)
class Computation:
    """Instructions by name, in order; the last one marked is the root."""

    instructions: dict[str, Instruction]
    root: Instruction

    def operand(self, name: str) -> Instruction:
        """The instruction behind an operand, seen through those that only rename."""
        found = self.instructions[name]
        while found.opcode == "bitcast":
            found = self.instructions[found.operands[0]]
        return found


@dataclasses.dataclass(frozen=True)
class Module:
    """A compiled program."""

    computations: dict[str, Computation]
    entry: Computation
    turns: int
    cheapest_branches: bool

    def trips(self, loop: Instruction) -> int:
        """How often a loop turns: `turns` if neither the compiler nor its condition says it.

        A TPU's compiler does not say it. Loops that JAX counts begin at 0 and compare with their
        number.
        """
        if loop.trips is not None:
            return loop.trips
        condition = self.computations[loop.condition]
        if condition.root.opcode == "compare" and "direction=LT" in condition.root.rest:
            threshold = condition.operand(condition.root.operands[1])
            if threshold.opcode == "constant":
                return int(threshold.arguments)
        return self.turns


def parse(text: str, turns: int, cheapest_branches: bool = False) -> Module:
    """Reads what `Compiled.as_text()` gives; `turns` are those of loops that it does not say."""
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
            instruction = _instruction(inner)
            body[instruction.name] = instruction
            root = instruction if inner.lstrip().startswith("ROOT ") else root
        computations[name[0]] = Computation(body, root)
        entry = computations[name[0]] if line.startswith("ENTRY") else entry
    return Module(computations, entry, turns, cheapest_branches)


def _instruction(line: str) -> Instruction:
    left, right = line.split(" = ", 1)
    end = _closing(right, 0) + 1 if right.startswith("(") else right.index(" ")
    opening = right.index("(", end)
    closing = _closing(right, opening)
    opcode, arguments = right[end:opening].strip(), right[opening + 1 : closing]
    return Instruction(left.split()[-1], right[:end], opcode, arguments, right[closing + 1 :])


def _closing(text: str, start: int) -> int:
    depth = 0
    for place in range(start, len(text)):
        depth += {"(": 1, ")": -1}.get(text[place], 0)
        if not depth:
            return place
    raise ValueError(f"no closing parenthesis in {text[start : start + 80]!r}")


def _entries(dims: str) -> int:
    return math.prod(map(int, filter(None, dims.split(","))))


def _item_bytes(dtype: str) -> int:
    if dtype == "pred":
        return 1
    bits = re.search(r"\d+", dtype)
    return max(1, int(bits[0]) // 8) if bits else 0

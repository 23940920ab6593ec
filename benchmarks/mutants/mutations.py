"""Small changes of a Python source, each of which some test should notice."""

import ast
import copy
from collections.abc import Iterator
from typing import Any, NamedTuple

OPERATORS = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
    ast.Pow: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
}
# The other side of the boundary, and the opposite.
COMPARISONS = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
PAIRS = [("maximum", "minimum"), ("max", "min"), ("any", "all"), ("floor", "ceil"), ("sum", "max")]
NAMES = {a: b for pair in PAIRS for a, b in (pair, pair[::-1])}

# Fields that hold types, or names.
TYPES = {"annotation", "returns", "bases", "type_comment"}

Lines = tuple[int, int]


class Mutation(NamedTuple):
    """A span of a source and what stands there instead.

    Attributes:
      lines: tests that run one of these lines, from the first to the last, reach it.
      start: where the span begins, in bytes.
      end: where it ends.
      text: what is put there.
    """

    lines: Lines
    start: int
    end: int
    text: str

    def applied(self, source: str) -> str:
        """The source with the change."""
        code = source.encode()
        return (code[: self.start] + self.text.encode() + code[self.end :]).decode()


def mutations(source: str) -> list[Mutation]:
    """All of a source, from its first line to its last."""
    code, starts = source.encode(), [0]
    for line in code.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    found = {}
    for statement, lines in _statements(ast.parse(source).body, (1, len(starts))):
        for node in _expressions(statement):
            for old, new in _changes(node):
                start = starts[old.lineno - 1] + old.col_offset
                end = starts[old.end_lineno - 1] + old.end_col_offset
                text = new if isinstance(new, str) else f"({ast.unparse(new)})"
                if text.encode() != code[start:end]:
                    found[start, end, text] = Mutation(lines, start, end, text)
    return sorted(found.values(), key=lambda each: each[1:])


def _statements(body: list[Any], imported: Lines | None) -> Iterator[tuple[ast.stmt, Lines]]:
    """Each statement, and the lines that tell who runs it.

    Args:
      body: statements.
      imported: for those that run when a module is imported, all lines of the file: the tests that
        run any of them may notice a change.
    """
    for statement in body:
        inner = getattr(statement, "body", [])
        if isinstance(statement, ast.FunctionDef):
            # Its decorators and defaults act where its body runs.
            yield statement, (inner[0].lineno, statement.end_lineno or 0)
            yield from _statements(inner, None)
            continue
        header = inner[0].lineno - 1 if inner else statement.end_lineno
        yield statement, imported or (statement.lineno, max(statement.lineno, header))
        for name in ("body", "orelse", "finalbody"):
            yield from _statements(getattr(statement, name, []), imported)
        for handler in getattr(statement, "handlers", []):
            yield from _statements(handler.body, imported)


def _expressions(node: ast.AST) -> Iterator[Any]:
    """The nodes of one statement that may be changed: no annotations, messages, or statements."""
    yield node
    if isinstance(node, ast.Raise | ast.Assert | ast.ImportFrom | ast.JoinedStr):
        return
    if isinstance(node, ast.keyword) and ast.unparse(node) == "strict=True":
        return  # of `zip`, for what only a bug could break
    for name, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            is_other = isinstance(child, ast.stmt | ast.excepthandler) or name in TYPES
            if isinstance(child, ast.AST) and not is_other:
                yield from _expressions(child)


def _changes(node: Any) -> Iterator[tuple[Any, ast.expr | str]]:
    """Nodes, this one or below it, and what may stand in their place."""
    match node:
        case ast.BinOp(op=op) if type(op) in OPERATORS:
            yield node, _with(node, op=OPERATORS[type(op)]())
        case ast.AugAssign(op=op) if type(op) in OPERATORS:
            yield node, ast.unparse(_with(node, op=OPERATORS[type(op)]()))
        case ast.Compare(ops=[op, *others]):
            for new in COMPARISONS[type(op)]:
                yield node, _with(node, ops=[new(), *others])
        case ast.Constant(value=bool(value)):
            yield node, str(not value)
        case ast.Constant(value=int(value) | float(value)):
            yield node, repr(value + 1 if value == 0 or isinstance(value, int) else value * 2)
        case ast.BoolOp(op=op, values=values):
            yield node, _with(node, op=ast.Or() if isinstance(op, ast.And) else ast.And())
            yield from ((node, value) for value in values)
        case ast.UnaryOp(operand=operand):
            yield node, operand
        case ast.If() | ast.IfExp():
            yield from ((node.test, text) for text in ("True", "False"))
        case ast.comprehension(ifs=[test]):
            yield test, "True"
        case ast.Return(value=ast.expr()):
            yield node, "return None"
        case ast.Raise() | ast.Expr(value=ast.Call()) | ast.Delete():
            yield node, "pass"
        case ast.FunctionDef() | ast.ClassDef():
            yield from ((each, "(lambda wrapped: wrapped)") for each in node.decorator_list)
        case ast.Call():
            yield from ((node, new) for new in _calls(node))


def _calls(node: ast.Call) -> Iterator[ast.expr]:
    args, function = node.args, node.func
    for keyword in node.keywords:
        if keyword.arg and ast.unparse(keyword) != "strict=True":
            yield _with(node, keywords=[other for other in node.keywords if other is not keyword])
    if len(args) == 1 and not (node.keywords or isinstance(args[0], ast.Starred)):
        yield args[0]
    if len(args) > 1 and ast.dump(args[0]) != ast.dump(args[1]):
        yield _with(node, args=[args[1], args[0], *args[2:]])
    match function:
        case ast.Attribute(attr=name) if name in NAMES:
            yield _with(node, func=_with(function, attr=NAMES[name]))
        case ast.Name(id=name) if name in NAMES:
            yield _with(node, func=_with(function, id=NAMES[name]))


def _with(node: Any, **changes: Any) -> Any:
    new = copy.copy(node)
    for name, value in changes.items():
        setattr(new, name, value)
    return new

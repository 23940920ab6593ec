"""Generates small changes of Python sources, which tests should detect."""

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
# The comparison with the boundary changed, and the opposite comparison.
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

# Fields that contain types or names.
TYPES = {"annotation", "returns", "bases", "type_comment"}

Lines = tuple[int, int]


class Mutation(NamedTuple):
    """A span of bytes and its replacement, which tests that run one of `lines` reach."""

    lines: Lines
    start: int
    end: int
    text: str

    def apply(self, source: str) -> str:
        """Applies the mutation to the source."""
        code = source.encode()
        return (code[: self.start] + self.text.encode() + code[self.end :]).decode()


def list_mutations(source: str) -> list[Mutation]:
    """Returns all mutations of a source in order."""
    code, starts = source.encode(), [0]
    for line in code.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    found = {}
    for statement, lines in _list_statements(ast.parse(source).body, (1, len(starts))):
        for node in _list_expressions(statement):
            for old, new in _list_changes(node):
                start = starts[old.lineno - 1] + old.col_offset
                end = starts[old.end_lineno - 1] + old.end_col_offset
                text = new if isinstance(new, str) else f"({ast.unparse(new)})"
                if text.encode() != code[start:end]:
                    found[start, end, text] = Mutation(lines, start, end, text)
    return sorted(found.values(), key=lambda each: each[1:])


def _list_statements(body: list[Any], imported: Lines | None) -> Iterator[tuple[ast.stmt, Lines]]:
    """Yields statements, and the lines by which tests reach them.

    Args:
      body: The statements.
      imported: All lines of the file for statements that run at import, which affect all tests of
        the file.
    """
    for statement in body:
        inner = getattr(statement, "body", [])
        if isinstance(statement, ast.FunctionDef):
            # Tests that run the body can detect changes of decorators and defaults.
            yield statement, (inner[0].lineno, statement.end_lineno or 0)
            yield from _list_statements(inner, None)
            continue
        header = inner[0].lineno - 1 if inner else statement.end_lineno
        yield statement, imported or (statement.lineno, max(statement.lineno, header))
        for name in ("body", "orelse", "finalbody"):
            yield from _list_statements(getattr(statement, name, []), imported)
        for handler in getattr(statement, "handlers", []):
            yield from _list_statements(handler.body, imported)


def _list_expressions(node: ast.AST) -> Iterator[Any]:
    """Yields the nodes of a statement without annotations, messages, and other statements."""
    yield node
    if isinstance(node, ast.Raise | ast.Assert | ast.ImportFrom | ast.JoinedStr):
        return
    if isinstance(node, ast.keyword) and ast.unparse(node) == "strict=True":
        return  # `strict=True` of `zip` only detects bugs.
    for name, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            is_other = isinstance(child, ast.stmt | ast.excepthandler) or name in TYPES
            if isinstance(child, ast.AST) and not is_other:
                yield from _list_expressions(child)


def _list_changes(node: Any) -> Iterator[tuple[Any, ast.expr | str]]:
    """Yields nodes, including descendants, and their replacements."""
    match node:
        case ast.BinOp(op=op) if type(op) in OPERATORS:
            yield node, _replace(node, op=OPERATORS[type(op)]())
        case ast.AugAssign(op=op) if type(op) in OPERATORS:
            yield node, ast.unparse(_replace(node, op=OPERATORS[type(op)]()))
        case ast.Compare(ops=[op, *others]):
            for new in COMPARISONS[type(op)]:
                yield node, _replace(node, ops=[new(), *others])
        case ast.Constant(value=bool(value)):
            yield node, str(not value)
        case ast.Constant(value=int(value) | float(value)):
            yield node, repr(value + 1 if value == 0 or isinstance(value, int) else value * 2)
        case ast.BoolOp(op=op, values=values):
            yield node, _replace(node, op=ast.Or() if isinstance(op, ast.And) else ast.And())
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
            yield from ((node, new) for new in _list_call_changes(node))


def _list_call_changes(node: ast.Call) -> Iterator[ast.expr]:
    args, function = node.args, node.func
    for keyword in node.keywords:
        if keyword.arg and ast.unparse(keyword) != "strict=True":
            yield _replace(
                node, keywords=[other for other in node.keywords if other is not keyword]
            )
    if len(args) == 1 and not (node.keywords or isinstance(args[0], ast.Starred)):
        yield args[0]
    if len(args) > 1 and ast.dump(args[0]) != ast.dump(args[1]):
        yield _replace(node, args=[args[1], args[0], *args[2:]])
    match function:
        case ast.Attribute(attr=name) if name in NAMES:
            yield _replace(node, func=_replace(function, attr=NAMES[name]))
        case ast.Name(id=name) if name in NAMES:
            yield _replace(node, func=_replace(function, id=NAMES[name]))


def _replace(node: Any, **changes: Any) -> Any:
    new = copy.copy(node)
    for name, value in changes.items():
        setattr(new, name, value)
    return new

"""What of a module's text runs: not its comments and docstrings, nor which values a sweep tries."""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Iterator

DECLARED = "Tunable"  # calls of it say what is searched; a row is checked against that by itself

Span = tuple[int, int]  # bytes of the text


def code_of(text: str, tree: ast.Module) -> str:
    """`text`, of which `tree` was made, without what does not run and without blank lines.

    Raises SyntaxError or ValueError where it is no Python.
    """
    lines = [line.encode() for line in io.StringIO(text)]
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))
    data, kept, end = b"".join(lines), [], 0
    for start, stop in sorted([*_comments(text, starts), *_declared(tree, starts)]):
        if start >= end:  # not inside what was left out already
            kept.append(data[end:start])
        end = max(end, stop)
    code = b"".join([*kept, data[end:]]).decode()
    return "\n".join(line.rstrip() for line in code.splitlines() if line.strip())


def _comments(text: str, starts: list[int]) -> Iterator[Span]:
    try:
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.COMMENT:
                row, column = token.start
                start = starts[row - 1] + len(token.line[:column].encode())
                yield start, start + len(token.string.encode())
    except tokenize.TokenError as error:
        raise SyntaxError(str(error)) from None


def _declared(tree: ast.Module, starts: list[int]) -> Iterator[Span]:
    """Docstrings, and the arguments of declarations."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            if ast.get_docstring(node, clean=False) is not None:
                yield _start(node.body[0], starts), _end(node.body[0], starts)
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") == DECLARED:
            yield _end(node.func, starts), _end(node, starts)


def _start(node: ast.expr | ast.stmt, starts: list[int]) -> int:
    return starts[node.lineno - 1] + node.col_offset


def _end(node: ast.expr | ast.stmt, starts: list[int]) -> int:
    assert node.end_lineno is not None and node.end_col_offset is not None
    return starts[node.end_lineno - 1] + node.end_col_offset

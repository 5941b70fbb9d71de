"""Plain text: tables, and texts from elsewhere."""

from __future__ import annotations

from collections.abc import Sequence


def aligned(rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """Columns two spaces apart, the first `left` to the left and the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(
            cell.ljust(width) if i < left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
    return "\n".join(line.rstrip() for line in lines)


def printable(text: str) -> str:
    """As it is, but for line ends and characters that a terminal would obey."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)

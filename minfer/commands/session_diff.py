"""What differs between two session files, as text and for machines."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from minfer.commands.columns import aligned, printable
from minfer.kv.session.pieces import WHICH
from minfer.sessions.comparing import ComparedRows, Comparison, Pair, differing, flat
from minfer.sessions.deviation import Deviation, planes_json
from minfer.sessions.wording import counted


def as_json(found: Comparison, a: str, b: str) -> dict[str, Any]:
    """One object; pairs are [of a, of b]."""
    return {
        "a": a,
        "b": b,
        "equal": found.equal,
        "facts": found.facts,
        "tables": found.tables,
        "host": found.host,
        "rows": None if found.rows is None else [_rows_json(rows) for rows in found.rows],
    }


def _rows_json(rows: ComparedRows) -> dict[str, Any]:
    return {
        **{"seq": rows.seq, "compared": rows.compared, "equal": rows.equal, "first": rows.first},
        "planes": planes_json(rows.planes),
    }


def as_text(found: Comparison, a: str, b: str) -> str:
    """A line for everything that differs, then the rows."""
    a, b = printable(a), printable(b)
    if found.equal:
        return f"{a} and {b} are equal, byte for byte"
    lines = [f"{a} and {b} differ"]
    lines += [f"  {name}: {_beside(pair)}" for name, pair in found.facts.items()]
    lines += [f"  {name}: {_changed(pair)}" for name, pair in found.tables.items()]
    if found.host:
        lines.append(f"  host: {printable(', '.join(found.host))}")
    if found.rows is None:
        return "\n".join([*lines, "  rows: of other shapes, not compared"])
    by = "in value" if "cache_type" in found.facts else "byte for byte"
    for rows in found.rows:
        lines += _rows_text(rows, by)
    return "\n".join(lines)


def _beside(pair: Pair) -> str:
    return " | ".join("none" if value is None else printable(str(value)) for value in pair)


def _changed(pair: Pair) -> str:
    """What differs between two records, or who alone has one."""
    if None in pair:
        return f"only in {'b' if pair[0] is None else 'a'}"
    fields = differing(*map(flat, pair))
    return ", ".join(f"{name} {_beside(values)}" for name, values in fields.items())


def _rows_text(rows: ComparedRows, by: str) -> Iterable[str]:
    told = f"  seq {rows.seq}: {rows.equal} of {rows.compared} rows equal {by}"
    if rows.first is None:
        return [told]
    table = [["layer", *(f"{x} {what}" for x in "KV" for what in ("largest", "rms"))]]
    for layer in sorted({layer for layer, _ in rows.planes}):
        cells = [_figures(rows.planes.get((layer, which))) for which in WHICH]
        table.append([str(layer), *cells[0], *cells[1]])
    told = f"{told}, the first that differs is at position {rows.first}"
    return [told, *(f"    {line}" for line in aligned(table).splitlines()), *_lost(rows)]


def _figures(deviation: Deviation | None) -> list[str]:
    if deviation is None:
        return ["equal", ""]
    return [f"{deviation.max_abs:.3g}", f"{deviation.rms:.3g}"]


def _lost(rows: ComparedRows) -> list[str]:
    lost = sum(deviation.lost for deviation in rows.planes.values())
    return [f"    finite in one file only: {counted(lost, 'element')}"] if lost else []

"""Files of promoted rows, each read once a process."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from minfer.device import Device
from minfer.format import KvFormat
from minfer.ops import OPS, Shape
from minfer.tuned.machine import device_kind
from minfer.tuned.rows import Key, Row, key_of
from minfer.tuned.saying import say

SCHEMA = 1
COLUMNS = 100
FOLDER = Path(__file__).parent


@dataclass(frozen=True, eq=False)
class Found:
    """The rows of one key, in the order of their file. problem: with the file, "" for none."""

    device_kind: str = ""
    rows: tuple[Row, ...] = ()
    problem: str = ""


NOTHING = Found()


@dataclass(frozen=True, eq=False)
class Table:
    """The rows of one kind of device by key. other: what is found under any other key."""

    by_key: dict[Key, Found] = field(default_factory=dict)
    other: Found = NOTHING


def found(op: str, device: Device, fmt: KvFormat, shape: Shape) -> Found:
    """The rows for a choice; the same object for the same key."""
    kind = device_kind(device)
    table = _table(FOLDER, kind)
    return table.by_key.get(key_of(op, fmt, shape), table.other)


@cache
def _table(folder: Path, kind: str) -> Table:
    """What a file holds. One that cannot be read is said once and holds nothing."""
    path = folder / f"{kind}.json"
    try:
        rows = loaded(path, kind)
    except FileNotFoundError:
        return Table()
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        problem = f"{path.name} is not taken: {why}"
        say(f"minfer/tuned/{problem}")
        return Table(other=Found(kind, problem=problem))
    by_key: dict[Key, list[Row]] = {}
    for row in rows:
        by_key.setdefault(row.key, []).append(row)
    return Table({key: Found(kind, tuple(some)) for key, some in by_key.items()})


def loaded(path: Path, kind: str) -> list[Row]:
    """The rows of a file; OSError, or ValueError that says what is wrong with it."""
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        raise ValueError("it is no JSON") from None
    if not isinstance(content, dict) or type(content.get("schema")) is not int:
        raise ValueError("it has no schema")
    if content["schema"] != SCHEMA:
        raise ValueError(f"it has schema {content['schema']}, and this minfer reads {SCHEMA}")
    if content.get("device_kind") != kind:
        raise ValueError(f"it is not for {kind}")
    if set(content) != {"schema", "device_kind", "rows"} or not isinstance(content["rows"], list):
        raise ValueError("it must hold schema, device_kind and rows")
    rows = []
    for number, given in enumerate(content["rows"], 1):
        try:
            rows.append(Row.read(given))
        except RecursionError:  # reading it in takes fewer frames than looking at it
            raise ValueError(f"row {number}: it is nested too deep") from None
        except ValueError as error:
            raise ValueError(f"row {number}: {error}") from None
    return rows


def dumped(kind: str, rows: Iterable[Row]) -> str:
    """The text of a file: rows in the order of ops and keys, so that a change is a short diff."""
    ops = list(OPS)

    def order(row: Row) -> tuple[Any, ...]:
        made = json.dumps(dict(row.made_with), sort_keys=True)
        return ops.index(row.op), row.fmt, row.head_dim, row.kind, made, row.source

    listed = [row.as_dict() for row in sorted(rows, key=order)]
    content = {"schema": SCHEMA, "device_kind": kind, "rows": listed}
    return _laid_out(content) + "\n"


def _laid_out(value: Any, indent: int = 0) -> str:
    """JSON with what fits on one line there, but for the outermost level."""
    flat = json.dumps(value, ensure_ascii=False)
    if not isinstance(value, dict | list) or (indent and indent + len(flat) < COLUMNS):
        return flat
    inner = indent + 2
    if isinstance(value, dict):
        names = [f"{json.dumps(name, ensure_ascii=False)}: " for name in value]
        parts = [name + _laid_out(x, inner) for name, x in zip(names, value.values(), strict=True)]
        opening, closing = "{}"
    else:
        parts = [_laid_out(part, inner) for part in value]
        opening, closing = "[]"
    lines = ",\n".join(" " * inner + part for part in parts)
    return f"{opening}\n{lines}\n{' ' * indent}{closing}"

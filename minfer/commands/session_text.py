"""A description of a session as text."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Mapping
from typing import Any

from minfer.commands.columns import aligned, printable
from minfer.kv.session.tables import Tables
from minfer.memory import human
from minfer.ops import OPS
from minfer.sessions.arena_map import ASCII, UNICODE, Shades, draw, legend
from minfer.sessions.description import Facts
from minfer.sessions.wording import counted


def summary(facts: Facts) -> str:
    """The header, what the file belongs to, sizes and counts."""
    model, numbers = facts["model"], facts["numerics"]
    rows = [
        ("cache", _cache(facts)),
        ("model", _named(model["name"], model["fingerprint"], "none")),
        ("weights", model["hash"] or "not told"),
        ("numbers", numbers["fingerprint"] or "unknown: transcoded"),
        ("", ", ".join(f"{name} {value}" for name, value in _short(numbers["facts"]).items())),
        ("host", _host(facts["host"])),
        ("sizes", ", ".join(f"{name} {human(n)}" for name, n in facts["sizes"].items() if n)),
        ("cells", ", ".join(_counted(facts["cells"]))),
        ("so far", ", ".join(f"{_words(name)} {n}" for name, n in facts["counters"].items())),
    ]
    kind = f"session of version {facts['version']}, {human(facts['bytes'])}"
    first = f"{printable(facts['file'])}: {kind}"
    return "\n".join([first, *(f"  {name:8} {printable(text)}" for name, text in rows if text)])


def _cache(facts: Facts) -> str:
    heads = f"{counted(facts['n_head_kv'], 'head')} of {facts['head_dim']}"
    return (
        f"{facts['cache_type']} on {facts['backend']}: {counted(facts['n_layer'], 'layer')}, "
        f"{counted(facts['n_ctx'], 'cell')} of {facts['cell_bytes']} bytes for {heads}, "
        f"{facts['n_rows']} written"
    )


def _named(name: str, fingerprint: str | None, without: str) -> str:
    told = f"fingerprint {fingerprint}" if fingerprint else without
    return f"{name}, {told}" if name else told


def _short(facts: Mapping[str, str]) -> dict[str, str]:
    """The facts that tell machines apart, without those of single ops."""
    return {name: fact for name, fact in facts.items() if name.partition(" ")[0] not in OPS}


def _host(host: Mapping[str, Any]) -> str:
    if not host["bytes"]:
        return "nothing"
    version = host["version"]
    kind = "not written by an engine" if version is None else f"version {version}"
    return f"{human(host['bytes'])}, {kind}"


def _counted(cells: Mapping[str, int]) -> list[str]:
    return [f"{_words(name)} {n}" for name, n in cells.items()]


def _words(name: str) -> str:
    return name.replace("_", " ")


def tables(facts: Facts) -> str:
    """Runs in the order of the arena, and sequences."""
    runs = [["run", "cells", "rows", "owner", "read by"]]
    for run in facts["runs"]:
        cells = f"{run['start']}-{run['start'] + run['cap'] - 1}"
        owner = "orphan" if run["owner"] is None else f"seq {run['owner']}"
        readers = ", ".join(f"seq {seq}" for seq in run["readers"]) or "-"
        runs.append([str(run["id"]), cells, str(run["rows"]), owner, readers])
    sequences = [["seq", "rows", "cap", "in cells", "shares", "last token"]]
    for seq in facts["sequences"]:
        spans = ", ".join(f"{cell}-{cell + n - 1}" for _, cell, n in seq["spans"])
        share, last = seq["share"], seq["last"]
        shared = f"{counted(share['rows'], 'row')} of run {share['run']}" if share else "-"
        fed = "-"
        if last:
            digest = f", logits {last['logits']}" if last["logits"] else ""
            fed = f"{last['token']} by {last['kind']}{digest}"
        row = [str(seq["id"]), str(seq["rows"]), str(seq["cap"]), spans, shared, fed]
        sequences.append(row)
    return "\n\n".join(aligned(rows, left=len(rows[0])) for rows in (runs, sequences))


def state(of: Any) -> str:
    """The host's state, a line for each name; bytes that no engine wrote as text."""
    if not isinstance(of, dict):
        return f"host: {printable(of)}"
    lines = [f"{printable(name)}: {json.dumps(value)}" for name, value in of.items()]
    return "\n".join(["state of the host", *(f"  {line}" for line in lines)])


def arena(of: Tables) -> str:
    """The map, as wide as the terminal; in ASCII where the output spells nothing else."""
    shades = shades_of(sys.stdout.encoding)
    label = len(str(of.n_ctx))
    drawn = draw(of, shutil.get_terminal_size().columns - label - 1, shades)
    per = "a cell each" if drawn.per == 1 else f"{drawn.per} cells each"
    lines = [f"map, {per}; below a run's number, its last digit of 36", legend(shades)]
    for line in drawn.lines:
        lines.append(f"{line.cell:{label}} {line.held}")
        lines += [f"{'':{label}} {line.runs}"] if line.runs else []
    return "\n".join(lines)


def shades_of(encoding: str | None) -> Shades:
    """The characters that an output of `encoding` can spell."""
    try:
        "".join(UNICODE).encode(encoding or "ascii")
    except (LookupError, UnicodeError):
        return ASCII
    return UNICODE

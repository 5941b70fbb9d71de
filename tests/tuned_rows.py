"""Promoted rows for tests: of the CPU's kernels here, and of a user's module."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from minfer import registry, tuned
from minfer.device import Device
from minfer.ops import PREFILL, Shape
from minfer.tuned import saying, table

CPU = Device.parse("cpu")
OTHER = {"numba": "0.1"}
EVIDENCE = {
    "speedup": [1.05, 1.08, 1.11],
    "date": "2026-11-30T20:00:00+0000",
    "commit": "98bdcc5aa0ffee",
}
MINE = """
from minfer.kernels_numba.attn_map import attn_map_rows
from minfer.kernels_numba.attn_window import attn_window_rows
from minfer.ops import Tunable, variant

SPACE = {"threads": Tunable(1, (), searched=False), "block_n": Tunable(0, (16, 32), numeric=True),
         "stages": Tunable(2, (2, 3))}

@variant(space=SPACE)
def attn_window_mine(q, k, v, positions, span, tiles, *, fmt, scale, width, config):
    return attn_window_rows(q, k, v, positions, span, tiles, fmt=fmt, scale=scale, width=width,
                            config=config)

@variant(space=SPACE)
def attn_map_mine(q, k, v, positions, runs, tiles, *, fmt, scale, width, config):
    return attn_map_rows(q, k, v, positions, runs, tiles, fmt=fmt, scale=scale, width=width,
                         config=config)
"""


def row(variant: str = "flash", free: Any = None, **other: Any) -> dict[str, Any]:
    """A row that holds here, as JSON: attn_window over q8_0, prefill, d64; `other` wins."""
    op = other.get("op", "attn_window")
    known = {v.name: v for v in registry.variants(op)}
    source = tuned.source_of(known[variant]) if variant in known else "0"
    buckets = {1: {}} if free is None else free
    return {
        "op": op,
        "format": "q8_0",
        "head_dim": 64,
        "kind": PREFILL,
        "variant": variant,
        "numeric": {},
        "free": [{"n_q": n_q, "config": config} for n_q, config in buckets.items()],
        "source": source,
        "made_with": dict(tuned.made_with(CPU)),
        "evidence": EVIDENCE,
        **other,
    }


def content(*rows: Mapping[str, Any]) -> dict[str, Any]:
    return {"schema": 1, "device_kind": tuned.device_kind(CPU), "rows": list(rows)}


class Folder:
    """The folder that rows are read from while a test runs."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._top, self._patch, self._made = path, monkeypatch, 0
        self.write()

    @property
    def file(self) -> Path:
        return table.FOLDER / f"{tuned.device_kind(CPU)}.json"

    def write(self, *rows: Mapping[str, Any], text: str | bytes | None = None) -> None:
        """These rows and no others, or this text; what was said is forgotten."""
        self._made += 1
        folder = self._top / f"rows{self._made}"  # a file is read once
        folder.mkdir()
        self._patch.setattr(table, "FOLDER", folder)
        self._patch.setattr(saying, "_said", set())
        if text is None and rows:
            text = json.dumps(content(*rows))
        if text is not None:
            self.file.write_bytes(text.encode() if isinstance(text, str) else text)


def user_module(path: Path, text: str = MINE, name: str = "my_tuned") -> ModuleType:
    """A module of a file of that text, not added."""
    file = path / f"{name}.py"
    file.write_text(text)
    module = ModuleType(name)
    exec(compile(text, str(file), "exec"), vars(module))
    return module


def choose(op: str = "attn_window", **how: Any) -> registry.Choice:
    shape = {"kind": PREFILL, "n_q": 40, **how.pop("shape", {})}
    return registry.select(op, **{"fmt": "q8_0", "shape": Shape(**shape), **how})

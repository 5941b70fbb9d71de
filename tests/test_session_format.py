"""docs/session-format.md is what the code does, and enough to read a file by (contract 8.1)."""

from __future__ import annotations

import os
import re
import struct
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import xxhash
from session_mutations import HEAD_DIM, small_store

from minfer.device import DeviceKind
from minfer.format import KvFormat, cell_words
from minfer.kv.batch import Batch
from minfer.kv.runs import LastRow
from minfer.kv.session.header import FLAGS, HEADER, MAGIC, RECORDS, VERSION
from minfer.kv.session.identity import Identity
from minfer.kv.session.tables import COUNTER_MAX, DTYPES
from minfer.kv.store import KvStore
from minfer.ops import KINDS

PAGE = (Path(__file__).parent.parent / "docs" / "session-format.md").read_text()
CODES = {"u32": "I", "u64": "Q", "i32": "i", "i64": "q"}


@pytest.fixture(autouse=True)
def quick_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that does not wait."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)


# --- the page -------------------------------------------------------------------------------------


class Field(NamedTuple):
    offset: int
    size: int
    type: str
    name: str
    meaning: str


def section(title: str) -> str:
    (found,) = re.findall(rf"^##+ {title}\n(.*?)(?=^##|\Z)", PAGE, re.MULTILINE | re.DOTALL)
    return str(found)


def rows_of_table(text: str) -> list[list[str]]:
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def fields(title: str) -> list[Field]:
    """The table of a section; its offsets leave no gap."""
    found = [Field(int(o), int(n), *rest) for o, n, *rest in rows_of_table(section(title))]
    end = 0
    for field in found:
        assert field.offset == end, f"{title}: {field.name}"
        end += field.size
    return found


def layout(of: list[Field]) -> str:
    """The same as a format of `struct`."""
    return "<" + "".join(CODES.get(field.type, f"{field.size}s") for field in of)


SECTIONS = {name: name.capitalize() for name in RECORDS}


def test_the_header_is_that_of_the_code() -> None:
    found = fields("Header")
    assert layout(found).replace("24s", "24x") == re.sub(
        r"(\d+)I", lambda match: "I" * int(match[1]), HEADER.format.replace("2Q", "QQ")
    )
    meaning = {field.name: field.meaning for field in found}
    assert meaning["magic"] == f"`{MAGIC.decode()}`"
    assert int(meaning["version"]) == VERSION
    for fmt, flag in FLAGS.items():
        assert f"{flag} {fmt}" in meaning["flags"]
    for kind in DeviceKind:
        assert f"{kind.value} {kind.label}" in meaning["backend"]


@pytest.mark.parametrize("name", RECORDS)
def test_the_records_are_those_of_the_code(name: str) -> None:
    found, dtype = fields(SECTIONS[name]), DTYPES[name]
    assert [field.name for field in found] == list(dtype.names or ())
    for field in found:
        kind, offset = (dtype.fields or {})[field.name][:2]
        assert (field.type, field.offset) == (f"{kind.kind}{8 * kind.itemsize}", offset)
        assert kind.byteorder in "<="
    assert struct.calcsize(layout(found)) == RECORDS[name] == dtype.itemsize


def test_the_parts_and_bounds_are_those_of_the_code() -> None:
    parts = dict(rows_of_table(PAGE.split("## Header")[0]))
    assert list(parts) == ["header", *RECORDS, "host", "rows", "checksum"]
    assert int(parts["header"]) == HEADER.size
    for name, size in RECORDS.items():
        assert parts[name] == (str(size) if name == "counters" else f"{size} * n_{name}")
    assert COUNTER_MAX == 2**53 and "2^53" in section("Counters")
    for number, kind in enumerate(KINDS, 1):
        assert f"{number} {kind}" in section("Sequences")


@pytest.mark.parametrize("fmt", KvFormat)
def test_the_width_of_cells(fmt: KvFormat) -> None:
    words = {row[0]: row[2] for row in rows_of_table(section("Rows"))}[str(fmt)]
    formula, _, rounded = words.partition(", ")
    for n in (32, 64, 96, 160, 1024) + ((1, 3, 15) if fmt is not KvFormat.Q8_0 else ()):
        value = eval(formula, {"n": n})
        assert -(-value // 1) == cell_words(fmt, n)
        assert rounded == "rounded up" or value == int(value)


# --- a reader made from the page ------------------------------------------------------------------


class Read(NamedTuple):
    """cells: by layer, "k" or "v", and cell."""

    header: dict[str, Any]
    tables: dict[str, list[dict[str, Any]]]
    host: bytes
    cells: dict[tuple[int, str, int], bytes]


def read(data: bytes) -> Read:
    """A file by the tables of the page alone."""
    assert xxhash.xxh3_128_hexdigest(data[:-16]) == data[-16:].hex()
    head = fields("Header")
    values = struct.unpack_from(layout(head), data)
    header = {field.name: value for field, value in zip(head, values, strict=True)}
    assert (header["magic"], header["version"]) == (b"MINFERPY", 2)
    at, tables = 128, {}
    for name, title in SECTIONS.items():
        columns, records = fields(title), []
        for _ in range(header.get(f"n_{name}", 1)):
            values = struct.unpack_from(layout(columns), data, at)
            records.append({c.name: value for c, value in zip(columns, values, strict=True)})
            at += columns[-1].offset + columns[-1].size
        tables[name] = records
    host = data[at : at + header["host_bytes"]]
    at += header["host_bytes"]
    by_cell = sorted(tables["runs"], key=lambda run: run["start"])
    rows = [run["start"] + i for run in by_cell for i in range(run["rows"])]
    cells, width = {}, 4 * header["cell_words"]
    for layer in range(header["n_layer"]):
        for which in "kv":
            for cell in rows:
                cells[layer, which, cell] = data[at : at + width]
                at += width
    assert (len(rows), at) == (header["n_rows"], len(data) - 16)
    return Read(header, tables, host, cells)


def cell_of(found: Read, sequence: dict[str, Any], position: int) -> int:
    start = {run["id"]: run["start"] for run in found.tables["runs"]}
    if position < sequence["share_rows"]:
        return int(start[sequence["share_run"]] + position)
    return int(start[sequence["run"]] + position - sequence["share_rows"])


def element(fmt: str, cell: bytes, i: int) -> float:
    if fmt == "f32":
        return float(struct.unpack_from("<f", cell, 4 * i)[0])
    if fmt == "f16":
        return float(struct.unpack_from("<e", cell, 2 * i)[0])
    at = i // 32 * 34
    scale, code = struct.unpack_from("<e", cell, at)[0], struct.unpack_from("b", cell, at + 2 + i)
    return float(scale * code[0])


@pytest.mark.parametrize("fmt", HEAD_DIM)
def test_a_file_is_read_by_the_page_alone(fmt: str, tmp_path: Path) -> None:
    store = small_store(fmt)
    store.save(tmp_path / "a.kv", b"host")
    found = read((tmp_path / "a.kv").read_bytes())
    assert found.host == b"host"
    assert found.header["flags"] == {"f32": 0, "q8_0": 1, "f16": 2}[fmt]
    sizes = [found.header[name] for name in ("n_layer", "n_ctx", "n_kv_embd", "n_head_kv")]
    assert sizes == [store.n_layer, store.n_ctx, store.head_dim, 1]
    assert [s["id"] for s in found.tables["sequences"]] == sorted(store.sequences())
    for sequence in found.tables["sequences"]:
        seq, n = sequence["id"], sequence["written"]
        assert n == store.written(seq)
        spans = [tuple(s.values())[1:] for s in found.tables["spans"] if s["seq"] == seq]
        assert spans == [tuple(span) for span in store.spans(seq)]
        for layer in range(store.n_layer):
            for which in "kv":
                cells = [found.cells[layer, which, cell_of(found, sequence, p)] for p in range(n)]
                assert b"".join(cells) == store.export_cells(seq, layer, which).tobytes()
                values = [[element(fmt, c, i) for i in range(store.head_dim)] for c in cells]
                rows = store.export(seq, layer, which).reshape(n, store.head_dim)
                np.testing.assert_array_equal(np.array(values).reshape(rows.shape), rows)
    owners = [(o["run"], o["cells"]) for o in found.tables["owners"]]
    assert [run for run, n in owners for _ in range(n)] == store.owners()
    (counters,) = found.tables["counters"]
    assert counters["next_run"] == store.tables.next_run
    last = found.tables["sequences"][0]
    assert (last["kind"], last["token"], last["logits"]) == (2, 17, 2**64 - 3)


# --- the example ----------------------------------------------------------------------------------


def test_the_example_is_what_is_written(tmp_path: Path) -> None:
    (dump,) = re.findall(r"```text\n(.*?)```", PAGE, re.DOTALL)
    store = KvStore(1, 4, 1, 1, cache_type="f32", threads=1)
    store.identity = lambda: Identity(b"\x11" * 16)
    store.reserve(7, 3)
    k = np.array([1, 2], np.float32).reshape(2, 1, 1)
    with store.step(Batch([7, 7], [0, 1], "prefill")) as step:
        step.write(0, k=k, v=-k)
        step.lasts[7] = LastRow(9, "prefill", 0x1122334455667788)
    store.save(tmp_path / "a.kv", b"hi")
    data = (tmp_path / "a.kv").read_bytes()
    lines = [f"{at:03x}  {data[at : at + 16].hex(' ')}\n" for at in range(0, len(data), 16)]
    assert dump == "".join(lines)
    ends = re.findall(r"\b0[0-9a-f]{2}\b|\b1[0-9a-f]{2}\b", section("An example").split("```")[2])
    begins = [HEADER.size]
    for name, n in zip(RECORDS, (1, 1, 1, 2, 1), strict=True):
        begins.append(begins[-1] + n * RECORDS[name])
    begins += [begins[-1] + 2, len(data) - 16]
    assert [int(at, 16) for at in ends] == begins

"""Files of another kind: refused, saying what differs and what to do; nothing changes (8.2)."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from refusals import refused
from session_mutations import HEAD_DIM, Parts, checksummed, empty_store, settle, small_store

from minfer.errors import Damaged, Refusal
from minfer.kv.session import host
from minfer.kv.session.header import HEADER, parse
from minfer.kv.session.identity import Identity
from minfer.kv.session.reading import SessionFile
from minfer.kv.store import KvStore

Change = Callable[[Parts], None]
pytestmark = pytest.mark.usefixtures("quick_disk")


@pytest.fixture(params=HEAD_DIM)
def store(request: pytest.FixtureRequest) -> KvStore:
    return small_store(request.param, sanitize=True)


@pytest.fixture
def path(store: KvStore, tmp_path: Path) -> Path:
    """What the store holds."""
    store.save(tmp_path / "a.kv", b'{"of": "the host"}')
    return tmp_path / "a.kv"


def change(path: Path, how: Change) -> None:
    """Change the parts of a file; counts are the caller's matter."""
    parts = Parts.of(path.read_bytes())
    how(parts)
    path.write_bytes(parts.packed())


def header(**fields: Any) -> Change:
    return lambda parts: parts.header.update(fields)


def refuses(store: KvStore, path: Path, rule: str, *words: str) -> Refusal:
    error = refused(store, rule, lambda: store.load(path), str(path), *words)
    assert type(error) is Refusal
    return error


def damaged(store: KvStore, path: Path, *words: str) -> None:
    error = refused(store, "8.2", lambda: store.load(path), str(path), "is damaged", *words)
    assert type(error) is Damaged and error.exit_code == 3
    assert error.message.endswith("nothing was loaded")


# --- other files ----------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [0, 1, 3, 2**32 - 1])
def test_another_version(store: KvStore, path: Path, version: int) -> None:
    change(path, header(version=version))
    words = (f"of version {version} and this minfer reads version 2", "the minfer that wrote it")
    error = refuses(store, path, "8.1", *words)
    assert error.facts == {"version": version, "reads": 2}


def test_another_version_of_another_layout(store: KvStore, path: Path) -> None:
    """Nothing behind the version is looked at."""
    for rest in (b"", bytes(5), bytes(500)):
        path.write_bytes(b"MINFERPY" + struct.pack("<I", 3) + rest)
        refuses(store, path, "8.1", "of version 3 and this minfer reads version 2")


@pytest.mark.parametrize("flags", [3, 4, 8, 2**31, 2**32 - 1])
def test_unknown_flags(store: KvStore, path: Path, flags: int) -> None:
    change(path, header(flags=flags))
    words = (f"flags {flags:#x}", "0 (f32), 1 (q8_0) and 2 (f16)", "a newer minfer")
    assert refuses(store, path, "8.1", *words).facts == {"flags": flags}


@pytest.mark.parametrize(
    "begin", [b"", b"M", b"MINFERP", b"MINFERPX", b"GGUF\3\0\0\0", b"{}", bytes(200)], ids=repr
)
def test_what_is_no_session(store: KvStore, path: Path, begin: bytes) -> None:
    path.write_bytes(begin)
    damaged(store, path, "it is no session file: it does not begin with MINFERPY")


# --- other runs -----------------------------------------------------------------------------------


def other(**sizes: Any) -> KvStore:
    """A store that differs from an f32 one of the small files in these."""
    how = {"n_layer": 2, "n_ctx": 24, "n_head_kv": 1, "head_dim": 4, "cache_type": "f32", **sizes}
    return KvStore(**how, threads=1)


@pytest.mark.parametrize(
    ("sizes", "words", "way_out"),
    [
        ({"n_ctx": 23}, "n_ctx 24 and this run has 23", "load the model with n_ctx 24"),
        ({"n_ctx": 25}, "n_ctx 24 and this run has 25", "load the model with n_ctx 24"),
        ({"n_layer": 1}, "n_layer 2 and this run has 1", "it belongs to another model"),
        ({"head_dim": 5}, "n_kv_embd 4 and this run has 5", "it belongs to another model"),
        ({"n_head_kv": 2, "head_dim": 2}, "n_head_kv 1 and this run has 2", "another model"),
        ({"cache_type": "f16"}, "cache type f32 and this run has f16", "use cache type f32"),
        (
            {"cache_type": "q8_0", "head_dim": 32},
            "n_kv_embd 4 and this run has 32, cache type f32 and this run has q8_0",
            "it belongs to another model",
        ),
        (
            {"cache_type": "f16", "n_ctx": 8},
            "n_ctx 24 and this run has 8, cache type f32 and this run has f16",
            "load the model with n_ctx 24 and use cache type f32",
        ),
    ],
    ids=str,
)
def test_another_run(tmp_path: Path, sizes: dict[str, Any], words: str, way_out: str) -> None:
    path = tmp_path / "a.kv"
    small_store("f32").save(path)
    target = other(**sizes)
    target.reserve(3, 5)
    refuses(target, path, "8.2", words, way_out)


@pytest.mark.parametrize("sizes", [{"cache_type": "f16"}, {"n_ctx": 8}, {"n_layer": 1}], ids=str)
def test_all_but_a_model_can_be_transcoded(tmp_path: Path, sizes: dict[str, Any]) -> None:
    path = tmp_path / "a.kv"
    small_store("f32").save(path)
    error = refuses(other(**sizes), path, "8.2")
    assert ("`minfer session transcode`" in error.message) == ("n_layer" not in sizes)


@pytest.mark.parametrize(("backend", "name"), [(1, "metal"), (2, "cuda"), (7, "7")])
def test_another_backend(store: KvStore, path: Path, backend: int, name: str) -> None:
    change(path, header(backend=backend))
    words = (f"holds backend {name} and this run has cpu", f"use device {name}", "transcode")
    assert refuses(store, path, "8.2", *words).facts == {"backend": (name, "cpu")}


MODEL, OTHER = b"m" * 16, b"o" * 16


def of_model(store: KvStore, model: bytes, name: str) -> KvStore:
    made = replace(store.identity(), model=model, name=name)
    store.identity = lambda: made
    return store


def saved_by(path: Path, model: bytes, name: str) -> None:
    told = host.pack(name, "", {}, None) if name else b""
    of_model(small_store("f32"), model, name).save(path, told)


def test_a_model_of_equal_dimensions(tmp_path: Path) -> None:
    path = tmp_path / "a.kv"
    saved_by(path, MODEL, "one.gguf")
    target = of_model(small_store("f32"), OTHER, "two.gguf")
    words = ("one.gguf", MODEL.hex(), "two.gguf", OTHER.hex(), "load the model that it was saved")
    error = refuses(target, path, "8.8", *words)
    assert error.facts == {"model": MODEL.hex(), "wanted": OTHER.hex()}


def test_a_model_and_none(tmp_path: Path) -> None:
    path = tmp_path / "a.kv"
    saved_by(path, MODEL, "")
    refuses(small_store("f32"), path, "8.8", MODEL.hex(), "this run has no model")
    small_store("f32").save(path)
    target = of_model(small_store("f32"), MODEL, "one.gguf")
    refuses(target, path, "8.8", "no model: a store without one wrote it", "one.gguf")


def test_names_in_a_file_do_not_steer_a_terminal(tmp_path: Path) -> None:
    path = tmp_path / "a.kv"
    told = {
        "minfer_host": 1,
        "model": "\x1b[2J\nevil\u202e\ud800" + 10_000 * "x",
        "numerics": {"a\nb": "\x07"},
    }
    named = of_model(small_store("f32"), MODEL, "")
    named.save(path, json.dumps(told).encode())
    target = of_model(small_store("f32"), OTHER, "two.gguf")
    message = refuses(target, path, "8.8", "evil").message
    assert message.isprintable() and len(message) < 1000
    refuses(other(n_layer=1), path, "8.2", "another model, ?[2J?evil??xxx")
    named.identity = lambda: Identity(b"n" * 16, {}, MODEL)
    assert named.load(path).differs == "a?b ? then, absent now"


def test_numbers_of_another_run_are_told(tmp_path: Path) -> None:
    """They are no reason to refuse (6.4)."""
    path = tmp_path / "a.kv"
    then = Identity(b"t" * 16, {"numba": "0.1", "a": "b", "gone": "x"})
    now = Identity(b"n" * 16, {"numba": "0.2", "a": "b", "new": "y"})
    store = small_store("f32")
    store.identity = lambda: then
    store.save(path, host.pack("", "", then.facts, None))
    assert store.load(path).bitwise
    store.identity = lambda: now
    loaded = store.load(path)
    assert not loaded.bitwise
    assert loaded.differs == (
        "numba 0.1 then, 0.2 now; gone x then, absent now; new absent then, y now"
    )
    for told, differs in ((b"", "kernels or libraries are others"), (b"[[[", "kernels or")):
        store.identity = lambda: then
        store.save(path, told)
        store.identity = lambda: now
        assert differs in store.load(path).differs
    change(path, header(numerics=bytes(16)))
    assert "transcode" in store.load(path).differs


# --- contradictions, with a checksum that fits ----------------------------------------------------


def table(name: str, index: int, **fields: int) -> Change:
    def set_fields(parts: Parts) -> None:
        for field, value in fields.items():
            parts.tables[name][field][index] = value

    return set_fields


def settled(*changes: Change) -> Change:
    """The changes, and whatever follows from runs and sequences made to fit."""

    def both(parts: Parts) -> None:
        for how in changes:
            how(parts)
        settle(parts)

    return both


def another_row(parts: Parts) -> None:
    parts.header["n_rows"] += 1
    parts.rows += bytes(2 * 2 * 4 * parts.header["cell_words"])


CONTRADICTIONS: dict[str, tuple[Change, str]] = {
    "n_layer 0": (header(n_layer=0), "n_layer is 0"),
    "n_ctx too large": (header(n_ctx=2**31), "n_ctx is 2147483648"),
    "heads": (header(n_head_kv=5), "elements of a row are not 5 equal heads"),
    "words": (header(cell_words=1000), "cells of 1000 words"),
    "more runs than cells": (header(n_runs=25), "n_runs is 25, above 24"),
    "more rows than cells": (header(n_rows=25), "n_rows is 25, above 24"),
    "more sequences than runs": (header(n_sequences=7), "n_sequences is 7, above 6"),
    "rows": (header(n_rows=8), "it is too long"),
    "a row of nobody": (another_row, "it says 10 rows and its tables say otherwise"),
    "huge host": (header(host_bytes=2**64 - 1), "it is cut short"),
    "rest of the header": (lambda parts: setattr(parts, "zero", bytes(23) + b"x"), "not zero"),
    "run ids": (table("runs", 1, id=0), "the ids of its runs do not ascend"),
    "negative run": (settled(table("runs", 0, id=-7)), "counters"),
    "sequence ids": (table("sequences", 1, id=9), "the ids of its sequences do not ascend"),
    "negative sequence": (settled(table("sequences", 0, id=-7)), "sequence -7 has 4 rows"),
    "negative rows": (settled(table("sequences", 0, written=-1, kind=0)), "has -1 rows"),
    "last row of none": (table("sequences", 3, kind=1), "the last row of sequence 4"),
    "kind": (table("sequences", 0, kind=3), "the last row of sequence 1 is of kind 3"),
    "token": (table("sequences", 0, token=-1), "token -1"),
    "token of no kind": (table("sequences", 0, kind=0), "its sequences are not those"),
    "overlap": (settled(table("runs", 1, start=4)), "begins at cell 4, inside run 0"),
    "past the arena": (settled(table("runs", 5, start=23, cap=2)), "leaves the arena of 24"),
    "no cells": (settled(table("runs", 3, cap=0)), "leaves the arena of 24"),
    "below the arena": (settled(table("runs", 0, start=-1)), "begins at cell -1"),
    "two owners": (settled(table("sequences", 3, run=0)), "names run 0 and does not own it"),
    "unknown run": (settled(table("sequences", 3, run=50)), "names run 50"),
    "own share": (settled(table("sequences", 1, share_run=1)), "unknown or its own"),
    "share of a share": (
        settled(table("sequences", 2, share_run=1, share_rows=1, written=1)),
        "shares run 1, which does not begin at position 0",
    ),
    "share of no rows": (settled(table("sequences", 1, share_rows=0)), "shares 0 rows"),
    "fewer rows than shared": (
        settled(table("sequences", 1, written=2)),
        "shares 3 rows and reads",
    ),
    "too many rows": (settled(table("sequences", 0, written=6)), "of 5 cells holds 6 rows"),
    "orphan beyond its readers": (
        settled(table("sequences", 4, share_rows=1, written=2)),
        "has no owner and 2 cells, of which 1 are read",
    ),
    "rows of a run": (table("runs", 0, rows=3), "its runs are not those"),
    "a span": (table("spans", 0, length=4), "its spans are not those"),
    "an owner": (table("owners", 0, cells=4), "its owners are not those"),
    "reserved of runs": (table("runs", 0, zero=1), "a reserved field of the runs is not zero"),
    "reserved": (table("sequences", 0, zero=1), "a reserved field of the sequences is not zero"),
    "next run": (table("counters", 0, next_run=5), "the next run 5"),
    "negative counter": (table("counters", 0, defrags=-1), "counters [-1, 0, 0, 0]"),
    "huge counter": (table("counters", 0, rows_copied=2**53 + 1), "counters [0, 0, 0, 90071992"),
    "huge next run": (table("counters", 0, next_run=2**63 - 1), "the next run 9223372036854775807"),
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_contradictions(store: KvStore, path: Path, name: str) -> None:
    how, words = CONTRADICTIONS[name]
    change(path, how)
    damaged(store, path, words)


@pytest.mark.parametrize("fmt", ["f16", "q8_0"])
def test_bytes_behind_the_elements(fmt: str, tmp_path: Path) -> None:
    store, path = small_store(fmt), tmp_path / "a.kv"
    store.save(path)
    data = path.read_bytes()
    path.write_bytes(checksummed(data[:-17] + b"\1"))
    damaged(store, path, "bytes of cells that hold no element are not zero")


def test_a_wrong_checksum_is_seen_before_what_the_tables_say(store: KvStore, path: Path) -> None:
    change(path, table("runs", 1, id=0))
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    damaged(store, path, "its checksum is not that of its bytes")


# --- reading without a store ----------------------------------------------------------------------


def test_a_file_that_shrinks_once_it_is_open(path: Path) -> None:
    for size in (path.stat().st_size - 17, 200, 3, 0):
        data = path.read_bytes()
        with SessionFile(path) as file:
            os.truncate(path, size)
            with pytest.raises(Damaged, match="was changed while it was read"):
                file.verify()
        path.write_bytes(data)


def test_layers_without_rows_take_no_time(tmp_path: Path) -> None:
    path = tmp_path / "a.kv"
    empty_store("f32").save(path)
    change(path, header(n_layer=2**31 - 1))
    with SessionFile(path) as file:
        file.verify()
        assert list(file.pieces()) == list(file.rows()) == []


def test_a_header_is_bounded_by_the_file(path: Path) -> None:
    """Whatever counts it holds, what follows from them is the size of the file."""
    data = path.read_bytes()
    rng = np.random.default_rng(1)
    for _ in range(2000):
        head = bytearray(data[: HEADER.size])
        at = 4 * int(rng.integers(3, 26))
        head[at : at + 4] = rng.bytes(4)
        try:
            found = parse(bytes(head), len(data), "it")
        except Refusal:
            continue
        assert found.offsets["end"] == len(data)

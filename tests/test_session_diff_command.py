"""`minfer session diff`: two files beside each other."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import numpy as np
import pytest
from saved_sessions import engine_session, kept_rows, resealed, row_changed, told_store
from stores import FORMATS, Told

from minfer import reference
from minfer.kv.session import pieces, reading
from minfer.kv.session.reading import SessionFile
from minfer.sessions import rows as session_rows


@pytest.fixture
def call(call):
    """`minfer session diff` in this process."""
    return functools.partial(call, "session", "diff")


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are read two at a time, where they are f32."""
    for module in (pieces, reading, session_rows):
        monkeypatch.setattr(module, "PIECE_BYTES", 512)


def saved(told: Told, path: Path, host: bytes = b"") -> Path:
    told.store.save(path, host)
    return path


def test_equal_files(call, tmp_path: Path) -> None:
    a, b = (saved(told_store(), tmp_path / name) for name in ("a.kv", "b.kv"))
    done = call(a, b)
    assert (done.code, done.out) == (0, f"{a} and {b} are equal, byte for byte\n")
    report = json.loads(call(a, b, "--json").out)
    assert report["equal"] and report["facts"] == report["tables"] == {} and report["host"] == []
    assert [(r["seq"], r["compared"], r["equal"], r["first"]) for r in report["rows"]] == [
        (2, 8, 8, None),
        (3, 5, 5, None),
        (9, 0, 0, None),
    ]


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.usefixtures("small_pieces")
def test_one_row_differs(call, tmp_path: Path, fmt: str) -> None:
    """Row 6 of the file is cell 11, position 6 of sequence 2; in f32 byte 0 is the last bits."""
    a, b = (saved(told_store(fmt), tmp_path / name) for name in ("a.kv", "b.kv"))
    row_changed(b, layer=1, which=1, row=6, byte=9, by=0x15)
    done = call(a, b, "--json")
    report = json.loads(done.out)
    assert done.code == 1 and not report["equal"]
    assert report["facts"] == {} and report["tables"] == {}
    two, three, _ = report["rows"]
    assert (two["compared"], two["equal"], two["first"]) == (8, 7, 6)
    assert (three["equal"], three["first"], three["planes"]) == (5, None, [])
    ((plane),) = two["planes"]
    assert (plane["layer"], plane["which"]) == (1, "v")
    rows = [stored(path, 6, 1, 1) for path in (a, b)]
    away = np.abs(rows[0].astype(np.float64) - rows[1])
    assert plane["max_abs"] == away.max() > 0
    assert plane["rms"] == pytest.approx(np.sqrt((away**2).sum() / (8 * 64)), rel=1e-12)
    text = call(a, b).out
    assert "  seq 2: 7 of 8 rows equal byte for byte, the first that differs is at pos" in text
    (line,) = [line for line in text.splitlines() if line.split()[:2] == ["1", "equal"]]
    assert line.split()[2:] == [f"{plane['max_abs']:.3g}", f"{plane['rms']:.3g}"]


def stored(path: Path, row: int, layer: int, which: int) -> np.ndarray:
    """A written row of a file, decoded by the oracle."""
    with SessionFile(path) as file:
        header, data = file.header, path.read_bytes()
    first = header.offsets["rows"] + ((2 * layer + which) * header.n_rows + row) * header.cell_bytes
    cells = np.frombuffer(data[first : first + header.cell_bytes], np.uint8)[None]
    return reference.decode_rows(cells, header.fmt, header.n_kv_embd)


@pytest.mark.usefixtures("small_pieces")
def test_formats_are_compared_in_value(call, tmp_path: Path) -> None:
    told = {fmt: told_store(fmt) for fmt in ("f32", "q8_0")}
    a, b = (saved(one, tmp_path / f"{fmt}.kv") for fmt, one in told.items())
    report = json.loads(call(a, b, "--json").out)
    assert report["facts"]["cache_type"] == ["f32", "q8_0"]
    for rows in report["rows"][:2]:
        assert (rows["equal"], rows["first"]) == (0, 0)
        assert len(rows["planes"]) == 4
        for plane in rows["planes"]:
            where = rows["seq"], plane["layer"], plane["which"]
            full, packed = (kept_rows(one, *where).astype(np.float64) for one in told.values())
            away = np.abs(full - packed)
            assert plane["max_abs"] == away.max()
            assert plane["rms"] == pytest.approx(np.sqrt((away**2).mean()), rel=1e-12)
            relative = np.sqrt((away**2).sum() / (full**2).sum())
            assert plane["relative_rms"] == pytest.approx(relative, rel=1e-12)
    assert "0 of 8 rows equal in value" in call(a, b).out


def test_f16_holds_the_values_of_f16(call, tmp_path: Path) -> None:
    """Values that a format holds exactly are equal in the other."""
    told = told_store("f16")
    a = saved(told, tmp_path / "a.kv")
    b = tmp_path / "b.kv"
    assert call.func("session", "transcode", a, b, "--cache-type", "f32").code == 0
    report = json.loads(call(a, b, "--json").out)
    assert [(r["equal"], r["first"]) for r in report["rows"]] == [(8, None), (5, None), (0, None)]
    assert not report["equal"]


def test_tables_that_differ(call, tmp_path: Path) -> None:
    told = told_store()
    a = saved(told, tmp_path / "a.kv", b"one")
    told.release(9)
    told.reserve(4, 3)
    told.truncate(3, 2)
    b = saved(told, tmp_path / "b.kv", b"two")
    done = call(a, b)
    lines = done.out.splitlines()
    assert done.code == 1
    assert "  runs 3: only in a" in lines and "  runs 4: only in b" in lines
    assert "  sequences 9: only in a" in lines and "  sequences 4: only in b" in lines
    assert "  runs 2: rows 1 | 0" in lines
    assert "  host: bytes" in lines and "  counters.next_run: 4 | 5" in lines
    assert "  seq 3: 2 of 2 rows equal byte for byte" in lines
    report = json.loads(call(a, b, "--json").out)
    assert report["tables"]["runs 3"][1] is None and report["host"] == ["bytes"]
    assert [rows["seq"] for rows in report["rows"]] == [2, 3]


def test_names_in_the_host_part(call, tiny_gguf: Path, tmp_path: Path) -> None:
    a, b = tmp_path / "a.kv", tmp_path / "b.kv"
    engine = engine_session(tiny_gguf, a)
    engine.save(b, {"stream_tokens": [1], "more": {"x": 2}})
    done = call(a, b)
    assert "numerics" not in done.out
    assert done.code == 1 and "  host: state.stream_tokens, state.more" in done.out.splitlines()


def test_rows_of_other_shapes(call, tmp_path: Path) -> None:
    a = saved(told_store(), tmp_path / "a.kv")
    b = saved(told_store(n_layer=1), tmp_path / "b.kv")
    done = call(a, b)
    assert done.code == 1 and done.out.splitlines()[-1] == "  rows: of other shapes, not compared"
    report = json.loads(call(a, b, "--json").out)
    assert report["rows"] is None and report["facts"]["n_layer"] == [2, 1]


def test_rows_that_are_not_finite(call, tmp_path: Path) -> None:
    a, b = (saved(told_store(), tmp_path / name) for name in ("a.kv", "b.kv"))
    put(b, 2, np.float32(np.inf).tobytes())
    report = json.loads(call(a, b, "--json").out)
    (plane,) = report["rows"][0]["planes"]
    assert plane["lost"] == 1 and plane["max_abs"] == 0.0
    assert "    finite in one file only: 1 element" in call(a, b).out.splitlines()
    assert call(b, b).code == 0


def put(path: Path, row: int, value: bytes) -> None:
    """The first element of a written K row of layer 0."""
    with SessionFile(path) as file:
        first = file.header.offsets["rows"] + row * file.header.cell_bytes
    data = bytearray(path.read_bytes())
    data[first : first + 4] = value
    resealed(path, bytes(data))


def test_damage_and_missing_files(call, tmp_path: Path) -> None:
    a = saved(told_store(), tmp_path / "a.kv")
    assert call(a, tmp_path / "none.kv").code == 2
    (tmp_path / "b.kv").write_bytes(a.read_bytes()[:-1])
    assert call(a, tmp_path / "b.kv").code == 3


def test_a_file_that_changes_meanwhile(
    call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = (saved(told_store(), tmp_path / name) for name in ("a.kv", "b.kv"))
    cells = SessionFile.cells

    def changing(file: SessionFile, *what):
        if file.path == b:
            put(b, 0, b"late")
        return cells(file, *what)

    monkeypatch.setattr(SessionFile, "cells", changing)
    done = call(a, b)
    assert done.code == 3 and "b.kv was changed while it was read" in done.err


def test_facts_of_numbers(call, tiny_gguf: Path, tmp_path: Path) -> None:
    """They are listed where both files tell them."""
    a, b, c = (tmp_path / f"{name}.kv" for name in "abc")
    engine_session(tiny_gguf, a)
    engine_session(tiny_gguf, b, weights="q8_0")
    facts = json.loads(call(a, b, "--json").out)["facts"]
    assert facts["numerics.facts.matvec f32"][1] is None
    assert "numerics.facts.device" not in facts
    assert call.func("session", "transcode", a, c, "--cache-type", "f16").code == 0
    done = call(a, c)
    assert "numerics.facts" not in done.out
    assert "  sequences 1: last.logits " in done.out
    fingerprint = json.loads(call(a, c, "--json").out)["facts"]["numerics.fingerprint"]
    assert fingerprint[0] == facts["numerics.fingerprint"][0] and fingerprint[1] is None

"""`minfer session extract`: one sequence as arrays, or as a session of its own."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import numpy as np
import pytest
from saved_sessions import engine_session, kept_rows, told_store
from stores import FORMATS, make_store

from minfer import Refusal
from minfer.commands.session_files import parse_layers
from minfer.kv.session import reading
from minfer.kv.session.header import HEADER, parse
from minfer.sessions.extracting import write_session
from minfer.sessions.opening import verified
from minfer.sessions.proving import prove


@pytest.fixture
def call(call):
    """`minfer session extract` in this process."""
    return functools.partial(call, "session", "extract")


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.usefixtures("sized")
def test_arrays_are_the_decoded_rows(call, tmp_path: Path, fmt: str) -> None:
    told, out = told_store(fmt), tmp_path / "out.npz"
    told.store.save(tmp_path / "s.kv")
    done = call(tmp_path / "s.kv", "--seq", 2, "-o", out)
    assert (done.code, done.err) == (0, "")
    assert done.out.startswith(f"{out}: sequence 2, 8 rows, 6 arrays, ")
    found = np.load(out, allow_pickle=False)
    assert found.files == ["positions", "metadata", "k_0", "v_0", "k_1", "v_1"]
    assert found["positions"].dtype == np.int32
    assert found["positions"].tolist() == list(range(8))
    for layer in range(2):
        for which in "kv":
            rows = found[f"{which}_{layer}"]
            assert rows.dtype == np.float32 and rows.shape == (8, 2, 32)
            np.testing.assert_array_equal(rows, kept_rows(told, 2, layer, which))
            np.testing.assert_array_equal(rows, told.store.export(2, layer, which))
    facts = json.loads(str(found["metadata"]))
    assert facts["seq"] == 2 and facts["rows"] == 8 and facts["cache_type"] == fmt


def test_some_layers_and_keys_alone(call, tmp_path: Path) -> None:
    told = told_store(n_layer=5)
    told.store.save(tmp_path / "s.kv")
    how = ("--seq", 3, "--layers", "0,2-3", "--which", "k", "--json")
    done = call(tmp_path / "s.kv", *how, "-o", tmp_path / "out.npz")
    names = ["positions", "metadata", "k_0", "k_2", "k_3"]
    assert json.loads(done.out)["arrays"] == names
    found = np.load(tmp_path / "out.npz")
    assert found.files == names
    np.testing.assert_array_equal(found["k_3"], kept_rows(told, 3, 3, "k"))
    empty = call(tmp_path / "s.kv", "--seq", 9, "-o", tmp_path / "nine.npz")
    assert empty.code == 0
    assert np.load(tmp_path / "nine.npz")["v_4"].shape == (0, 2, 32)


def test_lists_of_layers() -> None:
    assert parse_layers(None, 3) == [0, 1, 2]
    assert parse_layers("4,0,2-3,3", 5) == [0, 2, 3, 4]
    for text in ("", "5", "0-5", "3-2", "a", "1,", "-1", "1-", "0x1", "9" * 5000, "²"):
        with pytest.raises(Refusal, match="names no layers of 0 to 4; write 0,3-5"):
            parse_layers(text, 5)


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.usefixtures("sized")
def test_a_session_of_its_own(call, tmp_path: Path, fmt: str, keep: bool) -> None:
    told, out = told_store(fmt), tmp_path / "out.kv"
    told.store.save(tmp_path / "s.kv", b"mine")
    flags = ["--keep-share"] if keep else []
    done = call(tmp_path / "s.kv", "--seq", 2, "-o", out, *flags)
    assert done.code == 0 and "2, 8 rows, a session of its own" in done.out
    assert "host's state stayed behind" in done.err
    store = make_store(fmt, 40, 2)
    assert store.load(out).host == b""
    store.check()
    spans = [(0, 0, 5), (5, 5, 8)] if keep else [(0, 0, 13)]
    assert store.sequences() == [2] and store.spans(2) == spans
    assert store.cap(2) == told.store.cap(2)
    for layer in range(2):
        for which in "kv":
            cells = told.store.export_cells(2, layer, which)
            np.testing.assert_array_equal(store.export_cells(2, layer, which), cells)
    stats = store.stats()
    assert (stats.orphaned, stats.reserved, stats.free_runs) == ((5, 8, 1) if keep else (0, 13, 1))
    store.save(tmp_path / "again.kv")
    assert (tmp_path / "again.kv").read_bytes() == out.read_bytes()


def test_the_state_goes_along_where_it_can_mean_no_other(call, tmp_path: Path) -> None:
    told = told_store()
    for seq in (3, 9):
        told.release(seq)
    told.store.save(tmp_path / "s.kv", b"mine")
    done = call(tmp_path / "s.kv", "--seq", 2, "-o", tmp_path / "out.kv")
    assert (done.code, done.err) == (0, "")
    with verified(tmp_path / "out.kv") as file:
        assert file.host == b"mine"


@pytest.mark.parametrize("keep", [False, True])
def test_an_engine_goes_on_from_it_bitwise(tiny_gguf: Path, tmp_path: Path, keep: bool) -> None:
    engine = engine_session(tiny_gguf, tmp_path / "e.kv")
    wanted = engine.decode(7, 1)
    with verified(tmp_path / "e.kv") as file:
        write_session(file, 1, tmp_path / "one.kv", keep_share=keep)
    other = engine.with_cache("f32")
    with verified(tmp_path / "one.kv") as file:
        _, proofs = prove(other, file)
    assert [(proof.seq, proof.holds) for proof in proofs] == [(1, True)]
    resumed = other.resume(tmp_path / "one.kv")
    assert resumed.bitwise and resumed.host == {}
    np.testing.assert_array_equal(other.decode(7, 1), wanted)


def test_refusals_leave_no_file(call, tmp_path: Path) -> None:
    path, out = tmp_path / "s.kv", tmp_path / "out.npz"
    told_store().store.save(path)
    before = path.read_bytes()
    unknown = call(path, "--seq", 7, "-o", out)
    assert unknown.code == 2 and "holds no sequence 7; it has 2, 3, 9" in unknown.err
    for argv, told in (
        (("--seq", 2, "-o", tmp_path / "out.txt"), "ends in neither .npz (arrays) nor .kv"),
        (("--seq", 2, "-o", path), "is the file that is read"),
        (("--seq", 2, "-o", path, "--force"), "is the file that is read"),
        (("--seq", 2, "-o", out, "--layers", "2"), "names no layers of 0 to 1"),
        (("--seq", 2, "-o", out, "--keep-share"), "--keep-share changes nothing for .npz"),
        (("--seq", 2, "-o", tmp_path / "o.kv", "--layers", "0"), "--layers changes nothing"),
        (("--seq", 2, "-o", tmp_path / "o.kv", "--which", "k"), "--which changes nothing for .kv"),
        (("--seq", 2, "-o", tmp_path / "no" / "o.kv"), "is no folder; make it first"),
    ):
        done = call(path, *argv)
        assert (done.code, done.out) == (2, "") and told in done.err
    assert [p.name for p in tmp_path.iterdir()] == ["s.kv"] and path.read_bytes() == before
    out.write_text("kept")
    taken = call(path, "--seq", 2, "-o", out)
    assert taken.code == 2 and "--force to replace it" in taken.err and out.read_text() == "kept"
    assert call(path, "--seq", 2, "-o", out, "--force").code == 0 and len(np.load(out).files) == 6


@pytest.mark.parametrize("name", ["out.npz", "out.kv"])
def test_a_file_that_changes_meanwhile(
    call, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is left of what was read from it."""
    path = tmp_path / "s.kv"
    told_store().store.save(path)
    header = parse(path.read_bytes()[: HEADER.size], path.stat().st_size, "")
    cells = reading.SessionFile.cells

    def changing(file, layer: int, *more):
        found = cells(file, layer, *more)
        if layer == 1:
            with path.open("r+b") as other:
                other.seek(header.offsets["rows"])
                other.write(b"changed")
        return found

    monkeypatch.setattr(reading.SessionFile, "cells", changing)
    done = call(path, "--seq", 2, "-o", tmp_path / name)
    assert done.code == 3 and "was changed while it was read" in done.err
    assert [p.name for p in tmp_path.iterdir()] == ["s.kv"]


def test_the_header_says_the_same_run(tmp_path: Path) -> None:
    told = told_store("q8_0")
    told.write((2, 8, 1), kind="decode")
    told.store.save(tmp_path / "s.kv")
    with verified(tmp_path / "s.kv") as file:
        made = write_session(file, 2, tmp_path / "out.kv")
        assert (made.n_ctx, made.numerics, made.model) == (40, file.header.numerics, bytes(16))
    assert made.n_rows == 9

"""`minfer session transcode`: another cache type, device or n_ctx, and the error it brings."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import numpy as np
import pytest
from saved_sessions import engine_session, kept_rows, through, told_store
from stores import FORMATS, Told, make_store

from minfer import Refusal
from minfer.kv.runs import Counts, Entry, Run
from minfer.kv.session.header import ANY
from minfer.kv.session.identity import Identity
from minfer.kv.session.tables import Tables
from minfer.kv.store import KvStore
from minfer.sessions.opening import verified
from minfer.sessions.transcoding import resized
from minfer.sessions.wording import counted, percent


@pytest.fixture
def call(call):
    """`minfer session transcode` in this process."""
    return functools.partial(call, "session", "transcode")


PAIRS = [(a, b) for a in FORMATS for b in FORMATS if a != b]


@pytest.mark.parametrize(("old", "new"), PAIRS)
@pytest.mark.usefixtures("sized")
def test_rows_and_errors_are_those_of_the_oracle(call, tmp_path: Path, old: str, new: str) -> None:
    told, out = told_store(old), tmp_path / "out.kv"
    told.store.save(tmp_path / "s.kv", b"mine")
    report = json.loads(call(tmp_path / "s.kv", out, "--cache-type", new, "--json").out)
    store = make_store(new, 40, 2)
    loaded = store.load(out)
    store.check()
    assert loaded.host == b"mine" and not loaded.bitwise
    assert "made for another run, by `minfer session transcode`" in loaded.differs
    assert store.owners() == told.store.owners()
    for seq in (2, 3):
        assert store.written(seq) == told.store.written(seq)
        for layer in range(2):
            for which in "kv":
                wanted = through(kept_rows(told, seq, layer, which), new)
                np.testing.assert_array_equal(store.export(seq, layer, which), wanted)
    expected = [plane_error(told, new, layer, which) for layer in range(2) for which in "kv"]
    for plane, (largest, rms, relative) in zip(report["planes"], expected, strict=True):
        assert plane["max_abs"] == largest
        assert plane["rms"] == pytest.approx(rms, rel=1e-12)
        assert plane["relative_rms"] == pytest.approx(relative, rel=1e-12)
    assert report["error"]["max_abs"] == max(largest for largest, _, _ in expected)
    mean = np.mean([rms**2 for _, rms, _ in expected])
    assert report["error"]["rms"] == pytest.approx(np.sqrt(mean), rel=1e-12)
    exact = old != "f32" and new == "f32"
    assert (report["error"]["max_abs"] == 0) == exact
    assert report["error"]["lost"] == 0 and not report["bitwise"]


def plane_error(told: Told, new: str, layer: int, which: str) -> tuple[float, float, float]:
    """Largest, rms and relative rms error over the written cells of a plane; 3 reads 2's rows."""
    own = [kept_rows(told, 2, layer, which), kept_rows(told, 3, layer, which)[4:]]
    old = np.concatenate(own).astype(np.float64)
    away = through(np.concatenate(own), new) - old
    squares = (away**2).mean()
    return np.abs(away).max(), np.sqrt(squares), np.sqrt(squares / (old**2).mean())


def test_text_names_the_worst_layer(call, tmp_path: Path) -> None:
    told_store().store.save(tmp_path / "s.kv")
    report = json.loads(
        call(tmp_path / "s.kv", tmp_path / "a.kv", "--cache-type", "q8_0", "--json").out
    )
    done = call(tmp_path / "s.kv", tmp_path / "b.kv", "--cache-type", "q8_0")
    assert (tmp_path / "a.kv").read_bytes() == (tmp_path / "b.kv").read_bytes()
    worst = max(report["planes"], key=lambda plane: plane["relative_rms"])
    lines = done.out.splitlines()
    assert lines[0] == (
        f"{tmp_path / 'b.kv'}: q8_0 on cpu, n_ctx 40, 3.0 KiB, from f32 on cpu, n_ctx 40, 9.6 KiB"
    )
    share = f"({percent(worst['relative_rms'])} of the rows' own)"
    assert lines[2] == (
        f"  worst: {worst['which'].upper()} of layer {worst['layer']}, largest "
        f"{worst['max_abs']:.3g}, rms {worst['rms']:.3g} {share}"
    )
    assert lines[-1] == "  it resumes, but not bitwise: numbers are others"


@pytest.mark.parametrize("fmt", FORMATS)
def test_another_backend_keeps_the_bytes_of_cells(
    call, tmp_path: Path, planes: str, fmt: str
) -> None:
    told, out = told_store(fmt), tmp_path / "out.kv"
    told.store.save(tmp_path / "s.kv")
    done = call(tmp_path / "s.kv", out, "--device", planes)
    assert done.code == 0 and "  cells are those of the old file, byte for byte" in done.out
    with verified(tmp_path / "s.kv") as a, verified(out) as b:
        assert b.header.backend_name == "cuda" and b.header.numerics == ANY
        assert [x.tobytes() for _, x in a.rows()] == [x.tobytes() for _, x in b.rows()]
    store = make_store(fmt, 40, 2, device=planes)
    store.identity = lambda: Identity(bytes(range(16)))
    assert not store.load(out).bitwise
    for which in "kv":
        cells = told.store.export_cells(2, 1, which)
        np.testing.assert_array_equal(store.export_cells(2, 1, which), cells)


@pytest.mark.parametrize(("n_ctx", "moved"), [(24, 0), (22, 2), (1000, 0)])
@pytest.mark.usefixtures("sized")
def test_another_number_of_cells(call, tmp_path: Path, n_ctx: int, moved: int) -> None:
    """The last run ends at cell 24, and all together have 22 cells."""
    told, out = told_store("f16"), tmp_path / "out.kv"
    told.store.save(tmp_path / "s.kv")
    done = call(tmp_path / "s.kv", out, "--n-ctx", n_ctx, "--json")
    report = json.loads(done.out)
    assert (report["runs_moved"], report["planes"], report["bitwise"]) == (moved, [], True)
    store = make_store("f16", n_ctx, 2)
    assert store.load(out).bitwise
    store.check()
    for seq in (2, 3, 9):
        assert store.cap(seq) == told.store.cap(seq)
        for layer in range(2):
            for which in "kv":
                cells = told.store.export_cells(seq, layer, which)
                np.testing.assert_array_equal(store.export_cells(seq, layer, which), cells)
    text = call(tmp_path / "s.kv", out, "--n-ctx", n_ctx, "--force").out
    assert ("  runs packed, 2 moved" in text.splitlines()) == (moved == 2)


def test_too_few_cells_are_refused(call, tmp_path: Path) -> None:
    told_store().store.save(tmp_path / "s.kv")
    done = call(tmp_path / "s.kv", tmp_path / "out.kv", "--n-ctx", 21)
    assert done.code == 2 and "21 cells: 22 cells are reserved; give 22 or more" in done.err
    assert [p.name for p in tmp_path.iterdir()] == ["s.kv"]


def test_a_run_that_is_the_arena_stays_it() -> None:
    tables = Tables(40, {3: Run(3, 0, 40, 0)}, {0: Entry(3, 9)}, Counts(), 4)
    for n_ctx in (9, 100):
        assert resized(tables, n_ctx, "f").runs == {3: Run(3, 0, n_ctx, 0)}
    with pytest.raises(Refusal, match="f does not fit in 8 cells: 9 rows are written; give 9 or"):
        resized(tables, 8, "f")
    part = Tables(40, {3: Run(3, 1, 39, 0)}, {0: Entry(3, 9)}, Counts(), 4)
    assert resized(part, 39, "f").runs == {3: Run(3, 0, 39, 0)}
    assert resized(part, 50, "f").runs == part.runs
    assert resized(Tables(40, {}, {}, Counts(), 0), 1, "f").n_ctx == 1


@pytest.mark.parametrize("fmt", ["f16", "q8_0"])
def test_an_engine_resumes_it_and_says_so(tiny_gguf: Path, tmp_path: Path, fmt: str, call) -> None:
    engine = engine_session(tiny_gguf, tmp_path / "e.kv")
    assert call(tmp_path / "e.kv", tmp_path / "out.kv", "--cache-type", fmt).code == 0
    other = engine.with_cache(fmt)
    resumed = other.resume(tmp_path / "out.kv")
    assert not resumed.bitwise and len(resumed.host["stream_tokens"]) == other.store.written(0)
    assert np.abs(other.decode(7, 0) - engine.decode(7, 0)).max() < 1.0
    with verified(tmp_path / "e.kv") as a, verified(tmp_path / "out.kv") as b:
        for seq, entry in a.tables.entries.items():
            kept = b.tables.entries[seq].last
            assert kept == (entry.last and entry.last._replace(logits=0))
    done = call.func("session", "verify", tmp_path / "out.kv", "--prove", tiny_gguf)
    assert done.code == 2 and "`minfer session transcode` drops them" in done.err


def test_another_n_ctx_is_still_proved(tiny_gguf: Path, tmp_path: Path, call) -> None:
    engine_session(tiny_gguf, tmp_path / "e.kv")
    done = call(tmp_path / "e.kv", tmp_path / "out.kv", "--n-ctx", 80)
    assert done.out.endswith("  it resumes, as exactly as the old file\n")
    proved = call.func("session", "verify", tmp_path / "out.kv", "--prove", tiny_gguf)
    assert proved.code == 0 and proved.out.count(" proved: token ") == 2


def test_no_rows_are_told(call, tmp_path: Path) -> None:
    KvStore(1, 4, 2, 32, cache_type="f32").save(tmp_path / "s.kv")
    done = call(tmp_path / "s.kv", tmp_path / "out.kv", "--cache-type", "f16")
    assert done.code == 0 and done.out.splitlines()[1:-1] == ["  no rows are written"]


def test_numbers_as_people_read_them() -> None:
    assert [counted(n, "row") for n in (0, 1, 2)] == ["0 rows", "1 row", "2 rows"]
    told = [percent(share) for share in (0.000207, 0.00998, 0.01, 0.9828, 1.0, 12.34)]
    assert told == ["0.0207 %", "0.998 %", "1.00 %", "98.3 %", "100 %", "1.23e+03 %"]
    assert [percent(0.973, 4), percent(0.95, 2)] == ["97.30 %", "95 %"]


def test_elements_that_overflow_are_counted(call, tmp_path: Path) -> None:
    store = make_store("f32", 4, 1)
    store.reserve(0, 4)
    k = np.ones((1, 2, 2, 32), np.float32)
    v = k.copy()
    v[0, 1, 1, :3] = 70000.0, -1e20, 65504.0
    store.import_rows(0, k, v)
    store.save(tmp_path / "s.kv")
    done = call(tmp_path / "s.kv", tmp_path / "out.kv", "--cache-type", "f16")
    assert "  2 elements overflowed: finite in the old file only" in done.out.splitlines()


def test_refusals(call, tmp_path: Path) -> None:
    path, out = tmp_path / "s.kv", tmp_path / "out.kv"
    told_store().store.save(path)
    for argv, told in (
        ((), "is f32 on cpu with n_ctx 40 as it is; give another cache type, device or n_ctx"),
        (("--cache-type", "f32", "--device", "cpu", "--n-ctx", 40), "as it is"),
        (("--cache-type", "q4_0"), "invalid choice: 'q4_0'"),
        (("--n-ctx", 0), "n_ctx 0 is below 1"),
        (("--n-ctx", 2**31), "is above 2147483647"),
    ):
        done = call(path, out, *argv)
        assert (done.code, done.out) == (2, "") and told in done.err
    assert call(path, path, "--n-ctx", 50, "--force").code == 2
    (tmp_path / "link.kv").symlink_to(path)
    assert "is the file that is read" in call(path, tmp_path / "link.kv", "--n-ctx", 50).err
    out.write_text("kept")
    assert call(path, out, "--n-ctx", 50).code == 2 and out.read_text() == "kept"
    (tmp_path / "bad.kv").write_bytes(path.read_bytes()[:-1])
    assert call(tmp_path / "bad.kv", out, "--n-ctx", 50, "--force").code == 3
    assert out.read_text() == "kept"


def test_odd_heads_cannot_become_q8_0(call, tmp_path: Path) -> None:
    KvStore(1, 4, 2, 16, cache_type="f32").save(tmp_path / "s.kv")
    done = call(tmp_path / "s.kv", tmp_path / "out.kv", "--cache-type", "q8_0")
    assert done.code == 2 and "head_dim is 16 and n_kv_embd 32" in done.err
    assert not (tmp_path / "out.kv").exists()


@pytest.mark.model
def test_smollm2_goes_on_in_q8_0(call, smollm2: Path, tmp_path: Path) -> None:
    engine = engine_session(smollm2, tmp_path / "e.kv")
    report = json.loads(
        call(tmp_path / "e.kv", tmp_path / "out.kv", "--cache-type", "q8_0", "--json").out
    )
    assert len(report["planes"]) == 60 and 0.004 < report["error"]["relative_rms"] < 0.012
    other = engine.with_cache("q8_0")
    assert not other.resume(tmp_path / "out.kv").bitwise
    mine, its = (e.generate([28], 8) for e in (engine, other))
    assert list(mine) == list(its)

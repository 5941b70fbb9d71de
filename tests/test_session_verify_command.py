"""`minfer session verify`: what is checked, proofs by a model, and hashes of its weights."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import pytest
from saved_sessions import engine_session, header_changed, row_changed, told_store
from stores import FORMATS
from tiny_models import write_tiny_gguf

from minfer import Engine, Refusal
from minfer.engine_session import Resumed
from minfer.kv.session import host
from minfer.kv.session.header import ANY
from minfer.kv.session.reading import SessionFile
from minfer.sessions.opening import verified
from minfer.sessions.proving import Proof, prove


@pytest.fixture
def call(call):
    """`minfer session verify` in this process."""
    return functools.partial(call, "session", "verify")


@pytest.fixture
def saved(tiny_gguf: Path, tmp_path: Path) -> Path:
    engine_session(tiny_gguf, tmp_path / "e.kv")
    return tmp_path / "e.kv"


def proofs(engine: Engine, path: Path) -> list[Proof]:
    with verified(path) as file:
        return prove(engine, file)[1]


def test_a_sound_file(call, tmp_path: Path) -> None:
    path = tmp_path / "store.kv"
    told_store().store.save(path, b"mine")
    done = call(path)
    assert (done.code, done.err) == (0, "")
    lines = done.out.splitlines()
    assert lines[0] == f"{path}: sound"
    assert "  header    version 2, f32 on cpu, n_ctx 40" in lines
    assert "  tables    4 runs, 3 sequences, 5 spans, 6 owners: no contradiction" in lines
    checksum = path.read_bytes()[-16:].hex()
    assert f"  checksum  xxh3-128 {checksum} of all before it" in lines
    assert "  host      4 bytes" in lines
    report = json.loads(call(path, "--json").out)
    assert report["sound"] and report["bytes"] == path.stat().st_size
    assert list(report["checked"]) == ["header", "size", "checksum", "tables", "rows", "host"]


def test_damage_has_its_exit_code(call, saved: Path) -> None:
    whole = saved.read_bytes()
    for place in (10, 200, len(whole) // 2, len(whole) - 1):
        data = bytearray(whole)
        data[place] ^= 4
        saved.write_bytes(data)
        done = call(saved)
        assert done.out == "" and done.code == (2 if place == 10 else 3), place
    saved.write_bytes(whole[:-5])
    assert "cut short" in call(saved).err


def test_facts_of_numbers_must_be_those_of_the_fingerprint(call, saved: Path) -> None:
    header_changed(saved, numerics=bytes(range(16)))
    done = call(saved)
    assert done.code == 3 and "tells other facts of numbers than those of its fin" in done.err


def test_a_host_part_that_no_engine_can_read(call, tmp_path: Path) -> None:
    path = tmp_path / "store.kv"
    told_store().store.save(path, b'{"minfer_host": 7}')
    done = call(path)
    assert done.code == 2 and "has a host part of version 7 and this minfer reads 1" in done.err
    told_store().store.save(path, host.pack("m", "", {}, None).replace(b"null", b"[1]"))
    assert call(path).code == 3


@pytest.mark.parametrize("fmt", FORMATS)
def test_proof_holds_where_rows_are_shared(call, tiny_gguf: Path, tmp_path: Path, fmt: str) -> None:
    path = tmp_path / "e.kv"
    engine = engine_session(tiny_gguf, path, cache_type=fmt)
    before = path.read_bytes()
    report = json.loads(call(path, "--prove", tiny_gguf, "--json").out)
    assert report["bitwise"] and report["differs"] == ""
    for proof, seq, kind in zip(report["proofs"], (0, 1), ("decode", "prefill"), strict=True):
        last = engine.store.tables.known(seq).last
        assert last is not None
        assert proof["holds"] and proof["same_row"]
        assert (proof["seq"], proof["kind"], proof["token"]) == (seq, kind, last.token)
        assert proof["logits"] == proof["saved_logits"] == f"{last.logits:016x}"
        assert proof["position"] == engine.store.written(seq) - 1
    assert report["not_provable"] == [2]
    assert path.read_bytes() == before
    done = call(path, "--prove", tiny_gguf)
    assert done.code == 0 and done.out.count(" proved: token ") == 2
    assert "  not provable, as no logits were kept: seq 2" in done.out


def test_a_proof_loads_the_file_once_and_again_for_each(
    call, tiny_gguf: Path, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    resume, loaded = Engine.resume, []

    def counting(engine: Engine, path: Path) -> Resumed:
        loaded.append(path)
        return resume(engine, path)

    monkeypatch.setattr(Engine, "resume", counting)
    assert len(json.loads(call(saved, "--prove", tiny_gguf, "--json").out)["proofs"]) == 2
    assert loaded == 3 * [saved]


def test_nothing_is_printed_of_a_file_that_is_refused(call, saved: Path, tmp_path: Path) -> None:
    write_tiny_gguf(tmp_path / "other.gguf", seed=7)
    done = call(saved, "--prove", tmp_path / "other.gguf")
    assert (done.code, done.out) == (2, "")


def test_a_proof_leaves_the_session_as_it_was(tiny_gguf: Path, saved: Path) -> None:
    engine = engine_session(tiny_gguf, saved)
    wanted = engine.store.digest()
    other = engine.with_cache("f32")
    assert [proof.holds for proof in proofs(other, saved)] == [True, True]
    assert other.store.digest() == wanted
    other.store.check()


@pytest.mark.parametrize(
    ("layer", "row", "same_row", "same_logits"),
    [(0, 1, False, False), (1, 1, True, False), (0, -1, False, True)],
    ids=["an earlier row", "the last layer", "the last row"],
)
def test_one_bit_of_a_key_fails_the_proof(
    call, tiny_gguf: Path, saved: Path, layer: int, row: int, same_row: bool, same_logits: bool
) -> None:
    """A row shows in what later layers make of it, and the last one is compared itself."""
    with verified(saved) as file:
        n = file.tables.entries[0].written
    row_changed(saved, layer, which=0, row=row % n, byte=2, by=0x40)
    assert call(saved).code == 0  # a sound file of other rows
    done = call(saved, "--prove", tiny_gguf)
    assert done.code == 1
    (line,) = [line for line in done.out.splitlines() if line.startswith("  seq 0 ")]
    told = "the saved row" if same_row else "another row"
    assert "NOT proved: token" in line and f" gives {told} and logits " in line
    report = json.loads(call(saved, "--prove", tiny_gguf, "--json").out)
    proof = report["proofs"][0]
    assert not proof["holds"] and proof["same_row"] == same_row
    assert (proof["logits"] == proof["saved_logits"]) == same_logits


def test_other_numbers_are_told_first(call, tiny_gguf: Path, saved: Path) -> None:
    done = call(saved, "--prove", tiny_gguf, "--weights", "q8_0")
    lines = done.out.splitlines()
    told = [i for i, line in enumerate(lines) if line.startswith("  numbers   others than ")]
    first = next(i for i, line in enumerate(lines) if line.startswith("  seq 0"))
    assert told == [first - 1] and "weights f32 then, q8_0 now" in lines[first - 1]
    assert done.code == 1 and "NOT proved" in lines[first]


def test_what_cannot_be_proved_is_refused(call, tiny_gguf: Path, tmp_path: Path) -> None:
    path = tmp_path / "e.kv"
    engine = engine_session(tiny_gguf, path)
    for seq in (0, 1):
        engine.store.truncate(seq, 2)
    engine.save(path)
    done = call(path, "--prove", tiny_gguf)
    assert (done.code, done.out) == (2, "")
    assert "keeps the logits of no last row, of 3 sequences" in done.err
    idle = call(path, "--threads", 2)
    assert idle.code == 2 and "change nothing without --prove MODEL" in idle.err


def test_another_model_is_refused(call, saved: Path, tmp_path: Path) -> None:
    write_tiny_gguf(tmp_path / "other.gguf", seed=7)
    done = call(saved, "--prove", tmp_path / "other.gguf")
    assert done.code == 2 and "load the model that it was saved with" in done.err


def test_hash_of_all_weights(call, tiny_gguf: Path, saved: Path, tmp_path: Path) -> None:
    done = call(saved, "--model-hash", tiny_gguf)
    engine = Engine.load(tiny_gguf, n_ctx=8)
    assert done.code == 0 and f"  weights   equal, {engine.model_hash}" in done.out
    write_tiny_gguf(tmp_path / "other.gguf", seed=7)
    other = call(saved, "--model-hash", tmp_path / "other.gguf")
    assert other.code == 1 and f"others: the session tells {engine.model_hash}" in other.out
    report = json.loads(call(saved, "--model-hash", tmp_path / "other.gguf", "--json").out)
    found = Engine.load(tmp_path / "other.gguf", n_ctx=8).model_hash
    assert report["weights"] == {
        **{"told": engine.model_hash, "found": found},
        **{"same_fingerprint": False, "equal": False},
    }


def test_a_weight_that_the_fingerprint_does_not_see(call, tmp_path: Path) -> None:
    """Only the hash of all tells apart files that differ between the samples."""
    model, path = tmp_path / "m.gguf", tmp_path / "e.kv"
    write_tiny_gguf(model, n_embd=128, n_ff=512)
    engine = engine_session(model, path)
    start, size = max(
        (engine._loaded.file.extent(name) for name in engine._loaded.file.tensor_names),
        key=lambda extent: extent[1],
    )
    data = bytearray(model.read_bytes())
    assert size > 3 * 4096
    data[start + 4096 + 10] ^= 1
    model.write_bytes(data)
    report = json.loads(call(path, "--model-hash", model, "--json").out)
    assert report["weights"]["same_fingerprint"] and not report["weights"]["equal"]


def test_no_hash_to_compare_with_is_refused(call, tiny_gguf: Path, tmp_path: Path) -> None:
    told_store().store.save(tmp_path / "s.kv")
    done = call(tmp_path / "s.kv", "--model-hash", tiny_gguf)
    assert done.code == 2 and "tells no hash of a model's weights" in done.err


def test_cells_by_place_and_a_file_that_changes(saved: Path) -> None:
    with SessionFile(saved) as file:
        file.verify()
        file.refuse_changed()
        found = file.cells(1, 1, [range(1, 3), range(0, 1)])
        data, header = saved.read_bytes(), file.header
        width, first = header.cell_bytes, header.offsets["rows"]
        plane = first + 3 * header.n_rows * width
        wanted = data[plane + width : plane + 3 * width] + data[plane : plane + width]
        assert found.tobytes() == wanted and header.model != ANY
        with saved.open("r+b") as other:
            other.seek(plane)
            other.write(b"x")
        with pytest.raises(Refusal, match="was changed while it was read"):
            file.refuse_changed()
        saved.write_bytes(data[:-20])
        with pytest.raises(Refusal, match="was changed while it was read"):
            file.refuse_changed()
        with pytest.raises(Refusal, match="was changed while it was read"):
            file.cells(1, 1, [range(24, 26)])


@pytest.mark.model
def test_smollm2_is_proved(call, smollm2: Path, tmp_path: Path) -> None:
    path = tmp_path / "e.kv"
    engine = engine_session(smollm2, path, cache_type="q8_0")
    done = call(path, "--prove", smollm2, "--model-hash", smollm2)
    assert done.code == 0 and done.out.count(" proved: token ") == 2
    assert f"weights   equal, {engine.model_hash}" in done.out
    row_changed(path, layer=3, which=0, row=1, byte=2, by=0x40)
    assert [proof.holds for proof in proofs(engine, path)] == [False, False]

"""A resumed engine goes on to the bit as the saved one would have: contract 8.5 on real models."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from refusals import refused
from tiny_models import write_tiny_gguf

from minfer import Engine, KvStore, Refusal, loading
from minfer.engine_session import Resumed
from minfer.format import KvFormat
from minfer.kv.session.reading import SessionFile
from minfer.models.fingerprint import fingerprint, full_hash
from minfer.models.gguf import open_gguf

FORMATS = [fmt.value for fmt in KvFormat]
PROMPT = (
    "The old lighthouse keeper climbed the stairs every evening. He lit the lamp, wrote a line in "
    "his book, and watched the ships."
)
ENDING = " One night no ship came"
N_CTX = 192
STEPS = 4


@pytest.fixture(scope="module")
def engines(smollm2: Path) -> dict[str, Engine]:
    """One engine a cache format over the same weights."""
    first = Engine.load(smollm2, cache_type="f32", n_ctx=N_CTX)
    return {"f32": first, **{fmt: first.with_cache(fmt) for fmt in ("f16", "q8_0")}}


@pytest.fixture(params=FORMATS)
def engine(request: pytest.FixtureRequest, engines: dict[str, Engine]) -> Engine:
    """An engine with an empty store."""
    return engines[request.param].with_cache(request.param)


def resumed(engine: Engine, path: Path, **host: Any) -> tuple[Engine, Resumed]:
    """Another engine over the same weights, which takes over what `engine` holds."""
    engine.save(path, host or None)
    other = engine.with_cache(engine.store.fmt)
    found = other.resume(path)
    other.store.check()
    assert other.store.digest() == engine.store.digest()
    return other, found


def assert_goes_on(ours: Engine, theirs: Engine, seqs: list[int]) -> None:
    """Both decode the same tokens, with the same logits to the bit."""
    token = 5
    for _ in range(STEPS):
        for seq in seqs:
            mine, other = ours.decode(token, seq), theirs.decode(token, seq)
            np.testing.assert_array_equal(mine, other)
            token = int(np.argmax(mine))


@pytest.mark.model
def test_a_plain_sequence_goes_on_to_the_bit(engine: Engine, tmp_path: Path) -> None:
    ids = list(engine.generate(engine.encode(PROMPT), 6))
    other, found = resumed(engine, tmp_path / "s.kv", note="ü")
    assert found == Resumed({"note": "ü"}, True, "")
    np.testing.assert_array_equal(engine.decode(ids[-1]), other.decode(ids[-1]))
    assert_goes_on(engine, other, [0])


@pytest.mark.model
def test_sharers_go_on_after_copy_on_write_and_compaction(engine: Engine, tmp_path: Path) -> None:
    """A donor that is gone, a reader that wrote in the shared rows, runs that were moved."""
    prompt, ending, store = engine.encode(PROMPT), engine.tokenizer.encode(ENDING), engine.store
    for seq, cap in ((9, 3), (1, 64), (2, 48), (3, 16)):
        store.reserve(seq, cap)
    engine.prefill(prompt, 1)
    for seq in (2, 3):
        store.share_prefix(1, seq, len(prompt))
        engine.prefill(ending, seq)
    store.release(9)
    store.truncate(2, 8)
    engine.prefill(ending, 2)
    assert store.defrag()
    store.release(1)
    stats = store.stats()
    assert stats.orphaned == stats.shared == len(prompt)
    other, found = resumed(engine, tmp_path / "s.kv")
    assert found.bitwise and other.store.stats() == stats
    assert_goes_on(engine, other, [2, 3])


@pytest.mark.model
@pytest.mark.parametrize("cache_type", ["f32", "q8_0"])
def test_a_sequence_goes_on_after_a_removal(
    engines: dict[str, Engine], cache_type: str, tmp_path: Path
) -> None:
    engine = engines[cache_type].with_cache(cache_type)
    engine.store.reserve(4, 100)
    engine.prefill(engine.encode(PROMPT), 4)
    engine.remove(4, 3, 9)
    other, _ = resumed(engine, tmp_path / "s.kv")
    assert_goes_on(engine, other, [4])


@pytest.mark.model
def test_the_last_row_can_be_proved(engine: Engine, tmp_path: Path) -> None:
    """Dropped and fed again with its kind, the last token gives the logits that were saved."""
    store = engine.store
    store.reserve(1, 60)
    store.reserve(2, 60)
    engine.prefill(engine.encode(PROMPT), 1)
    engine.prefill(engine.encode(PROMPT), 2)
    logits = engine.decode(11, 2)
    other, _ = resumed(engine, tmp_path / "s.kv")
    first, second = (other.store.tables.entries[seq].last for seq in (1, 2))
    assert first is not None and (first.token, first.kind) == (engine.encode(PROMPT)[-1], "prefill")
    assert second is not None and (second.token, second.kind) == (11, "decode")
    assert second.logits == xxhash.xxh3_64_intdigest(logits.tobytes())
    for seq, last, feed in (
        (1, first, lambda: other.prefill([first.token], 1)),
        (2, second, lambda: other.decode(second.token, 2)),
    ):
        other.store.truncate(seq, other.store.written(seq) - 1)
        assert other.store.tables.entries[seq].last is None
        assert xxhash.xxh3_64_intdigest(feed().tobytes()) == last.logits


@pytest.fixture
def tiny(tiny_gguf: Path) -> Engine:
    engine = Engine.load(tiny_gguf, n_ctx=48, cache_type="f32")
    engine.store.reserve(0, 20)
    engine.prefill([5, 90, 41, 7], 0)
    return engine


def test_it_resumes_before_a_graph_was_built(tiny: Engine, tiny_gguf: Path, tmp_path: Path) -> None:
    tiny.save(tmp_path / "s.kv")
    other = Engine.load(tiny_gguf, n_ctx=48, cache_type="f32")
    other.resume(tmp_path / "s.kv")
    assert other.graphs_built == 0
    np.testing.assert_array_equal(tiny.decode(3), other.decode(3))


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"n_ctx": 40}, ["n_ctx 48 and this run has 40", "load the model with n_ctx 48"]),
        ({"cache_type": "q8_0"}, ["cache type f32 and this run has q8_0", "session transcode"]),
    ],
)
def test_another_run_is_refused(
    how: dict[str, Any], words: list[str], tiny: Engine, tiny_gguf: Path, tmp_path: Path
) -> None:
    tiny.save(tmp_path / "s.kv")
    other = Engine.load(tiny_gguf, **{"n_ctx": 48, "cache_type": "f32", **how})
    other.store.reserve(0, 10)
    other.prefill([1, 2], 0)
    refused(other.store, "8.2", lambda: other.resume(tmp_path / "s.kv"), *words)


def test_another_model_of_equal_sizes_is_refused(tiny: Engine, tmp_path: Path) -> None:
    tiny.save(tmp_path / "s.kv")
    write_tiny_gguf(tmp_path / "twin.gguf", seed=3)
    other = Engine.load(tmp_path / "twin.gguf", n_ctx=48, cache_type="f32")
    words = ("belongs to tiny.gguf", "this run has twin.gguf", "load the model that it was saved")
    refused(other.store, "8.8", lambda: other.resume(tmp_path / "s.kv"), *words)
    write_tiny_gguf(tmp_path / "large.gguf", n_layer=3)
    other = Engine.load(tmp_path / "large.gguf", n_ctx=48, cache_type="f32")
    words = ("n_layer 2 and this run has 3", "another model, tiny.gguf")
    refused(other.store, "8.2", lambda: other.resume(tmp_path / "s.kv"), *words)


def test_a_model_and_a_bare_store_do_not_mix(tiny: Engine, tmp_path: Path) -> None:
    store = tiny.store
    shape = (store.n_layer, store.n_ctx, store.n_head_kv, store.head_dim)
    bare = KvStore(*shape, cache_type="f32")
    bare.save(tmp_path / "bare.kv")
    tiny.save(tmp_path / "s.kv")
    refused(store, "8.8", lambda: tiny.resume(tmp_path / "bare.kv"), "a store without one wrote it")
    refused(bare, "8.8", lambda: bare.load(tmp_path / "s.kv"), "this run has no model")


def test_other_numbers_are_told(tiny: Engine, tiny_gguf: Path, tmp_path: Path) -> None:
    """Weights in another format: the rows are taken over, and it says what is different."""
    tiny.save(tmp_path / "s.kv")
    other = Engine.load(tiny_gguf, n_ctx=48, cache_type="f32", weights="f16")
    found = other.resume(tmp_path / "s.kv")
    assert not found.bitwise
    assert found.differs == "weights f32 then, f16 now"
    np.testing.assert_array_equal(other.store.export(0, 1), tiny.store.export(0, 1))


def test_a_host_that_refuses_leaves_everything(tiny: Engine, tmp_path: Path) -> None:
    tiny.save(tmp_path / "s.kv", {"version": 7})

    def accept(state: dict[str, Any]) -> None:
        raise Refusal("9.1", f"version {state['version']} is unknown")

    tiny.decode(9)
    refused(tiny.store, "9.1", lambda: tiny.resume(tmp_path / "s.kv", accept), "version 7")


@pytest.mark.parametrize("state", [{"a": {1, 2}}, {"a": float("nan")}, {"a": b"x"}])
def test_a_host_state_that_is_no_json_is_refused(
    state: dict[str, Any], tiny: Engine, tmp_path: Path
) -> None:
    refused(tiny.store, "8.6", lambda: tiny.save(tmp_path / "s.kv", state), "no plain JSON")
    assert not list(tmp_path.iterdir())


def test_one_byte_of_a_weight_changes_the_full_hash(tiny_gguf: Path, tmp_path: Path) -> None:
    """And the fingerprint too where it is looked at: at the start, middle and end of a tensor."""
    twin = tmp_path / "twin.gguf"
    data = bytearray(tiny_gguf.read_bytes())
    twin.write_bytes(data)
    file = open_gguf(tiny_gguf)
    assert full_hash(open_gguf(twin)) == full_hash(file)
    assert full_hash(file) != fingerprint(file) == fingerprint(open_gguf(twin))
    data[-40] ^= 1
    twin.write_bytes(data)
    assert full_hash(open_gguf(twin)) != full_hash(file)
    assert fingerprint(open_gguf(twin)) != fingerprint(file)


def test_the_file_names_its_model(tiny: Engine, tiny_gguf: Path, tmp_path: Path) -> None:
    tiny.save(tmp_path / "s.kv")
    with SessionFile(tmp_path / "s.kv") as file:
        assert file.header.model == fingerprint(open_gguf(tiny_gguf))
        assert file.header.numerics == tiny.store.identity().numerics


def test_layers_on_two_stretches_are_refused_before_a_file_is_opened(
    tiny_gguf: Path, tmp_path: Path
) -> None:
    engine = Engine.load(tiny_gguf, n_ctx=48, cache_type="f32", device="cpu:1,cpu:1")
    engine.store.reserve(0, 8)
    engine.prefill([5, 90], 0)
    words = ("2 stretches (1 on cpu, 1 on cpu)", "with all layers on one")
    refused(engine.store, "9.6", lambda: engine.save(tmp_path / "s.kv"), "save", *words)
    refused(engine.store, "9.6", lambda: engine.resume(tmp_path / "none.kv"), "load", *words)
    assert not list(tmp_path.iterdir())


def test_a_resume_that_is_not_bitwise_proves_nothing_afterwards(
    tiny: Engine, tiny_gguf: Path, tmp_path: Path
) -> None:
    """The logits of its last rows were those of other numbers."""
    tiny.save(tmp_path / "s.kv")
    other = Engine.load(tiny_gguf, n_ctx=48, cache_type="f32", weights="f16")
    assert not other.resume(tmp_path / "s.kv").bitwise
    last = tiny.store.tables.entries[0].last
    assert last is not None and last.logits
    assert other.store.tables.entries[0].last == last._replace(logits=0)
    other.save(tmp_path / "t.kv")
    again = Engine.load(tiny_gguf, n_ctx=48, cache_type="f32", weights="f16")
    assert again.resume(tmp_path / "t.kv").bitwise
    assert again.store.tables.entries[0].last == last._replace(logits=0)


def test_a_model_file_that_changes_while_it_is_loaded_is_refused(
    tiny_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(tiny_gguf.read_bytes())
    load_weights = loading.load_weights

    def replaced(*args: Any, **how: Any) -> Any:
        found = load_weights(*args, **how)
        write_tiny_gguf(tmp_path / "twin.gguf", seed=3)
        (tmp_path / "twin.gguf").replace(path)
        return found

    monkeypatch.setattr(loading, "load_weights", replaced)
    with pytest.raises(Refusal, match="was changed since it was loaded"):
        Engine.load(path, n_ctx=48)


def test_a_model_name_that_is_no_text_is_kept_readable(tiny_gguf: Path, tmp_path: Path) -> None:
    path = tmp_path / os.fsdecode(b"m\xff.gguf")
    path.write_bytes(tiny_gguf.read_bytes())
    engine = Engine.load(path, n_ctx=48, cache_type="f32")
    engine.save(tmp_path / "s.kv")
    with SessionFile(tmp_path / "s.kv") as file:
        file.verify()
        assert file.host_part.model == "m\ufffd.gguf"

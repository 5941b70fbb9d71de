"""Session files on an accelerator: the bytes of the CPU's, and answers to the bit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import under_test
from refusals import refused
from stores import FORMATS, batch_rows, make_store, tokens
from tiny_models import write_tiny_gguf

from minfer import Batch, Engine, KvStore
from minfer.kv.session.header import HEADER
from minfer.kv.session.reading import SessionFile

pytest.importorskip("numba")
pytestmark = pytest.mark.skipif(under_test.device == "cpu", reason="compares with the CPU")
N_LAYER = 2


def written(cache_type: str, device: str) -> KvStore:
    """A donor, its reader and an orphan, in runs that do not touch."""
    store = make_store(cache_type, n_layer=N_LAYER, device=device)
    for seq, cap in ((7, 2), (1, 9), (2, 6), (3, 5)):
        store.reserve(seq, cap)
    write(store, tokens((1, 0, 8), (3, 0, 4)))
    store.share_prefix(1, 2, 5)
    store.release(7)
    store.release(1)
    write(store, tokens((2, 5, 2)))
    return store


def write(store: KvStore, batch: Batch) -> None:
    with store.step(batch) as step:
        for layer in range(N_LAYER):
            _, k, v = batch_rows(batch, 10 * layer)
            step.write(layer, k=k, v=v)


@pytest.mark.parametrize("cache_type", FORMATS)
def test_a_file_has_the_bytes_of_the_cpus(cache_type: str, tmp_path: Path) -> None:
    """Rows that nobody rounds differently are stored alike, so the files differ in names alone."""
    rows = []
    for device in ("cpu", under_test.device):
        store = written(cache_type, device)
        store.save(tmp_path / device, b"host")
        with SessionFile(tmp_path / device) as file:
            file.verify()
            assert file.header.backend_name == device and file.host == b"host"
            rows.append((tmp_path / device).read_bytes()[HEADER.size : -16])
    assert rows[0] == rows[1]


@pytest.mark.parametrize("cache_type", FORMATS)
def test_a_store_is_loaded_and_saved_again(cache_type: str, tmp_path: Path) -> None:
    store = written(cache_type, under_test.device)
    store.save(tmp_path / "a", b"host")
    other = make_store(cache_type, n_layer=N_LAYER, device=under_test.device, sanitize=True)
    other.reserve(5, 30)
    write(other, tokens((5, 0, 30)))
    assert other.load(tmp_path / "a").bitwise
    other.check()
    other.save(tmp_path / "b", b"host")
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    for of in (store, other):
        write(of, tokens((2, 7, 1), kind="decode"))
    for layer in range(N_LAYER):
        for which in "kv":
            ours, theirs = (s.export_cells(2, layer, which) for s in (store, other))
            np.testing.assert_array_equal(ours, theirs)


def test_another_backend_is_refused(tmp_path: Path) -> None:
    written("f32", under_test.device).save(tmp_path / "a")
    store = written("f32", "cpu")
    words = (f"backend {under_test.device} and this run has cpu", "minfer session transcode")
    refused(store, "8.2", lambda: store.load(tmp_path / "a"), *words)


def test_an_engine_goes_on_to_the_bit(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    write_tiny_gguf(tmp_path / "m.gguf", n_layer=1)
    first, second = (
        Engine.load(tmp_path / "m.gguf", device=under_test.device, n_ctx=24) for _ in range(2)
    )
    first.store.reserve(0, 12)
    token = int(np.argmax(first.prefill([5, 90, 41, 7])))
    np.testing.assert_equal(int(np.argmax(first.decode(token))) >= 0, True)
    first.save(tmp_path / "s.kv", {"told": 1})
    found = second.resume(tmp_path / "s.kv")
    assert found.bitwise and found.host == {"told": 1}
    for token in (9, 17):
        np.testing.assert_array_equal(first.decode(token), second.decode(token))

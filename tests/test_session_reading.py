"""Files that cannot be read, or not to their end (contract 8.2)."""

from __future__ import annotations

import errno
import io
import os
from collections.abc import Callable
from itertools import count
from pathlib import Path

import pytest
from refusals import refused, state
from session_mutations import small_store
from stores import assert_clear

from minfer.errors import Refusal
from minfer.kv.session import reading


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A session, on a disk that does not wait."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)
    small_store("q8_0").save(tmp_path / "a.kv")
    return tmp_path / "a.kv"


@pytest.mark.parametrize("make", [lambda path: None, Path.mkdir, os.mkfifo], ids=range(3))
def test_what_is_no_file_is_not_loaded(tmp_path: Path, make: Callable[[Path], object]) -> None:
    target = small_store("f32")
    make(tmp_path / "a.kv")
    refused(target, "8.2", lambda: target.load(tmp_path / "a.kv"), "name a session file")
    with pytest.raises(Refusal, match="does not exist"):
        target.load("a\0b")


def test_a_file_that_may_not_be_read(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(*how: object, **more: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    target = small_store("q8_0")
    monkeypatch.setattr(Path, "open", denied)
    refused(target, "8.2", lambda: target.load(path), "cannot be read: Permission denied")


class Unreadable(io.FileIO):
    """A file whose reads fail from number `failing` on."""

    failing, reads = 0, 0

    def _read(self) -> None:
        self.reads += 1
        if self.reads == self.failing:
            raise OSError(errno.EIO, "Input/output error")

    def read(self, n: int = -1) -> bytes:
        self._read()
        return super().read(n)

    def readinto(self, buffer: memoryview) -> int:
        self._read()
        return super().readinto(buffer[:100])


def test_every_read_that_fails(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While it verifies nothing changes; while it fills, the store is emptied."""
    seen = []
    monkeypatch.setattr(reading, "_opened", Unreadable)
    for failing in count(1):
        monkeypatch.setattr(Unreadable, "failing", failing)
        target = small_store("q8_0", sanitize=True)
        before = state(target)
        try:
            target.load(path)
        except OSError as error:
            assert error.errno == errno.EIO
            emptied = [
                note for note in getattr(error, "__notes__", []) if "it is empty now" in note
            ]
            assert len(emptied) == (state(target) != before)
        else:
            break
        seen.append(len(emptied))
        target.check()
        assert_clear(target)
        assert not emptied or target.sequences() == []
    assert seen.index(1) > 5 and seen == sorted(seen)

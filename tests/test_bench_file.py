"""What the benchmark says of session files is checked first: rows that are not loaded show."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from minfer import KvStore
from tuning.bench import checks
from tuning.bench.cases import Work
from tuning.bench.file_cases import File
from tuning.columns import copied_file, files, ours_file

FILE = File(2, 120, 2, 32)
HOW = {"fmt": "q8_0", "threads": 1}


def test_a_file_says_what_it_moves() -> None:
    assert FILE.work("q8_0", "save") == Work(moved=2 * 2 * 120 * 68)
    assert FILE.bytes_of("f32") == 2 * 2 * 120 * 256


def test_rows_that_are_not_loaded_are_a_wrong_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    subject = ours_file.file(FILE, HOW)
    check = checks.check_ours(FILE, "q8_0", subject.values, {})
    assert check.passed and subject.values.shape[:2] == (2, 2), "rows 0 and 97"
    assert min(subject.measures[name].sample(1) for name in FILE.measures) > 0

    monkeypatch.setattr(KvStore, "load", lambda store, path: _fill_with_ones(store))
    wrong = checks.check_ours(FILE, "q8_0", ours_file.file(FILE, HOW).values, {})
    assert not wrong.passed


def _fill_with_ones(store: KvStore) -> None:
    store.reserve(ours_file.SEQ, FILE.rows)
    ones = np.ones((2, FILE.rows, 2, 32), np.float32)
    store.import_rows(ours_file.SEQ, ones, ones)


def test_a_copy_that_is_none_is_a_wrong_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    subject = copied_file.copied(FILE, HOW)
    assert checks.check_peer(FILE, "q8_0", subject.values, {}, None).passed
    assert subject.values.shape[1] == FILE.bytes_of("q8_0")
    same = bytes(FILE.bytes_of("q8_0"))
    monkeypatch.setattr(shutil, "copyfile", lambda source, target: target.write_bytes(same))
    wrong = copied_file.copied(FILE, HOW)
    assert not checks.check_peer(FILE, "q8_0", wrong.values, {}, None).passed


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="takes no such advice")
def test_a_cold_load_forgets_the_file_first(monkeypatch: pytest.MonkeyPatch) -> None:
    forgotten: list[str] = []
    advise = os.posix_fadvise

    def note(fd: int, start: int, size: int, advice: int) -> None:
        forgotten.append(Path(f"/proc/self/fd/{fd}").readlink().name)
        assert advice == os.POSIX_FADV_DONTNEED
        advise(fd, start, size, advice)

    monkeypatch.setattr(files.os, "posix_fadvise", note)
    ours_file.file(FILE, HOW).measures["load cold"].sample(1)
    copied_file.copied(FILE, HOW).measures["load cold"].sample(1)
    assert forgotten == ["session.kv", "source"]

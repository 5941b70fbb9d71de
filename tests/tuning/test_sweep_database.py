"""The database of a sweep: rows survive exactly, and damage costs the damaged line only."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sweep_rows import DECIDED, FINALS, OTHER, QUESTION, ROWS, SESSION, SPLIT, trial

from minfer.errors import Refusal
from tuning.sweep.configuration import Configuration
from tuning.sweep.database import Database
from tuning.sweep.fields import BadField
from tuning.sweep.rows import from_line, sealed, to_line

MANY = [
    trial(Configuration("split", (("heads", i),)), message="é\n\u2028", seconds=i / 8)
    for i in range(4)
]
LINES = [to_line(row).encode() for row in (SESSION, *MANY, DECIDED)]
anything = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)


@pytest.fixture
def database(tmp_path: Path) -> Database:
    """One that keeps what it warns of, in `said`."""
    said: list[str] = []
    made = Database(tmp_path / "sweep.jsonl", said.append)
    made.said = said  # type: ignore[attr-defined]
    return made


def said(database: Database) -> list[str]:
    return [text.removeprefix(f"{database.path}:") for text in database.said]  # type: ignore[attr-defined]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: type(row).__name__)
def test_a_row_comes_back_as_it_was(database: Database, row: Any) -> None:
    database.append(row)
    assert list(database.rows()) == [row] and said(database) == []
    assert database.path.read_bytes().count(b"\n") == 1
    assert repr(from_line(to_line(row))) == repr(row)  # 1, 1.0 and True are not the same


def test_the_line_of_a_trial() -> None:
    found = json.loads(to_line(trial()))
    assert found["schema"] == 1 and found["row"] == "trial"
    assert found["configuration"] == {
        "variant": "split",
        "values": {"heads": 4, "exact": True, "mode": "a", "ahead": 1.5},
    }
    assert list(found["configuration"]["values"]) == ["heads", "exact", "mode", "ahead"]
    assert found["cases"][0]["samples"] == [0.1 + 0.2, 5e-324, 1e300]
    assert found["score"] == 1 / 7


def without(found: Any, *path: Any) -> None:
    *outer, last = path
    for step in outer:
        found = found[step]
    del found[last]


def put(value: Any, *path: Any) -> Callable[[Any], None]:
    def change(found: Any) -> None:
        *outer, last = path
        for step in outer:
            found = found[step]
        found[last] = value

    return change


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (put(2, "schema"), "written by a newer minfer: schema 2"),
        (put(0, "schema"), "schema: 0 is no version"),
        (put(True, "schema"), "schema: True is no version"),
        (lambda row: without(row, "schema"), "schema: missing"),
        (put("tral", "row"), "row: 'tral' is none of session, trial, finals, decision"),
        (put([], "row"), "row: [] is none of session, trial, finals, decision"),
        (lambda row: without(row, "seconds"), "seconds: missing"),
        (lambda row: without(row, "cases", 1, "n_q"), "cases[1].n_q: missing"),
        (put(1, "cases", 0, "speed"), "cases[0].speed: unknown"),
        (put(1.5, "cases", 1, "calls"), "cases[1].calls: 1.5 is not a whole number"),
        (put(True, "cases", 0, "n_q"), "cases[0].n_q: True is not a whole number"),
        (put("3", "cases", 0, "samples", 2), "cases[0].samples[2]: '3' is not a number"),
        (put(float("nan"), "cases", 0, "samples", 1), "cases[0].samples[1]: nan is not finite"),
        (put(float("inf"), "score"), "score: inf is not finite"),
        (put(10**400, "seconds"), "seconds: inf is not finite"),
        (put({}, "cases"), "cases: {} is not a list"),
        (put([], "question"), "question: [] is not an object"),
        (put(8, "question", "fmt"), "question.fmt: 8 is not text"),
        (put(None, "message"), "message: None is not text"),
        (put(None, "resources", "spills"), "resources['spills']: None is not a number"),
        (put([float("nan")], "configuration", "values", "heads"), "values['heads'][0]: nan is not"),
        (put("fine", "status"), "status: 'fine' is none of ok, pruned, wrong"),
        (put("wrong", "status"), "score: 0.14285714285714285 is no score of a trial that is wrong"),
        (put(None, "score"), "score: a trial that is ok has a score"),
        (put(-1.0, "score"), "score: -1.0 is no score"),
    ],
)
def test_a_field_that_is_wrong_is_named(
    database: Database, change: Callable[[Any], None], problem: str
) -> None:
    found = json.loads(to_line(trial()))
    change(found)
    database.append(SESSION)
    with database.path.open("a") as file:
        file.write(sealed(found) + "\n")
    database.append(trial())
    assert list(database.rows()) == [SESSION, trial()]
    list(database.rows())
    assert len(said(database)) == 1  # once
    assert said(database)[0].startswith("2 is skipped: ") and problem in said(database)[0]


def test_keys_that_are_numbers_are_read_strictly() -> None:
    found = json.loads(to_line(DECIDED))
    assert found["chosen"].keys() == {"1", "16"}
    for key in ("01", "1.0", "x", "٣"):
        found["chosen"] = {key: found["chosen"].popitem()[1]}
        with pytest.raises(BadField, match=rf"chosen\['{key}'\]: its name is no whole number"):
            from_line(sealed(found))


def test_a_row_that_could_not_be_read_is_not_written(database: Database) -> None:
    for bad, problem in [
        (trial(seconds=float("inf")), "seconds: inf is not finite"),
        (trial(message=3), "message: 3 is not text"),
    ]:
        with pytest.raises(BadField, match=problem):
            database.append(bad)
    assert not database.path.exists()


def test_a_file_that_is_not_there_has_no_rows(database: Database) -> None:
    assert list(database.rows()) == [] and database.trials(QUESTION, {"split": "f00d"}) == {}
    assert not database.path.exists()


def test_paths_that_cannot_be_a_database_are_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path, tmp_path / "fifo", "/dev/full"):
        with pytest.raises(Refusal, match="cannot be read: it is no regular file") as caught:
            Database(path)
        assert caught.value.facts == {"path": str(path)}
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file" / "sweep.jsonl", "a\0b"):
        with pytest.raises(Refusal, match="cannot be read"):
            Database(path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_what_may_not_be_read_is_refused(database: Database) -> None:
    database.append(SESSION)
    database.path.chmod(0)
    with pytest.raises(Refusal, match="Permission denied"):
        Database(database.path)


def test_a_folder_that_is_missing_is_named_when_a_row_is_written(tmp_path: Path) -> None:
    database = Database(tmp_path / "none" / "sweep.jsonl")
    with pytest.raises(Refusal, match=r"none/sweep\.jsonl cannot be written: No such file"):
        database.append(SESSION)


def test_the_latest_trial_of_a_configuration_counts(database: Database) -> None:
    other = trial(OTHER, status="crashed", score=None, message="signal 11")
    for row in (
        SESSION,
        trial(),
        other,
        trial(score=0.5),
        trial(source="0ld", score=0.1),
        trial(question=QUESTION.__class__(**{**vars(QUESTION), "head_dim": 64}), score=0.2),
        trial(Configuration("rows"), score=0.3),
        FINALS,
    ):
        database.append(row)
    found = database.trials(QUESTION, {"split": "f00d"})
    assert list(found.items()) == [(OTHER.key, other), (SPLIT.key, trial(score=0.5))]
    assert database.trials(QUESTION, {"split": "0ld"}) == {
        SPLIT.key: trial(source="0ld", score=0.1)
    }
    assert [t.score for t in database.trials(QUESTION, {"rows": "f00d"}).values()] == [0.3]


@anything
@given(st.data())
def test_a_file_cut_anywhere_keeps_its_whole_lines(database: Database, data: st.DataObject) -> None:
    whole = b"".join(line + b"\n" for line in LINES)
    cut = data.draw(st.integers(0, len(whole)))
    database.path.write_bytes(whole[:cut])
    kept = [line for i, line in enumerate(LINES) if sum(map(len, LINES[: i + 1])) + i <= cut]
    database.append(FINALS)
    assert list(database.rows()) == [*map(from_line, kept), FINALS]
    assert database.path.read_bytes().startswith(whole[:cut])


@anything
@given(st.data())
def test_a_byte_changed_anywhere_costs_its_line_only(
    database: Database, data: st.DataObject
) -> None:
    lines = [bytearray(line) for line in LINES]
    hit = data.draw(st.sets(st.integers(0, len(lines) - 1)))
    for i in hit:
        place = data.draw(st.integers(0, len(lines[i]) - 1))
        lines[i][place] ^= data.draw(st.integers(1, 255))
    database.path.write_bytes(b"".join(line + b"\n" for line in lines))
    named: list[str] = []
    found = list(Database(database.path, named.append).rows())
    good = [from_line(line) for i, line in enumerate(LINES) if i not in hit]
    assert found == good
    assert len(named) >= len(hit)  # a line that is split in two is named twice


@given(st.binary(max_size=200) | st.text(max_size=200).map(str.encode))
def test_noise_is_never_more_than_a_bad_line(noise: bytes) -> None:
    with pytest.raises(BadField):
        from_line(noise)


def test_what_is_nested_without_end_is_a_bad_line() -> None:
    for noise in ("[" * 100_000, '{"schema":1,"row":' * 50_000, "9" * 10_000):
        with pytest.raises(BadField, match="damaged, it is no JSON"):
            from_line(noise)


def test_a_short_write_is_taken_back(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    database.append(SESSION)
    before, write, calls = database.path.read_bytes(), os.write, []

    def short(fd: int, data: bytes) -> int:
        calls.append(len(data))
        if len(calls) > 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(fd, bytes(data[:100]))

    monkeypatch.setattr(os, "write", short)
    with pytest.raises(Refusal) as caught:
        database.append(trial())
    monkeypatch.undo()
    assert calls == [calls[0], calls[0] - 100]
    assert caught.value.message == (
        f"{database.path} cannot be written: No space left on device; "
        "the rows in it are whole, mend that and start again"
    )
    assert database.path.read_bytes() == before


@pytest.mark.parametrize("error", [OSError(errno.EIO, "I/O error"), KeyboardInterrupt()], ids=repr)
def test_a_row_that_does_not_reach_the_disk_is_taken_back(
    database: Database, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    database.append(SESSION)
    before = database.path.read_bytes()

    def fails(fd: int) -> None:
        raise error

    monkeypatch.setattr(os, "fsync", fails)
    with pytest.raises((Refusal, KeyboardInterrupt)):
        database.append(trial())
    assert database.path.read_bytes() == before


LIMITED = """
import resource, sys
from minfer.errors import Refusal
from sweep_rows import SESSION, trial
from tuning.sweep.database import Database
database = Database(sys.argv[1])
resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))
database.append(SESSION)
try:
    while True:
        database.append(trial())
except Refusal as refusal:
    print(refusal.message)
"""

WRITER = """
import os, sys
from sweep_rows import trial
from tuning.sweep.database import Database
database, name = Database(sys.argv[1]), sys.argv[2]
write = os.write
os.write = lambda fd, data: write(fd, data[:1500])  # a line takes several
sys.stdin.readline()
for i in range(100):
    database.append(trial(message=f"{name} {i}" + 3000 * name, seconds=i))
"""


def python(text: str, *args: object) -> subprocess.Popen[str]:
    root = Path(__file__).parent.parent.parent
    return subprocess.Popen(
        [sys.executable, "-c", text, *map(str, args)],
        env={**os.environ, "PYTHONPATH": f"{root}:{Path(__file__).parent}"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def test_a_file_that_may_not_grow_keeps_its_rows(database: Database) -> None:
    pytest.importorskip("resource")
    out, _ = python(LIMITED, database.path).communicate(timeout=60)
    assert "cannot be written: File too large; the rows in it are whole" in out
    rows = list(database.rows())
    assert rows == [SESSION, *[trial()] * (len(rows) - 1)] and len(rows) > 2
    assert said(database) == [] and database.path.read_bytes().endswith(b"}\n")


def test_processes_that_append_at_once_never_mix(database: Database) -> None:
    database.path.write_bytes(LINES[0] + b"\n" + LINES[1][:50])  # a writer was killed here
    writers = [python(WRITER, database.path, name) for name in "abc"]
    done = threading.Event()
    seen: list[int] = []

    def read_on() -> None:
        while not done.is_set():
            seen.append(sum(1 for _ in database.rows()))

    reader = threading.Thread(target=read_on)
    reader.start()
    for writer in writers:
        writer.stdin.write("go\n")
        writer.stdin.flush()
    assert [writer.wait(timeout=60) for writer in writers] == [0, 0, 0]
    done.set()
    reader.join()
    for writer in writers:
        writer.communicate()
    first, *rows = database.rows()
    assert first == SESSION and len(rows) == 300 and seen == sorted(seen)
    for name in "abc":
        own = [row for row in rows if row.message.startswith(name)]
        assert [row.seconds for row in own] == list(range(100))
        assert {row.message.removeprefix(f"{name} {row.seconds:.0f}") for row in own} == {
            3000 * name
        }
    assert said(database) == ["2 is skipped: damaged, it is no JSON"]


def test_a_digit_that_was_changed_is_damage(database: Database) -> None:
    database.append(SESSION)
    line = to_line(trial())
    other = line.replace('"calls": ', '"calls": 1', 1)
    assert json.loads(other)["cases"][0]["calls"] != trial().cases[0].calls
    with database.path.open("a") as file:
        file.write(other + "\n")
    assert list(database.rows()) == [SESSION]
    assert said(database) == ["2 is skipped: damaged, its sum is that of another text"]

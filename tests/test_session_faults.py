"""A save that fails, or a machine that stops: the old file or the new one, whole (8.3)."""

from __future__ import annotations

import errno
import os
import socket
import stat
from collections import namedtuple
from collections.abc import Callable
from itertools import count
from pathlib import Path

import pytest
from interrupts import interrupted_at
from refusals import refused, state
from session_faults import Disk, Event, after_power_loss, make_old
from session_mutations import empty_store, write_rows

from minfer import Refusal, atomic
from minfer.kv.store import KvStore

OLD, NEW = b"old", b"new"
CALLS = ["open", *["write"] * 9, "fsync", "close", "replace", "open", "fsync", "close"]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A session, of which a newer one will be saved; sequence 1 has 1 row and then 2."""
    found = tmp_path / "a.kv"
    store(1).save(found, OLD)
    return found


def store(rows: int) -> KvStore:
    made = empty_store("q8_0")
    made.reserve(1, 4)
    write_rows(made, 1, 0, rows)
    identity = made.identity()
    made.identity = lambda: identity
    return made


@pytest.fixture
def newer() -> KvStore:
    return store(2)


def on(disk: Disk, monkeypatch: pytest.MonkeyPatch, call: Callable[[], object]) -> None:
    """Make the call while `minfer.atomic` sees this disk."""
    with monkeypatch.context() as patch:
        patch.setattr(atomic, "os", disk)
        call()


def held(path: Path) -> bytes:
    """The host's part of a whole session, whose cells are those of its host's part."""
    found = empty_store("q8_0")
    host = found.load(path).host
    assert found.digest() == store({OLD: 1, NEW: 2}[host]).digest()
    return host


def left(path: Path) -> list[str]:
    """Other files in the folder."""
    return sorted(p.name for p in path.parent.iterdir() if p != path)


# --- errors ---------------------------------------------------------------------------------------


def test_a_save_takes_these_steps(
    path: Path, newer: KvStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file is on the disk before it takes the name, and the name is before the save returns."""
    disk = Disk()
    on(disk, monkeypatch, lambda: newer.save(path, NEW))
    assert [name for name in disk.calls if name != "write"] == [c for c in CALLS if c != "write"]
    assert held(path) == NEW


@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC, KeyboardInterrupt()], ids=repr)
def test_every_step_that_fails(
    path: Path, newer: KvStore, monkeypatch: pytest.MonkeyPatch, error: int | BaseException
) -> None:
    clean = Disk()
    on(clean, monkeypatch, lambda: newer.save(path, NEW))
    after_replace = clean.calls.index("replace") + 1
    before, store_before = path.read_bytes(), state(newer)
    for failing in range(1, len(clean.calls) + 1):
        store(1).save(path, OLD)
        disk = Disk(failing, error)
        with pytest.raises((OSError, KeyboardInterrupt, Refusal)) as caught:
            on(disk, monkeypatch, lambda disk=disk: newer.save(path, NEW))
        assert getattr(caught.value.__cause__ or caught.value, "errno", error) == error
        assert held(path) == (OLD if failing <= after_replace else NEW), disk.calls
        assert left(path) == []
        assert state(newer) == store_before
    newer.save(path, NEW)
    assert path.read_bytes() == before


def is_interrupted(line: int, call: Callable[[], object]) -> bool:
    """Whether the call reached that many lines of minfer; what it held is gone afterwards."""
    try:
        with interrupted_at(line, inside="/minfer/"):
            call()
    except KeyboardInterrupt:
        return True
    return False


def test_an_interrupt_at_any_line_of_a_save(path: Path, newer: KvStore) -> None:
    old, before, seen = path.read_bytes(), state(newer), set()
    for line in count(1):
        path.write_bytes(old)
        if not is_interrupted(line, lambda: newer.save(path, NEW)):
            break
        seen.add(held(path))
        assert left(path) == []
        assert state(newer) == before
    assert seen == {OLD, NEW} and line > 300


@pytest.mark.parametrize("most", [1, 7, 100])
def test_writes_that_take_a_part(
    path: Path, newer: KvStore, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    disk = Disk(most=most)
    on(disk, monkeypatch, lambda: newer.save(path, NEW))
    assert disk.calls.count("write") >= path.stat().st_size / most
    assert held(path) == NEW


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP])
def test_a_folder_that_cannot_be_synced(
    path: Path, newer: KvStore, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    clean = Disk()
    on(clean, monkeypatch, lambda: newer.save(path, OLD))
    disk = Disk(len(clean.calls) - 1, number)
    on(disk, monkeypatch, lambda: newer.save(path, NEW))
    assert disk.calls[-2:] == ["fsync", "close"] and held(path) == NEW


def test_what_cannot_be_removed_goes_later(
    path: Path, newer: KvStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk fails and goes on failing, so a file is left, until a later save."""

    class Failing(Disk):
        def unlink(self, path: Path) -> None:
            raise OSError(errno.EIO, "no")

    with pytest.raises(OSError):
        on(Failing(3, errno.EIO), monkeypatch, lambda: newer.save(path, NEW))
    (name,) = left(path)
    newer.save(path, NEW)
    assert left(path) == [name], "it could be that of a writer that has not locked it yet"
    make_old(path.parent / name)
    newer.save(path, NEW)
    assert left(path) == []


# --- power ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("most", [1 << 30, 300], ids=["whole writes", "short writes"])
def test_power_lost_after_every_step(
    path: Path, newer: KvStore, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    old, found = path.read_bytes(), path.with_name("found.kv")
    disk = Disk(most=most)
    on(disk, monkeypatch, lambda: newer.save(path, NEW))
    new, seen = path.read_bytes(), set()
    for done in range(len(disk.events) + 1):
        for content in after_power_loss(old, disk.events[:done], path):
            assert content is not None
            found.write_bytes(content)
            assert held(found) in (OLD, NEW), f"{disk.events[done - 1].what} was the last"
            seen.add(content)
    assert seen == {old, new}
    assert after_power_loss(old, disk.events, path) == {new}, "the save returned"
    assert after_power_loss(None, disk.events[:-1], path) == {None, new}


@pytest.mark.parametrize(
    "without", ["sync of the file", "sync of the folder", "order of sync and name"]
)
def test_the_disk_sees_what_a_worse_save_would_lose(
    path: Path, newer: KvStore, monkeypatch: pytest.MonkeyPatch, without: str
) -> None:
    old, disk = path.read_bytes(), Disk()
    on(disk, monkeypatch, lambda: newer.save(path, NEW))
    *writes, sync, name, folder = disk.events
    assert [e.what for e in (sync, name, folder)] == ["sync", "replace", "sync"]
    worse: dict[str, list[Event]] = {
        "sync of the file": [*writes, name, folder],
        "sync of the folder": [*writes, sync, name],
        "order of sync and name": [*writes, name, sync, folder],
    }
    events, new = worse[without], path.read_bytes()
    found = [after_power_loss(old, events[:n], path) for n in range(len(events) + 1)]
    if without == "sync of the folder":
        assert found[-1] == {old, new}
    else:
        assert any(content not in (old, new) for some in found for content in some)


# --- files that are left --------------------------------------------------------------------------


def test_only_what_a_save_left_is_removed(path: Path, newer: KvStore) -> None:
    """What another program, the user, or a writer that lives has there stays."""
    names = ["0123abcd", "notes", "0123abcde", "0123ABCD", "01234567.1"]
    gone, *kept = (path.with_name(f".a.kv.{name}.part") for name in names)
    kept += [path.with_name(name) for name in (".b.kv.0123abcd.part", ".axkv.0123abcd.part")]
    for file in (gone, *kept):
        file.write_bytes(b"left")
    make_old(gone, *kept)
    fresh, locked = (path.with_name(f".a.kv.{n}{n}{n}{n}.part") for n in ("11", "22"))
    fresh.write_bytes(b"")
    writer = atomic.Part(locked, path)
    make_old(locked)
    newer.save(path, NEW)
    assert left(path) == sorted(file.name for file in (*kept, fresh, locked))
    writer.close()
    newer.save(path, NEW)
    assert left(path) == sorted(file.name for file in (*kept, fresh))


def test_a_name_with_signs_of_patterns(tmp_path: Path, newer: KvStore) -> None:
    path = tmp_path / "[a-z]*?.kv"
    gone, kept = (tmp_path / f".{name}.0123abcd.part" for name in (path.name, "b2?.kv"))
    for file in (gone, kept):
        file.write_bytes(b"")
    make_old(gone, kept)
    newer.save(path, NEW)
    assert held(path) == NEW
    assert left(path) == [kept.name]


# --- where a file can be put ----------------------------------------------------------------------


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o444])
def test_permissions_stay(path: Path, newer: KvStore, mode: int) -> None:
    path.chmod(mode)
    newer.save(path, NEW)
    assert stat.S_IMODE(path.stat().st_mode) == mode
    assert held(path) == NEW


def test_a_new_file_has_the_permissions_of_any_new_file(tmp_path: Path, newer: KvStore) -> None:
    (tmp_path / "plain").write_bytes(b"")
    newer.save(tmp_path / "a.kv", NEW)
    assert (tmp_path / "a.kv").stat().st_mode == (tmp_path / "plain").stat().st_mode


@pytest.mark.parametrize("there", [True, False], ids=["there", "dangling"])
def test_links_are_followed(tmp_path: Path, newer: KvStore, there: bool) -> None:
    (tmp_path / "away").mkdir()
    link, second, real = tmp_path / "link.kv", tmp_path / "second.kv", tmp_path / "away" / "a.kv"
    link.symlink_to("second.kv")
    second.symlink_to(Path("away") / "a.kv")
    if there:
        store(1).save(real, OLD)
    newer.save(link, NEW)
    assert link.is_symlink() and second.is_symlink() and not real.is_symlink()
    assert held(link) == held(real) == NEW
    assert left(real) == []


def socket_at(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(path))


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda path: path.mkdir(), "it is no regular file; give another name"),
        (os.mkfifo, "it is no regular file; give another name"),
        (socket_at, "it is no regular file; give another name"),
        (lambda path: path.symlink_to("/dev/null"), "it is no regular file; give another name"),
        (lambda path: path.symlink_to("none/a.kv"), "is no folder; make it first"),
        (lambda path: path.symlink_to("file/a.kv"), "is no folder; make it first"),
    ],
    ids=["folder", "fifo", "socket", "device", "missing folder", "file as a folder"],
)
def test_places_that_are_refused(
    tmp_path: Path, newer: KvStore, make: Callable[[Path], None], what: str
) -> None:
    (tmp_path / "file").write_bytes(b"")
    path = tmp_path / "there"
    make(path)
    before = path.lstat()
    refused(newer, "8.3", lambda: newer.save(path, NEW), str(path), "cannot be written", what)
    assert path.lstat() == before
    assert left(path) == ["file"]


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("a" * 241, "its name is too long"),
        ("ä" * 121, "its name is too long"),
        ("a\0b", "zero byte"),
    ],
)
def test_names_that_are_refused(tmp_path: Path, newer: KvStore, name: str, what: str) -> None:
    refused(newer, "8.3", lambda: newer.save(tmp_path / name), what)
    assert list(tmp_path.iterdir()) == []


def test_the_longest_name(tmp_path: Path, newer: KvStore) -> None:
    newer.save(tmp_path / ("a" * 240), NEW)
    assert held(tmp_path / ("a" * 240)) == NEW


def test_a_full_disk_is_refused_before_anything_is_written(
    path: Path, newer: KvStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = path.read_bytes()
    newer.save(path, NEW)
    size = path.stat().st_size
    path.write_bytes(before)
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(atomic.shutil, "disk_usage", lambda folder: usage(9**9, 0, size - 1))
    disk = Disk()

    def save() -> None:
        on(disk, monkeypatch, lambda: newer.save(path, NEW))

    error = refused(newer, "8.3", save, "are needed and", "make room or save elsewhere")
    assert error.facts["size"] == size
    assert disk.calls == [] and path.read_bytes() == before and left(path) == []
    monkeypatch.setattr(atomic.shutil, "disk_usage", lambda folder: usage(9**9, 0, size))
    save()
    assert held(path) == NEW


def test_a_private_file_is_private_while_it_is_replaced(tmp_path: Path) -> None:
    target = tmp_path / "a"
    target.write_bytes(b"old")
    target.chmod(0o600)
    with atomic.replacing(target) as part:
        part.write(b"new")
        assert [path.stat().st_mode & 0o777 for path in tmp_path.iterdir()] == [0o600, 0o600]
    assert target.read_bytes() == b"new" and target.stat().st_mode & 0o777 == 0o600


def test_links_that_lead_to_themselves_are_refused(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    one.symlink_to(other)
    other.symlink_to(one)
    with pytest.raises(Refusal, match="links lead to themselves"), atomic.replacing(one):
        pass
    assert one.is_symlink() and other.is_symlink()


def test_a_folder_that_takes_no_file_is_refused_by_the_name_that_was_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> int:
        raise PermissionError(errno.EACCES, "Permission denied", "/some/part")

    monkeypatch.setattr(atomic.os, "open", refuse)
    with pytest.raises(Refusal) as caught, atomic.replacing(tmp_path / "a"):
        pass
    assert caught.value.message.startswith(f"{tmp_path / 'a'} cannot be written: Permission denied")

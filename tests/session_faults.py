"""A disk that fails or loses power under `minfer.atomic`, and a process that saves until killed.

`python tests/session_faults.py FOLDER`: for every line on stdin a child is forked that saves one
session after the other as FOLDER/a.kv; its id is printed once it begins.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

from minfer.kv.store import KvStore


class Event(NamedTuple):
    """What was done: create, write, sync, replace or unlink. data: what is written."""

    what: str
    path: Path
    data: bytes = b""
    to: Path = Path()


class Disk:
    """Stands in for `os`: notes what is done to files, and fails the call number `failing`.

    error: an errno, or an exception to raise instead. most: bytes that one write takes.
    """

    def __init__(
        self, failing: int = 0, error: int | BaseException = 0, most: int = 1 << 30
    ) -> None:
        self.events: list[Event] = []
        self.calls: list[str] = []
        self._failing, self._error, self._most = failing, error, most
        self._paths: dict[int, Path] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def open(self, path: Path, flags: int, mode: int = 0o777) -> int:
        self._call("open")
        fd = os.open(path, flags, mode)
        self._paths[fd] = Path(path)
        if flags & os.O_CREAT:
            self.events.append(Event("create", Path(path)))
        return fd

    def write(self, fd: int, data: memoryview) -> int:
        self._call("write")
        n = os.write(fd, data[: self._most])
        self.events.append(Event("write", self._paths[fd], bytes(data[:n])))
        return n

    def fsync(self, fd: int) -> None:
        self._call("fsync")
        self.events.append(Event("sync", self._paths[fd]))

    def close(self, fd: int) -> None:
        os.close(fd)
        self._call("close")

    def replace(self, path: Path, to: Path) -> None:
        self._call("replace")
        Path(path).replace(to)
        self.events.append(Event("replace", Path(path), to=Path(to)))

    def unlink(self, path: Path) -> None:
        self._call("unlink")
        Path(path).unlink()
        self.events.append(Event("unlink", Path(path)))

    def _call(self, name: str) -> None:
        self.calls.append(name)
        if len(self.calls) == self._failing:
            if isinstance(self._error, BaseException):
                raise self._error
            raise OSError(self._error, os.strerror(self._error))


def after_power_loss(old: bytes | None, events: list[Event], target: Path) -> set[bytes | None]:
    """All that `target` may be found to hold if the machine stops after `events`; None: no file.

    What was written and not synced is there, or in part, or lost, or zeros. A new name that its
    folder was not synced after is there or not, whether or not the data it names is.
    """
    written: dict[Path, bytes] = {}
    synced: dict[Path, bytes] = {}
    names: set[Path | None] = {None}  # of the files that `target` may name, None for the old one
    for event in events:
        if event.what == "create":
            written[event.path] = synced[event.path] = b""
        elif event.what == "write":
            written[event.path] += event.data
        elif event.what == "replace" and event.to == target:
            names.add(event.path)
            named = event.path
        elif event.what == "sync" and event.path in written:
            synced[event.path] = written[event.path]
        elif event.what == "sync" and event.path == target.parent and len(names) > 1:
            names = {named}
    found: set[bytes | None] = set()
    for name in names:
        if name is None:
            found.add(old)
        else:
            kept, lost = synced[name], len(written[name]) - len(synced[name])
            found |= {kept, written[name], kept + bytes(lost)}
            found.add(written[name][: len(kept) + lost // 2])
    return found


def stores() -> Iterator[tuple[KvStore, bytes]]:
    """One store after the other, each with what its host says: contents differ, and sizes."""
    from session_mutations import write_rows

    for number in count():
        store = KvStore(4, 64, 2, 64, cache_type="f32", threads=1)
        store.reserve(number % 7, 48)
        write_rows(store, number % 7, 0, 1 + number % 48)
        yield store, str(number).encode()


def _save_on_demand(folder: Path) -> None:
    """Fork a child that saves for every line on stdin."""
    made = [next(of) for of in [stores()] for _ in range(8)]
    for _ in sys.stdin:
        child = os.fork()
        if child == 0:
            print(os.getpid(), flush=True)
            while True:
                for store, said in made:
                    store.save(folder / "a.kv", said)
        os.waitpid(child, 0)
        print("gone", flush=True)


if __name__ == "__main__":
    _save_on_demand(Path(sys.argv[1]))

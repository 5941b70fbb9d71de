"""Files that tools read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from minfer import numerics
from minfer.kv.session.header import damaged
from minfer.kv.session.reading import SessionFile
from minfer.sessions.progress import bar


@contextmanager
def verified(path: str | Path, *, progress: bool = False) -> Iterator[SessionFile]:
    """An open session file, of which every part was checked; refused or Damaged otherwise.

    progress: a bar on stderr.
    """
    with SessionFile(path) as file:
        with bar(file.size, "verifying", "B", show=progress) as update:
            file.verify(update)
        _ = file.tables
        _check_host(file)
        yield file


def _check_host(file: SessionFile) -> None:
    """The part of an engine: a version and a state that can be read, and facts that fit."""
    part = file.host_part
    if part.version is None:
        return
    part.state(file.where)
    if part.facts and numerics.fingerprint(part.facts) != file.header.numerics:
        what = "its host part tells other facts of numbers than those of its fingerprint"
        raise damaged(file.where, what)

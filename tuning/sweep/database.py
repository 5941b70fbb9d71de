"""The database of a sweep: a file of JSON lines that only grows.

Writers lock it, and a row is a whole line or not there: what a killed writer left is ended by the
next one, and named and skipped by readers.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from minfer.errors import Refusal
from tuning.sweep.configuration import Question
from tuning.sweep.fields import BadField
from tuning.sweep.rows import Row, Trial, from_line, to_line

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]


def to_stderr(text: str) -> None:
    print(f"minfer: {text}", file=sys.stderr)


class Database:
    """The rows in one file; a file that is not there yet has none.

    warn: is told once of each line that is skipped. Refuses a path that is no regular file or
    that cannot be read.
    """

    def __init__(self, path: str | Path, warn: Callable[[str], None] = to_stderr) -> None:
        self.path, self._warn = Path(path), warn
        self._named: set[str] = set()
        try:
            if self.path.exists() and not self.path.is_file():
                raise self._refusal("read", "it is no regular file; name a .jsonl file")
            with contextlib.suppress(FileNotFoundError):
                self.path.open("rb").close()
        except (OSError, ValueError) as error:  # ValueError: a zero byte in the name
            raise self._refusal("read", f"{_reason(error)}; name another file") from error

    def append(self, row: Row) -> None:
        """Write one row to the disk, whole; a Refusal that names the file leaves it as it was.

        Raises BadField for a row that could not be read again.
        """
        line = to_line(row).encode() + b"\n"
        try:
            fd = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
            try:
                _append(fd, line)
            finally:
                os.close(fd)
        except OSError as error:
            reason = f"{_reason(error)}; the rows in it are whole, mend that and start again"
            raise self._refusal("written", reason) from error

    def rows(self) -> Iterator[Row]:
        """The rows in the order of the file; a line that holds none is named and skipped."""
        for number, line in self._lines():
            try:
                row = from_line(line)
            except BadField as error:
                self._skip(number, str(error))
            else:
                yield row

    def trials(
        self,
        question: Question,
        sources: Mapping[str, str],
        counts: Callable[[Trial], bool] = lambda trial: True,
    ) -> dict[str, Trial]:
        """The latest trial of each configuration of `question`, by its key, latest last.

        sources: variant -> hash; trials of other variants and other sources do not count, nor do
        those of which `counts` says so.
        """
        found: dict[str, Trial] = {}
        for row in self.rows():
            if not isinstance(row, Trial) or row.question != question:
                continue
            if row.source == sources.get(row.configuration.variant) and counts(row):
                found.pop(row.configuration.key, None)
                found[row.configuration.key] = row
        return found

    def _lines(self) -> Iterator[tuple[int, bytes]]:
        """Number and text of each line, as far as no writer is at it."""
        try:
            with self.path.open("rb") as file:
                with _locked(file.fileno(), exclusive=False):
                    left = os.fstat(file.fileno()).st_size
                for number, line in enumerate(file, 1):
                    if left <= 0:
                        return
                    part = line[:left]
                    left -= len(line)
                    if part.strip():
                        yield number, part
        except FileNotFoundError:
            return
        except OSError as error:
            raise self._refusal("read", _reason(error)) from error

    def _skip(self, number: int, what: str) -> None:
        text = f"{self.path}:{number} is skipped: {what}"
        if text not in self._named:
            self._named.add(text)
            self._warn(text)

    def _refusal(self, done: str, why: str) -> Refusal:
        return Refusal("0.1", f"{self.path} cannot be {done}: {why}", {"path": str(self.path)})


def _append(fd: int, line: bytes) -> None:
    """One line behind whole lines, on the disk; else the file is as long as it was."""
    with _locked(fd, exclusive=True):
        size = os.lseek(fd, 0, os.SEEK_END)
        if size and _last_byte(fd, size) != b"\n":
            line = b"\n" + line
        try:
            left = memoryview(line)
            while left:
                left = left[os.write(fd, left) :]
            os.fsync(fd)
        except BaseException:
            with contextlib.suppress(OSError):
                os.ftruncate(fd, size)
            raise


def _last_byte(fd: int, size: int) -> bytes:
    os.lseek(fd, size - 1, os.SEEK_SET)
    return os.read(fd, 1)


@contextlib.contextmanager
def _locked(fd: int, *, exclusive: bool) -> Iterator[None]:
    """Held against other writers, where the file system has locks."""
    if fcntl is None:
        yield
        return
    with contextlib.suppress(OSError):
        fcntl.flock(fd, fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_UN)


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)

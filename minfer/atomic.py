"""Files that are replaced whole or not at all (contract 8.3).

What is written goes to a file of another name in the same folder; once it is on the disk it takes
the name, and the folder is brought to the disk as well. So whoever opens the name, and whatever
stops the machine, finds the old file or the new one.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from minfer.errors import Refusal
from minfer.memory import human
from minfer.uninterrupted import Uninterrupted

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

LEFT_AFTER = 60  # seconds without a change, then a file may be left behind
NAME_BYTES = 255 - len("..xxxxxxxx.part")  # so that the other name fits where file systems end
UNSUPPORTED = (errno.EINVAL, errno.ENOTSUP)  # of a folder that cannot be brought to the disk


class Part:
    """The new file while it is written."""

    def __init__(self, path: Path, target: Path) -> None:
        self.path, self._mode = path, None if not target.exists() else mode_of(target)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        self._fd = os.open(path, flags, 0o666 if self._mode is None else self._mode)
        if fcntl is not None:  # says to others that its writer lives
            with contextlib.suppress(OSError):
                fcntl.flock(self._fd, fcntl.LOCK_EX)

    def write(self, data: Any) -> None:
        """Append all of `data`."""
        left = memoryview(data).cast("B")
        while left:
            left = left[os.write(self._fd, left) :]

    def finish(self) -> None:
        """Bring it to the disk, with the permissions of the file it replaces."""
        if self._mode is not None:
            with contextlib.suppress(OSError):
                self.path.chmod(self._mode)
        os.fsync(self._fd)

    def close(self) -> None:
        os.close(self._fd)


@contextlib.contextmanager
def replacing(path: str | Path, size: int = 0) -> Iterator[Part]:
    """A new file that takes the name `path` once the block ends well; without that, no trace.

    size: bytes that will be written, as far as known. A link is followed. Refuses a folder that
    does not exist, a `path` that is no regular file, and too little free disk.
    """
    target = _checked(path, size)
    _remove_left(target)
    name = target.with_name(f".{target.name}.{secrets.token_hex(4)}.part")
    part: Part | None = None
    try:
        try:
            with Uninterrupted():  # an open file that nobody knows of would stay open
                part = _begun(name, target, path)
            yield part
            part.finish()
        finally:
            if part is not None:
                part.close()
        os.replace(name, target)  # noqa: PTH105
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)  # noqa: PTH108
        raise
    sync_folder(target.parent)


def _checked(path: str | Path, size: int = 0) -> Path:
    """Where a file of `size` bytes can be put, links followed; refused where it cannot."""
    has_zero = "\0" in str(path)
    target = Path(os.path.realpath("" if has_zero else path))
    folder, why = target.parent, ""
    if has_zero:
        why = "its name has a zero byte; give another name"
    elif not folder.is_dir():
        why = f"{folder} is no folder; make it first"
    elif target.is_symlink():
        why = "its links lead to themselves; give another name"
    elif target.exists() and not target.is_file():
        why = "it is no regular file; give another name"
    elif target.exists() and not os.access(target, os.W_OK):
        why = "it is read-only; make it writable or give another name"
    elif len(os.fsencode(target.name)) > NAME_BYTES:
        why = "its name is too long; give a shorter one"
    elif size > shutil.disk_usage(folder).free:
        free = human(shutil.disk_usage(folder).free)
        why = f"{human(size)} are needed and {free} free; make room or save elsewhere"
    if why:
        raise Refusal("8.3", f"{path} cannot be written: {why}", {"path": str(path), "size": size})
    return target


def _begun(name: Path, target: Path, path: str | Path) -> Part:
    try:
        return Part(name, target)
    except OSError as error:
        raise Refusal(
            "8.3",
            f"{path} cannot be written: {error.strerror or error} in {target.parent}; write "
            "elsewhere, or make that folder writable",
            {"path": str(path)},
        ) from error


def mode_of(path: Path) -> int:
    """The permissions of a file."""
    return stat.S_IMODE(path.stat().st_mode)


def sync_folder(folder: Path) -> None:
    """Bring the names in a folder to the disk, where its system can."""
    try:
        fd = os.open(folder, os.O_RDONLY)
    except PermissionError:  # Windows opens no folders
        return
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise
    finally:
        os.close(fd)


def _remove_left(target: Path) -> None:
    """Remove what writers of `target` left that were killed: nobody locks it any more."""
    if fcntl is None:
        return
    for left in target.parent.glob(f".{_escaped(target.name)}.{8 * '[0-9a-f]'}.part"):
        with contextlib.suppress(OSError), left.open("rb") as file:
            # a new one is not locked yet
            if left.stat().st_mtime < time.time() - LEFT_AFTER:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                left.unlink()


def _escaped(name: str) -> str:
    """A name as a pattern that matches it alone."""
    return "".join(f"[{c}]" if c in "*?[" else c for c in name)

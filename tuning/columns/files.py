"""Files for the columns that save, load and copy: in the cache folder, gone with the process."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from minfer import settings


def folder() -> tempfile.TemporaryDirectory[str]:
    """A folder on the disk of the cache folder."""
    parent = settings.cache_dir() / "bench"
    parent.mkdir(parents=True, exist_ok=True)
    return tempfile.TemporaryDirectory(dir=parent, prefix="files-")


def to_disk(path: Path) -> None:
    """Bring a file to the disk."""
    fd = os.open(path, os.O_RDWR)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def forget(path: Path) -> None:
    """Let the system forget what it keeps of a file in memory, where it takes such advice."""
    if hasattr(os, "posix_fadvise"):
        to_disk(path)
        fd = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)

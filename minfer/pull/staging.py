"""Where a file is made before it takes its name: whole or not at all."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from minfer.atomic import sync_folder
from minfer.errors import Refusal
from minfer.memory import human

LEFT_AFTER = 24 * 3600  # seconds without a change, then a pull's folder counts as left behind


@contextlib.contextmanager
def staging(models: Path) -> Iterator[Path]:
    """A folder inside `models` that is gone afterwards, as are old ones of killed pulls."""
    models.mkdir(parents=True, exist_ok=True)
    for left in models.glob(".pull-*"):
        with contextlib.suppress(OSError):
            # a long download changes its file only, and not the folder
            changed = max(path.lstat().st_mtime for path in (left, *left.rglob("*")))
            if changed < time.time() - LEFT_AFTER:
                shutil.rmtree(left)
    with tempfile.TemporaryDirectory(dir=models, prefix=".pull-") as folder:
        yield Path(folder)


def require_free(folder: Path, needed: int, what: str) -> None:
    """Refuse to fetch `what` unless the disk of `folder` has `needed` bytes free."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise Refusal(
            "0.1",
            f"pulling {what} needs {human(needed)} of disk at {folder.parent}, {human(free)} free; "
            "make room or set MINFER_CACHE_DIR to another folder",
            {"needed": needed, "free": free, "path": str(folder.parent)},
        )


def place(made: Path, target: Path) -> None:
    """Give a staged file its name, durably where the system lets a folder be opened."""
    with made.open("rb+") as file:
        os.fsync(file.fileno())
    target.parent.mkdir(parents=True, exist_ok=True)
    made.replace(target)
    sync_folder(target.parent)

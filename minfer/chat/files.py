"""The two files of a chat, and whether they are still what the chat left there (contract 9.1)."""

from __future__ import annotations

from pathlib import Path

from minfer.errors import Damaged, Refusal
from minfer.kv.session.header import HEADER, MAGIC, parse

AWAY = "move it away or give another --session"


class Seen:
    """A file, and its state when this chat last read or wrote it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.look()

    def look(self) -> None:
        self._state = state_of(self.path)

    def refuse_changed(self) -> None:
        """Refuse a file that somebody else wrote, made or removed since the last look."""
        if state_of(self.path) != self._state:
            raise Refusal(
                "9.1",
                f"{self.path} was changed by somebody else while this chat ran, and is left as it "
                "is; /save OTHER keeps this chat under another name",
                {"path": str(self.path)},
            )


def state_of(path: Path) -> tuple[int, int, int] | None:
    """Inode, size and time of the last change, None where no file is."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


def cache_of(path: Path) -> Path:
    """Where the cache of a history is."""
    return path.with_name(path.name + ".kv")


def refuse_no_file(path: Path) -> None:
    """Refuse a name that no history can have."""
    if not path.name or (path.exists() and not path.is_file()):
        kind = "a folder, not a file" if not path.name or path.is_dir() else "no regular file"
        what = f"--session {str(path)!r} names {kind}; give the name of a file"
        raise Refusal("9.1", what, {"path": str(path)})


def refuse_foreign(path: Path) -> None:
    """Refuse a cache file that no save of this version may replace: it is not one that it reads."""
    try:
        with path.open("rb") as file:
            parse(file.read(HEADER.size), path.stat().st_size, str(path))
        return
    except FileNotFoundError:
        return
    except OSError as error:
        why = f"{path} cannot be read ({error.strerror or error})"
    except Damaged:
        with path.open("rb") as file:
            if file.read(len(MAGIC)) == MAGIC:
                return
        why = f"{path} is no session file"
    except Refusal as refusal:
        why = refusal.message
    raise Refusal("9.1", f"{why}; a chat would overwrite it: {AWAY}", {"path": str(path)})

"""Files of promoted rows: merged with new rows, shown as differences, written whole."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from minfer import atomic, tuned
from minfer.errors import Refusal
from minfer.receipt import short_path
from minfer.tuned import Row
from tuning.promote.decisions import Candidate, NotPromoted, asked_of, source_now


@dataclass(frozen=True)
class Change:
    """One file as it is and as it will be. old: None where there is none yet."""

    path: Path
    old: str | None
    new: str

    @property
    def difference(self) -> str:
        """A unified diff, "" where nothing changes."""
        name = short_path(str(self.path))
        before = (self.old or "").splitlines(keepends=True)
        lines = difflib.unified_diff(
            before,
            self.new.splitlines(keepends=True),
            "/dev/null" if self.old is None else f"a/{name}",
            f"b/{name}",
        )
        return "".join(lines)

    def write(self) -> None:
        """The file, replaced whole; a Refusal leaves the old one."""
        text = self.new.encode()
        try:
            with atomic.replacing(self.path, len(text)) as part:
                part.write(text)
        except OSError as error:
            why = f"{self.path} cannot be written: {error.strerror or error}; it is as it was"
            raise Refusal("8.3", why, {"path": str(self.path)}) from error


def change_of(
    folder: Path, kind: str, found: Sequence[Candidate]
) -> tuple[Change, list[Candidate]]:
    """The file of a kind of device with the candidates' rows, and each candidate's fate."""
    path = folder / f"{kind}.json"
    old, rows = _as_it_is(path, kind)
    new = [(c.row, c.question.device) for c in found if c.row is not None]
    kept = [row for row in rows if not any(_replaces(*one, row) for one in new)]
    fates = [_fate(candidate, kept, path) for candidate in found]
    if any(fate.row is not one.row for fate, one in zip(fates, found, strict=True)):
        return change_of(folder, kind, fates)
    return Change(path, old, tuned.dumped(kind, [*kept, *(row for row, _ in new)])), fates


def _as_it_is(path: Path, kind: str) -> tuple[str | None, list[Row]]:
    try:
        return path.read_text(encoding="utf-8"), tuned.loaded(path, kind)
    except FileNotFoundError:
        return None, []
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        message = f"{path} cannot be read: {why}; mend it or remove it"
        raise Refusal("8.3", message, {"path": str(path)}) from None


def _replaces(new: Row, device: str, old: Row) -> bool:
    """Whether an old row goes: the new one is of the same make, or its own text is gone."""
    if (new.op, new.key) != (old.op, old.key):
        return False
    return dict(new.made_with) == dict(old.made_with) or not _is_current(old, device)


def _is_current(row: Row, device: str) -> bool:
    """Whether the text of its variant is what it was; a module that is not here may be so."""
    asked = asked_of(row, device)
    variant = asked.variants[row.op].get(row.variant)
    if variant is None or tuned.module_of(variant, asked.device) != row.module:
        return bool(row.module)
    return source_now(variant) == row.source


def _fate(candidate: Candidate, kept: Sequence[Row], path: Path) -> Candidate:
    """The candidate, or without its row where a row that stays would disagree with it."""
    row = candidate.row
    for other in kept if row is not None else ():
        assert row is not None
        if other.op == row.op or other.key != row.key or other.made_with != row.made_with:
            continue
        device = candidate.question.device
        if _is_current(other, device) and _settled(other, device) != _settled(row, device):
            why = f"the row of {other.op} in {path.name} names {_named(other)}, this one"
            why += f" {_named(row)}, and their bits must be equal (contract 6.1): sweep both"
            return Candidate(candidate.decided, None, why)
    return candidate


def _settled(row: Row, device: str) -> object:
    try:
        return tuned.settled(row, asked_of(row, device))
    except (NotPromoted, KeyError):  # of a module that is not here
        return row.variant, row.module, tuple(row.numeric.items())


def _named(row: Row) -> str:
    return " ".join([row.variant, *(f"{name}={value}" for name, value in row.numeric.items())])

"""Files that a command is told to write."""

from __future__ import annotations

import os
from pathlib import Path

from minfer.errors import Refusal


def refuse_target(target: str | Path, source: str | Path, *, force: bool) -> None:
    """Refuse to write over the file that is read, and over any other one without `force`."""
    if os.path.realpath(source) == os.path.realpath(target):
        what = f"{target} is the file that is read; give the new file another name"
        raise Refusal("0.3", what, {"path": str(target)})
    if os.path.lexists(target) and not force:
        what = f"{target} exists; give another name, or --force to replace it"
        raise Refusal("0.3", what, {"path": str(target)})

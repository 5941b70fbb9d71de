"""Reading a text that a command is given by name."""

from __future__ import annotations

import sys
from pathlib import Path

from minfer.errors import Refusal


def read_text(name: str) -> str:
    """The text of a file in UTF-8 as it stands, line ends included; `-` is stdin.

    Refuses a file that cannot be read, and bytes that are no UTF-8, naming the first.
    """
    try:
        data = Path(name).read_bytes() if name != "-" else _stdin()
    except OSError as error:
        what = f"cannot read the text from {name}: {error.strerror or error}"
        raise Refusal("0.2", what, {"path": name}) from error
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise Refusal(
            "0.2",
            f"byte {error.start} of {name} (0x{data[error.start]:02x}) is no UTF-8; "
            "convert the text to UTF-8",
            {"path": name, "byte": error.start},
        ) from error


def _stdin() -> bytes:
    return sys.stdin.buffer.read() if sys.stdin else b""

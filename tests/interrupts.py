"""Signals at chosen moments."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def interrupted_at(line: int, inside: str = "/kv/") -> Iterator[None]:
    """Send SIGINT before the given line event in files with `inside` in their path, once."""
    left = line

    def trace(frame: FrameType, event: str, _arg: object) -> object:
        nonlocal left
        if inside not in frame.f_code.co_filename:
            return None
        if event == "line":
            left -= 1
            if left == 0:
                signal.raise_signal(signal.SIGINT)
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)

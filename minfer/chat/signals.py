"""Signals while a chat runs: noted, and looked at between tokens."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any

LEAVE = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name))


class Signals:
    """A block in which an interrupt ends no program.

    stop: an interrupt came since this was last set to False. leave: the number of a signal that
    is to end the program, 0 before.
    """

    def __init__(self) -> None:
        self.stop = False
        self.leave = 0
        self._wake: Callable[[], None] | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, *LEAVE):
                # A program that was told to outlive its terminal, or its keys, ignores them.
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @contextmanager
    def waking(self, wake: Callable[[], None]) -> Iterator[None]:
        """While something waits for input: call `wake`, which ends that, when a signal comes."""
        self._wake = wake
        try:
            yield
        finally:
            self._wake = None

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.stop = True
        self.leave = self.leave or (number if number in LEAVE else 0)
        if self._wake is not None:
            self._wake()

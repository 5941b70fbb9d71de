"""Changes that an interrupt must not cut in two."""

from __future__ import annotations

import signal
import threading
from itertools import repeat
from types import FrameType, TracebackType
from typing import Any

try:  # the functions behind those of `signal`, which turn handlers into enums: six times cheaper
    from _signal import getsignal as handler_of  # type: ignore[import-not-found]
    from _signal import signal as set_handler
except ImportError:
    from signal import getsignal as handler_of
    from signal import signal as set_handler

# Those whose handlers programs let raise; each costs microseconds.
NAMES = ("SIGINT", "SIGTERM", "SIGALRM")
SIGNALS = tuple(getattr(signal, name) for name in NAMES if hasattr(signal, name))


class Uninterrupted:
    """A block during which Python's signal handlers wait: what they raise comes after its end.

    Python runs them in the main thread only, between any two of its instructions; in other threads
    nothing is to be held back. Handlers are swapped inside one call of `list`, where no Python
    runs, and given back twice: one that is back may raise before the next is.
    """

    def __enter__(self) -> None:
        self._came: list[tuple[int, FrameType | None]] = []
        self._over = False
        self._handlers: dict[int, Any] = {}
        if threading.current_thread() is threading.main_thread():
            found = {number: handler_of(number) for number in SIGNALS}
            self._handlers = {n: handler for n, handler in found.items() if callable(handler)}
        numbers, handlers = list(self._handlers), list(self._handlers.values())
        self._back = [map(set_handler, numbers, handlers) for _ in range(2)]
        hold = map(set_handler, numbers, repeat(self._note))
        try:
            list(hold)
        except BaseException:  # of a handler that was not held back yet
            self._over = True
            self._end()
            raise

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end()

    def _end(self) -> None:
        """Give the handlers back, then run those of the signals that came, whatever one raises."""
        try:
            self._over = True
            list(self._back[0])
        finally:
            try:
                list(self._back[1])
            finally:
                self._deliver()

    def _note(self, number: int, frame: FrameType | None) -> None:
        """Keep a signal; after the block, where a handler is not back yet, hand it on."""
        if self._over:
            set_handler(number, self._handlers[number])
            self._handlers[number](number, frame)
        else:
            self._came.append((number, frame))

    def _deliver(self) -> None:
        """Run the handlers of the signals that came, all of them."""
        if self._came:
            number, frame = self._came.pop(0)
            try:
                self._handlers[number](number, frame)
            finally:
                self._deliver()

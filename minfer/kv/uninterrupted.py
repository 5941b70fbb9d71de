"""Changes that an interrupt must not cut in two."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType

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
    nothing is to be held back.
    """

    def __enter__(self) -> None:
        self._held: list[tuple[int, object]] = []
        self._came: list[tuple[int, FrameType | None]] = []
        if threading.current_thread() is not threading.main_thread():
            return
        try:
            for number in SIGNALS:
                handler = handler_of(number)
                if callable(handler):
                    self._held.append((number, handler))
                    set_handler(number, self._note)
        except BaseException:  # a handler that was not held back yet
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
        handlers = dict(self._held)
        try:
            self._restore(self._held)
        finally:
            self._deliver(handlers)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._came.append((number, frame))

    def _restore(self, held: list[tuple[int, object]]) -> None:
        """Give every handler back, whatever one of them raises."""
        if held:
            number, handler = held.pop()
            try:
                set_handler(number, handler)
            finally:
                self._restore(held)

    def _deliver(self, handlers: dict[int, object]) -> None:
        """Run the handlers of the signals that came, all of them."""
        if self._came:
            number, frame = self._came.pop(0)
            try:
                handlers[number](number, frame)  # type: ignore[operator]
            finally:
                self._deliver(handlers)

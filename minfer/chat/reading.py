"""Where messages come from: lines of a file or a pipe, or a person at a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, BinaryIO, Protocol

from minfer.chat.signals import Signals
from minfer.errors import Refusal

PROMPT, CONTINUED = "> ", ". "


class Reader(Protocol):
    """A source of messages."""

    def read(self, draft: str) -> str | None:
        """The next line, None at the end. draft: a line to begin with, for a person."""


class Lines:
    """A line is a message; a backslash at its end goes on in the next line."""

    def __init__(self, stream: BinaryIO | None, signals: Signals) -> None:
        self._stream, self._signals = stream, signals

    def read(self, draft: str) -> str | None:
        """Refuses bytes that are no UTF-8, naming the first; raises KeyboardInterrupt."""
        parts: list[str] = []
        while (line := self._line()) is not None:
            continued = line.endswith("\\")
            parts.append(line.removesuffix("\\"))
            if not continued:
                break
        return "\n".join(parts) if parts else None

    def _line(self) -> str | None:
        try:
            with self._signals.waking(interrupt):
                data = b"" if self._signals.leave or not self._stream else self._stream.readline()
        except KeyboardInterrupt:
            if self._signals.leave:
                return None
            raise
        if not data:
            return None
        try:
            return data.decode().removesuffix("\n").removesuffix("\r")
        except UnicodeDecodeError as error:
            byte = data[error.start]
            what = f"byte {error.start} of the line (0x{byte:02x}) is no UTF-8; convert the text"
            raise Refusal("0.2", what, {"byte": error.start}) from None


class Terminal:
    """A person: line editing, earlier messages, several lines by Alt-Enter or pasting.

    The key of an interrupt clears the line, that of the end of input leaves.
    """

    def __init__(self, signals: Signals, earlier: Sequence[str] = (), **options: Any) -> None:
        """earlier: messages to go back to. options: of the prompt_toolkit session, for tests."""
        from prompt_toolkit import PromptSession
        from prompt_toolkit.history import InMemoryHistory
        from prompt_toolkit.key_binding import KeyBindings

        keys = KeyBindings()
        keys.add("enter")(lambda event: event.current_buffer.validate_and_handle())
        keys.add("escape", "enter")(lambda event: event.current_buffer.insert_text("\n"))
        self._signals = signals
        self._session: PromptSession[str] = PromptSession(
            history=InMemoryHistory(earlier),
            key_bindings=keys,
            multiline=True,
            prompt_continuation=CONTINUED,
            **options,
        )

    def read(self, draft: str) -> str | None:
        while True:
            try:
                with self._signals.waking(self._end):
                    return self._session.prompt(PROMPT, default=draft, pre_run=self._leave_early)
            except KeyboardInterrupt:
                draft = ""
            except EOFError:
                return None

    def _end(self) -> None:
        """Of a signal handler: the loop sleeps until something comes through its own door."""
        app = self._session.app
        if self._signals.leave and app.loop is not None:
            app.loop.call_soon_threadsafe(self._leave_early)

    def _leave_early(self) -> None:
        app = self._session.app
        if self._signals.leave and app.is_running and not app.is_done:
            app.exit(exception=EOFError())


def as_typed(message: str) -> str:
    """The line that sends `message`: one slash more where it would be a command."""
    return f"/{message}" if message.startswith("/") else message


def interrupt() -> None:
    raise KeyboardInterrupt

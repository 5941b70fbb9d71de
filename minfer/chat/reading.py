"""Where messages come from: lines of a file or a pipe, or a person at a terminal."""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, BinaryIO, Protocol

from minfer.chat.signals import Signals
from minfer.errors import Refusal

PROMPT, CONTINUED = "> ", ". "
WAIT = 0.1  # seconds between two looks at signals
READ = 1 << 16  # bytes at once
DRAFT = 2000  # characters of a message that is put back into the line


class Reader(Protocol):
    """A source of messages."""

    def read(self, draft: str) -> str | None:
        """The next line, None at the end. draft: a line to begin with, for a person."""


class Lines:
    """A line is a message; a backslash at its end goes on in the next line."""

    def __init__(self, stream: BinaryIO | None, signals: Signals) -> None:
        """stream: a file or a pipe, which is read past what it buffers; None has no lines."""
        self._stream, self._signals = stream, signals
        self._rest = b""

    def read(self, draft: str) -> str | None:
        """None at a signal to leave, too; raises KeyboardInterrupt at an interrupt.

        Refuses bytes that are no UTF-8, naming the first.
        """
        parts: list[str] = []
        while (line := self._line()) is not None:
            continued = line.endswith("\\")
            parts.append(line.removesuffix("\\"))
            if not continued:
                break
        return "\n".join(parts) if parts and not self._signals.leave else None

    def _line(self) -> str | None:
        while b"\n" not in self._rest and (data := self._more()):
            self._rest += data
        if not self._rest or self._signals.leave:
            return None
        line, _, self._rest = self._rest.partition(b"\n")
        try:
            return line.decode().removesuffix("\r")
        except UnicodeDecodeError as error:
            byte = line[error.start]
            what = f"byte {error.start} of the line (0x{byte:02x}) is no UTF-8; convert the text"
            raise Refusal("0.2", what, {"byte": error.start}) from None

    def _more(self) -> bytes:
        """What comes next. A signal may come just before a wait, so waits are short."""
        while self._stream is not None and not self._signals.leave:
            if self._signals.stop:
                raise KeyboardInterrupt
            if can_be_read(self._stream, WAIT):
                return os.read(self._stream.fileno(), READ)
        return b""


def can_be_read(stream: BinaryIO, seconds: float) -> bool:
    """Whether something, or the end, comes within so many seconds."""
    if sys.platform == "win32":  # pipes cannot be waited for there
        return True
    return bool(select.select([stream], [], [], seconds)[0])


class Terminal:
    """A person: line editing, earlier messages, several lines by Alt-Enter or pasting.

    The key of an interrupt clears the line, that of the end of input leaves.
    """

    def __init__(self, signals: Signals, earlier: Sequence[str] = (), **options: Any) -> None:
        """earlier: messages to go back to. options: of the prompt_toolkit session, for tests."""
        from prompt_toolkit import PromptSession
        from prompt_toolkit.history import InMemoryHistory
        from prompt_toolkit.key_binding import KeyBindings
        from prompt_toolkit.renderer import CPR_Support

        keys = KeyBindings()
        keys.add("enter")(lambda event: event.current_buffer.validate_and_handle())
        keys.add("escape", "enter")(lambda event: event.current_buffer.insert_text("\n"))
        self._signals = signals
        self._session: PromptSession[str] = PromptSession(
            history=InMemoryHistory(earlier),
            key_bindings=keys,
            multiline=True,
            prompt_continuation=CONTINUED,
            enable_suspend=True,
            **options,
        )
        # Not every terminal answers where its cursor is, and then a warning would come.
        self._session.app.renderer.cpr_support = CPR_Support.NOT_SUPPORTED

    def read(self, draft: str) -> str | None:
        """A draft that would fill the screen is left to the history of lines."""
        hint = ""
        if len(draft) > DRAFT:
            draft, hint = "", "the up arrow brings the message back"
        while True:
            try:
                with self._signals.waking(self._end):
                    line = self._session.prompt(
                        PROMPT, default=draft, placeholder=hint, pre_run=self._leave_early
                    )
                return checked_text(line, "the line")
            except KeyboardInterrupt:
                draft = hint = ""
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


def checked_text(text: str, what: str) -> str:
    """`text`; refused where it holds bytes that were typed and are no text."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        message = f"character {error.start} of {what} is no text in this terminal's encoding"
        raise Refusal("0.2", f"{message}; type it again, in UTF-8", {"at": error.start}) from None
    return text


def as_typed(message: str) -> str:
    """The line that sends `message`: one slash more where it would be a command."""
    text = message.lstrip()
    return message[: len(message) - len(text)] + "/" + text if text.startswith("/") else message


def as_sent(line: str) -> str:
    """The message that `line` sends, without the slash that keeps it from being a command."""
    text = line.lstrip()
    return line[: len(line) - len(text)] + text[1:] if text.startswith("//") else line


@contextmanager
def unseen_keys() -> Iterator[None]:
    """Keys at a terminal wait for the prompt, which shows them: they mix with no answer."""
    try:
        import termios
    except ImportError:  # Windows
        yield
        return
    before = termios.tcgetattr(sys.stdin)
    silent = termios.tcgetattr(sys.stdin)
    silent[3] &= ~termios.ECHO
    termios.tcsetattr(sys.stdin, termios.TCSANOW, silent)
    try:
        yield
    finally:
        with suppress(termios.error):  # a terminal that has gone away
            termios.tcsetattr(sys.stdin, termios.TCSANOW, before)

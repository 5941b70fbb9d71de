"""`minfer chat` in front of a person: keys through a real terminal."""

from __future__ import annotations

import io
import json
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from chats import LONG
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput

from minfer import Engine, Refusal
from minfer.chat.events import Token
from minfer.chat.program import Program
from minfer.chat.reading import Terminal, checked_text
from minfer.chat.session import Session
from minfer.chat.showing import Text
from minfer.chat.signals import Signals

pty, termios = pytest.importorskip("pty"), pytest.importorskip("termios")

ROOT = Path(__file__).parent.parent
LIMIT = 30.0  # seconds until a test gives up waiting
CTRL_C, CTRL_D, ENTER, ALT_ENTER, UP = "\x03", "\x04", "\r", "\x1b\r", "\x1b[A"
SLOW = """
import sys, time
from minfer.cli import main
from minfer.engine import Engine
feed = Engine.prefill
Engine.prefill = lambda *args: (time.sleep(0.2), feed(*args))[1]
sys.exit(main())
"""
PASTED = "\x1b[200~{}\x1b[201~"
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]|\x1b[=>]|\r")


class Person:
    """The other end of a chat's terminal."""

    def __init__(self, *argv: object, main: Sequence[str] = ("-m", "minfer")) -> None:
        self._fd, other = pty.openpty()
        termios.tcsetwinsize(other, (24, 80))
        self.process = subprocess.Popen(
            [sys.executable, *main, "chat", *map(str, argv)],
            cwd=ROOT,
            stdin=other,
            stdout=other,
            stderr=other,
            start_new_session=True,
            preexec_fn=own_terminal,
            env={**os.environ, "TERM": "xterm"},
        )
        os.close(other)
        self.seen = ""
        self.asked = False  # where the cursor is, which this terminal does not answer

    def type(self, keys: str) -> None:
        os.write(self._fd, keys.encode())

    def sees(self, text: str) -> str:
        """Wait until `text` is on the screen, after what was seen before; what came up to it."""
        end = time.monotonic() + LIMIT
        while text not in self.seen:
            assert self._read(end - time.monotonic()), f"no {text!r} in {self.seen[-300:]!r}"
        before, _, self.seen = self.seen.partition(text)
        return before

    def wait(self, done: Callable[[], bool]) -> None:
        """Read until `done`."""
        end = time.monotonic() + LIMIT
        while not done():
            assert time.monotonic() < end, self.seen[:300]
            self._read(0.01)

    def hang_up(self) -> None:
        os.close(self._fd)
        self._fd = os.open(os.devnull, os.O_RDWR)

    def leaves(self) -> int:
        """Wait for the end; the exit code."""
        end = time.monotonic() + LIMIT
        while self._read(end - time.monotonic()):
            pass
        return self.process.wait(LIMIT)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._fd)

    def _read(self, seconds: float) -> bool:
        if not select.select([self._fd], [], [], max(0.0, seconds))[0]:
            return False
        try:
            data = os.read(self._fd, 65536)
        except OSError:  # the chat has closed its end
            return False
        self.asked |= b"\x1b[6n" in data
        self.seen += ESCAPES.sub("", data.decode(errors="replace"))
        return bool(data)


def own_terminal() -> None:
    """Make stdin the controlling terminal, so that its keys make signals."""
    import fcntl

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # a shell may have us ignore it


@pytest.fixture
def files(tmp_path: Path) -> Path:
    return tmp_path / "c.json"


@pytest.fixture
def sit_down(tiny_gguf: Path, files: Path) -> Iterator[Callable[[], Person]]:
    """Start a chat whose answers do not end by themselves."""
    people = []

    def sit(*options: object, **more: Any) -> Person:
        bans = ("--logit-bias", "<|im_end|>=-inf", "--logit-bias", "<|endoftext|>=-inf")
        argv = (tiny_gguf, "--session", files, "--n-ctx", 100_000, *bans, *options)
        people.append(Person(*argv, **more))
        return people[-1]

    yield sit
    for person in people:
        person.close()


def said(files: Path) -> list[str]:
    """What was said, as the history has it; an answer to the last may be under way."""
    messages = json.loads(files.read_text())["messages"]
    return [message["content"] for message in messages if message["role"] == "user"]


def ask(person: Person, files: Path, keys: str, message: str) -> None:
    """Type, see the answer begin, and stop it."""
    person.sees(">")
    person.type(keys)
    person.wait(lambda: said(files)[-1:] == [message])
    shown = len(person.seen) + 40
    person.wait(lambda: len(person.seen) > shown)
    person.type(CTRL_C)
    person.sees("(cut off by you)")


def test_a_conversation_by_keys(sit_down, files: Path) -> None:
    person = sit_down("--system", "in")
    person.sees("new chat")
    person.sees("/help lists commands")
    ask(person, files, "hello" + ENTER, "hello")
    ask(person, files, "no" + CTRL_C + "the cat" + ENTER, "the cat")
    ask(person, files, "two" + ALT_ENTER + "lines" + ENTER, "two\nlines")
    ask(person, files, PASTED.format("and\nfour") + ENTER, "and\nfour")
    ask(person, files, UP * 5 + ENTER, "the cat")
    person.sees(">")
    person.type("/stats" + ENTER)
    person.sees("messages                  11")
    person.sees(">")
    person.type(CTRL_D)
    person.sees(f"saved {files} and {files}.kv, ")
    assert person.leaves() == 0 and not person.asked
    messages = json.loads(files.read_text())["messages"]
    assert said(files) == ["hello", "the cat", "two\nlines", "and\nfour", "the cat"]
    assert len(messages) == 11 and all(message["content"] for message in messages)
    again = sit_down()
    again.sees("resumed ")
    ask(again, files, UP * 4 + ENTER, "two\nlines")
    again.sees(">")
    again.type("/exit" + ENTER)
    assert again.leaves() == 0


def test_feeding_a_history_shows_a_bar_and_can_be_stopped(sit_down, files: Path) -> None:
    turn = [{"role": role, "content": "the cat " * 40} for role in ("user", "assistant")]
    files.write_text(json.dumps({"version": 1, "messages": turn * 150}))
    person = sit_down(main=("-c", SLOW))
    person.sees("the history is fed again: ")
    person.sees("token/s")
    person.type(CTRL_C)
    person.sees(" tokens again")
    person.sees(">")
    person.type("hello" + ENTER)
    person.sees("token/s")
    person.type(CTRL_C)
    person.sees("stopped before the answer; the message was taken back")
    person.sees("hello")  # in the line again
    person.type(CTRL_C + CTRL_D)
    assert person.leaves() == 0
    assert len(said(files)) == 151 and said(files)[-1] == "hello"


@pytest.mark.parametrize("when", ["answering", "waiting"])
@pytest.mark.parametrize("how", ["hangs up", "SIGTERM"])
def test_a_terminal_that_goes_away_loses_nothing(
    sit_down, files: Path, how: str, when: str
) -> None:
    person = sit_down()
    ask(person, files, "hello" + ENTER, "hello")
    person.sees(">")
    if when == "answering":
        person.type("and" + ENTER)
        person.wait(lambda: said(files)[-1:] == ["and"])
        shown = len(person.seen) + 40
        person.wait(lambda: len(person.seen) > shown)
    if how == "SIGTERM":
        person.process.send_signal(signal.SIGTERM)
        assert person.leaves() == 128 + signal.SIGTERM
    else:
        person.hang_up()
        assert person.process.wait(LIMIT) == 128 + signal.SIGHUP
    roles = [message["role"] for message in json.loads(files.read_text())["messages"]]
    assert roles == ["user", "assistant"] * (1 + (when == "answering"))
    again = sit_down()
    again.sees("resumed ")


def read(
    keys: str,
    draft: str = "",
    before: Callable[[], object] = lambda: None,
    running: Callable[[Terminal], object] = lambda reader: None,
) -> str | None:
    """What the reader makes of keys. running: is called once the prompt runs."""
    with create_pipe_input() as keyboard, Signals() as signals:
        reader = Terminal(signals, ["one", "two"], input=keyboard, output=DummyOutput())
        leave_early = reader._leave_early

        def begin() -> None:
            leave_early()
            running(reader)

        reader._leave_early = begin  # type: ignore[method-assign]
        keyboard.send_text(keys)
        before()
        return reader.read(draft)


@pytest.mark.parametrize(
    ("keys", "draft", "message"),
    [
        ("the cat\r", "", "the cat"),
        ("the" + ALT_ENTER + "cat\r", "", "the\ncat"),
        (PASTED.format("a\r\nb") + "\r", "", "a\nb"),
        ("\r", "taken back", "taken back"),
        ("\x03\r", "taken back", ""),
        (UP + UP + "\r", "", "one"),
        ("\x04", "", None),
        ("x\x1b[D" + "the \x1b[F!\r", "", "the x!"),
    ],
)
def test_keys(keys: str, draft: str, message: str | None) -> None:
    assert read(keys, draft) == message


def test_a_signal_to_leave_ends_the_prompt() -> None:
    before = {n: signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)}

    def while_waiting(reader: Terminal) -> None:
        loop = reader._session.app.loop
        assert loop is not None
        loop.call_soon(signal.raise_signal, signal.SIGTERM)

    assert read("half a line", running=while_waiting) is None
    assert read("half a line", before=lambda: signal.raise_signal(signal.SIGTERM)) is None
    assert {n: signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)} == before


class Told:
    """A reader that gives these lines and keeps what it was given to begin with."""

    def __init__(self, *lines: str) -> None:
        self.drafts: list[str] = []
        self._lines = [*lines]

    def read(self, draft: str) -> str | None:
        self.drafts.append(draft)
        return self._lines.pop(0) if self._lines else None


def test_a_message_that_was_refused_is_in_the_line_again(tiny_gguf: Path, files: Path) -> None:
    messages = [{"role": "user", "content": "/why"}]
    files.write_text(json.dumps({"version": 1, "messages": messages}))
    session, long = Session(files, None), "//" + "x" * 99
    talk, opened = session.open(Engine.load(tiny_gguf, n_ctx=64), LONG)
    reader, out = Told("/stats", long, "/stats", "", "hello", "/no"), io.StringIO()
    Program(
        talk,
        session,
        opened,
        reader=reader,
        show=Text(out, out, terminal=False),
        signals=Signals(),
        max_tokens=3,
        stops=(),
    ).run()
    assert reader.drafts == ["//why", "", long, "", "", "", ""]
    assert said(files) == ["hello"] and "the last message has no answer: /why" in out.getvalue()


def test_a_terminal_gets_no_commands_from_a_model() -> None:
    out = io.StringIO()
    for terminal in (True, False):
        Text(out, out, terminal=terminal).event(Token(5, "a\x1b[2J\t\x9b\r\n"))
    assert out.getvalue() == "a\ufffd[2J\t\ufffd\na\x1b[2J\t\x9b\r\n"


def test_a_dumb_terminal_is_read_line_by_line(tiny_gguf: Path) -> None:
    """It can place no cursor; a signal ends the chat there too."""
    master, slave = os.openpty()
    argv = [sys.executable, "-m", "minfer", "chat", str(tiny_gguf), "-n", "4"]
    env = {**os.environ, "TERM": "dumb"}
    with subprocess.Popen(argv, stdin=slave, stdout=slave, stderr=slave, env=env) as child:
        os.close(slave)
        seen = b""
        while b"new chat" not in seen:
            seen += os.read(master, 1000)
        os.write(master, b"hello\n")
        while seen.count(b"(cut off by -n)") < 1:
            seen += os.read(master, 1000)
        child.send_signal(signal.SIGTERM)
        assert child.wait(30) == 128 + signal.SIGTERM
    os.close(master)


def test_bytes_that_are_no_text_are_refused_at_the_line() -> None:
    assert checked_text("grün", "the line") == "grün"
    with pytest.raises(Refusal, match="character 1 of the line is no text"):
        checked_text("a\udcff", "the line")

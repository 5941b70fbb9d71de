"""The loop of `minfer chat`: messages and commands in, answers out, files kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

from minfer.chat.conversation import Conversation
from minfer.chat.events import Event, Token
from minfer.chat.reading import Reader, as_sent, as_typed
from minfer.chat.session import RENDERED, Opened, Session
from minfer.chat.showing import Show, speeds
from minfer.chat.signals import Signals
from minfer.errors import Refusal
from minfer.memory import human
from minfer.timing import Timing

HELP = """\
/save [FILE]   write history and cache, to FILE and FILE.kv or to the session's
/stats         tokens, cells, speeds, memory
/undo          forget the last message and its answer
/reset         forget everything but the system prompt
/exit          leave; so does the end of input
//text         the message /text"""


class Program:
    """One chat from its start line to its last save."""

    def __init__(
        self,
        talk: Conversation,
        session: Session,
        opened: Opened,
        *,
        reader: Reader,
        show: Show,
        signals: Signals,
        max_tokens: int | None,
        stops: Sequence[str],
    ) -> None:
        self._talk, self._session, self._opened = talk, session, opened
        self._reader, self._show, self._signals = reader, show, signals
        self._max_tokens, self._stops = max_tokens, stops
        self._timing = Timing()
        self._done = False
        self._error = ""  # the last one told since the last line
        self._draft = as_typed(session.unanswered)
        self._commands: dict[str, Callable[[str], None]] = {
            "save": self._save,
            "stats": self._stats,
            "undo": self._undo,
            "reset": self._reset,
            "exit": self._exit,
            "help": lambda _: self._show.note(HELP),
        }

    def run(self) -> None:
        """Until the end of input, /exit or a signal; files are saved whatever ends it."""
        try:
            self._begin()
            while not self._done and not self._signals.leave:
                with self._told():
                    draft, self._draft = self._draft, ""
                    line, self._error = self._reader.read(draft), ""
                    if line is None:
                        break
                    self._take(line)
                self._signals.stop = False
        finally:
            self._leave()

    def _begin(self) -> None:
        opened, talk = self._opened, self._talk
        if opened.reason:
            fed = "the history is fed again" if talk.messages else "the cache is not taken over"
            what = fed if opened.how == RENDERED else "not bitwise"
            self._show.note(f"{what}: {opened.reason}")
        if opened.how == RENDERED:
            with self._told(), closing(talk.catch_up(self._timing)) as events:
                self._follow(events)
            self._signals.stop = False
        store = talk.engine.store
        self._show.start(
            {
                "model": talk.engine.path.name,
                "cache_type": store.fmt.value,
                "n_ctx": store.n_ctx,
                "session": str(self._session.path) if self._session.path else None,
                "state": opened.how,
                "reason": opened.reason,
                "tokens": talk.rows.written,
                "messages": len(talk.messages),
                "seed": talk.sampler.sampling.seed,
            }
        )
        if self._session.unanswered:
            self._show.note(f"the last message has no answer: {self._session.unanswered}")

    def _take(self, line: str) -> None:
        text = line.lstrip()
        if text.startswith("/") and not text.startswith("//"):
            name, *rest = text[1:].split(maxsplit=1) or [""]
            self._command(name, "".join(rest).rstrip())
        elif text:
            self._say(as_sent(line))

    def _command(self, name: str, rest: str) -> None:
        if name not in self._commands:
            known = ", ".join(f"/{known}" for known in self._commands)
            raise Refusal("9.1", f"/{name} is none of {known}; //{name} sends it as text")
        if rest and name != "save":
            raise Refusal("9.1", f"/{name} takes nothing; //{name} ... sends it as text")
        self._commands[name](rest)

    def _say(self, content: str) -> None:
        self._session.unanswered, self._draft = content, as_typed(content)
        with self._told():
            self._session.write(self._talk)
        answer = self._talk.say(content, self._max_tokens, self._stops)
        self._timing = answer.timing
        try:
            self._follow(answer)
        finally:
            held = answer.stop()
            if answer.finish_reason:
                self._session.unanswered = self._draft = ""
                if held:
                    self._show.event(Token(None, held))
            with self._told():  # before the answer is told of: who was told may rely on the file
                self._session.write(self._talk)
            if answer.finish_reason:
                self._show.answer(answer)
        if answer.taken_back:
            self._show.note("stopped before the answer; the message was taken back")

    def _follow(self, events: Iterator[Event]) -> None:
        """Show events until they end or a signal comes."""
        for event in events:
            self._show.event(event)
            if self._signals.stop or self._signals.leave:
                return

    @contextmanager
    def _told(self) -> Iterator[None]:
        """A refusal is told, and the chat goes on."""
        try:
            yield
        except Refusal as refusal:
            if refusal.message != self._error:
                self._show.error(refusal)
            self._error = refusal.message

    def _save(self, name: str) -> None:
        path = self._session.save(self._talk, Path(name).expanduser() if name else None)
        if path is None:
            raise Refusal("9.1", "this chat has no --session; give a name, /save FILE")
        self._show.saved(str(path), self._talk.rows.written)

    def _leave(self) -> None:
        path = self._session.leave(self._talk)
        if path is not None:
            self._show.saved(str(path), self._talk.rows.written)

    def _stats(self, _: str) -> None:
        talk, engine = self._talk, self._talk.engine
        self._show.stats(
            {
                "messages": len(talk.messages),
                "messages_left_out": talk.left_out,
                "tokens": talk.rows.written,
                "tokens_of_the_last_turn": talk.rows.written - talk.rows.turn,
                "cells": talk.rows.cap,
                "cache_type": engine.store.fmt.value,
                "cache_bytes": engine.cache_bytes(),
                "cache": human(engine.cache_bytes()),
                **speeds(self._timing),
            }
        )

    def _undo(self, _: str) -> None:
        content, what = self._session.unanswered, "the message without an answer"
        if not content:
            content, what = self._talk.undo(), "the turn that began"
        self._session.unanswered = self._draft = ""
        self._session.write(self._talk)
        self._show.note(f"forgot {what}: {content}")

    def _reset(self, _: str) -> None:
        self._talk.reset()
        self._timing = Timing()
        self._session.unanswered = ""
        self._session.write(self._talk)
        self._show.note("forgot everything but the system prompt")

    def _exit(self, _: str) -> None:
        self._done = True

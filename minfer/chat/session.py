"""A chat in two files: FILE, its history, and FILE.kv, its cache (contract 9.1)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minfer.chat import history
from minfer.chat.conversation import Conversation
from minfer.chat.files import AWAY, Seen, cache_of, refuse_foreign, refuse_no_file
from minfer.chat.history import History
from minfer.chat.state import Saved, host_state, parsed
from minfer.engine import Engine
from minfer.errors import Refusal
from minfer.models.sampling import Sampling

QUOTED = 60  # characters of a message that another message has
NEW, RESUMED, RENDERED = "new", "resumed", "rendered"


@dataclass(frozen=True)
class Opened:
    """How a chat began: new, resumed without prefill, or rendered: its history has to be fed.

    reason: why it is rendered, or, if it is resumed, why going on is not bitwise; else "".
    """

    how: str
    reason: str = ""


class Session:
    """The files of a chat, or none.

    unanswered: a message that has no answer yet. The history keeps it as its last one.
    """

    def __init__(self, path: Path | None, system: str | None) -> None:
        """Reads the history. system: what `--system` says, None where it is not given.

        Refuses a broken history, a system prompt that contradicts it, a cache without one, and a
        cache file that is none or of another version.
        """
        if path:
            refuse_no_file(path)
        self.path = path
        self._files = [Seen(path), Seen(cache_of(path))] if path else []
        self._saved: object = None  # the conversation as the cache file has it
        self._system = [{"role": "system", "content": system}] if system else []
        self._found: History | None = history.read(path) if path else None
        self.unanswered = self._found.unanswered if self._found else ""
        if self._found and system is not None:
            self._refuse_other_system(self._found)
        if path and not self._found and cache_of(path).exists():
            raise Refusal(
                "9.1",
                f"{cache_of(path)} is there and {path} is not: a new chat would overwrite it; "
                f"{AWAY}",
                {"path": str(path)},
            )
        if path:
            refuse_foreign(cache_of(path))

    def _refuse_other_system(self, found: History) -> None:
        known = [message for message in found.messages if message["role"] == "system"]
        if known == self._system:
            return
        said = f"begins with the system prompt {known[0]['content']!r}" if known else "has none"
        raise Refusal(
            "9.1",
            f"--system contradicts {self.path}, which {said}; leave --system out, edit the file, "
            "or give another --session",
            {"path": str(self.path)},
        )

    def open(self, engine: Engine, sampling: Sampling) -> tuple[Conversation, Opened]:
        """The conversation, resumed where the cache matches; else its messages are to be fed."""
        found = self._found or History(self._system, None)
        talk = Conversation(engine, found.messages, sampling=sampling, started=found.started)
        opened = Opened(NEW)
        if self.path and self._found:
            opened = self._resumed(self.path, talk, sampling)
        else:
            self._write(talk, "give another --session")
        self._saved = said(talk)
        return talk, opened

    def _resumed(self, path: Path, talk: Conversation, sampling: Sampling) -> Opened:
        there = cache_of(path).exists()
        try:
            return Opened(RESUMED, self._resume(talk, sampling))
        except Refusal as refusal:
            start_over(talk)
            replaced = f"; the next save replaces {cache_of(path)}" if there else ""
            return Opened(RENDERED, refusal.message + replaced)

    def _resume(self, talk: Conversation, sampling: Sampling) -> str:
        """Take the cache over; returns why going on is not bitwise. Refuses with the reason."""
        assert self.path
        path, states = cache_of(self.path), list[Saved]()
        if not path.exists():
            raise Refusal("9.1", f"{path} is not there", {"path": str(path)})

        def accept(state: dict[str, Any]) -> None:
            saved = parsed(state, talk.engine.tokenizer)
            refuse_edited(path, saved, talk)
            states.append(saved)

        resumed = talk.engine.resume(path, accept)
        states[0].put(talk, sampling)
        return resumed.differs

    def write(self, talk: Conversation) -> None:
        """Write the history; refuses files that somebody else changed."""
        self._write(talk, "/save it elsewhere")

    def _write(self, talk: Conversation, way_out: str) -> None:
        if self.path:
            for file in self._files:
                file.refuse_changed()
            write_history(self.path, talk, self.unanswered, way_out)
            self._files[0].look()

    def leave(self, talk: Conversation) -> Path | None:
        """Save at the end of a chat, unless nothing was said and there is a cache file already."""
        if self.path and said(talk) == self._saved and cache_of(self.path).exists():
            return None
        return self.save(talk)

    def save(self, talk: Conversation, path: Path | None = None) -> Path | None:
        """Write history and cache, in this order; returns where, None without a session.

        path: other files, which are not there yet; refused where one is. Refuses files of the
        session that somebody else changed, and a model on several devices.
        """
        target = path or self.path
        if target is None:
            return None
        talk.engine.store.refuse_several_stretches("save")
        own = target == self.path
        if self.path and target == cache_of(self.path):
            raise Refusal("9.1", f"{target} is for the cache of this chat; give another name")
        with told_as_refusal(target):
            for file in () if own else (target, cache_of(target)):
                if file.exists():
                    raise Refusal("9.1", f"{file} is there already; give a new name")
        if own:
            self.write(talk)
        else:
            write_history(target, talk, self.unanswered)
        with told_as_refusal(cache_of(target)):
            talk.engine.save(cache_of(target), host_state(talk))
        if own:
            self._files[1].look()
            self._saved = said(talk)
        return target


def said(talk: Conversation) -> object:
    """What is another after every turn, and after turns were forgotten."""
    return talk.started, [*talk.messages], talk.sampler.state()


def write_history(
    path: Path, talk: Conversation, unanswered: str, way_out: str = "/save it elsewhere"
) -> None:
    more = [{"role": "user", "content": unanswered}] if unanswered else []
    with told_as_refusal(path, way_out):
        history.write(path, [*talk.messages, *more], talk.started, talk.left_out)


@contextmanager
def told_as_refusal(path: Path, way_out: str = "/save it elsewhere") -> Iterator[None]:
    """A full disk or a folder that is gone ends no chat."""
    try:
        yield
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else None
        what = f"{path} cannot be written: {why or error}; {way_out}"
        raise Refusal("8.3", what, {"path": str(path)}) from error


def refuse_edited(path: Path, saved: Saved, talk: Conversation) -> None:
    """Refuse a cache of other messages than those of the history."""
    ours, theirs = talk.messages, saved.messages
    pairs = enumerate(zip(ours, theirs, strict=False))
    same = next((i for i, (one, other) in pairs if one != other), min(len(ours), len(theirs)))
    if same < max(len(ours), len(theirs)):
        many = "1 message" if len(theirs) == 1 else f"{len(theirs)} messages"
        what = f"is of {many} and the history has {len(ours)}"
        if same < min(len(ours), len(theirs)):
            what = f"is of another history: message {same + 1}, {quoted(ours[same])}, was edited"
        raise Refusal("9.1", f"{path} {what}", {"message": same})
    if saved.started != talk.started:
        raise Refusal("9.1", f"{path} is of a chat started at {saved.started}, not {talk.started}")


def quoted(message: dict[str, str]) -> str:
    content = message["content"]
    return repr(content if len(content) <= QUOTED else content[:QUOTED] + "...")


def start_over(talk: Conversation) -> None:
    """Empty rows, whatever a file brought."""
    store = talk.engine.store
    for seq in store.sequences():
        store.release(seq)
    store.reserve(talk.rows.seq, store.n_ctx)

"""One answer of a conversation: token by token, as text, and what is kept of it."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from typing import TYPE_CHECKING

from minfer.chat.events import Event, Token
from minfer.chat.rows import Rows
from minfer.chat.stream import Stream
from minfer.errors import Refusal
from minfer.generation import CACHE, END, LENGTH, STOP
from minfer.kv.checks import whole_number
from minfer.models.text_stream import TextStream
from minfer.models.tokenizer import Tokenizer
from minfer.timing import Timing

if TYPE_CHECKING:
    from minfer.chat.conversation import Conversation

INTERRUPTED = "interrupted"


class Answer:
    """Iterate for its events; `stop` ends it between any two of them.

    tokens, text: what came so far, end token and tokens of a stop string among the first and not in
    the second. An answer that was cut inside a character ends before it. finish_reason: None while
    it runs and for a message that was taken back, then "end", "stop", "length", "cache" (nothing
    may leave the full cache) or "interrupted". taken_back: the answer ended before any text of it,
    by `stop` or an error, and the message is in the conversation no more.
    """

    def __init__(
        self,
        conversation: Conversation,
        content: str,
        max_tokens: int | None,
        stops: str | Sequence[str],
    ) -> None:
        if max_tokens is not None:
            max_tokens = whole_number(max_tokens, "max_tokens", "10", low=1)
        self.tokens: list[int] = []
        self.finish_reason: str | None = None
        self.taken_back = False
        self.timing = Timing()
        self._conversation, self._max_tokens = conversation, max_tokens
        self._said = Said(conversation.engine.tokenizer, stops)
        self._before = 0  # rows of the prompt
        self._events = self._run({"role": "user", "content": content})

    @property
    def text(self) -> str:
        return self._said.text

    @property
    def stopped(self) -> str | None:
        """The stop string that was met."""
        return self._said.stopped

    def __iter__(self) -> Iterator[Event]:
        return self

    def __next__(self) -> Event:
        return next(self._events)

    def stop(self) -> str:
        """End it here; returns the text that had been held back. Nothing if it has ended."""
        shown = len(self.text)
        self._events.close()
        return self.text[shown:]

    def _run(self, message: dict[str, str]) -> Generator[Event, None, None]:
        talk = self._conversation
        base = talk.begin(message)
        try:
            prompt = talk.render(talk.visible)
            if len(talk.joined(prompt).tokens) > talk.rows.cap:
                less = talk.shorter(talk.rows.stream, prompt)
                if less is None:
                    raise too_long(len(talk.joined(prompt).tokens), talk.rows.cap)
                dropped, prompt = talk.drop(less), less.prompt
                base = talk.rows.stream
                yield dropped
            base = talk.rows.stream.base(prompt)
            talk.rows.turn = len(base.tokens)
            target = talk.joined(prompt)
            yield from talk.rows.feed(target, len(target.tokens) - 1, self.timing)
            self._before = len(target.tokens)
            talk.look_back()
            yield from self._generate()
        finally:
            self._settle(base)

    def _generate(self) -> Iterator[Event]:
        talk, rows, said = self._conversation, self._conversation.rows, self._said
        while self.finish_reason is None:
            assert rows.logits is not None
            token = talk.sampler.pick(rows.logits, position=rows.written - 1)
            self.tokens.append(token)
            ended = talk.engine.tokenizer.is_end(token)
            text = "" if ended else said.push(token)
            less = None
            if ended or said.stopped:
                self.finish_reason = END if ended else STOP
            elif len(self.tokens) == self._max_tokens:
                self.finish_reason = LENGTH
            elif rows.written == rows.cap:
                prompt = talk.render(talk.visible)
                less = talk.shorter(rows.stream.first(self._before), prompt, len(self.tokens))
                self.finish_reason = None if less else CACHE
            if self.finish_reason:
                text += said.finish()
            yield Token(token, text)
            if less:
                fed = self.tokens[:-1]
                dropped = talk.drop(less)
                self._before = rows.written - len(fed) if less.piece else self._before
                yield dropped
                target = rows.stream.first(self._before).joined(less.prompt, talk.engine.tokenizer)
                self._before = len(target.tokens)
                target.tokens += fed
                yield from rows.feed(target, len(target.tokens), self.timing)
            if self.finish_reason is None:
                rows.decode(token, self.timing)

    def _settle(self, base: Stream) -> None:
        """Keep the message and the answer, or neither, and the rows of their text alone."""
        self._said.finish()
        if self.finish_reason is None and not self.text:
            self.taken_back = True
            self._conversation.take_back(base)
        else:
            self.finish_reason = self.finish_reason or INTERRUPTED
            self._conversation.end(
                self.text, self._said.kept(self._conversation.rows, self._before)
            )


class Said:
    """The text of an answer, and which tokens it is made of. stopped: the stop string it met."""

    def __init__(self, tokenizer: Tokenizer, stops: str | Sequence[str]) -> None:
        self._shown = TextStream(tokenizer, stops)
        self._characters = tokenizer.stream()
        self._length = 0
        self._tokens: list[int] = []
        self._ends: list[int | None] = []  # characters up to each token, None inside of one
        self.text = ""

    @property
    def stopped(self) -> str | None:
        return self._shown.stopped

    def push(self, token: int) -> str:
        """The text that can be shown now that `token` is there."""
        self._length += len(self._characters.push(token))
        self._tokens.append(token)
        self._ends.append(None if self._characters.unfinished else self._length)
        shown = self._shown.push(token)
        self.text += shown
        return shown

    def finish(self) -> str:
        """The text that was held back, without the character that is not whole."""
        shown = self._shown.finish()
        if self._characters.unfinished and not self.stopped:
            shown = shown[:-1]
        self.text += shown
        return shown

    def kept(self, rows: Rows, before: int) -> Stream:
        """What of `rows`, the first `before` of which are the prompt's, has text that is kept.

        A last token that was not fed is pending.
        """
        old, written = rows.stream, rows.written
        if written < before:  # feeding the prompt again was cut short
            return old.cut(written, len(old.text))
        most = min(written - before + 1, len(self._tokens))
        whole = [0, *(at + 1 for at in range(most) if self._covers(at))][-1]
        chars = self._ends[whole - 1] or 0 if whole else 0
        fed = min(whole, written - before)
        pending = tuple(self._tokens[fed:whole])
        tokens = old.tokens[: before + fed]
        return Stream(tokens, old.text + self.text[:chars], old.marks, pending)

    def _covers(self, at: int) -> bool:
        end = self._ends[at]
        return end is not None and end <= len(self.text)


def too_long(tokens: int, n_ctx: int) -> Refusal:
    return Refusal(
        "9.2",
        f"the message, with the system prompt, needs {tokens} cells and n_ctx is {n_ctx}, and no "
        "older turn is left to drop; shorten it or use a larger --n-ctx",
        {"tokens": tokens, "n_ctx": n_ctx},
    )

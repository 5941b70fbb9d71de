"""A conversation over one sequence of an engine; no terminal, no file (contract 9.1, 9.2)."""

from __future__ import annotations

import datetime
from collections.abc import Generator, Mapping, Sequence

from minfer.chat.answer import Answer
from minfer.chat.events import Dropped, Event
from minfer.chat.overflow import Shorter, leading_system, shorter
from minfer.chat.rows import Rows
from minfer.chat.stream import Stream
from minfer.engine import Engine
from minfer.errors import Refusal
from minfer.generation import sampler_of
from minfer.models import chat_prompt
from minfer.models.chat_prompt import Prompt
from minfer.models.chat_template import Message
from minfer.models.sampling import Sampler, Sampling
from minfer.timing import Timing


class Conversation:
    """Messages, and what of them is in the cache.

    messages: {"role", "content"} each, a system prompt first if there is one. left_out: how many
    messages after the system prompt the cache sees no more. started: the time that templates write.

    A turn feeds what follows the rows that are there: its text is the template's rendering of all
    messages, and where that begins with the text of the rows no token of an answer is encoded
    again. A template that renders earlier messages in another way has the rest fed again.
    """

    def __init__(
        self,
        engine: Engine,
        messages: Sequence[Mapping[str, str]] = (),
        *,
        sampling: Sampling | Sampler | None = None,
        started: datetime.datetime | None = None,
        seq: int = 0,
    ) -> None:
        """Refuses a model without a chat template; messages are fed by `catch_up` or a turn."""
        engine.encode_chat([{"role": "user", "content": "?"}])
        self.engine = engine
        self.sampler = sampler_of(sampling, engine.n_vocab)
        self.rows = Rows(engine, seq)
        self.messages = [dict(message) for message in messages]
        self.left_out = 0
        self.started = started or now()
        self._answering = False

    @property
    def system(self) -> list[dict[str, str]]:
        """The system prompt's messages, usually one or none."""
        return self.messages[: leading_system(self.messages)]

    @property
    def visible(self) -> list[dict[str, str]]:
        """The messages that the cache sees, or would with the next turn."""
        return self.system + self.messages[len(self.system) + self.left_out :]

    @property
    def need_insert_eot(self) -> bool:
        """Whether the last answer's end of turn is not in the cache: the next turn begins so."""
        return lacks_end(self.messages, self.rows.stream.text)

    def say(
        self, content: str, max_tokens: int | None = None, stop: str | Sequence[str] = ()
    ) -> Answer:
        """A message and its answer, which runs as it is iterated.

        Refuses, and takes the message back: text that is no Unicode or that the template cannot
        keep apart from control tokens, and more tokens than n_ctx once every older turn has left.
        """
        self._refuse_open()
        return Answer(self, content, max_tokens, stop)

    def catch_up(self, timing: Timing) -> Generator[Event, None, None]:
        """Feed messages that are not in the cache; whatever is missing comes with the next turn."""
        self._refuse_open()
        if not self._has_turns():
            return
        prompt = self.render(self.visible, answer=False)
        target = self.joined(prompt)
        if len(target.tokens) > self.rows.cap:
            less = self.shorter(self.rows.stream, prompt, answer=False)
            if less is None:
                return
            yield self.drop(less)
            target = self.joined(less.prompt)
        target = target.cut(len(target.tokens), len(target.text))
        try:
            yield from self.rows.feed(target, len(target.tokens), timing)
        finally:
            if self.rows.written < len(target.tokens):
                self.rows.replace(target.cut(self.rows.written, len(target.text)))

    def undo(self) -> str:
        """Forget the last turn, in the cache too; returns its message. Refuses where none is."""
        self._refuse_open()
        turns = [i for i, message in enumerate(self.messages) if message["role"] == "user"]
        if not turns:
            raise Refusal("9.1", "there is no turn to take back", {"turns": 0})
        content = self.messages[turns[-1]]["content"]
        before = self.messages, self.left_out
        self.messages = self.messages[: turns[-1]]
        if self.left_out >= len(self.messages) - len(self.system):
            self.left_out = 0  # there is room again for turns that had to leave
        try:
            base = Stream()
            if self._has_turns():
                base = self.rows.stream.base(self.render(self.visible, answer=False))
        except Refusal:
            self.messages, self.left_out = before
            raise
        self.rows.replace(base)
        return content

    def reset(self) -> None:
        """Forget everything but the system prompt."""
        self._refuse_open()
        self.messages, self.left_out, self.started = self.system, 0, now()
        self.rows.replace(Stream())

    def render(self, messages: Sequence[Message], *, answer: bool = True) -> Prompt:
        """Messages in the model's template, as `chat_prompt.rendered`."""
        template = str(self.engine.chat_template)
        tokenizer = self.engine.tokenizer
        return chat_prompt.rendered(messages, template, tokenizer, answer=answer, now=self.started)

    def joined(self, prompt: Prompt) -> Stream:
        """The rows of `prompt`, as many of those that are there as it begins with."""
        return self.rows.stream.joined(prompt, self.engine.tokenizer)

    def shorter(
        self, stream: Stream, prompt: Prompt, more: int = 0, *, answer: bool = True
    ) -> Shorter | None:
        """Which turns may leave the cache so that `prompt` and `more` cells fit."""
        return shorter(
            stream,
            prompt,
            self.visible,
            lambda messages: self.render(messages, answer=answer),
            self.engine.tokenizer,
            fmt=self.engine.store.fmt,
            n_ctx=self.rows.cap,
            more=more,
        )

    def drop(self, less: Shorter) -> Dropped:
        """Let the oldest turns go; rows are removed, or left to be fed again."""
        if less.piece:
            self.rows.remove(*less.piece)
        self.left_out += less.messages
        removed = less.piece[1].at - less.piece[0].at if less.piece else 0
        return Dropped(less.turns, less.messages, removed, less.why)

    def begin(self, message: dict[str, str]) -> Stream:
        """Take a message in; returns the stream to go back to if it is taken back."""
        self._refuse_open()
        self._answering = True
        self.messages.append(message)
        return self.rows.stream

    def look_back(self) -> None:
        """Let the sampler see the last tokens, those of earlier turns and of the template too."""
        tokens = self.rows.stream.tokens[-self.sampler.sampling.repeat_last_n :]
        self.sampler.restore({**self.sampler.state(), "last": tokens})

    def end(self, text: str, kept: Stream) -> None:
        """Take an answer in, and its rows."""
        self.messages.append({"role": "assistant", "content": text})
        self._answering = False
        self.rows.replace(kept)

    def take_back(self, base: Stream) -> None:
        """Forget the message that is being answered; `base` were the rows before it."""
        self.messages.pop()
        self._answering = False
        stream = self.rows.stream
        same = stream.tokens[: len(base.tokens)] == base.tokens
        if not same or not stream.text.startswith(base.text):
            base = stream.cut(min(self.rows.turn, self.rows.written), len(stream.text))
        self.rows.replace(base)

    def _has_turns(self) -> bool:
        return any(message["role"] == "user" for message in self.visible)

    def _refuse_open(self) -> None:
        if self._answering:
            raise Refusal("9.1", "an answer is under way; let it end or stop it first")


def now() -> datetime.datetime:
    """The time to the second, as it is kept in files."""
    return datetime.datetime.now().replace(microsecond=0)


def lacks_end(messages: Sequence[Message], text: str) -> bool:
    """Whether `text`, of the rows of `messages`, stops at the end of the last answer."""
    last = messages[-1] if messages else None
    return bool(last and text and last["role"] == "assistant" and text.endswith(last["content"]))

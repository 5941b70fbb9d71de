"""Conversations to test: scripted answers, and what always holds of one."""

from __future__ import annotations

import datetime
from collections.abc import Sequence

import numpy as np

from minfer import Engine, Sampler, Sampling
from minfer.chat.answer import Answer
from minfer.chat.conversation import Conversation
from minfer.chat.events import Dropped, Event, Token
from minfer.format import Floats

TIME = datetime.datetime(2024, 1, 31, 12)
NO_END = {0: -np.inf, 1: -np.inf, 2: -np.inf}  # control tokens of the tiny models
LONG = Sampling(logit_bias=NO_END)
RANDOM = Sampling(temperature=9, top_k=40, repeat_penalty=1.2, seed=7, logit_bias=NO_END)


class Script(Sampler):
    """Picks the tokens it is given, whatever the logits."""

    def __init__(self, engine: Engine, *tokens: int) -> None:
        super().__init__(Sampling(), engine.n_vocab)
        self.tokens = [*tokens]

    def pick(self, logits: Floats, *, position: int) -> int:
        super().pick(logits, position=position)
        return self.tokens.pop(0)


def scripted(engine: Engine, *texts: str, system: str = "") -> Conversation:
    """A conversation whose answers are `texts`, each with its end."""
    ids = [token for text in texts for token in (*engine.tokenizer.encode(text), 2)]
    return talk_of(engine, Script(engine, *ids), system)


def talk_of(
    engine: Engine, sampling: Sampling | Sampler | None = None, system: str = ""
) -> Conversation:
    messages = [{"role": "system", "content": system}] if system else []
    return Conversation(engine, messages, sampling=sampling, started=TIME)


def ask(
    talk: Conversation, content: str, n: int | None = None, stop: str | Sequence[str] = ()
) -> tuple[Answer, list[Event]]:
    """A whole turn: the answer and its events, and what holds after each turn."""
    answer = talk.say(content, n, stop)
    events = list(answer)
    assert "".join(e.text for e in events if isinstance(e, Token)) == answer.text
    assert_sound(talk)
    return answer, events


def dropped(events: Sequence[Event]) -> list[Dropped]:
    return [event for event in events if isinstance(event, Dropped)]


def assert_sound(talk: Conversation) -> None:
    """Rows, tokens, text, marks and messages are of one conversation."""
    stream, tokenizer = talk.rows.stream, talk.engine.tokenizer
    assert len(stream.tokens) == talk.rows.written == talk.engine.store.written(talk.rows.seq)
    assert 0 <= talk.rows.turn <= talk.rows.written
    tokens = [*stream.tokens, *stream.pending]
    own = {mark.at: mark for mark in stream.marks}
    spelled = b"".join(
        tokenizer.token_bytes(token, special=at in own) for at, token in enumerate(tokens)
    )
    assert spelled.decode(errors="replace") == stream.text
    for at, mark in own.items():
        assert tokens[at] == mark.token
        assert stream.text[mark.start : mark.end] == tokenizer.decode([mark.token], special=True)
    following = talk.render([*talk.visible, {"role": "user", "content": "x"}])
    assert following.text.startswith(stream.text)
    assert stream.base(following) is stream
    talk.engine.store.check()


def logits_after(engine: Engine, prompt: Sequence[int], answer: Sequence[int] = ()) -> Floats:
    """Logits of a fresh cache after a prompt and generated tokens."""
    fresh = engine.with_cache(engine.store.fmt, engine.store.n_ctx)
    fresh.store.reserve(0, fresh.store.n_ctx)
    logits = fresh.prefill(prompt)
    for token in answer:
        logits = fresh.decode(token)
    return logits

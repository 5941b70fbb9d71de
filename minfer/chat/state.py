"""What a session file keeps of a conversation beside its rows: checked JSON (contract 9.1)."""

from __future__ import annotations

import datetime
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from minfer.chat.conversation import Conversation, lacks_end
from minfer.chat.history import checked_messages, checked_time
from minfer.chat.overflow import leading_system
from minfer.chat.stream import Mark, Stream
from minfer.errors import Refusal
from minfer.kv.checks import whole_number
from minfer.models.sampling import Sampler, Sampling
from minfer.models.tokenizer import Tokenizer

VERSION = 1


def host_state(talk: Conversation) -> dict[str, Any]:
    """Everything of a conversation that is not in the cache."""
    stream = talk.rows.stream
    return {
        "version": VERSION,
        "started": talk.started.isoformat(),
        "messages": talk.messages,
        "left_out": talk.left_out,
        "stream_tokens": stream.tokens,
        "current_pos": talk.rows.written,
        "turn_pos": talk.rows.turn,
        "text": stream.text,
        "marks": [[mark.at, mark.start, mark.end] for mark in stream.marks],
        "pending": list(stream.pending),
        "need_insert_eot": talk.need_insert_eot,
        "prev_tokens": {"seed": talk.sampler.sampling.seed, **talk.sampler.state()},
    }


@dataclass(frozen=True)
class Saved:
    """A state that was read and found sound."""

    started: datetime.datetime
    messages: list[dict[str, str]]
    left_out: int
    stream: Stream
    turn: int
    seed: int | None
    sampler: dict[str, Any]

    def put(self, talk: Conversation, sampling: Sampling) -> None:
        """Make `talk` what was saved; its rows are there already.

        Refuses rows that are not those of the state, and then leaves `talk` as it was. The random
        state is taken over unless `sampling` asks for another seed.
        """
        rows, engine = talk.rows, talk.engine
        if engine.store.sequences() != [rows.seq] or rows.written != len(self.stream.tokens):
            held = {seq: engine.store.written(seq) for seq in engine.store.sequences()}
            wanted = {rows.seq: len(self.stream.tokens)}
            raise _wrong(f"it is of rows {wanted} by sequence, and the cache holds {held}")
        if sampling.temperature and self.seed is not None and sampling.seed in (None, self.seed):
            talk.sampler = Sampler(replace(sampling, seed=self.seed), engine.n_vocab)
            talk.sampler.restore(self.sampler)
        talk.started, talk.messages, talk.left_out = self.started, self.messages, self.left_out
        rows.stream, rows.turn = self.stream, self.turn


def parsed(state: Any, tokenizer: Tokenizer) -> Saved:
    """The state that `host_state` gave; refuses any other, naming what is wrong."""
    version = state.get("version") if isinstance(state, dict) else None
    if type(version) is not int or version != VERSION:
        raise Refusal(
            "9.1",
            f"the state of the chat in it has version {version!r} and this minfer reads {VERSION}",
            {"version": version, "reads": VERSION},
        )
    messages = checked_messages(state.get("messages"))
    stream = _stream(state, tokenizer)
    end = len(stream.tokens)
    _whole(state, "current_pos", end, low=end)
    if _unspaced(spelled(stream, tokenizer)) != _unspaced(stream.text):
        raise _wrong("its tokens do not spell its text")
    if _typed(state, "need_insert_eot", bool) != lacks_end(messages, stream.text):
        raise _wrong("need_insert_eot contradicts the messages and the text")
    left_out, n_system = state.get("left_out"), leading_system(messages)
    left_out = whole_number(left_out, "left_out", "9.1", high=len(messages) - n_system)
    if left_out and [m["role"] for m in messages[n_system + left_out :]][:1] != ["user"]:
        raise _wrong(f"{left_out} messages left out are no whole turns")
    sampler = _typed(state, "prev_tokens", dict)
    seed = sampler.get("seed")
    Sampler(Sampling(seed=seed), tokenizer.n_vocab).restore(sampler)
    return Saved(
        started=checked_time(state.get("started")),
        messages=messages,
        left_out=left_out,
        stream=stream,
        turn=_whole(state, "turn_pos", end),
        seed=seed,
        sampler=sampler,
    )


def _stream(state: dict[str, Any], tokenizer: Tokenizer) -> Stream:
    tokens, pending = (_ids(state, key, tokenizer) for key in ("stream_tokens", "pending"))
    if len(pending) > 1:
        raise _wrong(f"pending are {len(pending)} tokens, not one or none")
    text, marks = _typed(state, "text", str), []
    for mark in _typed(state, "marks", list):
        if not isinstance(mark, list) or [type(place) for place in mark] != [int, int, int]:
            raise _wrong(f"mark {mark!r} is not three whole numbers")
        at, start, end = mark
        token = tokens[at] if 0 <= at < len(tokens) else None
        if token is None or not 0 <= start < end <= len(text):
            raise _wrong(f"mark {mark} lies outside {len(tokens)} tokens or {len(text)} characters")
        if tokenizer.decode([token], special=True) != text[start:end]:
            raise _wrong(f"token {token} at {at} is not spelled {text[start:end]!r}")
        marks.append(Mark(at, token, start, end))
    for one, other in pairwise(marks):
        if one.at >= other.at or one.end > other.start:
            raise _wrong(f"marks at {one.at} and {other.at} are not in order")
    return Stream(tokens, text, marks, tuple(pending))


def spelled(stream: Stream, tokenizer: Tokenizer) -> str:
    """What the tokens spell, the pending one too; control tokens only where the template is."""
    own = {mark.at for mark in stream.marks}
    tokens = enumerate([*stream.tokens, *stream.pending])
    data = b"".join(tokenizer.token_bytes(token, special=at in own) for at, token in tokens)
    return data.decode(errors="replace")


def _unspaced(text: str) -> str:
    # Some vocabularies put a space in front of every piece that is encoded.
    return text.replace(" ", "")


def _ids(state: dict[str, Any], key: str, tokenizer: Tokenizer) -> list[int]:
    high = tokenizer.n_vocab - 1
    given = _typed(state, key, list)
    return [whole_number(token, f"a token of {key}", "9.1", high=high) for token in given]


def _whole(state: dict[str, Any], key: str, high: int, low: int = 0) -> int:
    return whole_number(state.get(key), key, "9.1", low=low, high=high)


def _typed(state: dict[str, Any], key: str, kind: type) -> Any:
    value = state.get(key)
    if type(value) is not kind:
        raise _wrong(f"{key} is no {kind.__name__}")
    return value


def _wrong(what: str) -> Refusal:
    return Refusal("9.1", f"the state of the chat in it is not sound: {what}")

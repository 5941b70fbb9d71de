"""When the context is full: which turns go, and how (contract 9.2)."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

from minfer import settings
from minfer.chat.stream import Mark, Stream, common
from minfer.format import KvFormat
from minfer.models.chat_prompt import Prompt
from minfer.models.chat_template import Message
from minfer.models.tokenizer import Tokenizer

FREE = 4  # a quarter of the cells is free afterwards: what goes, goes rarely and many turns at once
NO_SHIFT = "MINFER_NO_CONTEXT_SHIFT"


@dataclass(frozen=True)
class Shorter:
    """A conversation without its oldest turns.

    messages: how many go. prompt: the rest. piece: the rows to remove are those from the first
    control token up to the second; None where the rest has to be fed again, `why`. size: tokens.
    """

    turns: int
    messages: int
    prompt: Prompt
    piece: tuple[Mark, Mark] | None
    why: str
    size: int


def shorter(
    stream: Stream,
    prompt: Prompt,
    messages: Sequence[Message],
    render: Callable[[Sequence[Message]], Prompt],
    tokenizer: Tokenizer,
    *,
    fmt: KvFormat,
    n_ctx: int,
    more: int = 0,
) -> Shorter | None:
    """The fewest turns that have to go for a quarter of `n_ctx` to be free, else all that may.

    stream: of `prompt`, or of what it begins with. messages: what `prompt` renders; system messages
    and the last turn stay. more: cells that are needed besides. None where too little may go.
    """
    n_system = leading_system(messages)
    starts = [i for i, m in enumerate(messages) if i >= n_system and m["role"] == "user"]
    forbidden = why_not_in_place(fmt)

    @cache
    def without(turns: int) -> Shorter:
        rest = render([*messages[:n_system], *messages[starts[turns] :]])
        piece = None if forbidden else removable(stream, prompt, rest)
        left = stream.without(*piece) if piece else stream
        size = len(left.joined(rest, tokenizer).tokens) + more
        unlike = "its turns do not match the rows" if stream.tokens else "they are not in the cache"
        why = "" if piece else forbidden or unlike
        return Shorter(turns, starts[turns] - n_system, rest, piece, why, size)

    may_go = range(1, len(starts))
    if not may_go:
        return None
    enough = bisect_left(may_go, True, key=lambda n: without(n).size <= n_ctx - n_ctx // FREE)
    found = without(may_go[min(enough, len(may_go) - 1)])
    return found if found.size <= n_ctx else None


def why_not_in_place(fmt: KvFormat) -> str:
    """Why rows are not removed from a cache, "" where they are."""
    if fmt is KvFormat.F16:
        return "an f16 cache cannot turn keys"
    return f"{NO_SHIFT} is set" if settings.flag(NO_SHIFT) else ""


def leading_system(messages: Sequence[Message]) -> int:
    """How many messages the system prompt is."""
    others = (i for i, message in enumerate(messages) if message["role"] != "system")
    return next(others, len(messages))


def removable(stream: Stream, before: Prompt, after: Prompt) -> tuple[Mark, Mark] | None:
    """The piece of `stream` that is in `before` and not in `after`, between two control tokens.

    None where `after` is not `before` with one piece taken out, or where rows do not begin and end
    with it.
    """
    if stream.agreed(before) < len(stream.text):
        return None
    chars = len(before.text) - len(after.text)
    agreed = common(before.text, after.text)
    at = {mark.start: mark for mark in stream.marks}
    for start in reversed(stream.marks) if chars > 0 else ():
        end = at.get(start.start + chars)
        if end and start.start <= agreed and _same(start, end, before, after):
            return start, end
    return None


def _same(start: Mark, end: Mark, before: Prompt, after: Prompt) -> bool:
    """Whether what follows the piece is what follows its place, control tokens included."""
    chars = end.start - start.start
    kept = [c for c in before.controls if c[1] < start.start]
    moved = [(t, a - chars, b - chars) for t, a, b in before.controls if a >= end.start]
    same_text = before.text[end.start :] == after.text[start.start :]
    return same_text and kept + moved == list(after.controls)

"""The tokens of a conversation in the cache, and the rendered text that they stand for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from minfer.models.chat_prompt import Prompt
from minfer.models.tokenizer import Tokenizer


class Mark(NamedTuple):
    """A control token that the template made: its place among the tokens, and in the text."""

    at: int
    token: int
    start: int
    end: int


@dataclass
class Stream:
    """tokens: ids whose rows are in the cache. text: what they and `pending` stand for.

    marks: the template's control tokens, ascending. pending: the last generated token, which is fed
    together with what follows it, or nothing. While a prompt is fed, text and marks are ahead of
    the tokens.

    Text is cut beside control tokens only: no token reaches across one, so that what is encoded
    from there on is encoded as in one piece.
    """

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    marks: list[Mark] = field(default_factory=list)
    pending: tuple[int, ...] = ()

    def first(self, rows: int) -> Stream:
        """The first `rows` tokens, under the same text: a stream that is still being fed."""
        return Stream(self.tokens[:rows], self.text, self.marks)

    def cut(self, rows: int, chars: int) -> Stream:
        """The longest part of at most `rows` tokens and `chars` characters that may be cut off."""
        edges = [(0, 0)]
        for mark in self.marks:
            edges += [(mark.at, mark.start), (mark.at + 1, mark.end)]
        rows, chars = max(edge for edge in edges if edge[0] <= rows and edge[1] <= chars)
        marks = [mark for mark in self.marks if mark.at < rows]
        return Stream(self.tokens[:rows], self.text[:chars], marks)

    def without(self, start: Mark, end: Mark) -> Stream:
        """The rest when what lies from one control token up to another is taken out."""
        rows, chars = end.at - start.at, end.start - start.start
        before = [mark for mark in self.marks if mark.at < start.at]
        after = [
            Mark(m.at - rows, m.token, m.start - chars, m.end - chars)
            for m in self.marks
            if m.at >= end.at
        ]
        return Stream(
            self.tokens[: start.at] + self.tokens[end.at :],
            self.text[: start.start] + self.text[end.start :],
            before + after,
            self.pending,
        )

    def base(self, prompt: Prompt) -> Stream:
        """What of this stream `prompt` begins with: all of it, or a part that may be cut off."""
        agreed = self.agreed(prompt)
        return self if agreed == len(self.text) else self.cut(len(self.tokens), agreed)

    def joined(self, prompt: Prompt, tokenizer: Tokenizer) -> Stream:
        """The stream of all of `prompt`: its base, then what is encoded from there on."""
        base = self.base(prompt)
        ids, places = prompt.encode(tokenizer, len(base.text))
        old = [*base.tokens, *base.pending]
        new = [control for control in prompt.controls if control[1] >= len(base.text)]
        marks = [Mark(len(old) + at, *c) for at, c in zip(places, new, strict=True)]
        return Stream(old + ids, prompt.text, base.marks + marks)

    def agreed(self, prompt: Prompt) -> int:
        """How many leading characters `prompt` has in common, its control tokens too."""
        chars = common(self.text, prompt.text)
        ours, theirs = [mark[1:] for mark in self.marks], list(prompt.controls)
        same = common(ours, theirs)
        for _, start, _ in ours[same : same + 1] + theirs[same : same + 1]:
            chars = min(chars, start)
        return chars


def common(one: Sequence[Any], other: Sequence[Any]) -> int:
    """How many leading items are the same."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (x, y) in pairs if x != y), min(len(one), len(other)))

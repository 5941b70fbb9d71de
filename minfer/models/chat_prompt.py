"""A conversation as token ids: only its chat template makes control tokens.

A rendering does not say which characters a template wrote and which are from messages. So messages
are rendered once more in disguise; where that gives the same text, control tokens without disguise
are the template's own.
"""

from __future__ import annotations

import datetime
import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from minfer.errors import Refusal
from minfer.models.chat_template import Message, render
from minfer.models.tokenizer import Spelled, Tokenizer

Change: TypeAlias = Callable[[str], str]

PRIVATE_USE = range(0xF0000, 0x110000)
NAME = re.compile(r"[\w -]+")


@dataclass(frozen=True)
class Prompt:
    """A conversation as its template renders it.

    controls: the control tokens that the template made, and where they are in `text`; others that
    it spells are text.
    """

    text: str
    controls: tuple[Spelled, ...]

    def encode(self, tokenizer: Tokenizer, start: int = 0) -> tuple[list[int], list[int]]:
        """Token ids of the text from `start` on, and where among them its control tokens are.

        start: a place outside of control tokens.
        """
        ids: list[int] = []
        places: list[int] = []
        for token, at, end in self.controls:
            if at >= start:
                ids += tokenizer.encode(self.text[start:at])
                places.append(len(ids))
                ids.append(token)
                start = end
        return ids + tokenizer.encode(self.text[start:]), places


def encode(messages: Sequence[Message], template: str, tokenizer: Tokenizer) -> list[int]:
    """Token ids of a conversation, up to the answer; refuses what `rendered` refuses."""
    return rendered(messages, template, tokenizer).encode(tokenizer)[0]


def rendered(
    messages: Sequence[Message],
    template: str,
    tokenizer: Tokenizer,
    *,
    answer: bool = True,
    now: datetime.datetime | None = None,
) -> Prompt:
    """A conversation, with an answer begun or, if not `answer`, to its last message.

    messages: {"role": ..., "content": ...} each, both text. A control token that a message spells
    stays text: only the template makes control tokens. now: see `chat_template.render`. Refuses a
    message without role or content, a role that is no plain name, and a control token in a message
    that the template changes, where what it makes of it could not be told from its own text.
    """
    for index, message in enumerate(messages):
        _check(index, message, tokenizer)
    now, disguise = now or datetime.datetime.now(), Disguise(messages, template, tokenizer)
    special = {
        name: "" if token is None else tokenizer.decode([token], special=True)
        for name, token in (("bos", tokenizer.bos), ("eos", tokenizer.eos))
    }

    def shown(change: Change) -> str:
        changed = [{**_changed(m, change), "role": m["role"]} for m in messages]
        return render(changed, template, add_generation_prompt=answer, now=now, **special)

    text = shown(str)
    hidden = shown(disguise.characters)
    surest = tokenizer.controls(hidden)
    if disguise.taken_off(hidden) == text:
        return Prompt(text, tuple(surest))
    # The template looks for such characters in messages: hide fewer of them. It may make ends, of
    # `&lt;` say, around what a message spells.
    hidden = shown(disguise.ends)
    own = tokenizer.controls(hidden)
    framed = [token for token in _more(own, surest) if disguise.spells_inside(token)]
    if disguise.taken_off(hidden) == text and not framed:
        return Prompt(text, tuple(own))
    hidden = shown(disguise.control_tokens)
    controls = tokenizer.controls(hidden)
    more = [*_more(controls, own), *framed]
    if disguise.taken_off(hidden) == text and not more:
        return Prompt(text, tuple(controls))
    named = tokenizer.decode([*more, *disguise.spelled][:1], special=True)
    raise Refusal(
        "0.3",
        "in the chat template of this model, text of the messages could become the control token "
        f"{named!r}; take it out",
        {"token": named},
    )


def _more(of: Sequence[Spelled], than: Sequence[Spelled]) -> Counter[int]:
    """The tokens that `of` has more of."""
    return Counter(token for token, _, _ in of) - Counter(token for token, _, _ in than)


class Disguise:
    """Stand-ins for characters of messages, so that a rendering shows where they end up.

    Each stand-in is a private-use character that neither the messages nor the template hold, one
    for each character, so that lengths stay. spelled: what `control_tokens` found.
    """

    def __init__(self, messages: Sequence[Message], template: str, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.spelled: list[int] = []
        tokens = tokenizer.control_tokens
        used = set("".join(tokens))
        hidden = sorted(used)
        self._texts = _texts(messages)
        used.update(template, *self._texts)
        free = (character for character in map(chr, PRIVATE_USE) if character not in used)
        stand_ins = list(itertools.islice(free, len(hidden)))
        if len(stand_ins) < len(hidden):
            raise Refusal("0.3", "the messages hold every private-use character; take some out")
        self._all = {ord(old): new for old, new in zip(hidden, stand_ins, strict=True)}
        ends = {ord(token[at]) for token in tokens for at in (0, -1)}
        self._ends = {old: new for old, new in self._all.items() if old in ends}
        self._off = {ord(new): chr(old) for old, new in self._all.items()}

    def characters(self, text: str) -> str:
        """Every character that a control token is spelled with."""
        return text.translate(self._all)

    def ends(self, text: str) -> str:
        """Every character that a control token starts or ends with."""
        return text.translate(self._ends)

    def control_tokens(self, text: str) -> str:
        """The control tokens that `text` spells."""
        for token, start, end in self._tokenizer.controls(text):
            self.spelled.append(token)
            text = text[:start] + self.characters(text[start:end]) + text[end:]
        return text

    def spells_inside(self, token: int) -> bool:
        """Whether a message spells a control token but for its ends."""
        inside = self._tokenizer.decode([token], special=True)[1:-1]
        return any(inside in text for text in self._texts)

    def taken_off(self, text: str) -> str:
        return text.translate(self._off)


def _changed(value: Any, change: Change) -> Any:
    """`value` with every text in it changed, but for the keys of mappings."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {key: _changed(item, change) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_changed(item, change) for item in value]
    return value


def _texts(value: Any) -> list[str]:
    """Every text that `_changed` would change."""
    texts: list[str] = []

    def note(text: str) -> str:
        texts.append(text)
        return text

    _changed(value, note)
    return texts


def _keys(value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        yield from map(str, value)
        value = list(value.values())
    if isinstance(value, list | tuple):
        for item in value:
            yield from _keys(item)


def _check(index: int, message: Message, tokenizer: Tokenizer) -> None:
    for key in ("role", "content"):
        value = message.get(key) if isinstance(message, Mapping) else None
        if not isinstance(value, str):
            raise Refusal(
                "0.2",
                f"message {index} has no text under {key!r}; give a role and a content as text",
                {"message": index, "key": key},
            )
    names = [message["role"], *_keys(message)]
    for name in names:
        if not NAME.fullmatch(name) or tokenizer.controls(name):
            raise Refusal(
                "0.3",
                f"message {index} has the role or key {name!r}, no plain name; "
                "use letters, digits, spaces, - and _",
                {"message": index, "name": name},
            )

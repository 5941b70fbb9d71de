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
from typing import Any, TypeAlias

from minfer.errors import Refusal
from minfer.models.chat_template import Message, render
from minfer.models.tokenizer import Tokenizer

Change: TypeAlias = Callable[[str], str]

PRIVATE_USE = range(0xF0000, 0x110000)
NAME = re.compile(r"[\w -]+")


def encode(messages: Sequence[Message], template: str, tokenizer: Tokenizer) -> list[int]:
    """Token ids of a conversation, up to the answer.

    messages: {"role": ..., "content": ...} each, both text. A control token that a message spells
    stays text: only the template makes control tokens. Refuses a message without role or content,
    a role that is no plain name, and a control token in a message that the template changes, where
    what it makes of it could not be told from its own text.
    """
    for index, message in enumerate(messages):
        _check(index, message, tokenizer)
    now, disguise = datetime.datetime.now(), Disguise(messages, template, tokenizer)
    special = {
        name: "" if token is None else tokenizer.decode([token], special=True)
        for name, token in (("bos", tokenizer.bos), ("eos", tokenizer.eos))
    }

    def rendered(change: Change) -> str:
        shown = [{**_changed(m, change), "role": m["role"]} for m in messages]
        return render(shown, template, add_generation_prompt=True, now=now, **special)

    text = rendered(str)
    for hide in (disguise.characters, disguise.ends):
        hidden = rendered(hide)
        if disguise.taken_off(hidden) == text:
            return tokenizer.encode(text, special=tokenizer.controls(hidden))
    # The template looks for such characters in messages: hide whole control tokens only, and see
    # that no more of them stand there than without any end of one.
    own = tokenizer.controls(rendered(disguise.ends))
    hidden = rendered(disguise.control_tokens)
    controls = tokenizer.controls(hidden)
    more = Counter(token for token, _, _ in controls) - Counter(token for token, _, _ in own)
    if disguise.taken_off(hidden) == text and not more:
        return tokenizer.encode(text, special=controls)
    named = tokenizer.decode([*more, *disguise.spelled][:1], special=True)
    raise Refusal(
        "0.3",
        "in the chat template of this model, text of the messages could become the control token "
        f"{named!r}; take it out",
        {"token": named},
    )


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
        used.update(template, *_texts(messages))
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

"""Text to token ids and back, from the metadata of a GGUF file alone."""

from __future__ import annotations

import codecs
import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from minfer.errors import Refusal
from minfer.models.vocabulary import CONTROL, UNKNOWN, WHOLE_WORDS, Vocabulary

Spelled: TypeAlias = tuple[int, int, int]  # a token, where it starts in a text, where it ends
END_NAMES = ("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>")


class Tokenizer:
    """Encodes and decodes by one vocabulary.

    bos, eos, eot: token ids or None (eot: what ends a chat turn). prompt_start: what a plain
    prompt starts with, bos or nothing.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._plain = vocabulary.build()
        self._bytes = vocabulary.token_bytes()
        self.n_vocab = len(vocabulary.tokens)
        self.bos, self.eos = vocabulary.special_id("bos"), vocabulary.special_id("eos")
        self.eot = vocabulary.special_id("eot")
        by_default = vocabulary.model == "llama" or vocabulary.pre in WHOLE_WORDS
        self.prompt_start: tuple[int, ...] = ()
        if vocabulary.flag("add_bos_token", by_default):
            if self.bos is None:
                raise vocabulary.missing("bos_token_id")
            self.prompt_start = (self.bos,)
        ends = {self.eos, self.eot, *map(vocabulary.control_id, END_NAMES)}
        self.end_ids = frozenset(token for token in ends if token is not None)

    @functools.cached_property
    def _finder(self) -> Any:
        return self._vocabulary.finder()

    @functools.cached_property
    def control_tokens(self) -> tuple[str, ...]:
        """How control tokens are spelled."""
        kinds = zip(self._vocabulary.tokens, self._vocabulary.types, strict=True)
        return tuple(token for token, kind in kinds if kind == CONTROL and token)

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> Tokenizer:
        """From the keys `tokenizer.ggml.*`.

        Refuses a kind of vocabulary or a pre-tokenizer it does not know by name; raises Damaged
        for missing or contradictory keys.
        """
        return cls(Vocabulary(metadata))

    def encode(self, text: str, *, special: bool | Sequence[Spelled] = False) -> list[int]:
        """Token ids of `text`, without bos.

        Control tokens spelled in `text` stay text, unless `special`, which is for text that a
        chat template made; a list says where they are control tokens. Refuses text that is no
        Unicode: a lone surrogate.
        """
        _refuse_surrogates(text)
        ids: list[int] = []
        done = 0
        for token, start, end in self.controls(text) if special is True else special or ():
            ids += self._plain.encode(text[done:start], add_special_tokens=False).ids
            ids.append(token)
            done = end
        return ids + list(self._plain.encode(text[done:], add_special_tokens=False).ids)

    def controls(self, text: str) -> list[Spelled]:
        """The control tokens spelled in `text`: the leftmost first, the longest of one place."""
        _refuse_surrogates(text)
        found = self._finder.encode(text, add_special_tokens=False)
        spelled = zip(
            map(self._vocabulary.ids.__getitem__, found.tokens), found.offsets, strict=True
        )
        return [(i, *at) for i, at in spelled if self._vocabulary.types[i] == CONTROL]

    def decode(self, ids: Iterable[int], *, special: bool = False) -> str:
        """The text of whole tokens; broken UTF-8 becomes U+FFFD, as does a cut last character.

        Control tokens are left out unless `special`. The space that encoding puts in front of
        a text is taken away.
        """
        text = b"".join(self.token_bytes(token, special=special) for token in ids)
        decoded = text.decode("utf-8", errors="replace")
        return decoded.removeprefix(" ") if self._vocabulary.space_prefix else decoded

    def token_bytes(self, token: int, *, special: bool = False) -> bytes:
        """The bytes one token stands for; none for a control token unless `special`."""
        if not 0 <= token < self.n_vocab:
            raise Refusal(
                "0.2", f"token {token} is outside 0 .. {self.n_vocab - 1}", {"token": token}
            )
        hidden = not special and self._vocabulary.types[token] in (CONTROL, UNKNOWN)
        return b"" if hidden else self._bytes[token]

    def stream(self, *, continues: bool = False) -> CharacterStream:
        """Decodes token by token; the pieces joined are what `decode` gives.

        continues: the text goes on from an earlier one, so that a space in front of it is kept.
        """
        return CharacterStream(self, drop_space=self._vocabulary.space_prefix and not continues)

    def is_end(self, token: int) -> bool:
        """Whether `token` ends a generation: eos, eot, or a turn's end known by name."""
        return token in self.end_ids


def _refuse_surrogates(text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise Refusal(
            "0.2",
            f"character {error.start} of the text is half of a surrogate pair; "
            "pass text that was decoded from valid UTF-8",
            {"character": error.start},
        ) from None


class CharacterStream:
    """Text of tokens as they come; characters appear whole."""

    def __init__(self, tokenizer: Tokenizer, *, drop_space: bool = False) -> None:
        """drop_space: leave out a space that the text starts with."""
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._drop_space = drop_space

    def push(self, token: int) -> str:
        """The characters that `token` completes; bytes of an unfinished one wait."""
        text = self._decoder.decode(self._tokenizer.token_bytes(token))
        if self._drop_space and text:
            self._drop_space = False
            return text.removeprefix(" ")
        return text

    @property
    def unfinished(self) -> bool:
        """Whether bytes of a character wait for the rest of it."""
        return bool(self._decoder.getstate()[0])

    def finish(self) -> str:
        """What is left: U+FFFD for an unfinished character, else nothing."""
        return self._decoder.decode(b"", final=True)

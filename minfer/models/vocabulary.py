"""The vocabulary in the metadata of a GGUF file, and the machinery it asks for.

Two kinds: `gpt2` (byte-level BPE: each byte is spelled as one printable character, merges are
listed) and `llama` (SentencePiece BPE: a space is spelled U+2581, unknown characters fall back to
byte tokens, merges follow from the scores). Splitting into words and merging are done by the
`tokenizers` package.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from minfer.errors import Damaged, Refusal

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6  # tokenizer.ggml.token_type
SPACE = "\u2581"

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_MODERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3, QWEN2 = _MODERN % r"\p{N}{1,3}", _MODERN % r"\p{N}"
SPLITS: dict[str, tuple[str, ...]] = {  # tokenizer.ggml.pre -> patterns, each cutting further
    "gpt-2": (GPT2,),
    "smollm": (r"\p{N}", GPT2),
    "llama-bpe": (LLAMA3,),
    "llama3": (LLAMA3,),
    "llama-v3": (LLAMA3,),
    "qwen2": (QWEN2,),
    "deepseek-r1-qwen": (QWEN2,),
    "default": (r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]"),
}
WHOLE_WORDS = {"llama-bpe", "llama3", "llama-v3"}  # a word of the vocabulary is taken unmerged
COMPOSED = {"qwen2"}  # text is brought into the Unicode form NFC first
BYTE_TOKEN = re.compile("<0x[0-9A-F]{2}>")


class Vocabulary:
    """The keys `tokenizer.ggml.*`, checked.

    tokens, types: text and kind by token id. space_prefix: whether encoding puts a space in front
    of a text.
    """

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        self.metadata = metadata
        self.model = self._typed("model", str)
        if self.model not in ("gpt2", "llama"):
            raise Refusal(
                "0.3",
                f"the tokenizer model {self.model!r} is none of gpt2, llama; use another model",
                {"model": self.model},
            )
        self.pre = self._typed("pre", str) if self.model == "gpt2" else ""
        if self.model == "gpt2" and self.pre not in SPLITS:
            raise Refusal(
                "0.3",
                f"the pre-tokenizer {self.pre!r} is none of {', '.join(SPLITS)}; use another model",
                {"pre": self.pre},
            )
        self.tokens: list[str] = self._list("tokens", str)
        self.types: list[int] = (
            self._list("token_type", int, len(self.tokens))
            if self._get("token_type") is not None
            else [NORMAL] * len(self.tokens)
        )
        for token, kind in zip(self.tokens, self.types, strict=True):
            if self.model == "llama" and kind == BYTE and not BYTE_TOKEN.fullmatch(token):
                raise self._damaged(f"byte token {token!r} is not spelled <0x00> to <0xFF>")
        self.ids = {token: i for i, token in enumerate(self.tokens)}
        self.space_prefix = self.flag("add_space_prefix", self.model == "llama")
        if self.model == "gpt2" and self.space_prefix:
            raise Refusal(
                "0.3",
                "tokenizer.ggml.add_space_prefix is not supported for gpt2; use another model",
            )

    def build(self) -> Any:
        """A `tokenizers.Tokenizer` that takes control tokens in a text for ordinary characters."""
        import tokenizers

        built = tokenizers.Tokenizer(self._bpe() if self.model == "gpt2" else self._spm())
        if self.model == "gpt2":
            built.pre_tokenizer = self._splits()
            if self.pre in COMPOSED:
                built.normalizer = tokenizers.normalizers.NFC()
        else:
            built.normalizer = self._spaces()
        built.add_special_tokens(self._added(USER_DEFINED))
        return built

    def finder(self) -> Any:
        """A `tokenizers.Tokenizer` of the control tokens, and those of users, that a text spells.

        Everything else in the text gives no token.
        """
        import tokenizers

        found = tokenizers.Tokenizer(tokenizers.models.BPE())
        found.add_special_tokens(self._added(CONTROL, USER_DEFINED))
        return found

    def _added(self, *kinds: int) -> list[Any]:
        from tokenizers import AddedToken

        return [
            AddedToken(token, normalized=False, special=True)
            for token, kind in zip(self.tokens, self.types, strict=True)
            if kind in kinds and token
        ]

    def _bpe(self) -> Any:
        """Control tokens are no part of it, so that no text can reach them."""
        from tokenizers.models import BPE

        ids = {t: i for t, i in self.ids.items() if self.types[i] != CONTROL}
        merges = []
        for merge in self._list("merges", str):
            left, _, right = merge.partition(" ")
            if not {left, right, left + right} <= self.ids.keys():
                raise self._damaged(f"merge {merge!r} is not made of tokens")
            if {left, right, left + right} <= ids.keys():
                merges.append((left, right))
        return BPE(ids, merges, ignore_merges=self.pre in WHOLE_WORDS)

    def _splits(self) -> Any:
        from tokenizers import Regex
        from tokenizers.pre_tokenizers import ByteLevel, Split
        from tokenizers.pre_tokenizers import Sequence as Chain

        cuts = [Split(Regex(pattern), behavior="isolated") for pattern in SPLITS[self.pre]]
        return Chain([*cuts, ByteLevel(add_prefix_space=False, use_regex=False)])

    def _spm(self) -> Any:
        """SentencePiece's BPE: join the neighbours whose union scores highest, leftmost first."""
        from tokenizers.models import BPE

        scores: list[float] = self._list("scores", float, len(self.tokens))
        normal = [i for i, kind in enumerate(self.types) if kind == NORMAL]
        mergeable = {self.tokens[i] for i in normal}
        merges = [
            (token[:cut], token[cut:])
            for token in (self.tokens[i] for i in sorted(normal, key=lambda i: -scores[i]))
            for cut in range(1, len(token))
            if token[:cut] in mergeable and token[cut:] in mergeable
        ]
        unknown = self.special_id("unknown")
        return BPE(
            self.ids,
            merges,
            unk_token=None if unknown is None else self.tokens[unknown],
            fuse_unk=True,
            byte_fallback=BYTE in self.types,
        )

    def _spaces(self) -> Any:
        from tokenizers.normalizers import Prepend, Replace
        from tokenizers.normalizers import Sequence as Chain

        return Chain([*([Prepend(SPACE)] if self.space_prefix else []), Replace(" ", SPACE)])

    def token_bytes(self) -> list[bytes]:
        """The bytes of every token."""
        if self.model == "gpt2":
            spelled = {character: byte for byte, character in byte_alphabet().items()}
            return [
                bytes(spelled[c] for c in token)
                if kind == NORMAL and spelled.keys() >= set(token)
                else token.encode()
                for token, kind in zip(self.tokens, self.types, strict=True)
            ]
        return [
            bytes([int(token[1:-1], 16)]) if kind == BYTE else token.replace(SPACE, " ").encode()
            for token, kind in zip(self.tokens, self.types, strict=True)
        ]

    def special_id(self, name: str) -> int | None:
        """Id under `tokenizer.ggml.<name>_token_id`, or None if the file has none."""
        if self._get(f"{name}_token_id") is None:
            return None
        token: int = self._typed(f"{name}_token_id", int)
        if not 0 <= token < len(self.tokens):
            raise self._damaged(f"{name}_token_id {token} is none of {len(self.tokens)} tokens")
        return token

    def control_id(self, name: str) -> int | None:
        """Id of the control token spelled `name`."""
        token = self.ids.get(name)
        return token if token is not None and self.types[token] == CONTROL else None

    def flag(self, name: str, default: bool) -> bool:
        return default if self._get(name) is None else bool(self._typed(name, bool))

    def missing(self, name: str) -> Damaged:
        return self._damaged(f"it lacks tokenizer.ggml.{name}")

    def _get(self, name: str) -> Any:
        return self.metadata.get(f"tokenizer.ggml.{name}")

    def _typed(self, name: str, kind: type) -> Any:
        value = self._get(name)
        if value is None:
            raise self.missing(name)
        if type(value) is not kind:
            raise self._damaged(f"tokenizer.ggml.{name} is no {kind.__name__}")
        return value

    def _list(self, name: str, kind: type, length: int | None = None) -> Any:
        values: Sequence[Any] = self._typed(name, list)
        if any(type(value) is not kind for value in values):
            raise self._damaged(f"tokenizer.ggml.{name} holds something else than {kind.__name__}")
        if length is not None and len(values) != length:
            raise self._damaged(
                f"tokenizer.ggml.{name} has {len(values)} entries for {length} tokens"
            )
        return values

    def _damaged(self, what: str) -> Damaged:
        return Damaged("0.2", f"the tokenizer of this model is damaged: {what}; fetch it again")


def byte_alphabet() -> dict[int, str]:
    """How byte-level BPE spells each byte: printable Latin-1 as itself, the rest from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {
        byte: chr(256 + i) for i, byte in enumerate(rest)
    }

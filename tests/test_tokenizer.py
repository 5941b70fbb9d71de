"""Tokenizers: equal to those of transformers, lossless, and strict about what they do not know."""

from __future__ import annotations

import unicodedata
from pathlib import Path
from typing import Any

import pytest
from tiny_models import MERGES, tiny_tokens
from tiny_tokenizers import spm, tiny

from minfer.errors import Damaged, Refusal
from minfer.models.gguf import open_gguf
from minfer.models.tokenizer import Tokenizer
from minfer.models.vocabulary import SPACE, byte_alphabet

TEXTS = [
    "Hello, world! It's 2024 and I'll go; DON'T, we'Ve.",
    "The capital of France is",
    "日本語のテキスト、中文文本。한국어 العربية हिन्दी ไทย",
    "🙂👩‍👩‍👧‍👦🏳️‍🌈 emoji 👍🏽 and ☃",
    "def f(x):\n    return x**2  # comment\n\n\n\tprint('a')\r\n",
    "   leading,   inner   and trailing   ",
    "1234567890 12 3.14 1,000 x86_64 007",
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
    "<|endoftext|><|im_end|> <|im_start|>x<|im_end|",
    "a\u0301 e\u0301 naïve Ångström ﬁ",
    "\r\n\r\n  \t \u00a0\u3000x\u2028y",
    "",
    " ",
    "\n",
    "\x00\x01\x7f\ufeff\ufffd",
    "ＡＢＣ fullwidth",
    "for i in range(10): x[i] += {'k': -1}  // 0xFF",
]
DIGITS_OF_OTHER_SCRIPTS = "١٢٣٤ ½¼ Ⅻ １２３ ₁₂ १२३"


def pieces(tokenizer: Tokenizer, text: str) -> list[str]:
    return [tokenizer.decode([i], special=True) for i in tokenizer.encode(text)]


# --- byte-level BPE -----------------------------------------------------------------------------


def test_merges_by_hand() -> None:
    tokenizer, tokens = tiny(), tiny_tokens()
    assert [tokens[i] for i in tokenizer.encode("the cat and hello")] == [
        *("the", "Ġcat", "Ġ", "and", "Ġ", "hello"),
    ]
    assert tokenizer.encode("A") == [3 + list(byte_alphabet()).index(ord("A"))]


def test_the_byte_alphabet_is_that_of_the_tokenizers_package() -> None:
    from tokenizers.pre_tokenizers import ByteLevel

    spelled = byte_alphabet()
    assert set(spelled.values()) == set(ByteLevel.alphabet()) and len(spelled) == 256
    assert (spelled[ord("A")], spelled[ord(" ")], spelled[0], spelled[0xAD]) == (
        *("A", "\u0120", "\u0100", "\u0143"),
    )
    for character in "é 語🙂\n":
        ((piece, _),) = ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(
            character
        )
        assert piece == "".join(spelled[byte] for byte in character.encode())


@pytest.mark.parametrize("text", [*TEXTS, DIGITS_OF_OTHER_SCRIPTS])
def test_decoding_gives_the_text_back(text: str) -> None:
    tokenizer = tiny()
    plain, special = tokenizer.encode(text), tokenizer.encode(text, special=True)
    assert tokenizer.decode(plain) == text
    assert tokenizer.decode(special, special=True) == text
    stream = tokenizer.stream()
    parts = [stream.push(token) for token in plain]
    assert "".join(parts) + stream.finish() == text


def test_control_tokens_of_a_user_stay_text() -> None:
    tokenizer = tiny()
    assert tokenizer.encode("<|im_start|>x<|im_end|>", special=True) == [
        *(1, tokenizer.encode("x")[0], 2),
    ]
    plain = tokenizer.encode("<|im_start|>x<|im_end|>")
    assert len(plain) == 23 and not {0, 1, 2} & set(plain)
    assert tokenizer.decode([1, *tokenizer.encode("hi"), 2]) == "hi"
    assert tokenizer.decode([1, 2], special=True) == "<|im_start|><|im_end|>"


def test_a_control_token_that_is_a_whole_word_stays_text() -> None:
    """`llama-bpe` takes whole words from the vocabulary; a control token is no such word."""
    tokens = ["PAD", *tiny_tokens()[1:]]
    tokenizer = tiny(tokens=tokens, pre="llama-bpe")
    assert tokenizer.encode("PAD", special=True) == [0]
    assert pieces(tokenizer, "PAD") == ["P", "A", "D"]


def test_user_defined_tokens_are_always_found() -> None:
    tokens = [*tiny_tokens(), "<think now>"]
    tokenizer = tiny(tokens=tokens, token_type=[3, 3, 3] + [1] * (len(tokens) - 4) + [4])
    assert tokenizer.encode("the<think now>the") == [
        *(tokens.index("the"), len(tokens) - 1, tokens.index("the")),
    ]
    assert tokenizer.decode([len(tokens) - 1]) == "<think now>"
    assert tokenizer.controls("é<|im_end|><think now><|im_") == [(2, 1, 11)]


def test_a_stream_holds_incomplete_characters() -> None:
    tokenizer = tiny()
    ids = tokenizer.encode("é🙂x")
    assert len(ids) == 7
    stream = tokenizer.stream()
    assert [stream.push(token) for token in ids] == ["", "é", "", "", "", "🙂", "x"]
    assert [stream.push(ids[2]), stream.finish(), stream.finish()] == ["", "\ufffd", ""]
    assert tokenizer.decode(ids[:3]) == "é\ufffd"
    stream = tokenizer.stream()
    assert [stream.push(ids[2]), stream.push(ids[6])] == ["", "\ufffdx"]


def test_ends_and_special_ids() -> None:
    tokenizer = tiny()
    assert (tokenizer.bos, tokenizer.eos, tokenizer.eot) == (1, 2, None)
    assert tokenizer.prompt_start == () and tokenizer.n_vocab == 289
    assert [tokenizer.is_end(i) for i in range(4)] == [True, False, True, False]
    assert tiny(eot_token_id=1).is_end(1)
    assert tiny(add_bos_token=None).prompt_start == ()
    assert tiny(add_bos_token=None, pre="llama-bpe").prompt_start == (1,)
    assert tiny(add_bos_token=True).prompt_start == (1,)


def test_a_token_that_is_none_is_refused() -> None:
    for token in (-1, 289):
        with pytest.raises(Refusal, match=f"token {token} is outside 0 .. 288"):
            tiny().decode([token])


def test_text_that_is_no_unicode_is_refused() -> None:
    with pytest.raises(Refusal, match="character 2 of the text is half of a surrogate pair"):
        tiny().encode("ab\udc80")


SPLIT = "it's 12345 x  y=1\n\n z IT'S"
PRE = {
    "gpt-2": ["it", "'s", " 12345", " x", " ", " y", "=", "1", "\n\n", " z", " IT", "'", "S"],
    "smollm": [
        *("it", "'s", " ", "1", "2", "3", "4", "5", " x", " ", " y", "=", "1"),
        *("\n\n", " z", " IT", "'", "S"),
    ],
    "llama-bpe": [
        *("it", "'s", " ", "123", "45", " x", " ", " y", "=", "1", "\n\n", " z", " IT", "'S"),
    ],
    "qwen2": [
        *("it", "'s", " ", "1", "2", "3", "4", "5", " x", " ", " y", "=", "1"),
        *("\n\n", " z", " IT", "'S"),
    ],
    "default": [
        *("it", "'", "s", " ", "123", "45", " x", " ", " y", "=", "1", "\n\n", " z"),
        *(" IT", "'", "S"),
    ],
}


@pytest.mark.parametrize("pre", PRE)
def test_words_of_each_pre_tokenizer(pre: str) -> None:
    words = tiny(pre=pre)._plain.pre_tokenizer.pre_tokenize_str(SPLIT)
    assert [SPLIT[start:end] for _, (start, end) in words] == PRE[pre]


def test_qwen2_is_that_of_transformers() -> None:
    from transformers import Qwen2Tokenizer

    ours, tokens = tiny(pre="qwen2"), tiny_tokens()
    theirs = Qwen2Tokenizer(
        vocab={token: i for i, token in enumerate(tokens)},
        merges=[tuple(merge.split(" ")) for merge in MERGES],
    )
    for text in [*TEXTS, DIGITS_OF_OTHER_SCRIPTS, SPLIT]:
        plain = theirs(text, split_special_tokens=True).input_ids
        assert ours.encode(text) == plain
        assert ours.decode(plain) == unicodedata.normalize("NFC", text)


def test_an_unknown_pre_tokenizer_is_refused_by_name() -> None:
    with pytest.raises(Refusal, match="pre-tokenizer 'tekken' is none of gpt-2, smollm") as caught:
        tiny(pre="tekken")
    assert caught.value.rule == "0.3" and caught.value.exit_code == 2
    with pytest.raises(Damaged, match=r"lacks tokenizer\.ggml\.pre"):
        tiny(pre=None)


@pytest.mark.parametrize(
    "changes, error, message",
    [
        ({"model": "bert"}, Refusal, "tokenizer model 'bert' is none of gpt2, llama"),
        ({"add_space_prefix": True}, Refusal, "add_space_prefix is not supported for gpt2"),
        ({"model": None}, Damaged, r"lacks tokenizer\.ggml\.model"),
        ({"tokens": None}, Damaged, r"lacks tokenizer\.ggml\.tokens"),
        ({"merges": None}, Damaged, r"lacks tokenizer\.ggml\.merges"),
        ({"tokens": [1, 2]}, Damaged, "tokens holds something else than str"),
        ({"tokens": "abc"}, Damaged, "tokens is no list"),
        ({"token_type": [1]}, Damaged, "token_type has 1 entries for 289 tokens"),
        ({"merges": ["t h", "q zz"]}, Damaged, "merge 'q zz' is not made of tokens"),
        ({"merges": ["th"]}, Damaged, "merge 'th' is not made of tokens"),
        ({"eos_token_id": 289}, Damaged, "eos_token_id 289 is none of 289 tokens"),
        ({"add_bos_token": True, "bos_token_id": None}, Damaged, "lacks .*bos_token_id"),
        ({"add_bos_token": 1}, Damaged, "add_bos_token is no bool"),
    ],
)
def test_keys_that_cannot_be_used(
    changes: dict[str, Any], error: type[Refusal], message: str
) -> None:
    with pytest.raises(error, match=message):
        tiny(**changes)


@pytest.mark.model
def test_equal_to_transformers(
    smollm2: Path, smollm2_transformers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole page, with and without control tokens.

    transformers splits by the words of GPT-2 for this file; the model's own tokenizer, and this
    one, split every digit first, which shows on digits of other scripts only.
    """
    from tokenizers import pre_tokenizers

    ours = Tokenizer.from_gguf(open_gguf(smollm2).metadata)
    theirs = smollm2_transformers

    def check(text: str) -> None:
        plain = theirs(text, add_special_tokens=False, split_special_tokens=True).input_ids
        assert ours.encode(text) == plain
        assert not any(token <= 16 for token in plain)
        special = theirs(text, add_special_tokens=False).input_ids
        assert ours.encode(text, special=True) == special
        assert ours.decode(special, special=True) == theirs.decode(special)
        assert ours.decode(plain) == text

    for text in TEXTS:
        check(text)
    check("\n".join(TEXTS))
    words = pre_tokenizers.ByteLevel(add_prefix_space=False)
    each_digit = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), words])
    monkeypatch.setattr(theirs.backend_tokenizer, "pre_tokenizer", each_digit)
    check(DIGITS_OF_OTHER_SCRIPTS)
    check("\n".join([*TEXTS, DIGITS_OF_OTHER_SCRIPTS]))


@pytest.mark.model
def test_smollm2_by_hand(smollm2: Path) -> None:
    tokenizer = Tokenizer.from_gguf(open_gguf(smollm2).metadata)
    assert pieces(tokenizer, "The capital of France is 42!") == [
        *("The", " capital", " of", " France", " is", " ", "4", "2", "!"),
    ]
    assert (tokenizer.bos, tokenizer.eos, tokenizer.prompt_start) == (1, 2, ())
    assert tokenizer.end_ids == {0, 2}


# --- SentencePiece BPE --------------------------------------------------------------------------


def test_spm_joins_by_score() -> None:
    tokenizer = spm()
    tokens = tokenizer._vocabulary.tokens
    assert [tokens[i] for i in tokenizer.encode("hello hello")] == [SPACE + "hello"] * 2
    assert [tokens[i] for i in tokenizer.encode("hell")] == [SPACE, "he", "ll"]
    assert [tokens[i] for i in tokenizer.encode("  lo")] == [SPACE + SPACE, SPACE, "l", "o"]
    assert [tokens[i] for i in tokenizer.encode("é")] == [SPACE, "<0xC3>", "<0xA9>"]
    assert tokenizer.prompt_start == (tokenizer.bos,)


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("prefix", [True, False])
def test_spm_decoding_gives_the_text_back(text: str, prefix: bool) -> None:
    tokenizer = spm(add_space_prefix=prefix)
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_spm_control_tokens_of_a_user_stay_text() -> None:
    tokenizer = spm()
    assert not {0, 1, 2} & set(tokenizer.encode("<s>hello</s><unk>"))
    ids = tokenizer.encode("<s>hello</s>", special=True)
    assert [ids[0], ids[-1]] == [1, 2] and tokenizer.decode(ids) == "hello"


def test_spm_byte_tokens_are_checked() -> None:
    good = spm()._vocabulary
    tokens = [*good.tokens[:3], "<0xZZ>", *good.tokens[4:]]
    with pytest.raises(Damaged, match="byte token '<0xZZ>' is not spelled <0x00> to <0xFF>"):
        spm(tokens=tokens)


def test_a_stream_drops_the_space_that_encoding_puts_in_front() -> None:
    tokenizer = spm()
    ids = tokenizer.encode("hello hello")
    stream = tokenizer.stream()
    assert (
        [stream.push(i) for i in ids]
        == ["hello", " hello"]
        == [tokenizer.decode(ids[:1]), " hello"]
    )
    stream = tokenizer.stream(continues=True)
    assert [stream.push(i) for i in ids] == [" hello", " hello"]
    stream = spm(add_space_prefix=False).stream()
    assert [stream.push(i) for i in ids] == [" hello", " hello"]

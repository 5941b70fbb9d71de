"""Streamed text: whole characters, cut at stop strings, equal to the text in one piece."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import write_tiny_gguf
from tiny_tokenizers import spm, tiny

from minfer import Engine, Sampler, Sampling
from minfer.errors import Refusal
from minfer.models.text_stream import TextStream
from minfer.models.tokenizer import Tokenizer
from minfer.models.vocabulary import SPACE
from minfer.timing import Timing

TOKENIZERS = {"bytes": tiny(), "spm": spm(), "spm bare": spm(add_space_prefix=False)}
PROMPT = [5, 90, 41, 7, 201, 33, 33, 12, 150, 6, 77]


def one_shot(text: str, stops: Sequence[str]) -> tuple[str, str | None]:
    """`text` cut at the first character that completes a stop string, the longest of several."""
    for end in range(1, len(text) + 1):
        met = [stop for stop in stops if text[:end].endswith(stop)]
        if met:
            stop = max(met, key=len)
            return text[: end - len(stop)], stop
    return text, None


def streamed(
    tokenizer: Tokenizer, ids: Sequence[int], stops: Sequence[str] = ()
) -> tuple[list[str], str | None]:
    stream = TextStream(tokenizer, stops)
    pieces = [stream.push(token) for token in ids]
    return [*pieces, stream.finish()], stream.stopped


def tokens_of(tokenizer: Tokenizer) -> st.SearchStrategy[list[int]]:
    """Any ids: words, single bytes that break characters, control tokens; and whole texts."""
    any_id = st.integers(0, tokenizer.n_vocab - 1)
    text = st.text("helo é🙂ab\n<", max_size=6).map(tokenizer.encode)
    parts = st.lists(any_id.map(lambda i: [i]) | text, max_size=12)
    return parts.map(lambda lists: [i for ids in lists for i in ids])


@st.composite
def cases(draw: st.DrawFn, tokenizer: Tokenizer) -> tuple[list[int], list[str]]:
    """Tokens, and stop strings that are often in their text or nearly so."""
    ids = draw(tokens_of(tokenizer))
    text = tokenizer.decode(ids)
    places = st.tuples(st.integers(0, len(text)), st.integers(1, 6))
    inside = places.map(lambda at: text[at[0] : at[0] + at[1]]).filter(bool)
    nearly = (
        st.tuples(inside, st.text("helo é🙂", max_size=2)).map("".join) if text else st.nothing()
    )
    some = st.text("helo é🙂\ufffd", min_size=1, max_size=3) | nearly
    return ids, draw(st.lists(some | inside if text else some, max_size=4))


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=400, deadline=None)
@given(data=st.data())
def test_joined_pieces_equal_the_text_in_one_piece(name: str, data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[name]
    ids, stops = data.draw(cases(tokenizer))
    pieces, stopped = streamed(tokenizer, ids, stops)
    assert ("".join(pieces), stopped) == one_shot(tokenizer.decode(ids), stops)


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_only_what_may_become_a_stop_is_held_back(name: str, data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[name]
    ids, stops = data.draw(cases(tokenizer))
    stream, plain = TextStream(tokenizer, stops), tokenizer.stream()
    shown = seen = ""
    for token in ids:
        shown, seen = shown + stream.push(token), seen + plain.push(token)
        if stream.stopped:
            break
        assert seen.startswith(shown)
        held = seen[len(shown) :]
        assert not held or any(stop.startswith(held) and stop != held for stop in stops)


@pytest.mark.parametrize("text", ["hello the cat é🙂 stop", "aéb", "ab🙂🙂ab"])
@pytest.mark.parametrize("stops", [["é🙂"], ["e", "the c"], ["🙂a", "b"], ["o t", "lo th"]])
def test_where_tokens_end_changes_nothing(text: str, stops: list[str]) -> None:
    tokenizer = TOKENIZERS["bytes"]
    single = [tokenizer.encode(chr(i))[0] for i in range(128)]
    byte_of = {tokenizer.token_bytes(i): i for i in range(3, 259)}
    by_byte = [byte_of[bytes([byte])] for byte in text.encode()]
    assert tokenizer.decode(by_byte) == text and set(single) <= set(range(3, 259))
    wanted = one_shot(text, stops)
    for ids in (by_byte, tokenizer.encode(text)):
        pieces, stopped = streamed(tokenizer, ids, stops)
        assert ("".join(pieces), stopped) == wanted


@pytest.mark.parametrize(
    ("text", "stops", "shown", "stopped"),
    [
        ("hello the cat", ["the"], "hello ", "the"),
        ("hello the cat", ["lo t"], "hel", "lo t"),
        ("hello the cat", ["dog", " cat"], "hello the", " cat"),
        ("abcd", ["abcd", "bc"], "a", "bc"),  # "bc" is complete first
        ("abc", ["bc", "abc"], "", "abc"),  # completed by the same character: the longest
        ("abc", ["ab", "abc"], "", "ab"),
        ("aab", ["ab"], "a", "ab"),
        ("naïve café", ["fé"], "naïve ca", "fé"),
        ("hello", ["hellos", "x"], "hello", None),
        ("", ["x"], "", None),
    ],
)
def test_stops_by_hand(text: str, stops: list[str], shown: str, stopped: str | None) -> None:
    tokenizer = TOKENIZERS["bytes"]
    pieces, met = streamed(tokenizer, tokenizer.encode(text), stops)
    assert ("".join(pieces), met) == (shown, stopped)


def test_text_is_held_back_and_released() -> None:
    tokenizer = TOKENIZERS["bytes"]
    stream = TextStream(tokenizer, ["abc", "é!"])
    shown = [stream.push(token) for token in tokenizer.encode("xababdé?é")]
    assert shown == ["x", "", "", "ab", "", "abd", "", "", "é?", "", ""]
    assert (stream.finish(), stream.finish(), stream.stopped) == ("é", "", None)


def test_a_cut_character_at_the_end_may_complete_a_stop() -> None:
    tokenizer = TOKENIZERS["bytes"]
    ids = tokenizer.encode("aé")[:-1]
    assert streamed(tokenizer, ids) == (["a", "", "\ufffd"], None)
    assert streamed(tokenizer, ids, ["\ufffd"]) == (["a", "", ""], "\ufffd")


def test_nothing_is_shown_after_a_stop() -> None:
    tokenizer = TOKENIZERS["bytes"]
    stream = TextStream(tokenizer, "b")
    assert [stream.push(i) for i in tokenizer.encode("abab")] == ["a", "", "", ""]
    assert (stream.finish(), stream.stopped) == ("", "b")


@pytest.mark.parametrize("stops", ["", [""], ["a", ""], [b"a"], [None], ["\ud800"]])
def test_stops_that_cannot_appear_are_refused(stops: object) -> None:
    with pytest.raises(Refusal, match="is no text that can appear") as caught:
        TextStream(TOKENIZERS["bytes"], stops)  # type: ignore[arg-type]
    assert caught.value.rule == "10"


def test_a_continuation_goes_on_from_its_prompt() -> None:
    tokenizer = TOKENIZERS["spm"]
    ids = tokenizer.encode("hello hello hello")
    stream = TextStream(tokenizer, continues=True)
    rest = "".join(stream.push(i) for i in ids[1:])
    assert tokenizer.decode(ids[:1]) + rest == tokenizer.decode(ids) == "hello hello hello"
    assert tokenizer._vocabulary.tokens[ids[0]] == SPACE + "hello"


# --- whole generations --------------------------------------------------------------------------


def load(path: Path) -> Engine:
    return Engine.load(path, cache_type="f32", n_ctx=96, threads=2)


def test_a_generation_is_the_text_of_its_tokens(tiny_gguf: Path) -> None:
    engine, timing = load(tiny_gguf), Timing()
    made = list(load(tiny_gguf).generate(PROMPT, 12))
    generation = engine.stream(PROMPT, 12, timing=timing)
    assert (generation.finish_reason, generation.tokens, generation.text) == (None, [], "")
    pieces = list(generation)
    assert all(pieces) and "".join(pieces) == generation.text == engine.tokenizer.decode(made)
    assert (generation.tokens, generation.finish_reason, generation.stop) == (made, "length", None)
    assert timing.tokens == {"prefill": 11, "decode": 11}


def test_a_stop_ends_a_generation_before_the_next_token_runs(tiny_gguf: Path) -> None:
    whole = load(tiny_gguf).stream(PROMPT, 12)
    text = "".join(whole)
    stop = text[5:8]
    engine = load(tiny_gguf)
    cut = engine.stream(PROMPT, 12, stop=["never", stop])
    assert "".join(cut) == text[: text.index(stop)] == cut.text
    assert (cut.finish_reason, cut.stop) == ("stop", stop)
    n = len(cut.tokens)
    assert n < 12 and cut.tokens == whole.tokens[:n]
    assert stop in engine.tokenizer.decode(cut.tokens)
    assert stop not in engine.tokenizer.decode(cut.tokens[:-1])
    assert engine.store.written(0) == len(PROMPT) + n - 1
    assert list(cut) == []


def test_an_end_token_ends_a_generation_and_is_no_text(tiny_gguf: Path) -> None:
    engine = load(tiny_gguf)
    second = list(load(tiny_gguf).generate(PROMPT, 2))[1]
    ends = Sampling(logit_bias={engine.tokenizer.eos: 1000.0})
    generation = engine.stream(PROMPT, 5, sampling=ends)
    assert list(generation) == [] and generation.tokens == [engine.tokenizer.eos]
    assert generation.finish_reason == "end"
    banned = engine.generate(PROMPT, 2, seq=0, sampling=Sampling(logit_bias={second: -np.inf}))
    assert second not in list(banned)


def test_an_end_token_that_is_a_word_is_no_text_either(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_tiny_gguf(path, metadata={"tokenizer.ggml.eos_token_id": 65})
    generation = load(path).stream(PROMPT, 5, sampling=Sampling(logit_bias={65: 1000.0}))
    assert list(generation) == [] and generation.tokens == [65]
    assert (generation.text, generation.finish_reason) == ("", "end")


def test_the_last_cell_ends_a_generation_without_a_limit(tiny_gguf: Path) -> None:
    engine = Engine.load(tiny_gguf, cache_type="f32", n_ctx=14)
    generation = engine.stream(PROMPT)
    assert "".join(generation) == engine.tokenizer.decode(generation.tokens)
    assert (len(generation.tokens), generation.finish_reason) == (4, "cache")


def test_a_seed_repeats_a_generation_and_a_sampler_goes_on(tiny_gguf: Path) -> None:
    options = Sampling(temperature=20, top_k=20, repeat_penalty=1.2, seed=11)
    first, again = (list(load(tiny_gguf).generate(PROMPT, 9, sampling=options)) for _ in "ab")
    other = list(load(tiny_gguf).generate(PROMPT, 9, sampling=Sampling(temperature=20, seed=12)))
    assert first == again != other
    engine, sampler = load(tiny_gguf), Sampler(options, 289)
    begun = list(engine.generate(PROMPT, 4, sampling=sampler))
    assert begun == first[:4]
    saved = sampler.state()
    rest = list(engine.generate(begun[-1:], 5, sampling=sampler))
    assert len(rest) == 5 and sampler.state() != saved
    assert sampler.state()["last"] == [*PROMPT, *begun, begun[-1], *rest]


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"stop": ""}, "stop string '' is no text"),
        ({"sampling": Sampling(logit_bias={289: 1.0})}, "token 289 is above 288"),
        ({"sampling": Sampler(Sampling(), 288)}, "Sampler of 288 tokens; give .* of 289 tokens"),
        ({"sampling": 0.7}, "sampling is 0.7; give a Sampling"),
        ({"max_tokens": 0}, "max_tokens 0 is below 1"),
    ],
)
def test_bad_arguments_are_refused_before_anything_runs(
    tiny_gguf: Path, how: dict[str, object], message: str
) -> None:
    engine = load(tiny_gguf)
    with pytest.raises(Refusal, match=message):
        engine.stream(PROMPT, **how)  # type: ignore[arg-type]
    assert not engine.store.has(0)

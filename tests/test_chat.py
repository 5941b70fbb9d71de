"""Conversations: what a turn feeds, where answers are cut, and what is taken back."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chats import LONG, Script, ask, assert_sound, scripted, talk_of
from refusals import refused

from minfer import Engine
from minfer.chat import rows
from minfer.chat.conversation import Conversation
from minfer.chat.events import Fed, Token
from minfer.chat.stream import Mark, Stream
from minfer.errors import Refusal
from minfer.models.chat_prompt import Prompt
from minfer.timing import Timing

SMILE = "\U0001f642"


@pytest.fixture
def engine(tiny_gguf: Path) -> Engine:
    return Engine.load(tiny_gguf, n_ctx=256)


def test_a_turn_feeds_what_follows_the_rows_that_are_there(engine: Engine) -> None:
    talk = scripted(engine, "the cat", "hello", system="in and on")
    plain = engine.tokenizer.encode
    first = [1, *plain("system\nin and on"), 2, *plain("\n"), 1, *plain("user\nhello"), 2]
    first += [*plain("\n"), 1, *plain("assistant\n")]
    answer, events = ask(talk, "hello")
    assert (answer.text, answer.finish_reason) == ("the cat", "end")
    assert talk.rows.stream.tokens == first + plain("the cat")
    assert answer.tokens == [*plain("the cat"), 2] and talk.need_insert_eot
    assert [e for e in events if isinstance(e, Fed)] == [Fed(len(first), len(first))]
    rest = [2, *plain("\n"), 1, *plain("user\nand"), 2, *plain("\n"), 1, *plain("assistant\n")]
    answer, events = ask(talk, "and")
    assert events[0] == Fed(len(rest), len(rest))
    assert talk.rows.stream.tokens == first + plain("the cat") + rest + plain("hello")
    assert [m["role"] for m in talk.messages] == ["system", *["user", "assistant"] * 2]
    assert talk.rows.turn == len(first + plain("the cat"))


def test_tokens_of_an_answer_are_never_encoded_again(engine: Engine) -> None:
    """An answer in single bytes, which encoding would join."""
    letters = [engine.tokenizer.encode(c)[0] for c in "the cat"]
    talk = talk_of(engine, Script(engine, *letters, 2, 2))
    ask(talk, "hello")
    before = list(talk.rows.stream.tokens)
    assert before[-7:] == letters != engine.tokenizer.encode("the cat")
    ask(talk, "and")
    assert talk.rows.stream.tokens[: len(before)] == before


def test_a_token_that_was_not_fed_begins_the_next_turn(engine: Engine) -> None:
    talk = talk_of(engine, LONG)
    answer, _ = ask(talk, "hello", n=5)
    assert answer.finish_reason == "length" and len(answer.tokens) == 5
    fed = list(talk.rows.stream.tokens)
    assert fed[-4:] == answer.tokens[:4] and talk.rows.stream.pending == (answer.tokens[4],)
    ask(talk, "and", n=2)
    assert talk.rows.stream.tokens[len(fed) : len(fed) + 2] == [answer.tokens[4], 2]


def test_answers_are_those_of_one_prompt_with_all_tokens(engine: Engine) -> None:
    """The turns' rows, bitwise: prompts as prompts, answers as answers."""
    talk = talk_of(engine, LONG)
    fresh = engine.with_cache("f32", 256)
    fresh.store.reserve(0, 256)
    for content in ("hello", "the cat", "and the"):
        before = talk.rows.written
        answer, _ = ask(talk, content, n=6)
        tokens = talk.rows.stream.tokens
        logits = fresh.prefill(tokens[before:-5])
        for token in answer.tokens:
            assert int(np.argmax(logits + ban(engine))) == token
            logits = fresh.decode(token) if fresh.store.written(0) < len(tokens) else logits
        assert (logits == talk.rows.logits).all()


def ban(engine: Engine) -> np.ndarray:
    banned = np.zeros(engine.n_vocab)
    banned[:3] = -np.inf
    return banned


@pytest.mark.parametrize(
    ("stop", "text", "fed"),
    [
        ("d t", "hello an", "hello "),  # from the inside of a token into another
        ("he ca", "hello and t", "hello and "),
        ("hello", "", ""),
        (" cat", "hello and the", "hello and the"),
        ("on the", "hello and the cat on", "hello and the cat on"),  # held back to the end
    ],
)
def test_stop_strings(engine: Engine, stop: str, text: str, fed: str) -> None:
    talk = scripted(engine, "hello and the cat on", "and")
    answer, _ = ask(talk, "x", stop=stop)
    met = stop in "hello and the cat on"
    assert (answer.text, answer.finish_reason) == (text, "stop" if met else "end")
    assert answer.stopped == (stop if met else None)
    assert talk.messages[-1] == {"role": "assistant", "content": text}
    assert talk.rows.stream.text.rpartition("assistant\n")[2] == fed
    talk.sampler.tokens[:] = [2]
    ask(talk, "y")
    assert f"assistant\n{text}<|im_end|>" in talk.rows.stream.text


def test_an_answer_cut_inside_a_character_ends_before_it(engine: Engine) -> None:
    ids = engine.tokenizer.encode(f"the {SMILE}x")
    whole = len(engine.tokenizer.encode("the "))
    for n in range(whole, len(ids)):
        talk = talk_of(engine, Script(engine, *ids))
        answer, _ = ask(talk, "hello", n=n)
        complete = n == len(ids) - 1
        assert answer.text == talk.messages[-1]["content"] == f"the {SMILE if complete else ''}"
        assert talk.rows.stream.text.endswith(f"assistant\n{answer.text}")
        assert bool(talk.rows.stream.pending) == (n in (whole, len(ids) - 1))


@pytest.mark.parametrize("at", range(1, 9))
def test_stopping_between_two_tokens_loses_nothing(engine: Engine, at: int) -> None:
    ids = engine.tokenizer.encode(f"the {SMILE} cat")
    talk = talk_of(engine, Script(engine, *ids, 2, 2))
    answer = talk.say("hello", stop=["cats", "he ca"])
    shown = ""
    for count, event in enumerate(answer):  # the first one is Fed
        shown += event.text if isinstance(event, Token) else ""
        if count == at:
            break
    shown += answer.stop()
    assert answer.stop() == ""
    assert_sound(talk)
    ends = len(ids) < at
    assert answer.finish_reason == ("end" if ends else "interrupted")
    assert shown == answer.text == talk.messages[-1]["content"]
    assert shown == engine.tokenizer.decode(answer.tokens).rstrip("\ufffd")
    talk.sampler.tokens[:] = [2]
    ask(talk, "and")
    assert f"assistant\n{shown}<|im_end|>" in talk.rows.stream.text


def test_stopping_before_the_first_token_takes_the_message_back(
    engine: Engine, monkeypatch
) -> None:
    monkeypatch.setattr(rows, "CHUNK", 8)
    talk = talk_of(engine, LONG)
    ask(talk, "hello", n=5)
    stream, messages = talk.rows.stream, list(talk.messages)
    for chunks in (1, 2, 3):
        answer = talk.say("the cat and the cat on the cat", max_tokens=3)
        for n in range(1, chunks + 1):
            assert next(answer).done == 8 * n
            assert len(talk.rows.stream.tokens) == talk.rows.written == len(stream.tokens) + 8 * n
        assert answer.stop() == "" and answer.taken_back and answer.finish_reason is None
        assert talk.messages == messages and talk.rows.stream == stream
        assert_sound(talk)
    again, _ = ask(talk, "and", n=5)
    other = talk_of(engine.with_cache("f32", 256), LONG)
    ask(other, "hello", n=5)
    assert ask(other, "and", n=5)[0].tokens == again.tokens
    assert other.rows.stream == talk.rows.stream


def test_stopping_before_the_first_text_takes_the_message_back(engine: Engine) -> None:
    """A token that begins a character is no text yet."""
    talk = talk_of(engine, Script(engine, *engine.tokenizer.encode(SMILE)))
    answer = talk.say("hello")
    assert isinstance(next(answer), Fed) and next(answer) == Token(answer.tokens[0], "")
    assert answer.stop() == "" and answer.taken_back and talk.messages == []
    assert talk.rows.written == 0


def test_a_message_that_was_never_begun_changes_nothing(engine: Engine) -> None:
    talk = talk_of(engine, LONG)
    talk.say("hello").stop()
    assert talk.messages == [] and talk.rows.written == 0
    answer = talk.say("hello", max_tokens=9)
    next(answer)
    for call in (lambda: list(talk.say("x")), talk.undo, talk.reset):
        refused(engine.store, "9.1", call, "an answer is under way")
    answer.stop()
    ask(talk, "hello", n=2)


def test_logits_that_are_not_finite_end_the_answer(engine: Engine, monkeypatch) -> None:
    talk = talk_of(engine, LONG)
    ask(talk, "hello", n=3)
    before = talk.rows.stream
    decode, count = engine.decode, iter(range(99))
    monkeypatch.setattr(
        engine, "decode", lambda *a: decode(*a) * (np.nan if next(count) == 2 else 1)
    )
    answer = talk.say("and", max_tokens=9)
    with pytest.raises(Refusal, match="logits at position") as caught:
        list(answer)
    assert caught.value.rule == "4.2"
    assert (answer.finish_reason, len(answer.tokens)) == ("interrupted", 3)
    assert talk.messages[-1] == {"role": "assistant", "content": answer.text}
    assert_sound(talk)
    monkeypatch.setattr(engine, "prefill", lambda *a: decode(5, 0) * np.nan)
    count = len(talk.messages)
    with pytest.raises(Refusal):
        list(talk.say("the", max_tokens=9))
    assert len(talk.messages) == count and before is not talk.rows.stream
    monkeypatch.undo()
    ask(talk, "the", n=3)


@pytest.mark.parametrize("call", range(1, 8))
def test_a_step_that_fails_is_no_part_of_the_chat(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, call: int
) -> None:
    """Whether it feeds a prompt, in three parts here, or a generated token."""
    monkeypatch.setattr(rows, "CHUNK", 8)
    talk = talk_of(engine, LONG)
    ask(talk, "hello", n=5)
    messages, forward, calls = list(talk.messages), engine.forward, iter(range(1, 99))

    def fails(*args: Any, **options: Any) -> Any:
        if next(calls) == call:
            raise RuntimeError("the kernel failed")
        return forward(*args, **options)

    monkeypatch.setattr(engine, "forward", fails)
    answer = talk.say("the cat and", max_tokens=9)
    with pytest.raises(RuntimeError):
        list(answer)
    assert answer.taken_back == (call <= 3) == (talk.messages == messages)
    assert len(answer.tokens) == max(0, call - 3)
    assert_sound(talk)
    monkeypatch.undo()
    ask(talk, "and", n=4)


def test_a_token_that_fails_has_no_row(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    talk = talk_of(engine, LONG)
    ask(talk, "hello", n=5)
    before = list(talk.rows.stream.tokens)
    monkeypatch.setattr(engine, "forward", None)
    with pytest.raises(TypeError):
        talk.rows.decode(5, Timing())
    assert talk.rows.stream.tokens == before and len(before) == talk.rows.written


def test_a_new_chat_forgets_what_its_sequence_held(engine: Engine) -> None:
    ask(talk_of(engine, LONG), "hello", n=5)
    talk = talk_of(engine, LONG)
    assert talk.rows.written == 0
    ask(talk, "the", n=5)


def test_text_that_is_alike_in_other_tokens_does_not_agree() -> None:
    marks = [Mark(0, 1, 0, 12), Mark(3, 2, 20, 30)]
    text = "<|im_start|>the cat <|im_end|>"
    stream = Stream([1, 5, 6, 2], text, marks)
    first, last = (mark[1:] for mark in marks)
    for controls, agreed in (
        ((first, last), 30),
        ((first,), 20),
        ((first, (0, 20, 30)), 20),
        ((last,), 0),
        ((first, (0, 15, 20), last), 15),
        ((first, last, (0, 40, 45)), 30),
    ):
        assert stream.agreed(Prompt(text + "and more text here", controls)) == agreed


def test_undo_is_as_if_it_had_never_been_said(engine: Engine) -> None:
    talk = talk_of(engine, LONG, system="in")
    ask(talk, "hello", n=5)
    kept = talk.messages[:]
    ask(talk, "the cat", n=7)
    assert talk.undo() == "the cat" and talk.messages == kept
    assert_sound(talk)
    assert "the cat<" not in talk.rows.stream.text
    answer, _ = ask(talk, "and", n=8)
    other = talk_of(engine.with_cache("f32", 256), LONG, system="in")
    ask(other, "hello", n=5)
    assert ask(other, "and", n=8)[0].tokens == answer.tokens
    assert (other.rows.logits == talk.rows.logits).all()
    assert [talk.undo(), talk.undo()] == ["and", "hello"]
    assert talk.rows.written == 0 and talk.messages == kept[:1]
    refused(engine.store, "9.1", talk.undo, "no turn to take back")
    ask(talk, "hello", n=5)


def test_reset_keeps_the_system_prompt(engine: Engine) -> None:
    talk = talk_of(engine, LONG, system="in")
    ask(talk, "hello", n=5)
    talk.reset()
    assert talk.messages == [{"role": "system", "content": "in"}] and talk.rows.written == 0
    ask(talk, "hello", n=5)


def test_max_tokens_is_checked_first(engine: Engine) -> None:
    talk = talk_of(engine)
    refused(engine.store, "10", lambda: talk.say("x", 0), "max_tokens 0 is below 1")
    refused(engine.store, "10", lambda: talk.say("x", stop=""), "stop string ''")


def test_penalties_see_earlier_turns(engine: Engine) -> None:
    """The last tokens before a turn's first pick are those of the rows."""
    talk = talk_of(engine, replace(LONG, repeat_penalty=1.5, repeat_last_n=12))
    ask(talk, "hello", n=3)
    answer = talk.say("the cat", max_tokens=4)
    next(answer)
    next(answer)
    assert talk.sampler.state()["last"] == [*talk.rows.stream.tokens[-11:], answer.tokens[0]]
    answer.stop()


@pytest.mark.model
def test_a_chat_with_smollm2(smollm2: Path) -> None:
    engine = Engine.load(smollm2, n_ctx=512, cache_type="q8_0")
    talk = Conversation(engine, [{"role": "system", "content": "Answer in one word."}])
    ask(talk, "What is the capital of France?", n=12)
    answer, events = ask(talk, "And of Italy?", n=12)
    assert "Rome" in answer.text and events[0].total < 20

"""A full context: the oldest turns leave it, in place or by feeding the rest again (9.2)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from chats import (
    LONG,
    TIME,
    Script,
    ask,
    assert_sound,
    dropped,
    logits_after,
    scripted,
    talk_of,
)
from refusals import refused
from test_chat_prompt import QWEN
from tiny_models import write_tiny_gguf

from minfer import Engine, Sampling
from minfer.chat.conversation import Conversation
from minfer.chat.events import Dropped, Fed
from minfer.chat.overflow import Shorter, removable
from minfer.chat.stream import Mark, Stream
from minfer.errors import Refusal
from minfer.models.chat_prompt import Prompt

N_CTX = 200
IN_PLACE = ("f32", "q8_0")
WORDS = ["the cat", "hello", "in and on", "and", "on the cat", "sand", "there"]


def engine_of(path: Path, fmt: str, n_ctx: int = N_CTX) -> Engine:
    return Engine.load(path, n_ctx=n_ctx, cache_type=fmt)


def filled(engine: Engine, turns: int = 5, n: int = 14) -> Conversation:
    """A chat whose turns have some 36 tokens each."""
    talk = talk_of(engine, LONG, system="in")
    for content in WORDS[:turns]:
        assert not dropped(ask(talk, content, n)[1])
    return talk


@pytest.mark.parametrize("fmt", IN_PLACE)
def test_turns_are_removed_in_place_before_a_turn(tiny_gguf: Path, fmt: str) -> None:
    engine = engine_of(tiny_gguf, fmt)
    talk = filled(engine)
    stream, messages = talk.rows.stream, list(talk.messages)
    values = engine.store.export_cells(0, 1, "v")
    answer, events = ask(talk, "there the cat", 4)
    (found,) = dropped(events)
    place = stream.text.index("<|im_start|>user")
    start = next(mark.at for mark in stream.marks if mark.start == place)
    end = start + found.rows
    dropped_text = engine.tokenizer.decode(stream.tokens[start:end], special=True)
    assert dropped_text.count("<|im_start|>user\n") == found.turns
    assert dropped_text.startswith("<|im_start|>user\nthe cat") and dropped_text.endswith("|>\n")
    assert found.rendered == "" and found.messages == 2 * found.turns == talk.left_out
    assert talk.messages[: len(messages)] == messages and len(talk.visible) < len(talk.messages)
    kept = stream.tokens[:start] + stream.tokens[end:]
    assert talk.rows.stream.tokens[: len(kept)] == kept
    after = engine.store.export_cells(0, 1, "v")
    assert (after[: len(kept)] == np.delete(values, slice(start, end), axis=0)).all()
    fed = [event for event in events if isinstance(event, Fed)]
    assert fed[0].total < 40 and len(answer.tokens) == 4
    assert str(found) == (
        f"the context is full: the oldest {found.turns} turns left it; "
        f"{found.rows} rows were removed in place"
    )


@pytest.mark.parametrize("fmt", ["f32", "f16", "q8_0"])
def test_where_nothing_is_removed_the_rest_is_fed_again(
    tiny_gguf: Path, fmt: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then answers are, bitwise, those of a chat that began with what is kept."""
    if fmt != "f16":
        monkeypatch.setenv("MINFER_NO_CONTEXT_SHIFT", "1")
    engine = engine_of(tiny_gguf, fmt)
    talk = filled(engine)
    answer, events = ask(talk, "there the cat", 6)
    (found,) = dropped(events)
    why = "an f16 cache cannot turn keys" if fmt == "f16" else "MINFER_NO_CONTEXT_SHIFT is set"
    assert (found.rendered, found.rows) == (why, 0) and str(found).endswith(f"fed again: {why}")
    kept = talk.visible[:-2]
    fresh = Conversation(engine.with_cache(fmt, N_CTX), kept, sampling=LONG, started=TIME)
    assert ask(fresh, "there the cat", 6)[0].tokens == answer.tokens
    assert (fresh.rows.logits == talk.rows.logits).all()
    assert fresh.rows.stream == talk.rows.stream


@pytest.mark.parametrize("fmt", ["f32", "f16", "q8_0"])
def test_an_answer_goes_on_when_the_last_cell_is_reached(tiny_gguf: Path, fmt: str) -> None:
    engine = engine_of(tiny_gguf, fmt)
    talk = filled(engine, turns=3)
    answer, events = ask(talk, "there", 150)
    found = dropped(events)
    assert len(found) == 2 and answer.finish_reason == "length" and len(answer.tokens) == 150
    assert {d.rendered for d in found} == {"" if fmt != "f16" else "an f16 cache cannot turn keys"}
    assert talk.left_out == 2 * sum(d.turns for d in found) == 6
    assert talk.visible[0]["content"] == "in"
    if fmt != "f16":
        turn = engine.tokenizer.decode(talk.rows.stream.tokens[talk.rows.turn :], special=True)
        assert turn.startswith("<|im_start|>user\nthere<|im_end|>")
    assert talk.visible[-2:] == [
        {"role": "user", "content": "there"},
        {"role": "assistant", "content": answer.text},
    ]
    ask(talk, "and", 3)


def test_an_answer_goes_on_bitwise_after_feeding_again(tiny_gguf: Path) -> None:
    """What was generated before is fed as a prompt; from there on tokens are generated."""
    engine = engine_of(tiny_gguf, "f16")
    talk = filled(engine, turns=3)
    answer = talk.say("there", 120)
    before = 0
    for event in answer:
        if isinstance(event, Dropped):
            before = len(answer.tokens) - 1
    stream = talk.rows.stream
    start = len(stream.tokens) - 119  # one is pending
    assert stream.tokens[start:] == answer.tokens[:-1] and before
    at = start + before
    wanted = logits_after(engine, stream.tokens[:at], stream.tokens[at:])
    assert (wanted == talk.rows.logits).all()


@pytest.mark.parametrize("fmt", ["f32", "f16"])
def test_an_answer_ends_when_nothing_may_leave(tiny_gguf: Path, fmt: str) -> None:
    engine = engine_of(tiny_gguf, fmt, n_ctx=64)
    talk = talk_of(engine, LONG, system="in")
    answer, events = ask(talk, "hello")
    assert answer.finish_reason == "cache" and not dropped(events)
    assert talk.rows.written == 64 and talk.rows.stream.pending == (answer.tokens[-1],)
    answer, events = ask(talk, "and", 3)
    assert [d.turns for d in dropped(events)] == [1] and talk.left_out == 2


def test_a_message_that_never_fits_is_refused_before_anything_runs(
    tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(tiny_gguf, "f32")
    talk = filled(engine, turns=2)
    messages, stream = list(talk.messages), talk.rows.stream
    monkeypatch.setattr(engine, "forward", None)
    error = refused(
        engine.store, "9.2", lambda: list(talk.say("x" * 300)), "needs", "n_ctx is 200", "--n-ctx"
    )
    assert error.facts["n_ctx"] == N_CTX and error.facts["tokens"] > 300
    assert talk.messages == messages and talk.rows.stream == stream and talk.left_out == 0
    monkeypatch.undo()
    ask(talk, "and", 3)
    tight = talk_of(engine_of(tiny_gguf, "f32", n_ctx=32), LONG, system="in" * 40)
    refused(tight.engine.store, "9.2", lambda: list(tight.say("x")), "n_ctx is 32")


def test_a_prompt_may_take_every_cell(tiny_gguf: Path) -> None:
    talk = talk_of(engine_of(tiny_gguf, "f32", n_ctx=64), LONG)
    size = len(talk.render([{"role": "user", "content": ""}]).encode(talk.engine.tokenizer)[0])
    answer, _ = ask(talk, "x" * (64 - size), None)
    assert talk.rows.written == 64 and (len(answer.tokens), answer.finish_reason) == (1, "cache")


def test_a_template_that_rewrites_history_is_not_cut_in_place(tmp_path: Path) -> None:
    write_tiny_gguf(tmp_path / "q.gguf", metadata={"tokenizer.chat_template": QWEN})
    engine = engine_of(tmp_path / "q.gguf", "f32")
    texts = [f"<think>{'on ' * 9}</think>\n\nthe cat {i}" for i in range(9)]
    talk = scripted(engine, *texts, system="in")
    found = []
    for i in range(9):
        answer = talk.say(f"hello {i} " + "and " * 12)
        found += dropped(list(answer))
        assert answer.finish_reason == "end"
    assert found and {d.rendered for d in found} == {"its turns do not match the rows"}
    prompt = talk.render(talk.visible[:-1])
    assert talk.rows.stream.text.startswith(prompt.text)


def test_a_template_without_control_tokens_is_fed_again(tmp_path: Path) -> None:
    plain = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "
    write_tiny_gguf(tmp_path / "p.gguf", metadata={"tokenizer.chat_template": plain})
    engine = engine_of(tmp_path / "p.gguf", "f32", n_ctx=96)
    talk = talk_of(engine, LONG)
    found = []
    for content in WORDS:
        found += dropped(list(talk.say(content, 8)))
        assert len(talk.rows.stream.tokens) == talk.rows.written
    assert found and {d.rendered for d in found} == {"its turns do not match the rows"}


def test_as_few_turns_go_as_free_a_quarter(tiny_gguf: Path) -> None:
    talk = filled(engine_of(tiny_gguf, "f32"))
    prompt = talk.render([*talk.visible, {"role": "user", "content": "x"}])
    talk.messages.append({"role": "user", "content": "x"})
    less = talk.shorter(talk.rows.stream, prompt)
    assert isinstance(less, Shorter) and less.size <= 150
    assert less.piece is not None and less.size + 33 > 150
    assert less.messages == 2 * less.turns


def test_a_last_turn_too_long_for_a_quarter_may_still_fit(tiny_gguf: Path) -> None:
    talk = filled(engine_of(tiny_gguf, "f32"), turns=2)
    _, events = ask(talk, "x" * 150, 2)
    assert [d.turns for d in dropped(events)] == [2] and talk.rows.written > 150


def test_a_piece_is_removed_only_between_control_tokens_that_match() -> None:
    """`<a>in<b>the<b>cat<c>` without `<b>the`, and what is nearly that."""
    marks = [Mark(0, 1, 0, 3), Mark(2, 2, 5, 8), Mark(4, 2, 11, 14), Mark(6, 3, 17, 20)]
    stream = Stream([1, 9, 2, 9, 2, 9, 3], "<a>in<b>the<b>cat<c>", marks)
    before = Prompt(stream.text + "on", tuple(mark[1:] for mark in marks))
    controls = ((1, 0, 3), (2, 5, 8), (3, 11, 14))
    assert removable(stream, before, Prompt("<a>in<b>cat<c>on", controls)) == (marks[1], marks[2])
    for text, others in (
        ("<a>in<b>sat<c>on", controls),
        ("<a>on<b>cat<c>on", controls),
        ("<a>in<b>cat<c>in", controls),
        ("<a>in<b>cat<c>on", controls[:2]),
        ("<a>in<b>cat<c>on", (*controls[:2], (4, 11, 14))),
        (before.text, before.controls),
        ("<a>in<b>cat<c>o", controls),
    ):
        assert removable(stream, before, Prompt(text, others)) is None
    other = Prompt("<a>in<b>the<b>can<c>on", before.controls)
    assert removable(stream, other, Prompt("<a>in<b>can<c>on", controls)) is None


def test_stopping_while_turns_go(tiny_gguf: Path) -> None:
    for fmt in ("f32", "f16"):
        talk = filled(engine_of(tiny_gguf, fmt))
        messages, written = list(talk.messages), talk.rows.written
        answer = talk.say("there the cat", 6)
        event = next(answer)
        assert isinstance(event, Dropped)
        answer.stop()
        assert talk.rows.written == written - event.rows  # no other row went
        assert answer.taken_back and talk.messages == messages
        assert len(talk.rows.stream.tokens) == talk.rows.written
        _, events = ask(talk, "there the cat", 6)
        assert not dropped(events)


def test_stopping_while_an_answer_is_fed_again(tiny_gguf: Path, monkeypatch) -> None:
    """The text stays; its rows are fed with the next turn."""
    monkeypatch.setattr("minfer.chat.rows.CHUNK", 16)
    for count in range(1, 6):
        talk = filled(engine_of(tiny_gguf, "f16"), turns=3)
        answer = talk.say("there", 150)
        while not isinstance(next(answer), Dropped):
            pass
        for _ in range(count):
            next(answer)
        answer.stop()
        assert answer.finish_reason == "interrupted" and talk.messages[-1]["content"] == answer.text
        assert_sound(talk)
        ask(talk, "and", 3)


@pytest.mark.parametrize("fmt", ["f32", "f16"])
def test_taking_a_message_back_after_turns_left(tiny_gguf: Path, fmt: str) -> None:
    """An answer of control tokens has no text; the rows before it are others by then."""
    engine = engine_of(tiny_gguf, fmt)
    talk = filled(engine, turns=3)
    messages, talk.sampler = list(talk.messages), Script(engine, *[1] * 200)
    answer = talk.say("there")
    while not isinstance(next(answer), Dropped):
        pass
    for _ in range(9):
        next(answer)
    assert answer.stop() == "" and answer.taken_back and talk.messages == messages
    assert_sound(talk)
    talk.sampler = Script(engine, 5, 2)
    ask(talk, "and")


def test_undo_after_turns_left(tiny_gguf: Path) -> None:
    talk = filled(engine_of(tiny_gguf, "f32"))
    ask(talk, "there the cat", 4)
    turns = len(talk.messages) // 2
    for left in range(turns - 1, -1, -1):
        talk.undo()
        assert len(talk.messages) == 1 + 2 * left
        assert talk.left_out <= 2 * left
        if left:
            assert_sound(talk)
    ask(talk, "hello", 4)


OPTIONS = Sampling(temperature=1.5, seed=3, logit_bias={0: -np.inf, 1: -np.inf, 2: 0.5})


@pytest.mark.parametrize("seed", range(12))
def test_any_course_of_a_chat_keeps_rows_and_text_together(tiny_gguf: Path, seed: int) -> None:
    """Random messages, lengths, stop strings, interrupts, undos and resets in a small context."""
    rng = np.random.default_rng(seed)
    talk = talk_of(engine_of(tiny_gguf, ["f32", "f16", "q8_0"][seed % 3], 120), OPTIONS, "in")
    for _ in range(25):
        move = rng.random()
        if move < 0.1:
            turns = [m for m in talk.messages if m["role"] == "user"]
            assert talk.undo() == turns[-1]["content"] if turns else True
        elif move < 0.13:
            talk.reset()
        else:
            content = " ".join(rng.choice([*WORDS, "é🙂", "<|im_end|>"], rng.integers(1, 12)))
            answer = talk.say(
                content, int(rng.integers(1, 60)), stop=["the", "e"][: rng.integers(3)]
            )
            last = int(rng.integers(1, 90))
            try:
                for count, _ in enumerate(answer):
                    if count == last:
                        break
            except Refusal as refusal:
                assert refusal.rule == "9.2"
            answer.stop()
        assert_sound(talk)

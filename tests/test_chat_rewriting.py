"""Conversations under templates that rewrite, trim or leave out what was said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from chats import LONG, ask, logits_after, scripted, talk_of
from refusals import refused
from test_chat_prompt import QWEN
from tiny_models import CHAT_TEMPLATE, write_tiny_gguf

from minfer import Engine
from minfer.chat.conversation import Conversation
from minfer.chat.events import Fed
from minfer.errors import Refusal


def engine_with(tmp_path: Path, template: str | None, **sizes: Any) -> Engine:
    path = tmp_path / "t.gguf"
    write_tiny_gguf(path, metadata={"tokenizer.chat_template": template}, **sizes)
    return Engine.load(path, n_ctx=256)


def test_a_template_that_rewrites_history_has_it_fed_again(tmp_path: Path) -> None:
    """What an answer thought leaves the rendering with the next turn, and so the cache."""
    engine = engine_with(tmp_path, QWEN)
    talk = scripted(engine, "<think>on the</think>\n\nthe cat", "hello", "and")
    answer = talk.say("hello")
    list(answer)
    assert answer.text.startswith("<think>") and "think" in talk.rows.stream.text
    base = talk.rows.stream.text.index("<think>")
    list(talk.say("x"))
    assert "think" not in talk.rows.stream.text
    assert talk.rows.stream.text[base:].startswith("the cat<|im_end|>\n")
    prompt = talk.render(talk.messages[:-1])
    assert talk.rows.stream.tokens[:-1] == prompt.encode(engine.tokenizer)[0]
    wanted = logits_after(engine, talk.rows.stream.tokens[:-1], talk.rows.stream.tokens[-1:])
    assert (talk.rows.logits == wanted).all()
    list(talk.say("y"))
    assert talk.messages[1]["content"].startswith("<think>")


@pytest.mark.parametrize("space", [" ", "  \n"])
def test_a_template_that_trims_answers(tmp_path: Path, space: str) -> None:
    trimmed = QWEN.replace("+ content +", "+ content | trim +")
    engine = engine_with(tmp_path, trimmed)
    talk = scripted(engine, f"the cat{space}", "hello")
    list(talk.say("x"))
    list(talk.say("y"))
    assert "\nthe cat<|im_end|>" in talk.rows.stream.text
    assert (
        talk.rows.stream.tokens[:-1] == talk.render(talk.messages[:-1]).encode(engine.tokenizer)[0]
    )


def test_a_template_that_leaves_the_message_out(tmp_path: Path) -> None:
    """Then the rows of the whole prompt are there, and the last is made again for logits."""
    talk = talk_of(engine_with(tmp_path, "{{ messages[0].content }}<|im_end|>"), LONG)
    first = talk.say("hello", max_tokens=4)
    list(first)
    for _ in range(2):
        answer = talk.say("x", max_tokens=4)
        assert next(answer) == Fed(1, 1)
        list(answer)
        assert answer.tokens == first.tokens


def test_a_template_sees_the_time_at_which_the_chat_began(tmp_path: Path) -> None:
    engine = engine_with(tmp_path, "{{ strftime_now('%Y-%m-%d %H') }}{{ messages[-1].content }}")
    talk = talk_of(engine, LONG)
    list(talk.say("x", max_tokens=2))
    assert talk.rows.stream.text.startswith("2024-01-31 12x")


def test_an_undo_that_the_template_refuses_changes_nothing(tmp_path: Path) -> None:
    refuses = "{% if messages | length == 2 %}{{ raise_exception('no') }}{% endif %}"
    engine = engine_with(tmp_path, refuses + CHAT_TEMPLATE)
    talk = talk_of(engine, LONG)
    for content in ("hello", "the"):
        list(talk.say(content, max_tokens=3))
    messages, stream = list(talk.messages), talk.rows.stream
    refused(engine.store, "0.2", talk.undo, "refuses these messages: no")
    assert talk.messages == messages and talk.rows.stream is stream


def test_a_message_that_cannot_be_kept_apart_is_refused_and_taken_back(tmp_path: Path) -> None:
    engine = engine_with(
        tmp_path, "{% for m in messages %}{{ m.content | e }}<|im_end|>{% endfor %}"
    )
    talk = scripted(engine, "the", "cat")
    list(talk.say("x"))
    messages, digest = list(talk.messages), engine.store.digest()
    with pytest.raises(Refusal, match="could become the control token"):
        list(talk.say("<|im_end|>"))
    with pytest.raises(Refusal, match="surrogate"):
        list(talk.say("\ud800"))
    assert talk.messages == messages and engine.store.digest() == digest
    list(talk.say("y"))


def test_a_model_without_a_template_is_refused(tmp_path: Path) -> None:
    engine = engine_with(tmp_path, None)
    refused(engine.store, "0.3", lambda: Conversation(engine), "has no chat template")


def test_control_tokens_spelled_in_messages_and_answers_stay_text(tiny_gguf: Path) -> None:
    engine = Engine.load(tiny_gguf, n_ctx=256)
    spelled = "<|im_end|>\n<|im_start|>system\nin"
    talk = scripted(engine, f"the {spelled}", "hello")
    ask(talk, spelled)
    ask(talk, "and")
    controls = [token for token in talk.rows.stream.tokens if token < 3]
    assert controls == [1, 2, 1, 2, 1, 2, 1]
    assert talk.rows.stream.text.count("<|im_end|>") == 5

"""Chats in files: resumed as if never stopped, and every reason why one is fed again."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chats import LONG, RANDOM, ask, assert_sound, dropped
from tiny_models import write_tiny_gguf

from minfer import Engine, Sampling
from minfer.chat.conversation import Conversation
from minfer.chat.session import NEW, RENDERED, RESUMED, Opened, Session, cache_of
from minfer.chat.state import host_state
from minfer.errors import Refusal
from minfer.timing import Timing

FORMATS = ("f32", "f16", "q8_0")
CONTENTS = ("hello", "the cat and the cat", "in and on <|im_end|> é🙂", "and", "there")


def engine_of(path: Path, fmt: str = "f32", n_ctx: int = 256) -> Engine:
    return Engine.load(path, n_ctx=n_ctx, cache_type=fmt)


def opened(
    path: Path | None, engine: Engine, sampling: Sampling = LONG, system: str | None = None
) -> tuple[Conversation, Opened, Session]:
    files = Session(path, system)
    talk, how = files.open(engine, sampling)
    return talk, how, files


def chat(path: Path, engine: Engine, contents: tuple[str, ...] = CONTENTS[:2]) -> Conversation:
    """A saved chat."""
    talk, _, files = opened(path, engine, system="in" if not path.exists() else None)
    for content in contents:
        ask(talk, content, 6)
    files.save(talk)
    return talk


def no_forward(*args: object) -> Any:
    raise AssertionError("something was fed")


@pytest.mark.parametrize("sampling", [LONG, RANDOM], ids=["greedy", "sampled"])
@pytest.mark.parametrize("fmt", FORMATS)
def test_a_resumed_chat_gives_the_tokens_of_an_uninterrupted_one(
    tiny_gguf: Path, tmp_path: Path, fmt: str, sampling: Sampling
) -> None:
    path, lengths = tmp_path / "c.json", (6, 3, 9, 4, 5)
    whole, _, _ = opened(None, engine_of(tiny_gguf, fmt, 200), sampling)
    wanted = [
        ask(whole, content, n)[0].tokens for content, n in zip(CONTENTS, lengths, strict=True)
    ]
    for content, n, tokens in zip(CONTENTS, lengths, wanted, strict=True):
        engine = engine_of(tiny_gguf, fmt, 200)
        forward, engine.forward = engine.forward, no_forward  # type: ignore[method-assign]
        given = replace(sampling, seed=None) if path.exists() else sampling
        talk, how, files = opened(path, engine, given)
        assert how == (Opened(RESUMED) if talk.messages else Opened(NEW))
        assert_sound(talk)
        engine.forward = forward  # type: ignore[method-assign]
        assert ask(talk, content, n)[0].tokens == tokens
        files.save(talk)
    assert talk.messages == whole.messages and talk.rows.stream == whole.rows.stream
    assert (talk.rows.logits == whole.rows.logits).all()
    assert talk.left_out == whole.left_out


@pytest.mark.parametrize("fmt", FORMATS)
def test_a_chat_whose_context_was_full_is_resumed(
    tiny_gguf: Path, tmp_path: Path, fmt: str
) -> None:
    path = tmp_path / "c.json"
    engine = engine_of(tiny_gguf, fmt, 120)
    talk = chat(path, engine, CONTENTS[:4])
    assert talk.left_out and json.loads(path.read_text())["left_out"] == talk.left_out
    wanted = ask(talk, "and so on", 20)[0].tokens
    other, how, _ = opened(path, engine_of(tiny_gguf, fmt, 120))
    assert how == Opened(RESUMED) and len(other.messages) == 9 and other.left_out
    assert ask(other, "and so on", 20)[0].tokens == wanted


def test_another_seed_is_obeyed(tiny_gguf: Path, tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    talk, _, files = opened(path, engine_of(tiny_gguf), RANDOM)
    ask(talk, "hello", 6)
    files.save(talk)
    answers = {}
    for seed in (None, RANDOM.seed, 8, 9):
        talk, how, _ = opened(path, engine_of(tiny_gguf), replace(RANDOM, seed=seed))
        assert how.how == RESUMED and talk.sampler.sampling.seed == (seed or RANDOM.seed)
        answers[seed] = ask(talk, "and", 8)[0].tokens
    assert answers[None] == answers[RANDOM.seed]
    assert len({tuple(tokens) for tokens in answers.values()}) == 3
    talk, how, _ = opened(path, engine_of(tiny_gguf), LONG)
    assert how.how == RESUMED and talk.sampler.sampling == LONG


def edit(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    told = json.loads(path.read_text())
    change(told)
    path.write_text(json.dumps(told))


def resave(path: Path, engine: Engine, change: Callable[[dict[str, Any]], object]) -> None:
    """The cache once more, under another state."""
    states: list[dict[str, Any]] = []
    engine.resume(cache_of(path), states.append)
    change(states[0])
    engine.save(cache_of(path), states[0])


EDITS: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "an edited answer": (
        lambda told: told["messages"][2].update(content="the"),
        "message 3, 'the', was edited",
    ),
    "another system prompt": (
        lambda told: told["messages"][0].update(content="on"),
        "message 1, 'on', was edited",
    ),
    "fewer messages": (
        lambda told: told.update(messages=told["messages"][:3]),
        "is of 5 messages and the history has 3",
    ),
    "more messages": (
        lambda told: told["messages"].extend(told["messages"][1:3]),
        "is of 5 messages and the history has 7",
    ),
    "another start": (lambda told: told.update(started="2020-01-01T00:00:00"), "2020-01-01"),
}


@pytest.mark.parametrize(("change", "reason"), EDITS.values(), ids=EDITS.keys())
def test_an_edited_history_is_fed_again(
    tiny_gguf: Path, tmp_path: Path, change: Callable[[dict[str, Any]], object], reason: str
) -> None:
    path = tmp_path / "c.json"
    chat(path, engine_of(tiny_gguf))
    edit(path, change)
    fed_again(path, tiny_gguf, reason)


STATES: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "version": (lambda s: s.update(version=2), "has version 2 and this minfer reads 1"),
    "no version": (lambda s: s.pop("version"), "has version None and this minfer reads 1"),
    "messages": (lambda s: s.update(messages=5), "messages are no list"),
    "id": (lambda s: s["stream_tokens"].__setitem__(3, 289), "token of stream_tokens 289 is above"),
    "id type": (lambda s: s["stream_tokens"].__setitem__(3, 1.0), "is no whole number"),
    "fewer ids": (lambda s: s["stream_tokens"].pop(), "current_pos"),
    "more rows": (
        lambda s: s.update(
            stream_tokens=s["stream_tokens"] + s["pending"],
            current_pos=s["current_pos"] + 1,
            pending=[],
        ),
        "rows {0: ",
    ),
    "another id": (lambda s: s["stream_tokens"].__setitem__(6, 90), "do not spell its text"),
    "another pending": (lambda s: s.update(pending=[90]), "do not spell its text"),
    "no text": (lambda s: s.update(text="", marks=[], need_insert_eot=False), "do not spell"),
    "half a turn": (lambda s: s.update(left_out=1), "1 messages left out are no whole turns"),
    "all left out": (lambda s: s.update(left_out=4), "4 messages left out are no whole turns"),
    "version that is true": (
        lambda s: s.update(version=True),
        "has version True",
    ),
    "position": (lambda s: s.update(current_pos=True), "current_pos True is no whole number"),
    "turn": (lambda s: s.update(turn_pos=999), "turn_pos 999 is above"),
    "left out": (lambda s: s.update(left_out=5), "left_out 5 is above 4"),
    "end of turn": (lambda s: s.update(need_insert_eot=False), "need_insert_eot contradicts"),
    "two pending": (lambda s: s.update(pending=[5, 6]), "pending are 2 tokens"),
    "text": (lambda s: s.update(text=None), "text is no str"),
    "short text": (lambda s: s.update(text=s["text"][:9]), "lies outside"),
    "mark": (lambda s: s["marks"].append([1, 2]), "mark [1, 2] is not three whole numbers"),
    "mark place": (lambda s: s["marks"].append([-1, 0, 4]), "mark [-1, 0, 4] lies outside"),
    "mark text": (lambda s: s["marks"].append([3, 0, 4]), "is not spelled '<|im'"),
    "mark order": (lambda s: s["marks"].reverse(), "are not in order"),
    "sampler": (lambda s: s["prev_tokens"].pop("random"), "this is no state of a sampler"),
    "seed": (lambda s: s["prev_tokens"].update(seed=-1), "seed -1 is below 0"),
    "started": (lambda s: s.update(started="now"), "started 'now' is no time"),
}


@pytest.mark.parametrize(("change", "reason"), STATES.values(), ids=STATES.keys())
def test_a_state_that_is_not_sound_is_not_taken(
    tiny_gguf: Path, tmp_path: Path, change: Callable[[dict[str, Any]], object], reason: str
) -> None:
    path = tmp_path / "c.json"
    engine = engine_of(tiny_gguf)
    chat(path, engine)
    resave(path, engine, change)
    fed_again(path, tiny_gguf, reason)


def test_a_cache_of_one_message(tiny_gguf: Path, tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    chat(path, engine_of(tiny_gguf), ())
    edit(path, lambda told: told.update(messages=[]))
    assert "is of 1 message and the history has 0" in opened(path, engine_of(tiny_gguf))[1].reason


def test_rows_of_other_sequences_are_not_taken(tiny_gguf: Path, tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    engine = engine_of(tiny_gguf)
    talk = chat(path, engine)
    engine.store.resize(0, 200)
    engine.store.reserve(5, 9)
    engine.save(cache_of(path), host_state(talk))
    fed_again(path, tiny_gguf, "the cache holds {0: ")


def fed_again(path: Path, model: Path, reason: str, fmt: str = "f32", n_ctx: int = 256) -> None:
    """The chat is rendered for this reason, goes on as a fresh one, and resumes afterwards."""
    before = path.read_bytes()
    talk, how, files = opened(path, engine_of(model, fmt, n_ctx))
    assert how.how == RENDERED and reason in how.reason
    assert path.read_bytes() == before
    assert talk.rows.written == 0 and talk.engine.store.sequences() == [0]
    assert talk.engine.store.cap(0) == n_ctx
    list(talk.catch_up(Timing()))
    assert_sound(talk)
    assert talk.rows.written > 30 and talk.rows.stream.text.endswith("<|im_end|>")
    told = [dict(message) for message in talk.messages]
    fresh = Conversation(engine_of(model, fmt, n_ctx), told, sampling=LONG, started=talk.started)
    answers = [ask(chat, "and", 8)[0].tokens for chat in (talk, fresh)]
    assert answers[0] == answers[1] and (talk.rows.logits == fresh.rows.logits).all()
    files.save(talk)
    assert opened(path, engine_of(model, fmt, n_ctx))[1] == Opened(RESUMED)


def test_another_run_is_told_and_fed_again(tiny_gguf: Path, tmp_path: Path) -> None:
    path, other = tmp_path / "c.json", tmp_path / "other.gguf"
    chat(path, engine_of(tiny_gguf))
    kv = cache_of(path).read_bytes()
    write_tiny_gguf(other, seed=5)
    for model, fmt, n_ctx, reason in (
        (tiny_gguf, "f32", 128, "n_ctx 256"),
        (tiny_gguf, "q8_0", 256, "q8_0"),
        (other, "f32", 256, "model"),
    ):
        cache_of(path).write_bytes(kv)
        history_now = path.read_bytes()
        fed_again(path, model, reason, fmt, n_ctx)
        path.write_bytes(history_now)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda data: None, "is not there"),
        (lambda data: data[:-1], ""),
        (lambda data: data[:500] + bytes([data[500] ^ 1]) + data[501:], ""),
    ],
    ids=["missing", "cut", "flipped"],
)
def test_a_cache_that_is_damaged_is_fed_again(
    tiny_gguf: Path, tmp_path: Path, damage: Callable[[bytes], bytes | None], reason: str
) -> None:
    path = tmp_path / "c.json"
    chat(path, engine_of(tiny_gguf))
    data = damage(cache_of(path).read_bytes())
    cache_of(path).unlink()
    if data is not None:
        cache_of(path).write_bytes(data)
    fed_again(path, tiny_gguf, reason or "c.json.kv")


def test_a_cache_of_other_numerics_is_resumed_and_told(tiny_gguf: Path, tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    chat(path, engine_of(tiny_gguf))
    engine = Engine.load(tiny_gguf, n_ctx=256, cache_type="f32", weights="f16")
    talk, how, _ = opened(path, engine)
    assert how.how == RESUMED and "weights f32 then, f16 now" in how.reason
    ask(talk, "and", 4)


def test_a_message_without_an_answer_is_kept_apart(tiny_gguf: Path, tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    chat(path, engine_of(tiny_gguf))
    edit(path, lambda told: told["messages"].append({"role": "user", "content": "why"}))
    talk, how, files = opened(path, engine_of(tiny_gguf))
    assert how == Opened(RESUMED) and files.unanswered == "why"
    assert len(talk.messages) == 5
    files.write(talk)
    assert json.loads(path.read_text())["messages"][-1]["content"] == "why"


def test_the_order_of_saving(tiny_gguf: Path, tmp_path: Path, monkeypatch) -> None:
    """The history first: where the cache cannot be saved, no text is lost."""
    path = tmp_path / "c.json"
    talk = chat(path, engine_of(tiny_gguf))
    ask(talk, "and", 4)
    monkeypatch.setattr(talk.engine, "save", lambda *a: (_ for _ in ()).throw(OSError(28, "full")))
    with pytest.raises(Refusal, match="full; /save it elsewhere"):
        Session(path, None).save(talk)
    assert len(json.loads(path.read_text())["messages"]) == 7
    fed_again(path, tiny_gguf, "is of 5 messages and the history has 7")


def test_saving_elsewhere_overwrites_nothing(tiny_gguf: Path, tmp_path: Path) -> None:
    talk, _, files = opened(None, engine_of(tiny_gguf))
    ask(talk, "hello", 4)
    assert files.save(talk) is None and not list(tmp_path.iterdir())
    path = tmp_path / "copy.json"
    assert files.save(talk, path) == path
    assert opened(path, engine_of(tiny_gguf))[1] == Opened(RESUMED)
    for there in (path, cache_of(path)):
        with pytest.raises(Refusal, match="is there already; give a new name"):
            files.save(talk, path)
        there.unlink()
    for name in ("no/c.json", "x" * 300, "a\0b"):
        with pytest.raises(Refusal) as caught:
            files.save(talk, tmp_path / name)
        assert caught.value.rule in ("8.3", "9.1")


def test_a_cache_without_its_history_is_not_overwritten(tiny_gguf: Path, tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    chat(path, engine_of(tiny_gguf))
    path.unlink()
    with pytest.raises(Refusal, match="a new chat would overwrite it; move it away"):
        Session(path, None)


def test_a_history_too_long_drops_its_oldest_turns(tiny_gguf: Path, tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    chat(path, engine_of(tiny_gguf), CONTENTS)
    talk, _, _ = opened(path, engine_of(tiny_gguf, n_ctx=128))
    (found,) = dropped(list(talk.catch_up(Timing())))
    assert found.rendered and talk.left_out == found.messages > 0
    assert_sound(talk)
    ask(talk, "and", 4)


def test_feeding_a_history_can_be_stopped(tiny_gguf: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("minfer.chat.rows.CHUNK", 16)
    path = tmp_path / "c.json"
    chat(path, engine_of(tiny_gguf), CONTENTS[:4])
    cache_of(path).unlink()
    answers = set()
    for chunks in (1, 3, 5, 99):
        talk, _, _ = opened(path, engine_of(tiny_gguf))
        events = talk.catch_up(Timing())
        for _ in zip(range(chunks), events, strict=False):
            pass
        events.close()
        assert_sound(talk)
        assert talk.rows.written <= 16 * chunks and (talk.rows.written or chunks == 1)
        answers.add(tuple(ask(talk, "and", 8)[0].tokens))
    assert len(answers) == 1


@pytest.mark.model
@pytest.mark.parametrize("fmt", FORMATS)
def test_smollm2_is_resumed(smollm2: Path, tmp_path: Path, fmt: str) -> None:
    sampling = Sampling(temperature=0.8, top_k=40, seed=5, repeat_penalty=1.1)
    path = tmp_path / "c.json"
    engine = engine_of(smollm2, fmt, 160)
    talk, _, files = opened(path, engine, sampling, "Be brief.")
    ask(talk, "Name three animals.", 40)
    files.save(talk)
    wanted = [ask(talk, text, 60)[0].tokens for text in ("And three plants?", "Which is tall?")]
    other = engine.with_cache(fmt, 160)
    again, how, _ = opened(path, other, sampling)
    assert how == Opened(RESUMED)
    assert [ask(again, t, 60)[0].tokens for t in ("And three plants?", "Which is tall?")] == wanted
    assert np.array_equal(again.rows.logits, talk.rows.logits)  # type: ignore[arg-type]

"""The history of a chat: a JSON file that people may read and edit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from test_chat_session import chat, engine_of, opened

from minfer.chat import history, session
from minfer.chat.session import NEW, RENDERED, RESUMED, Opened, Session
from minfer.errors import Damaged, Refusal
from minfer.timing import Timing


def test_a_new_chat_writes_its_history_at_once(tiny_gguf: Path, tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    talk, how, files = opened(path, engine_of(tiny_gguf), system="in")
    assert how == Opened(NEW)
    first = json.loads(path.read_text())
    assert first["messages"] == [{"role": "system", "content": "in"}]
    assert first == {
        "version": 1,
        "started": talk.started.isoformat(),
        "left_out": 0,
        "messages": talk.messages,
    }
    files.unanswered = "é <b>"
    files.write(talk)
    assert '"content": "é <b>"' in path.read_text() and "\n  " in path.read_text()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["c.json"]


def test_system_prompts(tiny_gguf: Path, tmp_path: Path) -> None:
    path, plain = tmp_path / "c.json", tmp_path / "plain.json"
    chat(path, engine_of(tiny_gguf))
    assert opened(path, engine_of(tiny_gguf), system="in")[1].how == RESUMED
    opened(plain, engine_of(tiny_gguf))
    for file, said in ((path, "begins with the system prompt 'in'"), (plain, "which has none")):
        before = file.read_bytes()
        with pytest.raises(Refusal, match=said) as caught:
            Session(file, "on")
        assert caught.value.rule == "9.1" and "leave --system out" in caught.value.message
        assert file.read_bytes() == before
    assert Session(plain, "").path == plain


BROKEN = {
    "no JSON": ("{", "is no JSON"),
    "empty": ("", "is no JSON"),
    "deep": ("[" * 100_000, "is no JSON"),
    "no object": ("[1]", "it is no object"),
    "version": ('{"version": 2}', "its version is 2 and this minfer reads 1"),
    "no version": ("{}", "its version is None"),
    "key": ('{"version": 1, "messages": [], "model": 1}', "it has 'model', which is none of"),
    "no messages": ('{"version": 1}', "its messages are no list"),
    "message": ('{"version": 1, "messages": ["x"]}', "message 1 is not a role and a content"),
    "keys": (
        '{"version": 1, "messages": [{"role": "user", "content": "x", "name": "y"}]}',
        "message 1 is not a role and a content",
    ),
    "role": (
        '{"version": 1, "messages": [{"role": "tool", "content": "x"}]}',
        "message 1 has the role 'tool', none of system, user, assistant",
    ),
    "late system": (
        '{"version": 1, "messages": [{"role": "user", "content": "x"},'
        ' {"role": "system", "content": "x"}]}',
        "message 2 is a system prompt after other messages",
    ),
    "content": (
        '{"version": 1, "messages": [{"role": "user", "content": null}]}',
        "the content of message 1 is no text",
    ),
    "surrogate": (
        '{"version": 1, "messages": [{"role": "user", "content": "\\ud800"}]}',
        "the content of message 1 is no text",
    ),
    "time": ('{"version": 1, "messages": [], "started": 5}', "started 5 is no time"),
}


@pytest.mark.parametrize(("text", "reason"), BROKEN.values(), ids=BROKEN.keys())
def test_a_broken_history_is_told_and_left_alone(tmp_path: Path, text: str, reason: str) -> None:
    path = tmp_path / "c.json"
    path.write_text(text)
    with pytest.raises(Refusal) as caught:
        Session(path, None)
    assert reason in caught.value.message and str(path) in caught.value.message
    assert "mend it or give another name" in caught.value.message
    assert isinstance(caught.value, Damaged) == ("no JSON" in reason)
    assert path.read_text() == text


def test_a_history_written_by_hand(tiny_gguf: Path, tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    messages = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "the"}]
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps({"version": 1, "messages": messages}).encode())
    talk, how, _ = opened(path, engine_of(tiny_gguf))
    assert how.how == RENDERED and "is not there" in how.reason
    list(talk.catch_up(Timing()))
    prompt = talk.render(messages, answer=False)
    assert talk.rows.stream.tokens == prompt.encode(talk.engine.tokenizer)[0][:-1]


def test_a_write_is_atomic(tiny_gguf: Path, tmp_path: Path, monkeypatch) -> None:
    path = tmp_path / "c.json"
    talk = chat(path, engine_of(tiny_gguf))
    before = path.read_bytes()

    def fails(*args: object) -> None:
        raise OSError(5, "I/O error")

    monkeypatch.setattr("os.fsync", fails)
    with pytest.raises(Refusal, match="cannot be written: I/O error"):
        session.write_history(path, talk, "lost")
    assert path.read_bytes() == before and history.read(path) is not None

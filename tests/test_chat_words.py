"""What a chat says, and what its commands take."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_chat_command import chat, only, remarks  # noqa: F401  a fixture
from test_chat_terminal import Person, read, sit_down  # noqa: F401  a fixture
from test_chat_terminal import files as files  # a fixture

from minfer.chat.reading import DRAFT, as_sent, as_typed

Chat = Callable[..., Any]
STEERING = "\x1b[2J\x9b\u202etext"


def test_no_file_steers_a_terminal(chat: Chat, tmp_path: Path) -> None:  # noqa: F811
    path = tmp_path / "c.json"
    messages = [{"role": "user", "content": STEERING}]
    path.write_text(json.dumps({"version": 1, "messages": messages}))
    waiting = chat("", "--session", path).err
    undone = chat("/undo\n", "--session", path)
    messages.append({"role": "assistant", "content": "the"})
    path.write_text(json.dumps({"version": 1, "messages": messages}))
    Path(f"{path}.kv").unlink()
    undone = chat("/undo\n", "--session", path).err
    for shown in (waiting, undone):
        assert "\ufffd[2J\ufffd\ufffdtext" in shown and not {*STEERING[:1], "\x9b"} & {*shown}


@pytest.mark.parametrize("name", ["undo", "reset", "exit", "stats", "help"])
def test_commands_that_take_nothing_refuse_something(chat: Chat, name: str) -> None:  # noqa: F811
    done = chat(f"hello\n/{name} the oven\n/stats\n", "--json")
    (error,) = only(done, "error")
    assert error["message"] == f"/{name} takes nothing; //{name} ... sends it as text"
    assert only(done, "stats")[0]["messages"] == 2


def test_space_before_a_command(chat: Chat, tmp_path: Path) -> None:  # noqa: F811
    path = tmp_path / "c.json"
    done = chat("  /stats\n //why\n\t/exit \nno\n", "--json", "--session", path)
    assert len(only(done, "stats")) == 1 and not only(done, "error")
    assert json.loads(path.read_text())["messages"][0]["content"] == " /why"


@pytest.mark.parametrize("message", ["/why", " /why", "//x", "a", " a", "\n/b", ""])
def test_every_message_can_be_typed(message: str) -> None:
    assert as_sent(as_typed(message)) == message


def test_a_home_folder(chat: Chat, tmp_path: Path, monkeypatch) -> None:  # noqa: F811
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    assert only(chat("/save ~/c.json\n", "--json"), "saved")[0]["path"] == str(tmp_path / "c.json")


def test_speeds_begin_anew(chat: Chat) -> None:  # noqa: F811
    before, after = only(chat("hello\n/stats\n/reset\n/stats\n", "--json"), "stats")
    assert before["decode_tokens"] == 5 and after["decode_tokens"] == after["prefill_tokens"] == 0


def test_figures_for_people_are_one_column(chat: Chat) -> None:  # noqa: F811
    lines = remarks(chat("/stats\n"))[1:]
    assert len([line for line in lines if line.startswith("cache ")]) == 2  # type and size
    assert len(lines) == 11 and {line[25] for line in lines} == {" "}
    assert all(line[26] != " " for line in lines)


def test_a_history_that_does_not_fit(chat: Chat, tmp_path: Path) -> None:  # noqa: F811
    path = tmp_path / "c.json"
    messages = [{"role": "user", "content": "the " * 90}, {"role": "assistant", "content": "in"}]
    path.write_text(json.dumps({"version": 1, "messages": messages}))
    done = chat("and\n", "--session", path, "--n-ctx", 64)
    assert "nothing was fed; the next message brings what fits of the history" in done.err
    assert "left it; the rest is fed again: they are not in the cache" in done.err
    assert len(done.out.splitlines()) == 1


def test_a_long_message_is_not_put_into_the_line() -> None:
    short, long = "x" * DRAFT, "x" * (DRAFT + 1)
    assert read("\r", short) == short
    assert read("\r", long) == ""
    assert read("\x1b[A\r", long) == "two"


def test_a_disk_that_is_full_at_the_start(chat: Chat, tmp_path: Path, monkeypatch) -> None:  # noqa: F811
    def fails(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("minfer.chat.history.write", fails)
    done = chat("", "--session", tmp_path / "c.json")
    assert done.code == 2 and "device; give another --session" in done.err


def test_keys_during_an_answer_wait_for_the_prompt(
    sit_down: Callable[..., Person],  # noqa: F811
    files: Path,
) -> None:
    person = sit_down()
    person.sees("/help lists commands")
    person.sees(">")
    person.type("hello\r")
    person.wait(lambda: files.read_text().count("hello") == 1)
    shown = len(person.seen) + 40
    person.wait(lambda: len(person.seen) > shown)
    person.type("QZQZQ")
    shown = len(person.seen) + 200
    person.wait(lambda: len(person.seen) > shown)
    person.type("\x03")
    assert "QZQZQ" not in person.sees("(cut off by you)") and "CPR" not in person.seen

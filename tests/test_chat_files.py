"""The files of a chat: what is overwritten, and what never is."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_chat_command import chat as piped  # noqa: F401  a fixture
from test_chat_session import chat, engine_of, opened
from tiny_models import write_tiny_gguf

from minfer.chat.files import cache_of
from minfer.chat.session import RENDERED, Session
from minfer.errors import Refusal

OTHERS = {
    "no session": b"my own key-value pairs",
    "empty": b"",
    "another version": b"MINFERPY\x09\0\0\0 and so on",
    "short": b"MINFERP",
}


@pytest.mark.parametrize("data", OTHERS.values(), ids=OTHERS.keys())
def test_a_file_that_is_no_cache_is_never_overwritten(
    tiny_gguf: Path, tmp_path: Path, data: bytes
) -> None:
    path = tmp_path / "c.json"
    chat(path, engine_of(tiny_gguf))
    cache_of(path).write_bytes(data)
    with pytest.raises(Refusal, match="move it away or give another --session") as caught:
        Session(path, None)
    assert (caught.value.rule, caught.value.exit_code) == ("9.1", 2)
    assert str(cache_of(path)) in caught.value.message and cache_of(path).read_bytes() == data


def files_in(folder: Path) -> dict[str, tuple[bytes, int]]:
    return {p.name: (p.read_bytes(), p.stat().st_mtime_ns) for p in folder.glob("c.json*")}


@pytest.mark.parametrize("given", ["", "/stats\n", "/save COPY\n", "x" * 900 + "\n"])
def test_a_chat_in_which_nothing_was_said_keeps_its_files(
    piped: Callable[..., Any],  # noqa: F811
    tmp_path: Path,
    given: str,
) -> None:
    path = tmp_path / "c.json"
    piped("hello\n", "--session", path)
    before = files_in(tmp_path)
    for options, replaced in (
        ((), False),
        (("--cache-type", "q8_0"), True),
        (("--n-ctx", 128), True),
    ):
        copy = given.replace("COPY", str(tmp_path / f"copy{len(options)}{options[-1:]}"))
        done = piped(copy, "--session", path, *options)
        assert done.code == 0 and f"saved {path} and" not in done.err
        assert (f"the next save replaces {cache_of(path)}" in done.err) == replaced
        if "x" not in given:
            assert files_in(tmp_path) == before
        assert files_in(tmp_path)["c.json.kv"] == before["c.json.kv"]


@pytest.mark.parametrize("given", ["and\n", "/undo\n", "/reset\n", "/save\n"])
def test_a_chat_that_changed_replaces_its_cache(
    piped: Callable[..., Any],  # noqa: F811
    tmp_path: Path,
    given: str,
) -> None:
    path = tmp_path / "c.json"
    piped("hello\n", "--session", path)
    before = files_in(tmp_path)["c.json.kv"]
    done = piped(given, "--session", path, "--n-ctx", 128)
    assert done.code == 0 and done.err.count(f"saved {path} and") == 1
    assert files_in(tmp_path)["c.json.kv"][0] != before[0]


def test_a_missing_cache_is_made_anew(tiny_gguf: Path, tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    chat(path, engine_of(tiny_gguf))
    cache_of(path).unlink()
    talk, how, files = opened(path, engine_of(tiny_gguf))
    assert how.how == RENDERED and "replaces" not in how.reason
    assert files.leave(talk) == path and files.leave(talk) is None


def by_an_editor(path: Path) -> None:
    path.write_text(path.read_text() + "\n")


CHANGES: dict[str, Callable[[Path, Path], object]] = {
    "edited": lambda path, model: by_an_editor(path),
    "gone": lambda path, model: path.unlink(),
    "a second chat": lambda path, model: chat(path, engine_of(model)),
    "its cache is gone": lambda path, model: cache_of(path).unlink(),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_what_somebody_else_wrote_is_left_as_it_is(
    tiny_gguf: Path, tmp_path: Path, change: Callable[[Path, Path], object]
) -> None:
    path = tmp_path / "c.json"
    talk = chat(path, engine_of(tiny_gguf))
    _, _, files = opened(path, engine_of(tiny_gguf))
    change(path, tiny_gguf)
    before = files_in(tmp_path)
    for write in (files.write, files.save):
        with pytest.raises(Refusal, match=r"by somebody else .*; /save OTHER keeps") as caught:
            write(talk)
        assert caught.value.rule == "9.1"
    assert files_in(tmp_path) == before
    other = tmp_path / "other.json"
    assert files.save(talk, other) == other and files_in(tmp_path) == before


def test_a_cache_that_appears_is_not_overwritten(tiny_gguf: Path, tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    talk, _, files = opened(path, engine_of(tiny_gguf))
    cache_of(path).write_text("new")
    with pytest.raises(Refusal, match="by somebody else"):
        files.save(talk)
    assert cache_of(path).read_text() == "new"


def test_a_changed_file_is_told_once_a_turn_and_at_the_end(
    piped: Callable[..., Any],  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = tmp_path / "c.json"
    piped("hello\n", "--session", path)
    monkeypatch.setattr(
        "minfer.chat.session.start_over", lambda talk: path.write_text('{"theirs": 1}')
    )
    done = piped("and\nthere\n", "--session", path, "--n-ctx", 128)
    assert done.code == 2 and path.read_text() == '{"theirs": 1}'
    assert done.err.count("was changed by somebody else") == 3
    assert len(done.out.splitlines()) == 2


@pytest.mark.parametrize("name", ["", "."])
def test_a_name_that_is_no_file(piped: Callable[..., Any], name: str) -> None:  # noqa: F811
    done = piped("hello\n", "--session", name)
    assert done.code == 2 and "names a folder, not a file; give the name" in done.err


def test_a_history_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "c.json"
    path.write_text(json.dumps({"version": 1, "messages": []}))

    def fails(self: Path) -> bytes:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_bytes", fails)
    with pytest.raises(Refusal, match="cannot be read: Permission denied; give another name"):
        Session(path, None)


def test_several_devices_have_no_session(
    call: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, path = tmp_path / "two.gguf", tmp_path / "c.json"
    write_tiny_gguf(model, seed=5)
    done = call("chat", model, "--device", "cpu:1,cpu:1", "--session", path, "--n-ctx", 64)
    assert done.code == 2 and "2 stretches" in done.err and list(tmp_path.iterdir()) == [model]


def test_an_answer_is_in_the_file_before_it_is_told(tiny_gguf: Path, tmp_path: Path) -> None:
    """Who was told of it may end the program at once."""
    path = tmp_path / "c.json"
    argv = [sys.executable, "-m", "minfer", "chat", tiny_gguf, "--session", path, "--json"]
    with subprocess.Popen(
        [*map(str, argv), "-n", "4"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as child:
        assert child.stdin and child.stdout
        child.stdin.write("hello\n")
        child.stdin.flush()
        told = next(e for e in map(json.loads, child.stdout) if e["event"] == "answer")
        child.kill()
    kept = json.loads(path.read_text())["messages"][-1]
    assert kept == {"role": "assistant", "content": told["text"]}


def test_the_cache_file_takes_no_history(
    call, tiny_gguf: Path, tmp_path: Path, monkeypatch
) -> None:
    path = tmp_path / "c.json"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(pipe(f"hello\n/save {path}.kv\n")))
    done = call("chat", tiny_gguf, "--session", path, "-n", 4)
    assert done.code == 0 and "is for the cache of this chat" in done.err


def test_a_name_that_is_a_pipe_is_refused(call, tiny_gguf: Path, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    done = call("chat", tiny_gguf, "--session", tmp_path / "pipe")
    assert done.code == 2 and "names no regular file" in done.err


def pipe(text: str) -> io.BufferedReader:
    """A pipe with this text in it."""
    out, into = os.pipe()
    os.write(into, text.encode())
    os.close(into)
    return open(out, "rb")  # noqa: PTH123

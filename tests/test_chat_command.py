"""`minfer chat` by pipes: lines in, text or JSON events out, files that survive a kill."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryFile
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import Done

from minfer import Engine
from minfer.chat.signals import Signals

ROOT = Path(__file__).parent.parent
SPEEDS = {f"{kind}_tokens{rate}" for kind in ("prefill", "decode") for rate in ("", "_per_second")}
OPTIONS = ("--n-ctx", 256, "-n", 6, "--logit-bias", "<|im_end|>=-inf")


@pytest.fixture
def chat(
    call: Callable[..., Done], monkeypatch: pytest.MonkeyPatch, tiny_gguf: Path
) -> Callable[..., Done]:
    """Run a chat in this process with `given` as its input."""

    def run(given: str | bytes, *options: object, n: Sequence[object] = OPTIONS) -> Done:
        with TemporaryFile() as file:
            file.write(given.encode() if isinstance(given, str) else given)
            file.seek(0)
            monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=file, isatty=lambda: False))
            return call("chat", tiny_gguf, *n, *options)

    return run


def events(done: Done) -> list[dict[str, Any]]:
    return [json.loads(line) for line in done.out.splitlines()]


def only(done: Done, event: str) -> list[dict[str, Any]]:
    return [found for found in events(done) if found["event"] == event]


def remarks(done: Done) -> list[str]:
    lines = done.err.splitlines()
    return [line for line in lines if not line.startswith("minfer: compiling")]


def test_answers_go_to_stdout_and_remarks_to_stderr(chat) -> None:
    done = chat("hello\n\nthe cat\n")
    answers = [e["text"] for e in only(chat("hello\nthe cat\n", "--json"), "answer")]
    assert done.code == 0 and done.out == "".join(f"{text}\n" for text in answers)
    assert remarks(done) == [
        "tiny.gguf; cache f32 for 256 cells; new chat",
        *["(cut off by -n)"] * 2,
    ]


def test_events_are_one_object_a_line(chat, tiny_gguf: Path) -> None:
    done = chat("hello\n", "--json", "--system", "in", "--temp", 1, "--seed", 7)
    found = events(done)
    assert done.code == 0 and remarks(done) == []
    assert [e["event"] for e in found] == ["start", *["token"] * 6, "answer"]
    assert found[0] == {
        "event": "start",
        "model": "tiny.gguf",
        "cache_type": "f32",
        "n_ctx": 256,
        "session": None,
        "state": "new",
        "reason": "",
        "tokens": 0,
        "messages": 1,
        "seed": 7,
    }
    answer = found[-1]
    assert answer["tokens"] == [e["token"] for e in found[1:-1]]
    assert answer["text"] == "".join(e["text"] for e in found[1:-1])
    assert (answer["finish_reason"], answer["stop"]) == ("length", None)
    prompt = Engine.load(tiny_gguf, n_ctx=8).encode_chat(
        [{"role": "system", "content": "in"}, {"role": "user", "content": "hello"}]
    )
    assert (answer["prefill_tokens"], answer["decode_tokens"]) == (len(prompt), 5)
    assert answer["prefill_tokens_per_second"] > 0 < answer["decode_tokens_per_second"]


def test_the_page_names_every_event_and_field(chat, tmp_path: Path) -> None:
    page = (ROOT / "docs" / "chat.md").read_text()
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", page, re.MULTILINE))
    given = f"hello\n/stats\n/save {tmp_path / 'c.json'}\n/no\n/help\n"
    found = {event["event"]: event for event in events(chat(given, "--json"))}
    assert found.keys() == rows.keys()
    for name, event in found.items():
        for field in event.keys() - {"event", *SPEEDS}:
            assert f"`{field}`" in rows[name], f"{name} does not tell of {field}"
    assert found["answer"].keys() > SPEEDS < found["stats"].keys()


def test_a_backslash_goes_on_in_the_next_line(chat, tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    chat("the\\\n cat\\\r\n\nhello\r\nand\\", "--session", path)
    said = [m["content"] for m in json.loads(path.read_text())["messages"] if m["role"] == "user"]
    assert said == ["the\n cat\n", "hello", "and"]


def test_a_session_goes_on(chat, tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    whole = only(chat("hello\nthe cat\nand\n", "--json"), "answer")
    done = chat("hello\n", "--json", "--session", path)
    (start,), (saved,) = only(done, "start"), only(done, "saved")
    assert (start["state"], start["session"]) == ("new", str(path))
    assert saved["path"] == str(path) and saved["tokens"] > 0
    told = [e["text"] for e in only(done, "answer")]
    for text in ("the cat", "and"):
        done = chat(f"{text}\n", "--json", "--session", path)
        (start,) = only(done, "start")
        assert start["state"] == "resumed" and start["tokens"] == saved["tokens"]
        (saved,), (answer,) = only(done, "saved"), only(done, "answer")
        assert answer["prefill_tokens"] < 40 and not only(done, "note")
        told.append(answer["text"])
    assert told == [answer["text"] for answer in whole]
    again = chat("", "--session", path)
    assert again.out == "" and remarks(again) == [
        f"tiny.gguf; cache f32 for 256 cells; {path}: resumed {saved['tokens']} tokens"
    ]


def test_a_fallback_prints_its_reason(chat, tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    chat("hello\n", "--session", path)
    done = chat("and\n", "--session", path, "--json", "--cache-type", "q8_0")
    note, start = events(done)[:2]
    assert note["event"] == "note" and note["text"].startswith("the history is fed again: ")
    assert "q8_0" in note["text"] and note["text"].endswith(start["reason"])
    assert (start["state"], start["messages"]) == ("rendered", 2) and start["tokens"] > 20
    shown = chat("and\n", "--session", path)
    assert remarks(shown)[0].startswith("the history is fed again: ")
    assert ": rendered " in remarks(shown)[1]


def test_a_resume_that_is_not_bitwise_is_told(chat, tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    chat("hello\n", "--session", path)
    done = chat("and\n", "--session", path, "--json", "--weights", "f16")
    assert events(done)[0]["text"].startswith("not bitwise: ")
    assert only(done, "start")[0]["state"] == "resumed" and only(done, "answer")


def test_commands(chat, tmp_path: Path) -> None:
    path, copy = tmp_path / "c.json", tmp_path / "copy.json"
    given = f"/stats\nhello\n/save\n/save {copy}\n/save {copy}\nthe cat\n/undo\n/stats\n//and\n"
    done = chat(f"{given}/reset\n/help\n/exit\nhello\n", "--json", "--session", path)
    found = events(done)
    kinds = [e["event"] for e in found if e["event"] != "token"]
    assert kinds == [
        *("start", "stats", "answer", "saved", "saved", "error", "answer", "note", "stats"),
        *("answer", "note", "note", "saved"),
    ]
    first, last = only(done, "stats")
    assert (first["tokens"], first["messages"], last["messages"]) == (0, 0, 2)
    assert last["cells"] == 256 and last["cache_bytes"] == 2 * 2 * 256 * 64 * 4
    assert last["messages_left_out"] == 0 < last["tokens"]
    assert "is there already" in only(done, "error")[0]["message"]
    notes = [e["text"] for e in only(done, "note")]
    assert notes[0] == "forgot the turn that began: the cat"
    assert notes[1] == "forgot everything but the system prompt" and "//text" in notes[2]
    assert json.loads(path.read_text())["messages"] == []
    assert len(json.loads(copy.read_text())["messages"]) == 2
    assert [e["path"] for e in only(done, "saved")] == [str(path), str(copy), str(path)]
    resumed = chat("", "--session", copy, "--json")
    assert only(resumed, "start")[0]["state"] == "resumed"


def test_a_text_that_begins_with_a_slash(chat, tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    done = chat("//and on\n", "--session", path)
    assert json.loads(path.read_text())["messages"][0]["content"] == "/and on"
    done = chat("/and on\n/\n/saves\n", "--json")
    errors = [e["message"] for e in only(done, "error")]
    assert errors[0].startswith("/and is none of /save, /stats, ") and "//and sends" in errors[0]
    assert len(errors) == 3 and done.code == 0


def test_errors_are_told_and_the_chat_goes_on(chat) -> None:
    long = "x" * 400
    lines = f"hello\n{long}\n/undo\n/undo\n/undo\n/save\n".encode() + b"\xff\nand\n"
    done = chat(lines, "--json")
    kinds = [e["event"] for e in events(done) if e["event"] != "token"]
    assert kinds == [
        *("start", "answer", "error", "note", "note", "error", "error", "error", "answer")
    ]
    unanswered, turn = (e["text"] for e in only(done, "note"))
    assert unanswered == f"forgot the message without an answer: {long}"
    assert turn == "forgot the turn that began: hello"
    too_long, nothing, nowhere, no_text = only(done, "error")
    assert (too_long["rule"], too_long["exit_code"]) == ("9.2", 2)
    assert "n_ctx is 256" in too_long["message"]
    assert "no turn to take back" in nothing["message"]
    assert "no --session; give a name" in nowhere["message"]
    assert "byte 0 of the line (0xff) is no UTF-8" in no_text["message"]
    assert done.code == 0
    shown = chat(f"{long}\nand\n")
    assert "minfer: the message, with the system prompt, needs " in shown.err
    assert len(shown.out.splitlines()) == 1


def test_a_full_context_is_told(chat) -> None:
    done = chat("the cat\n" * 9, "--json", n=("--n-ctx", 128, "-n", 9))
    notes = [e["text"] for e in only(done, "note")]
    assert notes and all(note.startswith("the context is full: the oldest ") for note in notes)
    assert len(only(done, "answer")) == 9


def test_no_session_writes_nothing(chat, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert chat("hello\n").code == 0
    assert list(tmp_path.iterdir()) == []


def test_a_stop_string_and_the_end_of_a_turn(chat) -> None:
    text = only(chat("hello\n", "--json"), "answer")[0]["text"]
    done = chat("hello\n", "--json", "--stop", text[1:3])
    (answer,) = only(done, "answer")
    assert (answer["finish_reason"], answer["stop"], answer["text"]) == ("stop", text[1:3], text[0])
    ended = chat("hello\n", "--json", n=("--n-ctx", 64, "--logit-bias", "<|im_end|>=1000"))
    assert only(ended, "answer")[0]["finish_reason"] == "end"
    assert "cut off" not in chat("hello\n", "--stop", text[1:3]).err
    full = chat("hello\n", n=("--n-ctx", 64, "--logit-bias", "<|im_end|>=-inf"))
    assert remarks(full)[-1] == "(cut off by a full context)"


REFUSED = {
    "n": (("-n", 0), 2, "-n 0 is below 1"),
    "system": (("--session", "SYSTEM", "--system", "on"), 2, "begins with the system prompt 'in'"),
    "broken": (("--session", "BROKEN"), 3, "is no JSON"),
    "folder": (("--session", "FOLDER"), 2, "names a folder, not a file"),
    "no folder": (("--session", "NOWHERE"), 2, "is no folder; make it first"),
    "top-k": (("--top-k", 4), 2, "give --temp too"),
}


@pytest.mark.parametrize(("options", "code", "words"), REFUSED.values(), ids=REFUSED.keys())
def test_a_refusal_is_one_line_and_touches_nothing(
    chat, tmp_path: Path, options: tuple[str, ...], code: int, words: str
) -> None:
    files = {
        "SYSTEM": tmp_path / "system.json",
        "BROKEN": tmp_path / "broken.json",
        "FOLDER": tmp_path,
        "NOWHERE": tmp_path / "no" / "c.json",
    }
    system = [{"role": "system", "content": "in"}]
    files["SYSTEM"].write_text(json.dumps({"version": 1, "messages": system}))
    files["BROKEN"].write_text("{")
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    done = chat("hello\n", *(files.get(str(option), option) for option in options))
    assert done.code == code and done.out == ""
    assert len(remarks(done)) == 1 and words in remarks(done)[0]
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_missing_package_is_named(call, tiny_gguf: Path, monkeypatch) -> None:
    person = SimpleNamespace(isatty=lambda: True, write=lambda text: None, flush=lambda: None)
    monkeypatch.setattr(sys, "stdin", person)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setitem(sys.modules, "prompt_toolkit", None)
    done = call("chat", tiny_gguf)
    assert done.code == 2
    assert "prompt_toolkit is not installed; pip install 'minfer[cpu,models]'" in done.err


def started(tiny_gguf: Path, *options: object, **streams: Any) -> subprocess.Popen[bytes]:
    """A chat in a process of its own, whose answers go on until something stops them."""
    argv = [sys.executable, "-m", "minfer", "chat", tiny_gguf, "--n-ctx", 100_000]
    argv += ["--json", "--logit-bias", "<|im_end|>=-inf", "--logit-bias", "<|endoftext|>=-inf"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    # a shell may have this process ignore the end of its terminal
    hear: Callable[[], object] = lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL)  # noqa: E731
    argv = [str(a) for a in [*argv, *options]]
    return subprocess.Popen(argv, cwd=ROOT, preexec_fn=hear, **(pipes | streams))


def send(process: subprocess.Popen[bytes], text: str) -> None:
    assert process.stdin is not None
    process.stdin.write(text.encode())
    process.stdin.flush()


def until(process: subprocess.Popen[bytes], event: str) -> dict[str, Any]:
    """Read events up to one of this kind."""
    assert process.stdout is not None
    for line in process.stdout:
        found: dict[str, Any] = json.loads(line)
        if found["event"] == event:
            return found
    raise AssertionError(f"no {event}")


def test_a_kill_in_an_answer_leaves_the_history_whole(tiny_gguf: Path, tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    with started(tiny_gguf, "--session", path) as process:
        send(process, "hello\n")
        until(process, "token")
        process.send_signal(signal.SIGINT)
        first = until(process, "answer")
        send(process, "the cat\n")
        until(process, "token")
        process.kill()
    told = json.loads(path.read_text())["messages"]
    assert told == [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": first["text"]},
        {"role": "user", "content": "the cat"},
    ]
    with started(tiny_gguf, "--session", path) as process:
        assert "is not there" in until(process, "note")["text"]
        assert until(process, "start")["messages"] == 2
        assert until(process, "note")["text"] == "the last message has no answer: the cat"
        send(process, "/exit\n")
        until(process, "saved")
    assert process.wait() == 0 and json.loads(path.read_text())["messages"] == told


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("when", ["answering", "waiting"])
def test_a_signal_to_leave_saves(
    tiny_gguf: Path, tmp_path: Path, number: signal.Signals, when: str
) -> None:
    path = tmp_path / "c.json"
    with started(tiny_gguf, "--session", path) as process:
        until(process, "start")
        if when == "answering":
            send(process, "hello\n")
            until(process, "token")
        process.send_signal(number)
        if when == "answering":
            answer = until(process, "answer")
            assert answer["finish_reason"] == "interrupted"
        tokens = until(process, "saved")["tokens"]
    assert process.returncode == 128 + number and (tokens > 0) == (when == "answering")
    messages = json.loads(path.read_text())["messages"]
    assert [m["content"] for m in messages] == (["hello", answer["text"]] if messages else [])
    assert bool(messages) == (when == "answering")
    with started(tiny_gguf, "--session", path, stdin=subprocess.DEVNULL) as process:
        assert until(process, "start")["tokens"] == tokens


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGINT])
def test_a_signal_that_is_ignored_stays_ignored(number: signal.Signals) -> None:
    before = signal.signal(number, signal.SIG_IGN)
    try:
        with Signals() as signals:
            assert signal.getsignal(number) is signal.SIG_IGN
            signal.raise_signal(signal.SIGTERM)
            assert signals.leave
        assert signal.getsignal(number) is signal.SIG_IGN
    finally:
        signal.signal(number, before)


def test_an_interrupt_while_waiting_leaves_and_saves(tiny_gguf: Path, tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    with started(tiny_gguf, "--session", path) as process:
        until(process, "start")
        process.send_signal(signal.SIGINT)
        until(process, "saved")
    assert process.returncode == 130


def test_a_reader_that_leaves_early_does_not_stop_the_save(tiny_gguf: Path, tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    with started(tiny_gguf, "--session", path) as process:
        send(process, "hello\n")
        until(process, "token")
        assert process.stdout is not None
        process.stdout.close()
        process.wait(60)
    assert process.returncode == 0
    messages = json.loads(path.read_text())["messages"]
    assert [m["role"] for m in messages] == ["user", "assistant"]
    assert os.path.getsize(f"{path}.kv") > 1000  # noqa: PTH202

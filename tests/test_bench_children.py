"""Columns of the benchmark are child processes: what they answer, what becomes of bad ones."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from tuning.bench import protocol
from tuning.bench.contestants import Column, columns, opened
from tuning.bench.protocol import ROOT, Absent, Child, ChildFailed, pack, unpack

SERVER = """
import os, subprocess, sys, time
from tuning.bench.protocol import Absent, serve

def absent(request):
    raise Absent("no such thing")

def die(request):
    print("the last words", file=sys.stderr, flush=True)
    os._exit(7)

def shout(request):
    print("a library prints")
    os.system("echo so does a program")
    return {"echo": request["text"]}

def fork(request):
    return {"copy": os.fork()}

def forge(request):
    os.write(3, b'{"ok": {}, "number": 0}\\n')
    return {}

def start(request):
    return {"pid": subprocess.Popen(["sleep", "60"]).pid}

serve({
    "shout": shout, "absent": absent, "die": die, "fail": lambda request: 1 / 0,
    "hang": lambda request: time.sleep(60), "nonsense": lambda request: os.write(3, b"?\\n"),
    "mute": lambda request: (os.closerange(1, 30), time.sleep(60)), "fork": fork,
    "forge": forge, "start": start,
})
"""


@pytest.fixture
def child() -> Iterator[Child]:
    made = Child([sys.executable, "-c", SERVER])
    yield made
    made.close()


def test_a_child_answers_whatever_its_libraries_print(child: Child) -> None:
    for text in ("one", "zwei", "три"):
        reply = child.ask({"do": "shout", "text": text}, 30)
        assert reply["echo"] == text
        assert set(reply["idle"]) == {"cpu", "wall"}
    with pytest.raises(Absent, match="no such thing"):
        child.ask({"do": "absent"}, 30)
    with pytest.raises(ChildFailed, match="ZeroDivisionError: division by zero"):
        child.ask({"do": "fail"}, 30)
    assert child.ask({"do": "shout", "text": "still here"}, 30)["echo"] == "still here"


def test_a_dead_child_leaves_its_last_words(child: Child) -> None:
    with pytest.raises(ChildFailed, match=r"exit code 7: (?s:.*)the last words"):
        child.ask({"do": "die"}, 30)
    with pytest.raises(ChildFailed, match="exit code 7"):
        child.ask({"do": "shout", "text": "x"}, 30)


def test_a_child_that_hangs_is_ended(child: Child) -> None:
    child.ask({"do": "shout", "text": "it runs"}, 30)
    with pytest.raises(ChildFailed, match=r"no answer to hang in 0\.2 s"):
        child.ask({"do": "hang"}, 0.2)
    assert not child.alive


def test_a_child_that_speaks_nonsense_is_ended() -> None:
    babbling = Child([sys.executable, "-c", "print('{'); input()"])
    with pytest.raises(ChildFailed, match=r"answered '\{'"):
        babbling.ask({"do": "hello"}, 30)
    assert not babbling.alive


def test_a_child_that_closes_its_output_is_ended(
    child: Child, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol, "ENDING", 0.2)
    with pytest.raises(ChildFailed, match="exit code -9"):
        child.ask({"do": "mute"}, 30)


def test_an_answer_to_another_request_is_none(child: Child) -> None:
    with pytest.raises(ChildFailed, match='"number": 0'):
        child.ask({"do": "forge"}, 30)


def test_a_copy_that_a_call_forks_answers_nothing(child: Child) -> None:
    copy = child.ask({"do": "fork"}, 30)["copy"]
    assert copy > 0
    wait_until(lambda: not running(copy))
    assert child.ask({"do": "shout", "text": "x"}, 30)["echo"] == "x"


def test_what_a_child_starts_ends_with_it(child: Child) -> None:
    pid = child.ask({"do": "start"}, 30)["pid"]
    assert running(pid)
    child.close()
    wait_until(lambda: not running(pid))


def test_a_child_that_hangs_ends_itself_where_nobody_does() -> None:
    alone = SERVER.replace("serve({", "protocol.ALONE = 0.3; serve({").replace(
        "import os,", "from tuning.bench import protocol\nimport os,"
    )
    request = {"do": "hang", "number": 1, "within": 0.1}
    left = subprocess.Popen([sys.executable, "-c", alone], stdin=subprocess.PIPE, cwd=ROOT)
    assert left.stdin is not None
    left.stdin.write(json.dumps(request).encode() + b"\n")
    left.stdin.flush()  # and it stays open, as where a copy of this process holds it
    assert left.wait(30) == 1
    left.stdin.close()


def running(pid: int) -> bool:
    """Whether there is such a process, and it is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_arrays_travel_bit_by_bit() -> None:
    array = np.array([[1.5, -0.0, np.nan], [np.inf, 2**-149, 3]], np.float32)
    back = unpack(json.loads(json.dumps(pack(array))))
    assert np.array_equal(back.view(np.uint32), array.view(np.uint32))


def test_peers_that_are_not_there_are_absent_with_the_way_to_get_them(tmp_path: Path) -> None:
    assert ["--peers" in c.missing for c in columns(None)] == [False, False, False, True, True]
    gone = columns(tmp_path / "python")
    assert all("make peers" in c.missing and str(tmp_path) in c.missing for c in gone[3:])
    broken = Column("ggml", lambda: Child([sys.executable, "-c", "import no_such_module"]))
    with opened([broken]):
        assert broken.child is None
    assert "No module named 'no_such_module'; run `make peers`" in broken.missing

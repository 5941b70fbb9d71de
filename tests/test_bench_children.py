"""Columns of the benchmark are child processes: what they answer, what becomes of bad ones."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tuning.bench.contestants import Column, columns, opened
from tuning.bench.protocol import Absent, Child, ChildFailed, pack, unpack

SERVER = """
import os, sys, time
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

serve({
    "shout": shout, "absent": absent, "die": die, "fail": lambda request: 1 / 0,
    "hang": lambda request: time.sleep(60), "nonsense": lambda request: os.write(3, b"?\\n"),
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

"""Real processes that are killed while they save: the old file or a new one (contract 8.3)."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import pytest
from session_faults import stores

from minfer import atomic

ROOT = Path(__file__).parent.parent
SAVER = [sys.executable, str(ROOT / "tests" / "session_faults.py")]


@contextmanager
def savers(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that forks children which save; see `session_faults`."""
    path = os.pathsep.join(str(p) for p in (ROOT, ROOT / "tests"))
    parent = subprocess.Popen(
        [*SAVER, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    try:
        yield parent
    finally:
        parent.communicate()


def said(parent: subprocess.Popen[str], line: str = "") -> str:
    """Its next line; `line` is sent before."""
    assert parent.stdin and parent.stdout
    if line:
        parent.stdin.write(line)
        parent.stdin.flush()
    return parent.stdout.readline().strip()


@pytest.mark.parametrize(
    "kills", [20, pytest.param(200, marks=pytest.mark.deep)], ids=["20", "200"]
)
def test_killed_at_random_moments(tmp_path: Path, kills: int) -> None:
    path, rng = tmp_path / "a.kv", random.Random(kills)
    wanted = {host: store.digest() for store, host in first(8)}
    store, host = next(stores())
    store.save(path, host)
    began = time.perf_counter()
    store.save(path, host)
    longest = max(0.02, 4 * (time.perf_counter() - began))
    found, cut = set(), 0
    with savers(tmp_path) as parent:
        for done in count(1):
            child = int(said(parent, "go\n"))
            # longer and longer: a busy machine may not come to save
            time.sleep(rng.uniform(0, longest * (1 + done / kills)))
            os.kill(child, signal.SIGKILL)
            assert said(parent) == "gone"
            host = store.load(path).host
            assert store.digest() == wanted[host]
            found.add(host)
            cut += len(list(tmp_path.iterdir())) > 1
            make_old(tmp_path)
            if done >= kills and len(found) > 1 and cut:
                break
            assert done < 10 * kills, f"sessions {found} were found, {cut} saves cut short"
    store.save(path)
    assert list(tmp_path.iterdir()) == [path]


def first(n: int) -> list[tuple[object, bytes]]:
    made = stores()
    return [next(made) for _ in range(n)]


def make_old(folder: Path) -> None:
    """What was left may be removed at once."""
    before = time.time() - atomic.LEFT_AFTER - 1
    for path in folder.iterdir():
        os.utime(path, (before, before))

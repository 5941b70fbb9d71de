"""Saving and loading take a bounded amount of memory, however large the store (contract 8.4)."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parent.parent
ALLOWED = 64 << 20  # bytes

CHILD = """
import sys
from pathlib import Path

from minfer.kv.store import KvStore


def peak(what):
    (line,) = (row for row in Path("/proc/self/status").read_text().splitlines() if what in row)
    return 1024 * int(line.split()[1])


def grown_by(call):
    Path("/proc/self/clear_refs").write_text("5")  # the peak is what is held now
    before = peak("VmRSS")
    call()
    return peak("VmHWM") - before


path, fmt, n_layer, n_ctx, n_runs = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:])
store = KvStore(n_layer, n_ctx, 8, 128, cache_type=fmt, threads=1)
for layer in range(n_layer):
    for region in store.region(layer):
        region.arrays[0].view("<u4")[:] = layer + 1
for seq in range(n_runs):  # runs with a row left, so that pieces gather
    store.reserve(seq, n_ctx // n_runs)
    entry = store.tables.entries[seq]
    store.tables.entries[seq] = type(entry)(entry.run, n_ctx // n_runs - (n_runs > 1))
store.save(path)  # everything is imported
first = store.digest()
saved, loaded = grown_by(lambda: store.save(path)), grown_by(lambda: store.load(path))
print(saved, loaded, store.digest() == first)
assert all((r.arrays[0].view("<u4") == layer + 1).all() for layer in range(n_layer)
           for r in store.region(layer))
"""


def grown(folder: Path, *args: object) -> list[int]:
    """Bytes by which the memory of a process grew at most while it saved, and while it loaded."""
    done = subprocess.run(
        [sys.executable, "-c", CHILD, folder / "a.kv", *map(str, args)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    (folder / "a.kv").unlink(missing_ok=True)
    assert not done.returncode, done.stderr
    *found, same = done.stdout.split()
    assert same == "True"
    return [int(n) for n in found]


needs_proc = pytest.mark.skipif(
    not os.access("/proc/self/clear_refs", os.W_OK), reason="the peak is read from /proc"
)


@needs_proc
@pytest.mark.parametrize("n_runs", [1, 1024], ids=["one run", "many runs"])
def test_256_mib(tmp_path: Path, n_runs: int) -> None:
    save, load = grown(tmp_path, "f32", 4, 8192, n_runs)
    assert save < ALLOWED and load < ALLOWED


@needs_proc
@pytest.mark.deep
@pytest.mark.parametrize("n_runs", [1, 1024], ids=["one run", "many runs"])
def test_4_gib(tmp_path: Path, n_runs: int) -> None:
    if psutil.virtual_memory().available < 6 << 30 or shutil.disk_usage(tmp_path).free < 10 << 30:
        pytest.skip("takes 6 GiB of memory and 10 GiB of disk")
    save, load = grown(tmp_path, "f16", 32, 32768, n_runs)
    assert save < ALLOWED and load < ALLOWED

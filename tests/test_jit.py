"""How kernels are compiled and kept, and what the emitter promises."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numba
import numpy as np
import pytest

from minfer.kernels_numba import _cache, _jit
from minfer.kernels_numba._cache import KernelCache
from minfer.kernels_numba._emit import F32, VF, Emitter, vector
from minfer.kernels_numba._ir import address, exp2, fetch_add, intrinsic_of
from minfer.kernels_numba._jit import kernel

ROOT = Path(__file__).parent.parent

PROGRAM = """
import numpy as np
from minfer.kernels_numba._ir import address, fetch_add
from minfer.kernels_numba._jit import kernel
from minfer.kernels_numba._workers import Worker, read, run

@kernel
def double(x):
    return 2 * x

def counting(step):
    @Worker
    @kernel(key=(step,))
    def count(t, n_threads, pointer):
        total, out = read(pointer)
        fetch_add(address(total))
        out[t] = double(step * total.size)
        return 0
    return count

for step in (3, 5):
    count, total, out = counting(step), np.zeros(1, np.int64), np.zeros(2)
    run(2, count, None, (total, out))
    print(total[0], out[0], sum(count.kernel.stats.cache_hits.values()))
"""


def run_program(folder: Path, cache: Path) -> list[str]:
    """The lines that PROGRAM prints in a process of its own."""
    folder.mkdir(exist_ok=True)
    program = folder / "program.py"
    if not program.exists():
        program.write_text(PROGRAM)
    done = start_program(program, cache)
    out, err = done.communicate()
    assert done.returncode == 0, err
    return out.splitlines()


LONG = "        x = x * 3 % 1000003 + step\n" * 60
CHAINS = f"""
import sys
from minfer.kernels_numba import _jit

def chain(step):
    @_jit.kernel(key=step)
    def inner(x):  # long enough to stay a function of its own
{LONG}        return x

    @_jit.kernel(key=step)
    def outer(x):
        return inner(x) + inner(x + 1)

    return outer

chains = {{step: chain(step) for step in (1, 2)}}
print(*(chains[int(step)](10) for step in sys.argv[1:]))
"""


def chain(step: int) -> str:
    """What CHAINS prints for a step."""

    def inner(x: int) -> int:
        for _ in range(60):
            x = x * 3 % 1000003 + step
        return x

    return str(inner(10) + inner(11))


def start_program(program: Path, cache: Path, *args: str) -> subprocess.Popen[str]:
    env = {**os.environ, "MINFER_CACHE_DIR": str(cache), "PYTHONPATH": str(ROOT)}
    argv, pipe = [sys.executable, program, *args], subprocess.PIPE
    return subprocess.Popen(argv, env=env, stdout=pipe, stderr=pipe, text=True)


COMPILED = ["2 6.0 0", "2 10.0 0"]
CACHED = ["2 6.0 1", "2 10.0 1"]


def test_a_second_process_compiles_nothing_until_the_source_changes(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    assert run_program(tmp_path, cache) == COMPILED
    files = {path: path.stat().st_mtime_ns for path in cache.rglob("*.bin")}
    assert len(files) == 5  # two counts, one double; the loop and the start that all workers share
    assert run_program(tmp_path, cache) == CACHED
    assert {path: path.stat().st_mtime_ns for path in cache.rglob("*.bin")} == files
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.replace("return 2 * x", "return 3 * x"))
    assert run_program(tmp_path, cache) == ["2 9.0 0", "2 15.0 0"]


def test_a_damaged_file_is_compiled_again(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    run_program(tmp_path, cache)
    for path in cache.rglob("*.bin"):
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    assert run_program(tmp_path, cache) == COMPILED
    assert run_program(tmp_path, cache) == CACHED


def test_two_processes_at_once_leave_a_cache_that_works(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    both = [start_program(program, tmp_path / "cache") for _ in range(2)]
    for process in both:
        out, err = process.communicate()
        assert [line[:-2] for line in out.splitlines()] == ["2 6.0", "2 10.0"], err
    assert run_program(tmp_path, tmp_path / "cache") == CACHED
    assert not list((tmp_path / "cache").rglob(".*"))  # no temporary file stays


def test_kernels_of_one_factory_do_not_mix_when_processes_compile_one_each(tmp_path: Path) -> None:
    # Numba tells functions of one name apart by a counter that starts anew in every process.
    program = tmp_path / "chains.py"
    program.write_text(CHAINS)
    for args in (("1",), ("2",), ("1", "2")):
        out, err = start_program(program, tmp_path / "cache", *args).communicate()
        assert out.split() == [chain(int(step)) for step in args], err


FIRST = """
import sys
import numpy as np
from minfer.kernels_numba._jit import kernel
from minfer.kernels_numba._workers import Worker, read, run

@Worker
@kernel
def fill(t, n_threads, pointer):
    out = read(pointer)[0]
    out[t] = t + 1
    return 0

kind, threads = sys.argv[1], int(sys.argv[2])
out = np.zeros(threads, kind)
run(threads, fill, None, (out,))
print(*out.astype(int))
"""


def test_one_worker_runs_where_the_parallel_loop_was_compiled_by_another_process(
    tmp_path: Path,
) -> None:
    # The second process links a loop that the first one compiled; the third reads both from disk.
    program = tmp_path / "first.py"
    program.write_text(FIRST)
    for kind, threads, wanted in (("f4", "2", "1 2"), ("f8", "1", "1"), ("f8", "1", "1")):
        process = start_program(program, tmp_path / "cache", kind, threads)
        out, err = process.communicate()
        assert (process.returncode, out.strip()) == (0, wanted), err


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    for _ in range(2):
        assert run_program(tmp_path, blocked / "cache") == COMPILED


def test_the_hash_covers_names_bytes_and_every_file_of_the_package(tmp_path: Path) -> None:
    a, b = tmp_path / "a.py", tmp_path / "b.py"
    a.write_text("x = 1")
    before = _cache.source_hash((a,))
    b.write_text("x = 1")
    assert _cache.source_hash((b,)) != before
    a.write_text("x = 2")
    assert _cache.source_hash((a,)) != before
    a.write_text("x = 1")
    assert _cache.source_hash((a,)) == before
    names = {path.name for path in _cache.SOURCES}
    assert {"_ir.py", "_emit.py", "_cell.py", "dense.py", "matmul.py", "format.py"} <= names


def test_old_folders_are_pruned_oldest_first(tmp_path: Path) -> None:
    for age, name in enumerate(["new", "newer", "own", "old", "older", "oldest"]):
        (tmp_path / name).mkdir()
        os.utime(tmp_path / name, (1000 - age, 1000 - age))
    _cache.prune(tmp_path, tmp_path / "own")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["new", "newer", "old", "own"]


def fresh_kernel(name: str) -> object:
    """A kernel that was never compiled; defined from text, so it is not kept on disk."""
    space: dict[str, object] = {}
    exec(f"def {name}(x):\n    return x + 1", space)
    return kernel(space[name])  # type: ignore[call-overload]


def test_a_slow_compilation_is_announced_once(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(_jit, "NOTICE_AFTER", 0)
    plus = fresh_kernel("_plus_one_kernel")
    assert plus(1) == 2 and plus(2) == 3
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("minfer: compiling plus_one (once; ")
    assert str(_cache.cache_folder()) in lines[0]


def test_a_quick_compilation_is_silent(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(_jit, "NOTICE_AFTER", 3600)
    assert fresh_kernel("plus")(1) == 2
    assert capfd.readouterr().err == ""
    for timer in [t for t in threading.enumerate() if isinstance(t, threading.Timer)]:
        timer.join(5)  # a cancelled timer ends at once
        assert not timer.is_alive()


def test_a_kernel_without_a_source_file_is_not_kept() -> None:
    first = fresh_kernel("same_name")
    assert first(1) == 2
    space: dict[str, object] = {}
    exec("def same_name(x):\n    return x + 5", space)
    assert kernel(space["same_name"])(1) == 6  # type: ignore[call-overload]


def test_nothing_is_kept_after_an_edit(monkeypatch: pytest.MonkeyPatch) -> None:
    @kernel
    def half(x):
        return x / 2

    monkeypatch.setattr(_cache, "SOURCE_HASH", "another")
    target = numba.njit(lambda x: x).targetctx
    half(np.float32(3))
    (signature,) = half.signatures
    assert not KernelCache.path(half._cache, signature, target.codegen()).exists()


def test_captured_values_need_a_key() -> None:
    step = 3
    with pytest.raises(TypeError, match="captures values, so @kernel needs a key"):

        @kernel
        def add_step(x):
            return x + step


def test_an_address_of_this_process_is_refused() -> None:
    @kernel(parallel=True)
    def asks_numba(x):
        for i in numba.prange(x.size):
            x[i] = numba.get_num_threads()

    with pytest.raises(TypeError, match="pass the value as an argument"):
        asks_numba(np.zeros(3))


@kernel
def exp2_of(x, out):
    for i in range(x.size):
        out[i] = exp2(x[i])


def _emit_transpose(e: Emitter, rows: Any, out: Any) -> None:
    def load_quad(row: int, quad: int) -> Any:
        return e.load(vector(F32, 4), rows, 64 * row + 16 * quad)

    for i, column in enumerate(e.transpose(load_quad, 4)):
        e.store(column, out, 64 * i)


def _emit_sums(e: Emitter, rows: Any, out: Any) -> None:
    e.store(e.sums_of_four([e.load(VF, rows, 64 * row) for row in range(4)]), out)


def _emit_total(e: Emitter, rows: Any) -> Any:
    return e.reduce(e.load(VF, rows), e.builder.fadd)


_transpose = intrinsic_of("pp:v", _emit_transpose)
_sums = intrinsic_of("pp:v", _emit_sums)
_total = intrinsic_of("p:f", _emit_total)


@kernel
def shuffles(square, flipped, sums):
    _transpose(address(square), address(flipped))
    _sums(address(square), address(sums))
    return _total(address(square))


def halves(values: np.ndarray) -> np.float32:
    """The sum of f32 lanes by halves: the tree that `reduce` promises."""
    while len(values) > 1:
        values = values[: len(values) // 2] + values[len(values) // 2 :]
    return values[0]


def test_shuffles_and_their_trees() -> None:
    square = np.random.default_rng(0).standard_normal((16, 16)).astype(np.float32)
    flipped, sums = np.empty_like(square), np.empty(4, np.float32)
    total = shuffles(square, flipped, sums)
    assert (flipped == square.T).all()
    assert total == halves(square[0])
    quads = square[:4].reshape(4, 4, 4)
    inner = (quads[..., 0] + quads[..., 2]) + (quads[..., 1] + quads[..., 3])
    assert (sums == (inner[:, 0] + inner[:, 2]) + (inner[:, 1] + inner[:, 3])).all()


@kernel
def draw(counter, n):
    last = 0
    for _ in range(n):
        last = fetch_add(address(counter))
    return last


def test_exp2_is_accurate_and_has_the_right_ends() -> None:
    x = np.linspace(-126, 0, 1 << 18, dtype=np.float32)
    out = np.empty_like(x)
    exp2_of(x, out)
    assert np.abs(out / 2.0 ** x.astype(np.float64) - 1).max() < 8e-8
    ends = np.array([0, -1, -126, -126.00001, -np.inf, np.nan], np.float32)
    out = np.empty_like(ends)
    exp2_of(ends, out)
    assert out[:5].tolist() == [1, 0.5, 2.0**-126, 0, 0] and np.isnan(out[5])
    payloads = np.arange(0x7F800001, 0x7F800201, dtype=np.uint32).view(np.float32)
    out = np.empty_like(payloads)
    exp2_of(payloads, out)
    assert np.isnan(out).all()


def test_an_atomic_counter_hands_out_every_number_once() -> None:
    counter = np.zeros(1, np.int64)
    draw(counter, 1)
    pool = [threading.Thread(target=draw, args=(counter, 10_000)) for _ in range(4)]
    for thread in pool:
        thread.start()
    for thread in pool:
        thread.join()
    assert counter[0] == 40_001 and draw(counter, 1) == 40_001

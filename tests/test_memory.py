"""What a load needs against what is free."""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path

import pytest

from minfer import memory
from minfer.errors import Refusal

MIB = 1 << 20
ROOT = Path(__file__).parent.parent


def test_a_load_that_fits_passes_and_one_that_does_not_is_refused() -> None:
    needs = {"weights": 100 * MIB, "KV cache": 50 * MIB}
    memory.require(needs, free=214 * MIB)  # 64 MiB of headroom
    with pytest.raises(Refusal) as refused:
        memory.require(needs, free=214 * MIB - 1)
    text = str(refused.value)
    assert "needs 214.0 MiB (weights 100.0 MiB, KV cache 50.0 MiB), 214.0 MiB free" in text
    assert refused.value.facts["needs"] == 214 * MIB


class OutOfMemoryError(RuntimeError):
    """As torch's, by name."""


@pytest.mark.parametrize("error", [MemoryError, OutOfMemoryError])
def test_memory_that_runs_out_inside_is_refused_with_what_takes_how_much(
    error: type[Exception],
) -> None:
    left, needs = [214 * MIB, 3 * MIB], {"weights": 100 * MIB, "KV cache": 50 * MIB}
    words = r"needs 214\.0 MiB \(weights 100.* 3\.0 MiB free; use fewer"
    with pytest.raises(Refusal, match=words), memory.required(needs, lambda: left.pop(0)):
        raise error("tried to allocate")
    with (
        pytest.raises(Refusal, match=r"213\.0 MiB free"),
        memory.required(needs, lambda: 213 * MIB),
    ):
        raise AssertionError("refused before anything runs")
    with pytest.raises(Refusal, match="less free"), memory.required({"a": 1}, lambda: None):
        raise error
    with pytest.raises(RuntimeError, match="other"), memory.required({"a": 1}, lambda: None):
        raise RuntimeError("other")


@pytest.mark.parametrize(
    ("n", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (5 << 40, "5.0 TiB")]
)
def test_human(n: int, text: str) -> None:
    assert memory.human(n) == text


def group(folder: Path, limit: str, used: int, cached: int) -> None:
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 5\ninactive_file {cached}\n")


def test_the_limit_of_a_control_group_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "CGROUP", tmp_path)
    whole = memory.free_bytes()
    assert whole > 100 * MIB
    group(tmp_path, str(10 * MIB), 4 * MIB, MIB)
    assert memory.free_bytes() == 7 * MIB
    group(tmp_path, str(10 * MIB), 40 * MIB, 0)
    assert memory.free_bytes() == 0
    group(tmp_path, "max", 4 * MIB, MIB)
    assert memory.free_bytes() > 100 * MIB


FAULTS = """
import resource, sys
import numpy as np
from minfer.memory import keep_freed_pages

def faults_of_a_prompt():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        rows = [np.ones((512, 1536), np.float32) for _ in range(4)]
        del rows
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

first = faults_of_a_prompt()
keep_freed_pages()
faults_of_a_prompt()
print(first, faults_of_a_prompt())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="a habit of glibc")
def test_freed_pages_are_kept_for_the_next_rows() -> None:
    done = subprocess.run(
        [sys.executable, "-c", FAULTS], cwd=ROOT, capture_output=True, text=True, check=False
    )
    without, with_them = map(int, done.stdout.split())
    assert with_them < 100 < without, done


def test_zeroed_arrays_start_cache_lines_and_do_not_overlap() -> None:
    arrays = memory.zeroed([3, 0, 64, 65])
    assert [a.nbytes for a in arrays] == [3, 0, 64, 65]
    starts = [a.__array_interface__["data"][0] for a in arrays]
    assert starts[0] % 64 == 0 and [at - starts[0] for at in starts[2:]] == [64, 128]
    for fill, array in enumerate(arrays, 1):
        assert not array.any()
        array[:] = fill
    assert [set(a.tolist()) for a in arrays] == [{1}, set(), {3}, {4}]
    assert memory.zeroed([]) == []

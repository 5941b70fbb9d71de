"""Memory: what a load needs and what is free, asked first; how arrays that stay lie in it."""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from minfer.errors import Refusal
from minfer.format import Bytes

LINE = 64  # bytes of a cache line
CGROUP = Path("/sys/fs/cgroup")
LARGEST_THRESHOLD = (32 << 20) - (1 << 14)  # bytes of a block, with its header and page rounding
HEADROOM = 64 << 20  # bytes left to the interpreter, compiled kernels and activations


def free_bytes() -> int | None:
    """Bytes a process can still take: free memory, within the limit of its control group.

    None where psutil, which knows, is not installed.
    """
    try:
        import psutil
    except ModuleNotFoundError:
        return None
    free = int(psutil.virtual_memory().available)
    group = _group_free()
    return free if group is None else min(free, group)


def _group_free() -> int | None:
    """What a control group (version 2) leaves, None without a limit."""
    try:
        limit = (CGROUP / "memory.max").read_text().strip()
        used = int((CGROUP / "memory.current").read_text())
        cached = dict(
            line.split() for line in (CGROUP / "memory.stat").read_text().splitlines()
        ).get("inactive_file", "0")
    except (OSError, ValueError):
        return None
    return None if limit == "max" else max(0, int(limit) - used + int(cached))


def keep_freed_pages() -> None:
    """Let the C library keep up to 64 MiB of freed memory for the next arrays.

    Rows of a prompt are arrays of megabytes that live for a moment. By default glibc gives each
    back to the system and takes it again page by page, a fifth of a prompt's time. Its thresholds
    follow what a program frees, up to 32 MiB (mallopt(3), M_MMAP_THRESHOLD), so one block of
    almost that is taken and freed, untouched. Other C libraries have no such habit.
    """
    np.empty(LARGEST_THRESHOLD, np.uint8)


def zeroed(sizes: Iterable[int]) -> list[Bytes]:
    """One array of zero bytes a size, cut from one piece of memory; each starts a cache line.

    In large pages where the system has them: arrays read once a token are read up to twice as
    fast from those as from pages of 4 KiB.
    """
    wanted = list(sizes)
    starts = np.cumsum([0, *(-(-size // LINE) * LINE for size in wanted)])
    whole = np.frombuffer(_pages(max(int(starts[-1]), 1)), np.uint8)
    return [whole[start : start + size] for start, size in zip(starts[:-1], wanted, strict=True)]


def _pages(size: int) -> mmap.mmap:
    """Zero bytes of this process alone; shared ones would get no large pages."""
    if not hasattr(mmap, "MAP_PRIVATE"):  # Windows
        return mmap.mmap(-1, size)
    area = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(AttributeError, OSError):  # not every system has large pages
        area.madvise(mmap.MADV_HUGEPAGE)
    return area


def human(n: int) -> str:
    """1536 -> "1.5 KiB"."""
    value, unit = float(n), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):  # noqa: B007
        if value < 1024:
            break
        value /= 1024
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"


def require(needs: dict[str, int], free: int | None = None) -> None:
    """Refuse a load that needs more than is free, naming what takes how much.

    needs: bytes by what they are for, e.g. weights and KV cache. Without psutil nobody knows what
    is free, and nothing is refused.
    """
    total = sum(needs.values()) + HEADROOM
    free = free_bytes() if free is None else free
    if free is not None and total > free:
        parts = ", ".join(f"{name} {human(n)}" for name, n in needs.items())
        raise Refusal(
            "0.1",
            f"needs {human(total)} ({parts}), {human(free)} free; "
            "use fewer cells (--n-ctx), a q8_0 cache, --weights q8_0 or a smaller model",
            {"needs": total, "free": free, **needs},
        )

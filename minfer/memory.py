"""Memory: what a load needs and what is free, asked first; how arrays that stay lie in it."""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Callable, Iterable, Iterator
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


def gpu_free_bytes() -> int:
    """Bytes that torch can still take on the current GPU, what its allocator keeps included."""
    import torch

    kept = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    return int(torch.cuda.mem_get_info()[0] + kept)


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

    needs: bytes by what they are for, e.g. weights and KV cache. free: bytes, None for those of
    the host; without psutil nobody knows them, and nothing is refused.
    """
    free = free_bytes() if free is None else free
    if free is not None and sum(needs.values()) + HEADROOM > free:
        raise too_much(needs, free)


@contextlib.contextmanager
def required(needs: dict[str, int], free: Callable[[], int | None]) -> Iterator[None]:
    """Around what takes `needs`: refused as by `require`, also where memory runs out inside.

    free: tells the bytes that are left, None where nobody knows.
    """
    require(needs, free())
    try:
        yield
    except Exception as error:
        if not ran_out(error):
            raise
        raise too_much(needs, free()) from None


def too_much(needs: dict[str, int], free: int | None) -> Refusal:
    """What `require` refuses with: the sizes, and the ways out."""
    total = sum(needs.values()) + HEADROOM
    parts = ", ".join(f"{name} {human(n)}" for name, n in needs.items())
    left = "less" if free is None else human(free)
    return Refusal(
        "0.1",
        f"needs {human(total)} ({parts}), {left} free; "
        "use fewer cells (--n-ctx), a q8_0 cache, --weights q8_0 or a smaller model",
        {"needs": total, "free": free, **needs},
    )


def ran_out(error: Exception) -> bool:
    """Whether an error says that memory ran out, the host's or torch's on a GPU."""
    return isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"

"""The memory that a kernel is given: guarded copies, or MLX's own where it is large."""

from __future__ import annotations

import ctypes
import mmap
from dataclasses import dataclass
from typing import Any

import numpy as np

LARGE = 64 << 20  # bytes; from here on memory is shared with MLX, unguarded, instead of copied
GUARD = 16 * mmap.PAGESIZE

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t] + [ctypes.c_int] * 3 + [ctypes.c_long]
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
_POOLED = 1 << 20  # bytes; mappings up to here are kept for later buffers of their size
_pool: dict[int, list[int]] = {}
_taken: list[Guarded] = []  # of the call that runs


def _map(body: int) -> int:
    """Address of a mapping of `body` accessible bytes between guards."""
    if free := _pool.get(body):
        return free.pop()
    base = _libc.mmap(None, body + 2 * GUARD, 0, _PRIVATE, -1, 0)
    if base in (None, ctypes.c_void_p(-1).value):
        raise MemoryError(f"no {body} bytes of address space")
    if _libc.mprotect(base + GUARD, body, mmap.PROT_READ | mmap.PROT_WRITE):
        raise MemoryError(f"no {body} bytes of memory")
    return int(base)


class Guarded:
    """`nbytes` of memory with inaccessible pages before and after, until `release_all`.

    The end lies next to the later guard, to within the 16 bytes of alignment.
    """

    def __init__(self, nbytes: int) -> None:
        rounded = -(-nbytes // 16) * 16
        self._body = max(1, -(-rounded // mmap.PAGESIZE)) * mmap.PAGESIZE
        self._base = _map(self._body)
        self.address = self._base + GUARD + self._body - rounded
        self.nbytes = nbytes
        _taken.append(self)

    def release(self) -> None:
        if self._body <= _POOLED:
            _pool.setdefault(self._body, []).append(self._base)
        else:
            _libc.munmap(self._base, self._body + 2 * GUARD)

    def view(self) -> np.ndarray[Any, Any]:
        """The bytes."""
        if not self.nbytes:
            return np.zeros(0, np.uint8)
        return np.ctypeslib.as_array((ctypes.c_uint8 * self.nbytes).from_address(self.address))


def release_all() -> None:
    """Gives back what was taken: not in `__del__`, where Python swallows an interrupt."""
    while _taken:
        _taken.pop().release()


@dataclass
class Memory:
    """What one buffer argument may touch: [base, base + nbytes), and where its pointer starts."""

    pointer: int
    base: int
    nbytes: int
    keep: Any = None  # what owns the memory


def guarded(data: np.ndarray[Any, Any]) -> Memory:
    """A guarded copy of the bytes of `data`, which is C-contiguous."""
    copy = Guarded(data.nbytes)
    copy.view()[:] = data.reshape(-1).view(np.uint8)
    return Memory(copy.address, copy.address, data.nbytes, copy)


def _span(view: np.ndarray[Any, Any]) -> tuple[int, int]:
    """Offsets in bytes, from the first element, of the memory that a strided array touches."""
    if not view.size:
        return 0, 0
    reach = [s * (n - 1) for s, n in zip(view.strides, view.shape, strict=True)]
    return sum(r for r in reach if r < 0), sum(r for r in reach if r > 0) + view.itemsize


def of_array(view: np.ndarray[Any, Any]) -> Memory:
    """The memory of an input, strides and all."""
    low, high = _span(view)
    start = view.ctypes.data + low
    if high - low >= LARGE:
        return Memory(view.ctypes.data, start, high - low, view)
    if low == high:
        return guarded(np.zeros(0, np.uint8))
    storage = np.ctypeslib.as_array((ctypes.c_uint8 * (high - low)).from_address(start))
    memory = guarded(storage)
    memory.pointer -= low
    return memory

"""The runtime library seen from Python: one kernel, its arguments, one run."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from metalsim import compiler
from metalsim.buffers import Memory
from metalsim.errors import MetalError

MAX_THREADS = 1024  # of a threadgroup, as on Apple's GPUs; so many fibers the runtime has
THREADGROUP_BYTES = 32 << 10  # as on Apple's GPUs
MAX_CHECKED_GROUPS = 1 << 20  # that the runtime's notes of an access can number
INPUT, OUTPUT = 0, 1  # as the runtime's Kind


class _Argument(ctypes.Structure):
    _fields_ = [
        ("pointer", ctypes.c_void_p),
        ("base", ctypes.c_void_p),
        ("bytes", ctypes.c_uint64),
        ("name", ctypes.c_char_p),
        ("element", ctypes.c_uint32),
        ("kind", ctypes.c_int32),
        ("initialised", ctypes.c_int32),
        ("unwritten", ctypes.c_uint64),
        ("first_unwritten", ctypes.c_uint64),
    ]


class _Options(ctypes.Structure):
    _fields_ = [
        ("checked", ctypes.c_int32),
        ("random_order", ctypes.c_int32),
        ("seed", ctypes.c_uint32),
        ("preempt_every", ctypes.c_uint32),
        ("timeout_ms", ctypes.c_uint32),
        ("threadgroup_bytes", ctypes.c_uint32),
    ]


@dataclass
class Argument:
    """One buffer of a run; `unwritten` and `first_unwritten` are filled in by a checked run."""

    name: str
    kind: int
    element: int  # bytes
    memory: Memory
    initialised: bool = True
    unwritten: int = 0
    first_unwritten: int = 0


@dataclass(frozen=True)
class Schedule:
    checked: bool
    random_order: bool = False
    seed: int = 0
    preempt_every: int = 0  # one access in this many yields to another thread; 0: none
    timeout_ms: int = 0


@dataclass(frozen=True)
class Fault:
    message: str
    offset: int | None  # of the code in the kernel's library


@functools.cache
def _runtime(path: Path) -> ctypes.CDLL:
    library = ctypes.CDLL(str(path))
    library.metalsim_run.restype = ctypes.c_char_p
    return library


class Library:
    """A kernel that is built and loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._runtime = _runtime(compiler.build_runtime())  # first: the kernel's symbols are there
        try:
            library = ctypes.CDLL(str(path))
        except OSError as error:
            raise MetalError(f"a build is damaged ({error}); delete it") from None
        self._entry = library.metalsim_kernel
        self._image = (ctypes.c_void_p * 2).in_dll(library, "metalsim_image")

    def run(
        self,
        arguments: Sequence[Argument],
        grid: tuple[int, ...],
        group: tuple[int, ...],
        schedule: Schedule,
    ) -> Fault | None:
        """Runs the kernel over `grid` threads in threadgroups of `group`; the caller has the lock.

        Both are clamped and checked by the caller.
        """
        table = (_Argument * len(arguments))(
            *(
                _Argument(
                    a.memory.pointer,
                    a.memory.base,
                    a.memory.nbytes,
                    a.name.encode(),
                    a.element,
                    a.kind,
                    a.initialised,
                )
                for a in arguments
            )
        )
        options = _Options(
            schedule.checked,
            schedule.random_order,
            schedule.seed,
            schedule.preempt_every,
            schedule.timeout_ms,
            THREADGROUP_BYTES,
        )
        code = ctypes.c_uint64()
        message = self._runtime.metalsim_run(
            self._entry,
            table,
            len(arguments),
            (ctypes.c_uint32 * 3)(*grid),
            (ctypes.c_uint32 * 3)(*group),
            ctypes.byref(options),
            self._image,
            ctypes.byref(code),
        )
        for argument, row in zip(arguments, table, strict=True):
            argument.unwritten, argument.first_unwritten = row.unwritten, row.first_unwritten
        if message is None:
            return None
        offset = code.value - (self._image[0] or 0) if code.value else None
        return Fault(message.decode(errors="replace"), offset)

"""`@kernel`: how a kernel is compiled, and what the user is told meanwhile."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, overload

import numba as _numba
from numba.core import event as _event

from minfer.kernels_numba._cache import KernelCache, cache_folder

# Numba's own hints are partial and differ between versions.
numba: Any = _numba
event: Any = _event

NOTICE_AFTER = 1.0  # seconds of compiling before the user is told


def load_tbb() -> None:
    """Load the TBB library that pip put into this environment, where Numba does not look.

    Numba prefers it to OpenMP, and so do we: idle OpenMP workers spin, and when two of them meet
    on one core, every launch waits out the spin.
    """
    with contextlib.suppress(OSError):
        ctypes.CDLL(str(Path(sys.prefix) / "lib" / "libtbb.so.12"), mode=ctypes.RTLD_GLOBAL)


load_tbb()


class Notice(_event.Listener):
    """Tells the user, while it happens, that a kernel takes more than a second to compile."""

    def __init__(self) -> None:
        self.names: dict[Any, str] = {}
        self.depth = 0
        self.timer: threading.Timer | None = None

    def on_start(self, happening: Any) -> None:
        name = self.names.get(happening.data["dispatcher"])
        self.depth += 1
        if name and self.timer is None:
            self.timer = threading.Timer(NOTICE_AFTER, self.say, (name,))
            self.timer.daemon = True
            self.timer.start()

    def on_end(self, happening: Any) -> None:
        self.depth -= 1
        if self.depth == 0 and self.timer is not None:
            self.timer.cancel()
            self.timer = None

    @staticmethod
    def say(name: str) -> None:
        folder = cache_folder()
        kept = f"kept in {folder}" if os.access(folder, os.W_OK) else f"{folder} cannot be written"
        print(f"minfer: compiling {name} (once; {kept})", file=sys.stderr, flush=True)


_notice = Notice()
event.register("numba:compile", _notice)


@overload
def kernel(function: Callable[..., Any]) -> Callable[..., Any]: ...


@overload
def kernel(
    *, parallel: bool = False, key: object = ()
) -> Callable[[Callable[..., Any]], Callable[..., Any]]: ...


def kernel(
    function: Callable[..., Any] | None = None,
    *,
    parallel: bool = False,
    key: object = (),
) -> Any:
    """`@kernel` or `@kernel(key=...)`: compiled at the first call, kept on disk.

    No fastmath, IEEE division, no bounds checks, no GIL. key: what distinguishes kernels made by
    one factory function, such as a format; with it, closures cache too. Everything else that a
    closure captures must follow from the key. parallel: let Numba split `prange` loops; the one
    kernel that asks for it is the loop of `_workers`, which runs all others on threads.
    """
    if function is None:
        return functools.partial(kernel, parallel=parallel, key=key)
    if function.__closure__ and key == ():
        raise TypeError(f"{function.__qualname__} captures values, so @kernel needs a key")
    if key != ():
        # Part of the symbol: code from different processes meets in one when it is loaded.
        function.__qualname__ += f"[{key}]"
    flags = {
        "nopython": True,
        "nogil": True,
        "error_model": "numpy",
        "boundscheck": False,
        "fastmath": False,
        "parallel": parallel,
    }
    dispatcher = numba.jit(**flags)(function)
    dispatcher._cache = KernelCache(function, flags, key)
    name = function.__name__.strip("_").removesuffix("_kernel")
    _notice.names[dispatcher] = f"{name} for {key}" if isinstance(key, str) else name
    return dispatcher

"""How a kernel is compiled, kept on disk and launched with a thread count of its own.

Compiled code lives in the user's cache folder under a hash of everything it depends on: the
source of this package and of the modules it takes constants from, and the versions of Python,
Numba and llvmlite. Numba's own cache keys on the one file a function stands in, which misses a
change in an emitter; it also keeps an index that two compiling processes can cross. Here every
compiled signature is a file of its own, named by a hash of its full key and renamed into place.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import pickle
import platform
import shutil
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, overload

import llvmlite
import numba as _numba
import numpy as np
from numba.core import compiler as _compiler
from numba.core import event as _event
from numba.core import serialize as _serialize
from numpy.typing import NDArray

from minfer.errors import Refusal
from minfer.ops import Tunable

# Numba's own hints are partial and differ between versions.
numba: Any = _numba
compiler: Any = _compiler
event: Any = _event
serialize: Any = _serialize

NOTICE_AFTER = 1.0  # seconds of compiling before the user is told
KEPT_FOLDERS = 3  # caches of other sources that are left alone
THREADS = Tunable(default=numba.config.NUMBA_NUM_THREADS, values=(1, 2, 4, 8, 16, 32, 64))
PACKAGE = Path(__file__).parent
SOURCES = (
    *sorted(PACKAGE.glob("*.py")),
    PACKAGE.parent / "format.py",
    PACKAGE.parent / "window.py",
)


def source_hash(sources: tuple[Path, ...] = SOURCES) -> str:
    """Hash of the sources' names and bytes and of the compilers' versions."""
    digest = hashlib.sha256()
    versions = (platform.python_version(), numba.__version__, llvmlite.__version__)
    digest.update(repr(versions).encode())
    for path in sources:
        if path.exists():
            digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]


SOURCE_HASH = source_hash()  # of the text that is being imported, not of later edits


def cache_root() -> Path:
    """The folder that holds one folder of compiled kernels per source hash."""
    from minfer import settings

    return settings.cache_dir() / "kernels_numba"


def load_tbb() -> None:
    """Load the TBB library that pip put into this environment, where Numba does not look.

    Numba prefers it to OpenMP, and so do we: idle OpenMP workers spin, and when two of them meet
    on one core, every launch waits out the spin.
    """
    with contextlib.suppress(OSError):
        ctypes.CDLL(str(Path(sys.prefix) / "lib" / "libtbb.so.12"), mode=ctypes.RTLD_GLOBAL)


load_tbb()


@functools.cache
def cache_folder() -> Path:
    """Where this source's kernels are kept; the oldest of the others are pruned."""
    root = cache_root()
    folder = root / SOURCE_HASH
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        os.utime(folder)
        prune(root, folder)
    return folder


def prune(root: Path, keep: Path) -> None:
    """Delete the caches least recently used, all but `keep` and KEPT_FOLDERS others."""
    others = [path for path in root.iterdir() if path.is_dir() and path != keep]
    others.sort(key=lambda path: path.stat().st_mtime, reverse=True)
    for path in others[KEPT_FOLDERS:]:
        shutil.rmtree(path, ignore_errors=True)


class KernelCache:
    """Compiled signatures of one kernel on disk, in the shape Numba's dispatcher expects.

    A file is the SHA-256 of its payload, then the payload; one that does not match is compiled
    again. Nothing is kept for a function without a source file, such as one typed at a prompt.
    """

    def __init__(self, py_func: Callable[..., Any], flags: dict[str, Any], key: object) -> None:
        self.py_func = py_func
        own_source = Path(py_func.__code__.co_filename)
        self.enabled = own_source.is_file()
        name = (py_func.__module__, py_func.__qualname__)
        self.parts: tuple[str, ...] = (*name, repr(key), repr(sorted(flags.items())))
        if own_source.parent != PACKAGE and self.enabled:
            self.parts += (source_hash((own_source,)),)

    @property
    def cache_path(self) -> str:
        return str(cache_folder())

    def path(self, signature: Any, codegen: Any) -> Path:
        """The file of one signature; its name hashes everything the code depends on."""
        full = repr((self.parts, str(signature), codegen.magic_tuple()))
        digest = hashlib.sha256(full.encode()).hexdigest()[:24]
        return cache_folder() / f"{self.py_func.__name__}.{digest}.bin"

    def load_overload(self, signature: Any, target: Any) -> Any:
        """The compiled code, or None where there is none that can be read."""
        target.refresh()
        try:
            data = self.path(signature, target.codegen()).read_bytes() if self.enabled else b""
        except OSError:
            return None
        digest, payload = data[:32], data[32:]
        if hashlib.sha256(payload).digest() != digest:
            return None
        return compiler.CompileResult._rebuild(target, *pickle.loads(payload))

    def save_overload(self, signature: Any, result: Any) -> None:
        """Write a new file, then rename it into place; a full or closed disk is no error."""
        if result.library.has_dynamic_globals:
            raise TypeError(
                f"{self.py_func.__qualname__} holds an address of this process (a ctypes pointer, "
                "a large global array or numba.get_num_threads()), so it cannot be kept on disk; "
                "pass the value as an argument"
            )
        if not self.enabled or source_hash() != SOURCE_HASH:
            return  # an edit since the import: what was compiled is not what the hash says
        path = self.path(signature, result.codegen)
        payload = serialize.dumps(result._reduce())
        temporary = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}")
        try:
            temporary.write_bytes(hashlib.sha256(payload).digest() + payload)
            temporary.replace(path)
        except OSError:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)

    def flush(self) -> None:
        """Forget this kernel's compiled code."""
        for path in cache_folder().glob(f"{self.py_func.__name__}.*.bin"):
            path.unlink(missing_ok=True)


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
    *, parallel: bool = False, serial: bool = False, key: object = ()
) -> Callable[[Callable[..., Any]], Callable[..., Any]]: ...


def kernel(
    function: Callable[..., Any] | None = None,
    *,
    parallel: bool = False,
    serial: bool = False,
    key: object = (),
) -> Any:
    """`@kernel` or `@kernel(parallel=True)`: compiled at the first call, kept on disk.

    No fastmath, IEEE division, no bounds checks, no GIL. serial: compile it without threads as
    well, for launches of one thread, which are then plain calls. key: what distinguishes kernels
    made by one factory function, such as (n_head_kv, group, head_dim); with it, closures cache
    too. Everything else that a closure captures must follow from the key.
    """
    if function is None:
        return functools.partial(kernel, parallel=parallel, serial=serial, key=key)
    if function.__closure__ and key == ():
        raise TypeError(f"{function.__qualname__} captures values, so @kernel needs a key")
    if key != ():
        # Part of the symbol: code from different processes meets in one when it is loaded.
        function.__qualname__ += f"[{key}]"
    dispatcher = _dispatcher(function, parallel, key)
    if parallel:
        dispatcher.serial = _dispatcher(function, False, key) if serial else None
    return dispatcher


def _dispatcher(function: Callable[..., Any], parallel: bool, key: object) -> Any:
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
    _notice.names[dispatcher] = function.__name__.strip("_").removesuffix("_kernel")
    return dispatcher


@kernel
def first_outside(values: Any, limit: Any) -> int:
    """Index of the first value that is not in [0, limit), or -1."""
    for i in range(values.size):
        if values[i] < 0 or values[i] >= limit:
            return i
    return -1


def constant(array: NDArray[Any]) -> NDArray[np.float32]:
    """A contiguous f32 view that cannot be written.

    Numba compiles once more for arrays that are mapped read-only from a file; passing every
    weight as read-only leaves one signature.
    """
    view = np.ascontiguousarray(array, np.float32).view()
    view.flags.writeable = False
    return view


# The workqueue layer aborts the process when two threads launch at once; the others do not.
_workqueue_lock = threading.Lock()


def granted(threads: int) -> int:
    """How many threads a call that asks for `threads` gets: at most Numba's pool."""
    if threads < 1:
        raise Refusal("0.3", f"threads {threads} is less than 1", {"threads": threads})
    return min(threads, int(numba.config.NUMBA_NUM_THREADS))


def row_threads(rows: NDArray[Any], config: Mapping[str, Any]) -> int:
    """`threads` of config, or 1 below 16 Ki elements: waking a thread costs more than it saves."""
    return int(config["threads"]) if rows.size >= 1 << 14 else 1


def launch(kernel: Any, threads: int, *args: Any) -> Any:
    """Call `kernel(n_threads, *args)` with at most `threads` threads, this once.

    n_threads is the number granted (a kernel cannot ask Numba for it: that call cannot be kept on
    disk). Numba's mask is that of the calling thread and is restored. Checks belong before the
    launch: kernels do not raise.
    """
    n_threads = granted(threads)
    serial = getattr(kernel, "serial", None)
    if n_threads == 1 and serial is not None:
        return serial(1, *args)
    before = numba.get_num_threads()
    if n_threads != before:
        numba.set_num_threads(n_threads)
    try:
        with _workqueue_lock if _is_workqueue() else contextlib.nullcontext():
            return kernel(n_threads, *args)
    finally:
        if n_threads != before:
            numba.set_num_threads(before)


def _is_workqueue() -> bool:
    """Whether Numba runs on its own pool; before the first launch nobody knows, so yes."""
    try:
        return bool(numba.threading_layer() == "workqueue")
    except ValueError:
        return True

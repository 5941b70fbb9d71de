"""Compiled kernels on disk, in the user's cache folder.

They lie under a hash of everything they depend on: the source of this package and of the modules
it takes constants from, and the versions of Python, Numba and llvmlite. Numba's own cache keys on
the one file a function stands in, which misses a change in an emitter; it also keeps an index that
two compiling processes can cross. Here every compiled signature is a file of its own, named by a
hash of its full key and renamed into place.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import pickle
import platform
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import llvmlite
import numba as _numba
from numba.core import compiler as _compiler
from numba.core import serialize as _serialize

# Numba's own hints are partial and differ between versions.
numba: Any = _numba
compiler: Any = _compiler
serialize: Any = _serialize

KEPT_FOLDERS = 3  # caches of other sources that are left alone
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
    """Compiled signatures of one kernel on disk.

    The shape is that of Numba's dispatcher, which calls `load_overload` and `save_overload` and
    expects `cache_path` and `flush`.

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
        result = compiler.CompileResult._rebuild(target, *pickle.loads(payload))
        # Callers compiled from now on inherit what must run before their code is loaded: the
        # start of the thread pool. Numba forgets to hand it on from code it read from disk.
        result.library._reload_init.update(result.reload_init)
        return result

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

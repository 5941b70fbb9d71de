"""Finds clang, builds kernels and the runtime, keeps what it built.

A build is found again by the hash of the C++ text, the sources of the shim, the compiler and its
flags, in the folder `metalsim` of minfer's cache. Files appear there whole (os.replace), so
processes may build at the same time.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

from metalsim.errors import MetalError
from minfer import settings

SHIM = Path(__file__).parent / "shim"
LEAST_VERSION = 17  # of clang: bfloat arithmetic

_COMMON = ("-x", "c++", "-std=c++17", "-fPIC", "-fno-exceptions", "-fno-rtti", "-w")
_RUNTIME = (*_COMMON, "-O2", "-fno-threadsafe-statics")
# As in Metal: half and bfloat round at every operation, literals are float, char is signed, nothing
# is fused. MLX's own buffers are aligned to 8 bytes only (max-type-align).
_KERNEL = (
    *_COMMON,
    *("-O1", "-g1", "-gdwarf-4", "-nostdinc", "-ferror-limit=6", "-fmax-type-align=8"),
    *("-ffp-contract=off", "-fno-math-errno", "-fsigned-char"),
    *("-Xclang", "-cl-single-precision-constant"),
    *("-Xclang", "-ffloat16-excess-precision=none"),
    *("-Xclang", "-fbfloat16-excess-precision=none"),
    *("-fno-finite-loops", "-fno-stack-protector", "-fstack-clash-protection"),
)
_MACHINE = {"x86_64": ("-march=x86-64-v3",)}  # half conversions in hardware
_CHECKED = (
    *("-fsanitize=thread", "-mllvm", "-tsan-instrument-read-before-write=1"),
    *("-mllvm", "-tsan-instrument-func-entry-exit=0"),
    "-fsanitize=array-bounds",
)


def _zig() -> Path | None:
    found = importlib.util.find_spec("ziglang")
    return Path(found.origin).parent / "zig" if found and found.origin else None


def _candidates() -> list[list[str]]:
    """Compiler commands in the order they are tried."""
    chosen = os.environ.get("METALSIM_CXX")
    if chosen:
        return [chosen.split()]
    names = [f"clang++-{v}" for v in range(30, LEAST_VERSION - 1, -1)] + ["clang++"]
    found = [[name] for name in names if shutil.which(name)]
    zig = _zig()
    return found + ([[str(zig), "clang"]] if zig else [])


def _version(command: list[str]) -> tuple[int, str]:
    try:
        told = subprocess.run([*command, "--version"], capture_output=True, text=True).stdout
    except OSError:
        return 0, ""
    number = re.search(r"clang version (\d+)", told)
    return int(number[1]) if number else 0, told


@functools.cache
def find() -> tuple[tuple[str, ...], str]:
    """The compiler's command, and its version in words."""
    for command in _candidates():
        number, told = _version(command)
        if number >= LEAST_VERSION:
            return tuple(command), told
    raise MetalError(
        f"no clang {LEAST_VERSION} or newer; `pip install ziglang`, or set METALSIM_CXX to the "
        "command of one"
    )


def unavailable() -> str | None:
    """Why kernels cannot be built here, with the way out; None if they can."""
    try:
        find()
    except MetalError as error:
        return str(error)
    return None


def uses_zig(command: tuple[str, ...]) -> bool:
    return any("zig" in Path(word).name for word in command)


def _system_headers(machine: str) -> list[str]:
    """zig's own C library headers: a machine needs none installed."""
    zig = _zig()
    assert zig is not None
    library = zig.parent / "lib"
    family = "x86" if machine == "x86_64" else machine
    folders = [library / "include"]
    folders += [
        library / "libc" / "include" / name
        for name in (f"{family}-linux-gnu", "generic-glibc", f"{family}-linux-any", "any-linux-any")
    ]
    flags = [f"--target={machine}-linux-gnu", "-nostdinc"]
    return flags + [f for folder in folders for f in ("-isystem", str(folder))]


def runtime_command(machine: str) -> list[str]:
    """What compiles shim/runtime.cpp for `machine`, less the output."""
    command, _ = find()
    headers = _system_headers(machine) if uses_zig(command) else []
    return [*command, *_RUNTIME, *headers, "-c", str(SHIM / "runtime.cpp")]


def _kernel_flags(checked: bool, machine: str) -> list[str]:
    target = f"--target={machine}-linux-gnu"
    return [target, *_KERNEL, *_MACHINE.get(machine, ()), *(_CHECKED if checked else ())]


def _kernel_command(flags: list[str]) -> list[str]:
    """What compiles a kernel with `flags`, less the input and output.

    Their common header is parsed once: a third of the time of a build otherwise. It is known by
    its hash, so the compiler need not look for changes.
    """
    command = [*find()[0], *flags, "-I", str(SHIM)]

    def make(scratch: Path) -> Path:
        made = scratch / "prelude.pch"
        header = ["-x", "c++-header", str(SHIM / "mlx_prelude.h"), "-o", str(made)]
        _run([*command, *header])
        return made

    prelude = _kept(f"prelude-{_key(*flags)}.pch", make)
    return [*command, "-include-pch", str(prelude), "-Xclang", "-fno-validate-pch"]


def object_command(checked: bool, machine: str) -> list[str]:
    """What compiles a kernel to an object for `machine`, less the input and output."""
    return [*_kernel_command(_kernel_flags(checked, machine)), "-c"]


def _link_command(objects: list[Path], name: str, output: Path) -> list[str]:
    command, _ = find()
    inputs = [str(o) for o in objects]
    options = ["-shared", "-o", str(output), *inputs]
    if uses_zig(command):
        return [*command[:-1], "ld.lld", *options, "-soname", name, "-rpath", "$ORIGIN"]
    return [*command, "-nostdlib", *options, f"-Wl,-soname,{name},-rpath,$ORIGIN"]


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise MetalError(f"the kernel does not compile:\n{done.stderr[:4000]}")


@functools.cache
def _shim_hash() -> bytes:
    digest = hashlib.sha256(find()[1].encode())
    for path in sorted(SHIM.iterdir()):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.digest()


def _key(*parts: str) -> str:
    digest = hashlib.sha256(_shim_hash())
    for part in parts:
        digest.update(part.encode() + b"\0")
    return digest.hexdigest()[:24]


def _folder() -> Path:
    folder = settings.cache_dir() / "metalsim"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _kept(name: str, make: Callable[[Path], Path]) -> Path:
    """The file `name` of the cache; `make` puts it into the folder it is given if it is missing."""
    target = _folder() / name
    if not target.exists():
        with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
            make(Path(scratch)).replace(target)
    return target


def build_runtime() -> Path:
    """The runtime as a shared object."""
    machine = platform.machine()
    name = f"runtime-{_key(machine, *_RUNTIME)}.so"

    def make(scratch: Path) -> Path:
        made, library = scratch / "runtime.o", scratch / "runtime.so"
        _run([*runtime_command(machine), "-o", str(made)])
        _run(_link_command([made], name, library))
        return library

    return _kept(name, make)


def build_kernel(cpp: str, checked: bool) -> Path:
    """A kernel as a shared object; a checked one has passed the lint pass.

    cpp: what follows shim/mlx_prelude.h.
    """
    runtime = build_runtime()
    machine = platform.machine()
    name = f"{_key(cpp, runtime.name, *_kernel_flags(checked, machine))}.so"

    def make(scratch: Path) -> Path:
        source, made, library = (scratch / f"kernel.{end}" for end in ("cpp", "o", "so"))
        source.write_text(cpp)
        if checked:
            lint = _kernel_command([*_kernel_flags(False, machine), "-DMETALSIM_LINT"])
            _run([*lint, "-fsyntax-only", str(source)])
        _run([*object_command(checked, machine), str(source), "-o", str(made)])
        _run(_link_command([made, runtime], name, library))
        return library

    return _kept(name, make)

"""What a compiled kernel takes of a multiprocessor, by the tools that come with Triton."""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FIGURES = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")
SPILL = re.compile(r"^\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?(?:LDL|STL)\b", re.MULTILINE)


@dataclass(frozen=True)
class Usage:
    """registers: of a thread. shared: bytes of a program. stack: bytes of a thread, local:
    instructions that read or write it; both 0 unless registers are spilled."""

    registers: int
    stack: int
    local: int
    shared: int
    warps: int

    @property
    def spills(self) -> bool:
        return bool(self.stack or self.local)


def usage(kernel: Any) -> Usage:
    """Of a kernel as Triton compiled it."""
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        cubin.write_bytes(kernel.asm["cubin"])
        figures = _tool("cuobjdump", "-res-usage", cubin)
        local = len(SPILL.findall(_tool("nvdisasm", "-c", cubin)))
    registers, stack = stated(figures)
    metadata = kernel.metadata
    return Usage(registers, stack, local, int(metadata.shared), int(metadata.num_warps))


def stated(figures: str) -> tuple[int, int]:
    """Registers and bytes of stack in what `cuobjdump -res-usage` prints of one kernel."""
    found = FIGURES.search(figures)
    if found is None:
        raise ValueError(f"cuobjdump -res-usage says nothing of registers: {figures!r}")
    return int(found[1]), int(found[2]) + int(found[4])


def _tool(name: str, *args: object) -> str:
    import triton

    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    done = subprocess.run([path, *map(str, args)], capture_output=True, text=True, check=True)
    return done.stdout

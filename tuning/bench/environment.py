"""Where a measurement was made: what a reader needs to repeat or doubt it."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

import minfer
from minfer.device import cores
from minfer.tuned.machine import cpu_name
from tuning.bench.protocol import ROOT

DEFAULT_CACHE_BYTES = 32 << 20


def environment() -> dict[str, Any]:
    """Versions, machine, load and commit."""
    return {
        "minfer": minfer.__version__,
        "commit": commit(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "system": platform.platform(),
        "cpu": cpu_name(),
        "cores": cores(),
        "last_level_cache": last_level_cache(),
        "load": list(os.getloadavg()) if hasattr(os, "getloadavg") else None,
        "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": ["python", "-m", "tuning", *sys.argv[1:]],
    }


def commit() -> str | None:
    """The commit that is checked out, with `+` where files differ from it; None without git."""
    try:
        parts = [
            subprocess.run(
                ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True
            ).stdout.strip()
            for arguments in (("rev-parse", "HEAD"), ("status", "--porcelain"))
        ]
    except (OSError, subprocess.CalledProcessError):
        return None
    return parts[0] + "+" * bool(parts[1])


def last_level_cache() -> int:
    """Bytes of the largest cache the system tells of, else 32 MiB."""
    folder = Path("/sys/devices/system/cpu/cpu0/cache")
    sizes = [path.read_text().strip() for path in folder.glob("index*/size")]
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    known = [int(size[:-1]) * units[size[-1]] for size in sizes if size and size[-1] in units]
    return max(known, default=DEFAULT_CACHE_BYTES)

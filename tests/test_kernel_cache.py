"""Kernels that one process kept on disk run in another, in whatever order it needs them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
LAUNCH = """
import sys
import numpy as np
from minfer.registry import select
x, weight = np.ones((3, 64), np.float32), np.ones(64, np.float32)
for op in sys.argv[1:]:
    choice = select(op, config={"threads": 1})
    scalars = {"eps": 0.0} if op == "rms_norm" else {}
    y = weight if op == "rms_norm" else x
    print(op, choice.launch(x, y, **scalars, config=choice.config)[2, 63])
"""


def launch(cache: Path, *ops: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", LAUNCH, *ops],
        cwd=ROOT,
        env={**os.environ, "MINFER_CACHE_DIR": str(cache)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_a_launcher_compiled_against_a_kept_loop_runs_first_in_the_next_process(
    tmp_path: Path,
) -> None:
    """The thread pool's symbols are there, though what it kept names no parallel code."""
    assert launch(tmp_path, "rms_norm") == ["rms_norm 1.0"]
    compiled = launch(tmp_path, "silu_mul")
    assert launch(tmp_path, "silu_mul") == compiled

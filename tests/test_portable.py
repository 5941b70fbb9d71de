"""The CPU's code for other instruction sets gives the same bits."""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minfer.format import KvFormat
from minfer.kernels_numba._emit import VI, Emitter
from minfer.kernels_numba._ir import address, intrinsic_of
from minfer.kernels_numba._jit import kernel
from minfer.ops import DECODE, PREFILL

ROOT = Path(__file__).parent.parent
ONE, TWO = {"threads": 1}, {"threads": 2}


def print_digests(setups: Sequence[tuple[str, str, KvFormat]]) -> None:
    """One line per setup, for a process with its own target."""
    from test_invariance import RUNS, attend, last_queries, scattered, sequence

    for kind, name, fmt in setups:
        rows = [last_queries(kind), sequence(8, 300, 5)]
        out = attend(name, fmt, kind, rows, scattered(9, [len(r.k) for r in rows], 3), RUNS)
        print(f"{kind}-{name}-{fmt}", hashlib.sha256(out.tobytes()).hexdigest(), sep="\t")


def digests(call: str, **environment: str) -> list[str]:
    """The lines that `call` prints in a process of its own."""
    paths = os.pathsep.join(str(ROOT / part) for part in (".", "tests", "tests/kernels"))
    result = subprocess.run(
        [sys.executable, "-c", f"import test_portable as t; t.{call}"],
        env={**os.environ, **environment, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=True,
    )
    return result.stdout.splitlines()


FUSED_Q8 = [(DECODE, "split", KvFormat.Q8_0), (PREFILL, "flash", KvFormat.Q8_0)]


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="names an x86 target")
def test_code_for_an_older_cpu_gives_the_same_bits() -> None:
    """x86-64-v3 has neither 512-bit vectors nor the byte dot product."""
    here = digests("print_digests(t.FUSED_Q8)")
    older = digests("print_digests(t.FUSED_Q8)", NUMBA_CPU_NAME="x86-64-v3", NUMBA_CPU_FEATURES="")
    assert older == here and len(here) == len(FUSED_Q8)


def _emit_byte_products(e: Emitter, unsigned: Any, signed: Any, out: Any) -> None:
    e.store(e.dot_u8_s8(e.load(VI, out), e.load(VI, unsigned), e.load(VI, signed)), out)


_byte_products = intrinsic_of("ppp:v", _emit_byte_products)


@kernel
def byte_products(unsigned, signed, out):
    """out[row, lane] += the products of four neighbouring bytes; rows of 64 bytes."""
    for row in range(out.shape[0]):
        _byte_products(address(unsigned[row]), address(signed[row]), address(out[row]))


def byte_sums() -> np.ndarray:
    """What `byte_products` makes of random and extreme bytes, equal to numpy's."""
    rng = np.random.default_rng(6)
    unsigned = rng.integers(0, 256, (64, 64)).astype(np.uint8)
    signed = rng.integers(-128, 128, (64, 64)).astype(np.int8)
    unsigned[:2], signed[0], signed[1] = 255, 127, -128
    out = np.full((64, 16), -(1 << 20), np.int32)
    byte_products(unsigned, signed, out)
    wanted = (unsigned.astype(np.int32) * signed).reshape(64, 16, 4).sum(axis=2) - (1 << 20)
    assert (out == wanted).all()
    return out


def test_byte_products_are_exact() -> None:
    assert byte_sums()[0, 0] == 4 * 255 * 127 - (1 << 20)


DIGEST = """
import hashlib, sys
import numpy as np
sys.path[:0] = ["tests", "tests/kernels"]
from test_portable import digest_of_everything
from minfer.kernels_numba import environment
print(environment()["isa"], "|", digest_of_everything())
"""


def digest_of_everything() -> str:
    """A hash over what every path-dependent kernel makes of wild data."""
    from arrays import normal
    from test_q8_0 import wild_blocks
    from under_test import op

    from minfer.format import KvFormat
    from minfer.kernels_numba import decode_cells, empty_region
    from minfer.kernels_numba.cells import store_cells_rows
    from minfer.kernels_numba.dense import silu_mul_rows
    from minfer.reference import encode_weight

    digest = hashlib.sha256()
    x = wild_blocks(4096, 77).reshape(64, 2048)
    cells = op("quantize_q8_0")(x)
    digest.update(cells.tobytes())
    dots = op("dot_q8_0")(cells, cells[::-1], n=2048)
    digest.update(np.nan_to_num(dots, nan=-7).tobytes())
    region = empty_region(KvFormat.F16, 64, 1, 2048)
    store_cells_rows(region, x[:, None], np.arange(64), fmt=KvFormat.F16, config=TWO)
    digest.update(region.arrays[0].tobytes())
    digest.update(decode_cells(region, np.arange(64, dtype=np.int32)).tobytes())
    y = np.clip(x, -100, 100)[:, :2041]  # the last group of lanes is not full
    digest.update(byte_sums().tobytes())
    digest.update(silu_mul_rows(y, y, config=TWO).tobytes())
    for fmt in (KvFormat.F16, KvFormat.Q8_0):
        weight, rows = encode_weight(normal(35, 96), fmt), normal(19, 96, seed=1)
        for name in ("matvec", "matmul"):
            for n in (1, 19):
                out = op(name, fmt)(weight, rows[:n], fmt=fmt)
                digest.update(out.tobytes())
    return digest.hexdigest()


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="names x86 targets")
@pytest.mark.parametrize(
    ("cpu", "features", "isa"),
    [
        ("x86-64-v3", "+avx2,+fma,+f16c", "portable byte products, hardware f16"),
        ("generic", "", "portable byte products, portable f16"),
    ],
)
def test_portable_paths_give_the_same_bits(cpu: str, features: str, isa: str) -> None:
    env = {**os.environ, "NUMBA_CPU_NAME": cpu, "NUMBA_CPU_FEATURES": features}
    command = [sys.executable, "-c", DIGEST]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == f"{isa} | {digest_of_everything()}", done.stderr

"""Products on the CPU: their workers, their threads, and f16 weights as f32 ones to the bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from arrays import normal

from minfer import reference, registry
from minfer.errors import Refusal
from minfer.format import KvFormat
from minfer.kernels_numba import matmul, matvec
from minfer.kernels_numba.matmul import matmul_blocks, matmul_tiles
from minfer.kernels_numba.matvec import matvec_blocks, matvec_lanes
from minfer.ops import Shape

F32, F16, Q8_0 = KvFormat
ONE, TWO = {"threads": 1}, {"threads": 2}
PRODUCTS: dict[tuple[str, KvFormat], Callable[..., Any]] = {
    ("matvec", F32): matvec_lanes,
    ("matvec", F16): matvec_lanes,
    ("matvec", Q8_0): matvec_blocks,
    ("matmul", F32): matmul_tiles,
    ("matmul", F16): matmul_tiles,
    ("matmul", Q8_0): matmul_blocks,
}
EACH = pytest.mark.parametrize(("op", "fmt"), PRODUCTS, ids=lambda p: str(p))
SIZES = [(1, 1), (15, 63), (17, 65), (33, 64), (255, 3), (257, 130), (576, 1), (577, 65)]


@pytest.mark.parametrize("op", ["matvec", "matmul"])
@pytest.mark.parametrize(("n_in", "n_out"), SIZES)
@pytest.mark.parametrize("n", [1, 3, 17])
def test_f16_equals_f32_over_the_decoded_weight(op: str, n_in: int, n_out: int, n: int) -> None:
    weight, x = reference.encode_weight(normal(n_out, n_in), F16), normal(n, n_in, seed=1)
    out = PRODUCTS[op, F16](weight, x, fmt=F16, config=TWO)
    wide = weight.astype(np.float32)
    assert (out == PRODUCTS[op, F32](wide, x, fmt=F32, config=TWO)).all()


def test_few_bytes_are_left_to_one_thread_without_a_change(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    run = matvec.run
    monkeypatch.setattr(matvec, "run", lambda threads, *how: asked.append(threads) or run(1, *how))
    monkeypatch.setattr(matvec, "ALONE_BYTES", 64 * 96 * 4 * 2)
    for fmt, n_out in ((F32, 64), (F16, 64), (Q8_0, 64)):
        weight = reference.encode_weight(normal(n_out, 96), fmt)
        for n in (1, 2, 16):
            PRODUCTS["matvec", fmt](weight, normal(n, 96), fmt=fmt, config=TWO)
    assert asked == [1, 2, 2, 1, 1, 2, 1, 1, 2]


@EACH
def test_weights_mapped_read_only_need_no_other_compilation(op: str, fmt: KvFormat) -> None:
    weight, x = reference.encode_weight(normal(4, 32), fmt), normal(17, 32)
    frozen = weight.copy()
    frozen.flags.writeable = False
    out = [PRODUCTS[op, fmt](w, x, fmt=fmt, config=ONE) for w in (weight, frozen)]
    assert (out[0] == out[1]).all()
    workers = {
        ("matvec", Q8_0): matvec._matvec_blocks_kernel,
        "matvec": matvec.LANES_WORKERS.get(fmt),
        "matmul": matmul.WORKERS[fmt],
    }
    worker = workers.get((op, fmt)) or workers[op]
    assert worker is not None and len(worker.kernel.signatures) == 1
    assert weight.flags.writeable


def test_the_format_of_a_weight_chooses_its_variant() -> None:
    for (op, fmt), launch in PRODUCTS.items():
        choice = registry.select(op, fmt=fmt)
        assert choice.launch is launch
        said = f"x {'q8_0' if fmt is Q8_0 else 'f32'}, weight {fmt}, acc f32"
        assert choice.receipt.numerics == said
    odd = Shape(head_dim=80)  # whole blocks are asked of cells, not of weights
    assert registry.select("matvec", fmt="q8_0", shape=odd).launch is matvec_blocks
    with pytest.raises(Refusal, match="head_dim is 80"):
        registry.select("attn_window", fmt="q8_0", shape=odd)
    with pytest.raises(Refusal, match="does not read q8_0"):
        registry.select("matvec", fmt="q8_0", variant="lanes")

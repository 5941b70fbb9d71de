"""Of the q8_0 codec, what tests of every package cannot see: memory as torch hands it out."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("triton")
torch = pytest.importorskip("torch")

from test_cells_triton import needs_triton  # noqa: E402

from minfer import kernels_triton as backend  # noqa: E402
from minfer import reference  # noqa: E402
from minfer.format import KvFormat  # noqa: E402
from minfer.kernels_triton import q8_0  # noqa: E402
from minfer.kernels_triton._arguments import stored  # noqa: E402

pytestmark = needs_triton


def quantized(rows: Any) -> np.ndarray:
    return backend.to_host(q8_0.quantize_q8_0_blocks(rows, config={}))


def dequantized(cells: Any, n: int) -> np.ndarray:
    return backend.to_host(q8_0.dequantize_q8_0_blocks(cells, n=n, config={}))


@pytest.mark.parametrize("m", [0, 32, 64, 96, 2080])
def test_rows_pad_with_zeros_and_decode_exactly(m: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, empty = np.random.default_rng(m).standard_normal((5, m)).astype(np.float32), torch.empty
    monkeypatch.setattr(torch, "empty", lambda *shape, **how: empty(*shape, **how).fill_(90))
    cells = quantized(rows)
    assert (cells == reference.quantize_q8_0(rows)).all()
    assert (dequantized(cells, m) == reference.dequantize_q8_0(cells, n=m)).all()


def test_blocks_at_an_odd_address() -> None:
    rows = torch.ones(2, 64, device=backend.home())
    cells = q8_0.quantize_q8_0_blocks(rows, config={})
    shifted = torch.cat([cells.new_zeros(1), cells.flatten()])[1:].view(cells.shape)
    assert shifted.data_ptr() % 2
    assert (dequantized(shifted, 64) == dequantized(cells, 64)).all()
    matrix, _ = stored(shifted, KvFormat.Q8_0)
    assert matrix.data_ptr() % 2 == 0 and torch.equal(matrix, cells)

"""Tiles of K and V rows: one head of some cells, decoded, as kernels multiply them."""

import triton
import triton.language as tl

from minfer import format
from minfer.format import KvFormat

FORMATS = {KvFormat.F32: 0, KvFormat.F16: 1, KvFormat.Q8_0: 2}
F32 = tl.constexpr(FORMATS[KvFormat.F32])
F16 = tl.constexpr(FORMATS[KvFormat.F16])
Q8_0 = tl.constexpr(FORMATS[KvFormat.Q8_0])
BLOCK = tl.constexpr(format.BLOCK)  # elements that share a q8_0 scale


@triton.jit
def load_rows(
    rows,  # float32 or float16 [n_cells, row_stride], or int8 codes
    scales,  # float16 [n_cells, scale_stride] of q8_0, else unused
    cells,  # int32 [n]
    seen,  # bool [n]; the others are loaded as 0
    head,
    row_stride,
    scale_stride,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    FMT: tl.constexpr,
    TYPE: tl.constexpr,
):
    """One head of the cells as TYPE [n, BLOCK_D]; 0 where not seen and past D."""
    d = tl.arange(0, BLOCK_D)
    at = cells.to(tl.int64)
    mask = seen[:, None] & (d < D)[None, :]
    loaded = tl.load(rows + at[:, None] * row_stride + (head * D + d)[None, :], mask=mask, other=0)
    if FMT == Q8_0:
        block = d // BLOCK
        scale = tl.load(
            scales + at[:, None] * scale_stride + (head * (D // BLOCK) + block)[None, :],
            mask=mask,
            other=0.0,
        )
        return (loaded.to(tl.float32) * scale.to(tl.float32)).to(TYPE)
    return loaded.to(TYPE)

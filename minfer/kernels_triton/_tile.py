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
    rows,  # float32 or float16 [n_cells, STRIDE], or int8 codes
    scales,  # float16 [n_cells, SCALES] of q8_0, else unused
    head,
    base,  # cell that `cells` count from
    cells,  # int [n]
    seen,  # bool [n]; the others are loaded as 0
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    STRIDE: tl.constexpr,
    SCALES: tl.constexpr,
    FMT: tl.constexpr,
    TYPE: tl.constexpr,
    WHOLE: tl.constexpr = False,  # all are seen
):
    """One head of the cells as TYPE [n, BLOCK_D]; 0 where not seen and past D.

    Strides are constants: a thread's addresses then differ by constants and cost no arithmetic.
    """
    rows, scales = rows + base * STRIDE + head * D, scales + base * SCALES + head * (D // BLOCK)
    d = tl.arange(0, BLOCK_D)
    at = cells[:, None] * STRIDE + d[None, :]
    if WHOLE and D == BLOCK_D:
        loaded = tl.load(rows + at)
    else:
        loaded = tl.load(rows + at, mask=seen[:, None] & (d < D)[None, :], other=0)
    if FMT == Q8_0:
        block = tl.arange(0, BLOCK_D // BLOCK)
        at_scale = cells[:, None] * SCALES + block[None, :]
        if WHOLE and D == BLOCK_D:
            scale = tl.load(scales + at_scale)
        else:
            held = seen[:, None] & (block < D // BLOCK)[None, :]
            scale = tl.load(scales + at_scale, mask=held, other=0.0)
        codes = tl.reshape(loaded.to(TYPE), [cells.shape[0], BLOCK_D // BLOCK, BLOCK])
        loaded = tl.reshape(codes * scale.to(TYPE)[:, :, None], [cells.shape[0], BLOCK_D])
    return loaded.to(TYPE)

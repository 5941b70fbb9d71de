"""One oracle per op, in numpy: what a kernel must compute, written so that it can be read.

The names and the argument order are those of the kernels; `config` is accepted and ignored. The
q8_0 functions, products with a q8_0 weight, moves and maps of cells are bit oracles, stores work on
canonical bytes, everything else is float64.
"""

from minfer.reference.attention import (
    attention,
    attn_map,
    attn_window,
    round_query,
    rounded_weights_error,
    runs_of,
)
from minfer.reference.cells import map_q8_0_cells, move_cells, qkv_rope_store, store_cells
from minfer.reference.codec import (
    F16_NAN,
    decode_rows,
    dequantize_q8_0,
    dot_q8_0,
    encode_rows,
    quantize_q8_0,
    split_q8_0,
)
from minfer.reference.dense import (
    add,
    gelu_mul,
    rms_norm,
    rope,
    scale,
    silu_mul,
    softcap,
)
from minfer.reference.products import decode_weight, embed, encode_weight, matmul, matvec

__all__ = [
    "F16_NAN",
    "add",
    "attention",
    "attn_map",
    "attn_window",
    "decode_rows",
    "decode_weight",
    "dequantize_q8_0",
    "dot_q8_0",
    "embed",
    "encode_rows",
    "encode_weight",
    "gelu_mul",
    "map_q8_0_cells",
    "matmul",
    "matvec",
    "move_cells",
    "qkv_rope_store",
    "quantize_q8_0",
    "rms_norm",
    "rope",
    "round_query",
    "rounded_weights_error",
    "runs_of",
    "scale",
    "silu_mul",
    "softcap",
    "split_q8_0",
    "store_cells",
]

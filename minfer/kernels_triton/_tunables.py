"""Where attention variants round, and their tunables, the same for both attention ops."""

from minfer.format import KvFormat
from minfer.ops import DECODE, PREFILL, Limits, Tunable

HEAD_UNIT = 16  # elements of a head that the tensor cores multiply at once
HALF = {KvFormat.F16: "f16", KvFormat.Q8_0: "f16"}
DECODED = {KvFormat.Q8_0: "f16"}

ROWS = {"block_n": Tunable(32, (16, 32, 64), numeric=True)}
SPLIT_LIMITS = Limits(kinds=(DECODE,), head_dim_multiple=HEAD_UNIT)
SPLIT = {
    "stages": Tunable(0, (0, 2, 3, 4)),  # 0: what `blocks_of` says
    "waves": Tunable(1, (1, 2, 3, 4)),
}
# over f32, one chain of fma along a longer head would lose more than float32 should
FLASH_LIMITS = Limits(
    kinds=(PREFILL,), head_dim_multiple=HEAD_UNIT, max_head_dim_f32=128, max_group=32
)
FLASH = {"block_m": Tunable(128, (32, 64, 128, 256))}  # queries of a tile
RING_LIMITS = Limits(kinds=(DECODE,), head_dims=(64, 128), capability=(8, 0))
RING = {
    "block_n": Tunable(16, (16,), numeric=True),
    "stages": Tunable(3, (3, 4)),
    "warps": Tunable(2, (2, 4)),
    "waves": Tunable(1, (1, 2, 4)),
}

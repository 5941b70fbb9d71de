"""Where attention variants round, and their tunables, the same for both attention ops."""

from minfer.format import KvFormat
from minfer.ops import DECODE, Limits, Tunable

HEAD_UNIT = 16  # elements of a head that the tensor cores multiply at once
HALF = {KvFormat.F16: "f16", KvFormat.Q8_0: "f16"}
DECODED = {KvFormat.Q8_0: "f16"}

ROWS = {"block_n": Tunable(32, (16, 32, 64), numeric=True)}
SPLIT = {
    "stages": Tunable(3, (2, 3, 4)),
    "waves": Tunable(1, (1, 2, 3, 4)),
}
FLASH = {"block_m": Tunable(128, (32, 64, 128, 256))}  # queries of a tile
RING_LIMITS = Limits(kinds=(DECODE,), head_dims=(64, 128), capability=(8, 0))
RING = {
    "block_n": Tunable(16, (16,), numeric=True),
    "stages": Tunable(3, (3, 4)),
    "warps": Tunable(2, (2, 4)),
    "waves": Tunable(1, (1, 2, 4)),
}

"""Where attention variants round, and their tunables, the same for both attention ops."""

from minfer.format import KvFormat
from minfer.ops import Tunable

HEAD_UNIT = 16  # elements of a head that the tensor cores multiply at once
HALF = {KvFormat.F16: "f16", KvFormat.Q8_0: "f16"}
DECODED = {KvFormat.Q8_0: "f16"}

ROWS = {"block_n": Tunable(32, (16, 32, 64), numeric=True)}
SPLIT = {
    "block_n": Tunable(64, (32, 64, 128), numeric=True),
    "stages": Tunable(3, (2, 3, 4)),
    "waves": Tunable(4, (1, 2, 4, 8)),
}

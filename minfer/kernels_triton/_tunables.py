"""Where attention variants round, and their tunables, the same for both attention ops.

A tunable with the default 0 is left to `blocks_of` of its kernel, which knows what was measured for
the format, head_dim and architecture.
"""

from typing import Any

from minfer.format import KvFormat
from minfer.ops import DECODE, PREFILL, Config, Limits, Tunable

HEAD_UNIT = 16  # elements of a head that the tensor cores multiply at once
REGISTERS = 65536  # of a multiprocessor
HALF = {KvFormat.F16: "f16", KvFormat.Q8_0: "f16"}
DECODED = {KvFormat.Q8_0: "f16"}

ROWS = {"block_n": Tunable(32, (16, 32, 64), numeric=True)}
SPLIT_LIMITS = Limits(kinds=(DECODE,), head_dim_multiple=HEAD_UNIT)
SPLIT = {
    "block_n": Tunable(0, (16, 32, 64, 128), numeric=True),
    "warps": Tunable(0, (2, 4, 8), numeric=True),
    "stages": Tunable(0, (2, 3, 4)),
    "programs": Tunable(0, (1, 2, 3, 4)),
    "waves": Tunable(1, (1, 2, 3, 4)),
}
# over f32, one chain of fma along a longer head would lose more than float32 should
FLASH_LIMITS = Limits(
    kinds=(PREFILL,), head_dim_multiple=HEAD_UNIT, max_head_dim_f32=128, max_group=32
)
FLASH = {
    "block_m": Tunable(128, (32, 64, 128, 256)),  # queries of a tile
    "rows": Tunable(0, (64, 128), numeric=True),  # warps share a sum among them by its rows
    "block_n": Tunable(0, (32, 64, 128), numeric=True),
    "warps": Tunable(0, (4, 8), numeric=True),
    "stages": Tunable(0, (1, 2, 3, 4)),
}
RING_LIMITS = Limits(kinds=(DECODE,), head_dims=(64, 128), capability=(8, 0))
RING = {
    "block_n": Tunable(16, (16,), numeric=True),
    "stages": Tunable(3, (2, 3, 4)),
    "warps": Tunable(2, (2, 4, 8)),  # each a stream of its own: bits do not depend on them
    "waves": Tunable(1, (1, 2, 3, 4)),
}


def changes(measured: Any, config: Config) -> dict[str, Any]:
    """What `config` changes of measured `Blocks`, whose fields have the names of tunables.

    The limit on registers goes with the blocks it was measured with: under others it would spill.
    They get all there are, said aloud, because left alone `ptxas` may take 32 and spill the rest.
    """
    changed = {
        n: value for n, value in config.items() if value and getattr(measured, n, value) != value
    }
    warps = changed.get("warps", measured.warps)
    most = min(255, REGISTERS // (32 * warps))  # of a thread
    return {**changed, "registers": most} if changed else {}

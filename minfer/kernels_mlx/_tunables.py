"""What attention variants take, and their tunables, the same for both attention ops."""

from minfer.kernels_mlx._flash import ROWS
from minfer.kernels_mlx._split import HEADS
from minfer.ops import DECODE, PREFILL, Limits, Tunable

# `split` reads four elements at once, and its sums must fit the memory of a threadgroup.
SPLIT_LIMITS = Limits(kinds=(DECODE,), head_dim_multiple=4, max_head_dim=1024)
SPLIT = {"heads": Tunable(HEADS, (1, 2, HEADS))}  # query heads of a KV head that share its loads
# A simdgroup matrix has sides of 8; queries and answers of longer heads do not fit in registers.
FLASH_LIMITS = Limits(kinds=(PREFILL,), head_dim_multiple=8, max_head_dim=128)
FLASH = {"block_m": Tunable(ROWS, (8, 16, ROWS))}  # queries of a tile

"""The named cases.

Every size is odd on purpose: windows that start and end inside a tile of 16 and inside a
partition, runs of length 1, lengths on both sides of a partition border.
"""

from __future__ import annotations

from dataclasses import dataclass

from minfer.format import BLOCK, KvFormat
from minfer.ops import DECODE, PREFILL, Shape
from minfer.window import WindowMode


@dataclass(frozen=True)
class Case:
    """A batch of one kind.

    sequences: (first position, number of queries) of each. pieces: runs each sequence is cut
    into. clipped: the window input itself starts at the sliding width, not only the mask. scale:
    None is 1 / sqrt(head_dim). loud: scores are in the hundreds, and exact in float32 in any order
    of summation and in every format, so that all error is that of the softmax.
    """

    name: str
    kind: str
    heads: tuple[int, int]  # n_head, n_head_kv
    head_dim: int
    sequences: tuple[tuple[int, int], ...]
    mode: WindowMode = WindowMode.RUNS
    pieces: int = 1
    width: int = 0
    clipped: bool = False
    scale: float | None = None
    loud: bool = False

    def fits(self, fmt: KvFormat) -> bool:
        """Whether head rows are whole blocks, where the format needs it (contract 3.3)."""
        return fmt is not KvFormat.Q8_0 or self.head_dim % BLOCK == 0

    @property
    def shape(self) -> Shape:
        """What a choice of variant depends on."""
        return Shape(
            kind=self.kind,
            n_q=sum(n for _, n in self.sequences),
            n_head=self.heads[0],
            n_head_kv=self.heads[1],
            head_dim=self.head_dim,
        )


CAUSAL, SPAN, RUNS = WindowMode.CAUSAL, WindowMode.SPAN, WindowMode.RUNS

CASES = (
    Case("one-cell", DECODE, (9, 3), 64, ((0, 1),), CAUSAL),
    Case("partition-less-one", DECODE, (4, 4), 80, ((254, 1),), SPAN),
    Case("partition", DECODE, (9, 3), 64, ((255, 1),), CAUSAL),
    Case("partition-and-one", DECODE, (4, 1), 96, ((256, 1),), SPAN),
    Case("two-partitions-and-one", DECODE, (14, 2), 128, ((512, 1),), RUNS, pieces=4),
    Case("wide-heads", DECODE, (8, 1), 256, ((300, 1),), RUNS, pieces=2),
    Case("tiny-heads", DECODE, (5, 1), 32, ((33, 1),), RUNS, pieces=3),
    Case("tiniest-heads", DECODE, (2, 1), 16, ((17, 2),), SPAN),
    Case("drafts", DECODE, (9, 3), 64, ((40, 3), (255, 1), (600, 8)), RUNS, pieces=3),
    Case("drafts-span", DECODE, (8, 2), 64, ((15, 2), (700, 5)), SPAN),
    Case("sliding", DECODE, (3, 1), 64, ((512, 2),), RUNS, pieces=4, width=100),
    Case("sliding-clipped", DECODE, (3, 1), 64, ((512, 2),), RUNS, 4, width=300, clipped=True),
    Case("sliding-one", DECODE, (4, 2), 64, ((270, 3),), CAUSAL, width=1),
    Case("first-token", PREFILL, (9, 3), 64, ((0, 1),), CAUSAL),
    Case("prompt", PREFILL, (9, 3), 64, ((0, 70),), CAUSAL),
    Case("chunk-over-border", PREFILL, (9, 3), 64, ((250, 13),), RUNS, pieces=4),
    Case("batch", PREFILL, (8, 2), 64, ((0, 33), (500, 20), (7, 1)), RUNS, pieces=3),
    Case("batch-span", PREFILL, (4, 4), 64, ((3, 35), (255, 2)), SPAN),
    Case("prompt-80", PREFILL, (4, 4), 80, ((17, 19),), RUNS, pieces=2),
    Case("prompt-96", PREFILL, (7, 1), 96, ((200, 60),), SPAN),
    Case("prompt-128", PREFILL, (8, 1), 128, ((509, 7),), RUNS, pieces=4),
    Case("prompt-256", PREFILL, (3, 1), 256, ((1, 34),), CAUSAL),
    Case("prompt-32", PREFILL, (6, 2), 32, ((90, 17),), RUNS, pieces=3),
    Case("prompt-16", PREFILL, (2, 1), 16, ((5, 33),), CAUSAL),
    Case("prompt-sliding", PREFILL, (9, 3), 64, ((0, 100),), CAUSAL, width=40),
    Case("chunk-sliding", PREFILL, (4, 2), 64, ((505, 37),), RUNS, pieces=4, width=300),
    Case("chunk-clipped", PREFILL, (4, 2), 64, ((505, 37),), RUNS, 4, width=271, clipped=True),
    Case("narrow", PREFILL, (4, 2), 64, ((0, 70), (130, 9)), RUNS, pieces=4, width=3),
    Case("narrow-clipped", PREFILL, (4, 2), 64, ((0, 70), (130, 9)), RUNS, 4, 5, clipped=True),
    Case("gemma3", DECODE, (4, 1), 256, ((700, 1),), RUNS, pieces=3, width=512),
    Case("gemma3-prompt", PREFILL, (4, 1), 256, ((600, 19),), CAUSAL, width=512),
    Case("span-clipped", PREFILL, (4, 2), 64, ((250, 37),), SPAN, width=33, clipped=True),
)

HEADS_OF_DIM = {64: (4, 4), 80: (9, 3), 96: (8, 2), 128: (14, 2), 256: (8, 1)}
WIDTHS = (0, 33, 300)  # unlimited, inside a partition, larger than one


def _sized(kind: str, head_dim: int, mode: WindowMode, width: int) -> Case:
    """Two sequences, where the mode has room for two; heads differ by head_dim and width."""
    sizes = list(HEADS_OF_DIM)
    like = sizes[(sizes.index(head_dim) + WIDTHS.index(width)) % len(sizes)]
    sequences = ((521, 3), (40, 1)) if kind == DECODE else ((505, 21), (37, 5))
    return Case(
        f"{kind}-{head_dim}-{mode.value}-{width}",
        kind,
        HEADS_OF_DIM[like],
        head_dim,
        sequences[:1] if mode is CAUSAL else sequences,
        mode,
        pieces=3 if mode is RUNS else 1,
        width=width,
    )


SIZED_CASES = tuple(
    _sized(kind, head_dim, mode, width)
    for kind in (DECODE, PREFILL)
    for head_dim in HEADS_OF_DIM
    for mode in WindowMode
    for width in WIDTHS
)

LOUD_CASES = tuple(
    Case(f"loud-{kind}-{head_dim}-{scale}", kind, heads, head_dim, ((first, n),), RUNS, 3,
         scale=scale, loud=True)
    for kind, first, n in ((DECODE, 700, 8), (PREFILL, 250, 33))
    for head_dim, heads in ((64, (3, 1)), (65, (4, 2)), (128, (8, 2)), (256, (4, 1)))
    for scale in (4.0, -4.0)
)  # fmt: skip

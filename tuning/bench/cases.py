"""What is measured, as data: the shapes of attention, products and a whole model."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from minfer.format import BLOCK, BLOCK_BYTES, KvFormat, cell_bytes
from minfer.ops import DECODE, PREFILL

FORMATS = tuple(fmt.value for fmt in KvFormat)
ELEMENT_BYTES = {"f32": 4, "f16": 2, "q8_0": BLOCK_BYTES / BLOCK}


@dataclass(frozen=True)
class Work:
    """What one call must do at least.

    bytes: read from memory; 0 where the inputs stay in the caches. fma: f32 multiply-adds.
    int8: int8 multiply-adds. moved: bytes of cells copied; no floor, copies may stay in a
    cache.
    """

    bytes: float = 0
    fma: float = 0
    int8: float = 0
    moved: float = 0


@dataclass(frozen=True)
class Case:
    """One shape in several formats, all measured in the same rounds.

    measures: what is timed of it. tokens: that one call of a measure processes, where a rate in
    tokens a second says more than a time. cold: inputs rotate over more bytes than the last-level
    cache holds.
    """

    what: ClassVar[str]
    measures: ClassVar[tuple[str, ...]] = ("call",)
    cold: ClassVar[bool] = False

    @property
    def formats(self) -> tuple[str, ...]:
        return FORMATS

    def takes(self, fmt: str, measure: str) -> bool:
        """Whether there is such a measure in `fmt`."""
        return True

    def work(self, fmt: str, measure: str) -> Work | None:
        """The least work of a call, None where no floor is claimed."""
        raise NotImplementedError

    def tokens(self, measure: str) -> int:
        """Tokens a call of `measure` processes; 0 where that is no useful unit."""
        return 0

    def message(self) -> dict[str, Any]:
        """What a child needs to know."""
        return {"what": self.what, **asdict(self)}

    def label(self, measure: str) -> str:
        """The name of a row."""
        raise NotImplementedError


@dataclass(frozen=True)
class Attention(Case):
    """The last n_q positions of n_cells cached ones, causal."""

    what: ClassVar[str] = "attn"
    n_q: int
    n_cells: int
    n_head: int
    n_head_kv: int
    head_dim: int

    @property
    def cold(self) -> bool:  # type: ignore[override]
        return self.kind == DECODE

    @property
    def kind(self) -> str:
        return DECODE if self.n_q == 1 else PREFILL

    @property
    def checked(self) -> tuple[list[int], list[int]]:
        """Queries and KV heads that are compared with the oracle."""
        queries = sorted({0, self.n_q // 3, self.n_q - 1})
        return queries, sorted({0, self.n_head_kv - 1})

    @property
    def pairs(self) -> int:
        """(query, key) pairs under the causal mask."""
        return self.n_q * self.n_cells - self.n_q * (self.n_q - 1) // 2

    def row_bytes(self, fmt: str) -> int:
        return cell_bytes(KvFormat(fmt), self.n_head_kv * self.head_dim)

    def work(self, fmt: str, measure: str) -> Work:
        """Each product once; q8_0 scores are int8 products (contract 4.6)."""
        half = self.pairs * self.n_head * self.head_dim
        read = 2 * self.n_cells * self.row_bytes(fmt) if self.cold else 0
        if fmt == "q8_0":
            return Work(bytes=read, fma=half, int8=half)
        return Work(bytes=read, fma=2 * half)

    def label(self, measure: str) -> str:
        heads = f"{self.n_head}/{self.n_head_kv} d{self.head_dim}"
        return f"{self.kind} {self.n_q}x{self.n_cells} {heads}"


@dataclass(frozen=True)
class Product(Case):
    """x [rows, n_in] @ weight.T, weight [n_out, n_in]."""

    what: ClassVar[str] = "dense"
    n_out: int
    n_in: int
    rows: int

    @property
    def cold(self) -> bool:  # type: ignore[override]
        return self.rows == 1

    @property
    def op(self) -> str:
        return "matvec" if self.rows == 1 else "matmul"

    def weight_bytes(self, fmt: str) -> float:
        return ELEMENT_BYTES[fmt] * self.n_out * self.n_in

    def work(self, fmt: str, measure: str) -> Work:
        products = self.rows * self.n_out * self.n_in
        read = self.weight_bytes(fmt) if self.cold else 0
        if fmt == "q8_0":
            return Work(bytes=read, int8=products)
        return Work(bytes=read, fma=products)

    def label(self, measure: str) -> str:
        return f"{self.op} {self.n_out}x{self.n_in}, {self.rows} row" + "s" * (self.rows > 1)


@dataclass(frozen=True)
class Model(Case):
    """A prompt of `depth` tokens and decoding behind it; formats are those of the cache.

    weights: type of the weights in the file, `q4_1` as published or requantized by the peer.
    read_as: the format that every engine decodes them to, where that is asked of it. path: the
    file, known once the run has begun.
    """

    what: ClassVar[str] = "model"
    measures: ClassVar[tuple[str, ...]] = ("prefill", "decode")
    weights: str
    depth: int
    caches: tuple[str, ...] = FORMATS
    read_as: str = ""
    path: str = ""

    @property
    def formats(self) -> tuple[str, ...]:
        return self.caches

    def work(self, fmt: str, measure: str) -> Work | None:
        return None

    def tokens(self, measure: str) -> int:
        return self.depth if measure == "prefill" else 1

    def label(self, measure: str) -> str:
        where = f"prefill {self.depth}" if measure == "prefill" else f"decode at {self.depth}"
        weights = f"{self.read_as} weights" if self.read_as else f"{self.weights} file"
        return f"{where}, {weights}, cache"


def copies(case: Case, size: float, rotate_bytes: int) -> int:
    """How many sets of inputs of `size` bytes a cold case rotates over; a warm one keeps one."""
    return max(1, math.ceil(rotate_bytes / size)) if case.cold else 1

"""A tour of the Metal kernels: every one is launched, on inputs that are small and ragged.

Sizes are those at which a missing barrier or a wrong index shows: rows end inside a simdgroup,
windows begin and end inside a tile and a partition, loops run twice, the last cell is somebody's
own. Cells that nobody sees are NaN. In the first step of a kernel each of its barriers matters.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import numpy as np
import under_test
from arrays import normal

from minfer import reference, window
from minfer.format import Floats, KvFormat, Region
from minfer.ops import HALF, INTERLEAVED

F32, F16, Q8_0 = KvFormat


@dataclass(frozen=True, eq=False)
class Step:
    """One launch of a variant. kernel: whose turn it is; others may run on the way.

    tensors, scalars: arguments of the op, numpy arrays and canonical regions.
    """

    kernel: str
    title: str
    op: str
    variant: str
    tensors: tuple[Any, ...]
    scalars: dict[str, Any]

    @property
    def name(self) -> str:
        return f"{self.kernel}-{self.title}" if self.title else self.kernel

    def run(self) -> tuple[Any, ...]:
        """What the kernels answer: arrays, and regions in the canonical layout.

        They run in the simulator's mode of the context, as `under_test.launch` would not let them.
        """
        chosen, sent = under_test.find(self.op, self.variant), map(under_test.given, self.tensors)
        config = under_test.config_of(chosen)
        return _together(under_test.returned(chosen.launch(*sent, **self.scalars, config=config)))

    def error(self, answers: tuple[Any, ...]) -> float:
        """Largest difference from the oracle; infinite where only one of the two is NaN."""
        oracle = getattr(reference, self.op)
        wanted = _together(oracle(*copy.deepcopy(self.tensors), **self.scalars))
        worst = 0.0
        for a, b in zip(map(_values, answers), map(_values, wanted), strict=True):
            if (np.isnan(a) != np.isnan(b)).any():
                return float("inf")
            worst = max(worst, float(np.nanmax(np.abs(a - b))))
        return worst


def bits(answers: tuple[Any, ...]) -> list[bytes]:
    """Every bit of the answers, padding of cells too."""
    return [(a.arrays[0] if isinstance(a, Region) else a).tobytes() for a in answers]


def _together(answer: Any) -> tuple[Any, ...]:
    return answer if isinstance(answer, tuple) else (answer,)


def _values(answer: Any) -> Any:
    """Numbers of an array, or of the cells of a region, in float64."""
    if isinstance(answer, Region):
        answer = reference.decode_rows(answer.arrays[0], answer.fmt, answer.row_elems)
    return np.asarray(answer, np.float64)


# -- attention ------------------------------------------------------------------------------------

POS = 300  # of the first query; its window begins at 230, so it crosses a partition and two tiles
ALONE = 25  # the cell of the last query, which sees nothing else


def _cells(fmt: KvFormat, heads: int, d: int, n_cells: int, seen: np.ndarray, seed: int) -> Region:
    rows = np.full((n_cells, heads * d), np.nan, np.float32)
    rows[seen] = normal(len(seen), heads * d, seed=seed)
    return Region(fmt, "canonical", heads, d, (reference.encode_rows(rows, fmt),))


def _attention(
    kernel: str,
    fmt: KvFormat,
    mode: str,
    heads: tuple[int, int],
    d: int,
    n_q: int,
    pos: int = POS,
    width: int = 0,
) -> Step:
    """n_q queries of a sequence from `pos` on; in a span or in runs one more, of another."""
    ends = np.arange(n_q, dtype=np.int32)
    positions, groups, array = pos + ends, [n_q], None
    if mode == "causal":
        seen = np.arange(max(pos + 1 - (width or pos + 1), 0), pos + n_q)
    else:
        positions, groups = np.append(positions, np.int32(7)), [n_q, 1]
    if mode == "span":
        array = np.array([*((40, 111 + i) for i in ends), (ALONE, ALONE + 1)], np.int32)
        seen = np.append(np.arange(40 + (71 - width if width else 0), 110 + n_q), ALONE)
    if mode == "runs":
        own = [[(9, 0), (30, 7), (2, 21), (44, 43 + i)] for i in ends]
        array = np.array([*own, [(0, 0), (ALONE, 1), (0, 0), (0, 0)]], np.int32)
        seen = np.concatenate([np.arange(a, a + n) for a, n in own[-1]] + [np.array([ALONE])])
    k, v = (_cells(fmt, heads[1], d, seen.max() + 1, seen, seed) for seed in (1, 2))
    q = normal(len(positions), heads[0], d)
    return Step(
        kernel,
        f"{mode}-{fmt}" + ("-sliding" if width else ""),
        "attn_map" if mode == "runs" else "attn_window",
        kernel.removeprefix("attn_") if kernel != "attn_combine" else "split",
        (q, k, v, positions, array, window.tiles(groups, 32, decode=False)),
        {"fmt": fmt, "scale": d**-0.5, "width": width},
    )


ATTENTION = (
    _attention("attn_rows", F16, "runs", (4, 2), 40, n_q=2),
    _attention("attn_rows", Q8_0, "span", (2, 1), 32, n_q=2, width=50),
    _attention("attn_rows", Q8_0, "causal", (2, 1), 32, n_q=1, pos=40),
    _attention("attn_split", F16, "runs", (5, 1), 12, n_q=2),
    _attention("attn_split", Q8_0, "causal", (2, 2), 32, n_q=1),
    _attention("attn_combine", Q8_0, "causal", (2, 2), 32, n_q=1, pos=520),
    _attention("attn_flash", F16, "runs", (4, 2), 24, n_q=9),
    _attention("attn_flash", Q8_0, "causal", (1, 1), 32, n_q=3, pos=40, width=30),
)

# -- products and dense steps ---------------------------------------------------------------------


def _product(
    kernel: str, fmt: KvFormat, n: int, n_in: int, n_out: int, seed: int = 1, title: str = ""
) -> Step:
    op, _, variant = kernel.partition("_")
    if op == "matmul":
        variant = "blocks" if fmt is Q8_0 else "tiles"
    weight = reference.encode_weight(normal(n_out, n_in), fmt)
    x = normal(n, n_in, seed=seed)
    return Step(kernel, title or str(fmt), op, variant, (weight, x), {"fmt": fmt})


PRODUCTS = (
    _product("matvec_lanes", F32, n=5, n_in=133, n_out=5),
    _product("matvec_lanes", F16, n=1, n_in=132, n_out=5),
    _product("matvec_blocks", Q8_0, n=3, n_in=320, n_out=5, title="rows"),
    _product("matvec_blocks", Q8_0, n=1, n_in=320, n_out=5, title="row"),
    _product("matmul", F32, n=3, n_in=65, n_out=33),
    _product("matmul", F16, n=3, n_in=65, n_out=5),
    _product("matmul", Q8_0, n=9, n_in=96, n_out=5),
)


def _angles(n_pos: int, n_pairs: int) -> tuple[Floats, Floats]:
    at = np.arange(n_pos)[:, None] * 10.0 ** -np.linspace(0, 2, n_pairs) + 0.5
    return np.cos(at).astype(np.float32), np.sin(at).astype(np.float32)


AT = np.array([5, 0, 8], np.int32)  # positions, of a table of 9
HEADS = normal(3, 3, 11)
GATE, UP = normal(3, 37), normal(3, 37, seed=1)

DENSE = (
    Step("rms_norm_rows", "", "rms_norm", "rows", (normal(2, 1041), normal(1041)), {"eps": 1e-5}),
    Step("rope_rows", "half", "rope", "rows", (HEADS, AT, *_angles(9, 4)), {"pairing": HALF}),
    Step(
        *("rope_rows", "interleaved", "rope", "rows"),
        *((HEADS, AT, *_angles(9, 4)), {"pairing": INTERLEAVED}),
    ),
    Step("elements_rows", "silu", "silu_mul", "rows", (GATE, UP), {}),
    Step("elements_rows", "gelu", "gelu_mul", "rows", (GATE, UP), {}),
    Step("elements_rows", "softcap", "softcap", "rows", (GATE,), {"cap": 2.0}),
)

# -- cells ----------------------------------------------------------------------------------------

BLOCKS = normal(3, 96)  # an odd number of blocks a row
PACKED = reference.quantize_q8_0(BLOCKS)
STORED = np.array([6, 1, 4], np.int32)  # cells, of 7


def _region(fmt: KvFormat, heads: int, d: int) -> Region:
    cells = reference.encode_rows(normal(7, heads * d, seed=3), fmt)
    return Region(fmt, "canonical", heads, d, (cells,))


def _store(fmt: KvFormat, heads: int, d: int) -> tuple[Step, Step]:
    """Rows stored by themselves, and with a turn on the way."""
    k, v = (normal(3, heads, d, seed=seed) for seed in (1, 2))
    k_region, v_region = _region(fmt, heads, d), _region(fmt, heads, d)
    turned = (normal(3, 2 * heads, d), k, v, k_region, v_region, AT, STORED, *_angles(9, d // 4))
    return (
        Step(
            *(f"store_cells_rows_{fmt}", "", "store_cells", "rows"),
            *((k_region, k, STORED), {"fmt": fmt}),
        ),
        Step(
            *(f"qkv_rope_store_rows_{fmt}", "", "qkv_rope_store", "rows"),
            *(turned, {"fmt": fmt, "pairing": INTERLEAVED}),
        ),
    )


CELLS = (
    Step("quantize_q8_0_blocks", "", "quantize_q8_0", "blocks", (BLOCKS,), {}),
    Step("dequantize_q8_0_blocks", "", "dequantize_q8_0", "blocks", (PACKED,), {"n": 96}),
    Step("dot_q8_0_blocks", "", "dot_q8_0", "blocks", (PACKED, PACKED[::-1]), {"n": 96}),
    *_store(F32, 3, 37),
    *_store(F16, 3, 37),
    *_store(Q8_0, 3, 32),
    Step(
        *("map_q8_0_cells_rows", "", "map_q8_0_cells", "rows"),
        *((_region(Q8_0, 3, 32), STORED, *_angles(1, 12)), {"pairing": HALF}),
    ),
)

TOUR = (*ATTENTION, *PRODUCTS, *DENSE, *CELLS)

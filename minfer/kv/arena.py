"""The bytes of a store: the K and V regions of every layer (contract 1, 3.5).

All work on cells goes through the kernel package of the layer's device; how it arranges them is its
own matter.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from minfer import registry
from minfer.format import Bytes, Floats, KvFormat, Region, cell_bytes
from minfer.kv.inputs import joined
from minfer.kv.runs import Move
from minfer.offload import Need, Stretch

ROWS_AT_ONCE = 4096  # of a region, that are made float32 at a time

Turn = tuple[Floats, Floats]


def cache_needs(
    stretches: Sequence[Stretch], fmt: KvFormat, n_ctx: int, n_head_kv: int, head_dim: int
) -> list[Need]:
    """What the regions of an arena take, stretch by stretch (contract 3.5), before one is made."""
    layer = 2 * n_ctx * cell_bytes(fmt, n_head_kv * head_dim)
    what = f"{fmt} KV cache of {n_ctx} cells"
    return [Need(stretch.device, what, len(stretch.layers) * layer) for stretch in stretches]


class Arena:
    """`n_ctx` cells of K and of V in each layer. Regions are rebound: a backend may return others.

    stretches: where each layer lies. threads: workers of every kernel call, None for the variant's
    own. fill: what unused cells hold, 0 or NaN. generation: rises when a region comes to lie in
    other arrays.
    """

    def __init__(
        self,
        stretches: Sequence[Stretch],
        fmt: KvFormat,
        n_ctx: int,
        n_head_kv: int,
        head_dim: int,
        *,
        threads: int | None = None,
        fill: float = 0.0,
    ) -> None:
        self.stretches, self.fmt, self.fill = stretches, fmt, fill
        self._threads = threads
        self._choices: dict[tuple[str, int], registry.Choice] = {}  # by op and stretch
        self.by_layer = [stretch for stretch in stretches for _ in stretch.layers]
        self.layers: list[tuple[Region, Region]] = []
        for stretch in stretches:
            shape = (fmt, n_ctx, n_head_kv, head_dim)
            regions = stretch.kernels.empty_regions(2 * len(stretch.layers), *shape, fill)
            self.layers += zip(regions[::2], regions[1::2], strict=True)
        self.generation = 0

    def bind(self, layer: int, k: Region, v: Region) -> None:
        """Keep these cells of `layer`; `generation` rises if their arrays are others (7.4)."""
        kept = [array for region in self.layers[layer] for array in region.arrays]
        if any(a is not b for a, b in zip(kept, (*k.arrays, *v.arrays), strict=True)):
            self.generation += 1
        self.layers[layer] = k, v

    def answers(self) -> bool:
        """Whether every device takes and gives arrays; after a fault of a kernel it does not."""
        try:
            for stretch in self.stretches:
                stretch.kernels.to_host(stretch.kernels.from_host(np.zeros(1, np.float32)))
        except Exception:
            return False
        return True

    def move(self, moves: Sequence[Move]) -> None:
        """Copy rows inside every region, in order, cells verbatim (5.6)."""
        if not moves:
            return
        table = np.array([(move.src, move.dst, move.rows) for move in moves], np.int32)
        for layer, pair in enumerate(self.layers):
            k, v = (self._run(layer, "move_cells", region, table) for region in pair)
            self.bind(layer, k, v)

    def turn_keys(self, cells: range, turns: Sequence[Turn | None], pairing: str) -> None:
        """Rotate the K rows in `cells`, each layer by its own angles (5.7)."""
        for layer, turn in enumerate(turns):
            if turn is not None and len(cells):
                k, v = self.layers[layer]
                self.bind(layer, self._turned(layer, k, cells, turn, pairing), v)

    def _turned(self, layer: int, k: Region, cells: range, turn: Turn, pairing: str) -> Region:
        if self.fmt is KvFormat.Q8_0:
            k = self._run(layer, "map_q8_0_cells", k, joined([cells]), *turn, pairing=pairing)
            return k
        for first in range(cells.start, cells.stop, ROWS_AT_ONCE):
            some = joined([range(first, min(first + ROWS_AT_ONCE, cells.stop))])
            rows = self.by_layer[layer].kernels.decode_cells(k, some)
            turned = self._run(layer, "rope", rows, np.zeros_like(some), *turn, pairing=pairing)
            k = self._run(layer, "store_cells", k, turned, some, fmt=self.fmt)
        return k

    def clear(self, cells: Iterable[int]) -> None:
        """Wipe cells of every region: to 0, or to NaN under the sanitizer (5.7, 5.10)."""
        table = np.fromiter(cells, np.int32)
        for first in range(0, len(table), ROWS_AT_ONCE):
            some = table[first : first + ROWS_AT_ONCE]
            for layer, pair in enumerate(self.layers):
                clear = self.by_layer[layer].kernels.clear_cells
                k, v = (clear(region, some, self.fill) for region in pair)
                self.bind(layer, k, v)

    def decoded(self, layer: int, which: int, cells: Sequence[range]) -> Floats:
        """K (0) or V (1) rows of a layer, float32 [n, n_head_kv, head_dim] on the host."""
        kernels = self.by_layer[layer].kernels
        rows = kernels.decode_cells(self.layers[layer][which], joined(cells))
        host: Floats = kernels.to_host(rows)
        return host

    def canonical(self, layer: int, which: int, cells: Sequence[range]) -> Bytes:
        """K (0) or V (1) cells of a layer as stored, uint8 [n, cell_bytes]."""
        region = self.layers[layer][which]
        copied: Bytes = self.by_layer[layer].kernels.read_cells(region, joined(cells))
        return copied

    def _run(self, layer: int, op: str, region: Any, *args: Any, **scalars: Any) -> Any:
        stretch = self.by_layer[layer]
        key = op, stretch.layers.start
        if key not in self._choices:
            config = {} if self._threads is None else {"threads": self._threads}
            how: dict[str, Any] = {"device": stretch.device, "fmt": self.fmt, "config": config}
            self._choices[key] = registry.select(op, **how)
        choice = self._choices[key]
        return choice.launch(region, *args, **scalars, config=choice.config)

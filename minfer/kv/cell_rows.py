"""The bytes of a store: what its sequences hold in the cells of every layer (contract 5).

Tables alone are the matter of `sequences.Sequences`, steps and files of `store.KvStore`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from minfer import settings
from minfer.device import Device
from minfer.errors import Refusal
from minfer.format import Bytes, Floats, KvFormat, Region
from minfer.kv import removal, turning
from minfer.kv.arena import Arena, Turn, cache_needs
from minfer.kv.cells import CellTables
from minfer.kv.change import Change
from minfer.kv.checks import sanitizes, thread_count, whole_number
from minfer.kv.sequences import Sequences
from minfer.kv.session.identity import Identity, without_model
from minfer.offload import DevicePlan, Need, Stretch, required
from minfer.ops import HALF
from minfer.rope import Rope
from minfer.uninterrupted import Uninterrupted

TABLE_BYTES = 32  # a cell, of the free list


class CellRows(Sequences):
    """What moves, turns and reads the K and V rows of sequences; `KvStore` says the arguments."""

    def __init__(
        self,
        n_layer: int,
        n_ctx: int,
        n_head_kv: int,
        head_dim: int,
        *,
        cache_type: str | KvFormat | None = None,
        device: str | Device | DevicePlan = "cpu",
        threads: int | None = None,
        sanitize: bool | None = None,
    ) -> None:
        self.n_layer = whole_number(n_layer, "n_layer", "10", low=1)
        self.n_head_kv = whole_number(n_head_kv, "n_head_kv", "10", low=1)
        self.head_dim = whole_number(head_dim, "head_dim", "10", low=1)
        self.threads = None if threads is None else thread_count(threads)
        self.n_ctx = whole_number(n_ctx, "n_ctx", "10", low=1)
        self.device_plan = DevicePlan.parse(device)
        self.stretches = self.device_plan.stretches(self.n_layer)
        self.device, self.kernels = self.stretches[0].device, self.stretches[0].kernels
        self.sanitize = sanitizes(sanitize)
        heads = {"n_head_kv": self.n_head_kv, "head_dim": self.head_dim}
        asked = settings.cache_type() if cache_type is None else cache_type
        self.fmt = self.device_plan.resolve(asked, n_layer=self.n_layer, **heads)
        self.identity: Callable[[], Identity] = partial(without_model, self)  # a model sets its own
        needs = self.needs(self.fmt)
        with required([*needs, Need(self.device, "tables", TABLE_BYTES * self.n_ctx)]):
            super().__init__(CellTables(self.n_ctx))
            self._arena = Arena(
                self.stretches,
                self.fmt,
                self.n_ctx,
                **heads,
                threads=self.threads,
                fill=float("nan") if self.sanitize else 0.0,
            )

    def needs(self, fmt: KvFormat) -> list[Need]:
        """What the regions of such a store in `fmt` take, stretch by stretch."""
        return cache_needs(self.stretches, fmt, self.n_ctx, self.n_head_kv, self.head_dim)

    @property
    def tables(self) -> CellTables:
        """Whose cells are whose; to be read."""
        return self._tables

    @property
    def arena(self) -> Arena:
        """The cells of all layers."""
        return self._arena

    @property
    def layout(self) -> str:
        """How backends arrange cells inside their regions (contract 3.6), each way once."""
        return ",".join(dict.fromkeys(stretch.kernels.LAYOUT for stretch in self.stretches))

    def stretch_of(self, layer: int) -> Stretch:
        """The stretch that `layer` lies in."""
        return self._arena.by_layer[self.checked_layer(layer)]

    @property
    def pool_generation(self) -> int:
        """Rises when a region comes to lie in other arrays than before (contract 7.4)."""
        return self._arena.generation

    def remove(
        self,
        seq: int,
        start: int,
        length: int,
        *,
        rope: Rope | Sequence[Rope | None] | None,
        pairing: str = HALF,
    ) -> None:
        """Drop positions [start, start + length) of `seq`; later rows move down in place (5.7).

        Their K rows are turned back by `length` positions, V stays as it is. rope: how K rows were
        rotated, one for all layers or one a layer, None for rows that were not. Refused: f16, rows
        of a share, rows that others read.
        """
        turning.refuse_without_map(self.fmt)
        change = removal.remove(self._tables, seq, start, length)
        turns = turning.turns(rope, -int(length), self.n_layer, self.head_dim, pairing)
        self._carry_out(change, turns, pairing)

    def shift(
        self,
        seq: int,
        drop: int,
        *,
        rope: Rope | Sequence[Rope | None] | None,
        pairing: str = HALF,
    ) -> None:
        """Drop the first `drop` positions of `seq` (5.7), see `remove`."""
        self.remove(seq, 0, drop, rope=rope, pairing=pairing)

    def export(self, seq: int, layer: int, which: str = "k") -> Floats:
        """The readable K or V rows of `seq`, decoded: float32 [rows, n_head_kv, head_dim]."""
        return self._arena.decoded(*self._read_plan(seq, layer, which))

    def export_cells(self, seq: int, layer: int, which: str = "k") -> Bytes:
        """The readable K or V cells of `seq` as stored, canonical: uint8 [rows, cell_bytes]."""
        return self._arena.canonical(*self._read_plan(seq, layer, which))

    def region(self, layer: int) -> tuple[Region, Region]:
        """The K and the V cells of `layer`."""
        return self._arena.layers[self.checked_layer(layer)]

    def rebind(self, layer: int, k: Region, v: Region) -> None:
        """Keep the regions that a storing op returned for `layer`."""
        self._arena.bind(layer, k, v)

    def checked_layer(self, layer: int) -> int:
        """`layer` as an index in [0, n_layer), refused outside."""
        return whole_number(layer, "layer", "5.5", high=self.n_layer - 1)

    def _read_plan(self, seq: int, layer: int, which: str) -> tuple[int, int, tuple[range, ...]]:
        """The layer, 0 for K or 1 for V, and the cells that hold the readable rows of `seq`."""
        if which not in ("k", "v"):
            raise Refusal("10", f"which is {which!r}; give k or v", {"which": which})
        return self.checked_layer(layer), "kv".index(which), self._tables.written_cells(seq)

    def _carry_out(
        self, change: Change, turns: Sequence[Turn | None] = (), pairing: str = HALF
    ) -> None:
        with Uninterrupted():
            self._apply(change, turns, pairing)

    def _apply(
        self,
        change: Change,
        turns: Sequence[Turn | None] = (),
        pairing: str = HALF,
        kept: frozenset[int] = frozenset(),
    ) -> None:
        """kept: cells that are about to become readable, which the sanitizer leaves alone."""
        self._tables.refuse_stale(change)
        read = self._tables.read_cells() if self.sanitize else set()
        with self._tables.lost_by_errors():
            self._arena.move(change.moves)
            for move in change.moves if turns else ():
                self._arena.turn_keys(range(move.dst, move.dst + move.rows), turns, pairing)
            self._arena.clear(change.cleared)
            self._tables.install(change)
            if self.sanitize:
                self._arena.clear(read - self._tables.read_cells() - kept)

"""Random operations on a store against a plain model of it (contract 5, 0.1)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from minfer.errors import Refusal
from minfer.kv.batch import Batch
from minfer.kv.store import KvStore

N_CTX, N_LAYER, HEAD_DIM = 12, 2, 2
SEQS = st.integers(0, 3)


class BrokenError(Exception):
    """What a step's block raises when the machine lets it fail."""


class StoreMachine(RuleBasedStateMachine):
    """`rows` holds what every position must read as; `held` where each sequence lies."""

    def __init__(self) -> None:
        super().__init__()
        self.store = KvStore(N_LAYER, N_CTX, 1, HEAD_DIM, cache_type="f32", threads=1)
        self.held: dict[int, tuple[int, int]] = {}  # seq -> start, cap
        self.rows: dict[int, list[float]] = {}  # seq -> value of each readable position
        self.next_value = 1.0

    def refused(self, call: Callable[[], object], *rules: str) -> None:
        digest, generation = self.store.digest(), self.store.generation
        try:
            call()
        except Refusal as error:
            assert error.rule in rules, error
        else:
            raise AssertionError(f"not refused by {rules}")
        assert (self.store.digest(), self.store.generation) == (digest, generation)

    def first_fit(self, cap: int) -> int | None:
        taken = {c for start, n in self.held.values() for c in range(start, start + n)}
        for start in range(N_CTX - cap + 1):
            if not taken.intersection(range(start, start + cap)):
                return start
        return None

    def values(self, n: int) -> list[float]:
        self.next_value += n
        return [self.next_value - i for i in range(n)]

    @initialize(caps=st.lists(st.integers(2, 6), min_size=1, max_size=2))
    def begin(self, caps: list[int]) -> None:
        for seq, cap in enumerate(caps):
            self.reserve(seq, cap)

    @rule(seq=SEQS, cap=st.integers(0, 7))
    def reserve(self, seq: int, cap: int) -> None:
        start, held = self.first_fit(cap), self.held.get(seq, (0, 0))[1]
        if cap == 0 or (held and cap > held) or (not held and start is None):
            self.refused(lambda: self.store.reserve(seq, cap), "5.2")
            return
        slot = self.store.reserve(seq, cap)
        if not held:
            assert start is not None
            self.held[seq], self.rows[seq] = (start, cap), []
        assert (slot.start, slot.cap) == self.held[seq]

    @rule(seq=SEQS)
    def release(self, seq: int) -> None:
        if seq not in self.held:
            self.refused(lambda: self.store.release(seq), "2.5")
            return
        self.store.release(seq)
        del self.held[seq], self.rows[seq]

    @rule(seq=SEQS, keep=st.integers(0, 7))
    def truncate(self, seq: int, keep: int) -> None:
        if seq not in self.held or keep > len(self.rows[seq]):
            self.refused(lambda: self.store.truncate(seq, keep), "2.5", "5.11")
            return
        self.store.truncate(seq, keep)
        del self.rows[seq][keep:]

    @rule(seq=SEQS, n=st.integers(1, 4))
    def import_rows(self, seq: int, n: int) -> None:
        values = self.values(n)
        arrays = np.stack([self.arrays(values, layer) for layer in range(N_LAYER)])
        if seq not in self.held or len(self.rows[seq]) + n > self.held[seq][1]:
            self.refused(lambda: self.store.import_rows(seq, arrays, -arrays), "2.5")
            return
        self.store.import_rows(seq, arrays, -arrays)
        self.rows[seq] += values

    @rule(
        groups=st.lists(
            st.tuples(SEQS, st.sampled_from([0, 0, 1, 3]), st.integers(1, 3)),
            min_size=1,
            max_size=3,
            unique_by=lambda group: group[0],
        ),
        fails=st.sampled_from([None, None, 0, 1, 2]),
    )
    def step(self, groups: list[tuple[int, int, int]], fails: int | None) -> None:
        """A step over (seq, rows back from its end, n), raising after `fails` written layers."""
        groups = [(seq, max(0, len(self.rows.get(seq, ())) - back), n) for seq, back, n in groups]
        seqs = [seq for seq, _, n in groups for _ in range(n)]
        positions = [pos for _, t, n in groups for pos in range(t, t + n)]
        if self.cannot_step(groups):
            self.refused(
                lambda: self.run(Batch(seqs, positions, "prefill"), [], None), "2.5", "5.5"
            )
            return
        values = self.values(len(seqs))
        batch = Batch(seqs, positions, "prefill")
        try:
            self.run(batch, values, fails)
        except BrokenError:
            for seq, t, _ in groups:
                del self.rows[seq][t:]
            return
        for group in batch.groups:
            fresh = values[group.row : group.row + group.n]
            self.rows[group.seq][group.t : group.t + group.n] = fresh

    def cannot_step(self, groups: list[tuple[int, int, int]]) -> bool:
        return any(seq not in self.held or t + n > self.held[seq][1] for seq, t, n in groups)

    def run(self, batch: Batch, values: list[float], fails: int | None) -> None:
        with self.store.step(batch) as step:
            for layer in range(N_LAYER):
                if fails == layer:
                    raise BrokenError
                rows = self.arrays(values, layer)
                step.write(layer, k=rows, v=-rows)
            if fails == N_LAYER:
                raise BrokenError

    @staticmethod
    def arrays(values: list[float], layer: int) -> np.ndarray:
        """Row i of a layer is values[i] + layer / 4, exact in f32."""
        rows = np.array(values, np.float32)[:, None, None] + np.float32(layer / 4)
        return np.broadcast_to(rows, (len(values), 1, HEAD_DIM))

    @invariant()
    def agrees_with_the_model(self) -> None:
        self.store.check()
        stats = self.store.stats()
        reserved = sum(cap for _, cap in self.held.values())
        assert (stats.reserved, stats.free_cells) == (reserved, N_CTX - reserved)
        assert (stats.sequences, stats.written) == (
            len(self.held),
            sum(len(rows) for rows in self.rows.values()),
        )
        occupied = [owner != -1 for owner in self.store.owners()]
        for seq, (start, cap) in self.held.items():
            assert self.store.spans(seq) == [(0, start, cap)]
            assert all(occupied[start : start + cap])
            assert self.store.written(seq) == len(self.rows[seq])
            for layer in range(N_LAYER):
                wanted = self.arrays(self.rows[seq], layer)
                np.testing.assert_array_equal(self.store.export(seq, layer, "k"), wanted)
                np.testing.assert_array_equal(self.store.export(seq, layer, "v"), -wanted)
        assert sum(occupied) == reserved


StoreMachine.TestCase.settings = settings(max_examples=300, stateful_step_count=30, deadline=None)
test_store_machine = StoreMachine.TestCase

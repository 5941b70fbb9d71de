"""Proof that a resume is exact: last rows made again, compared bit by bit (contract 8.5)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from minfer.engine import Engine
from minfer.engine_session import Resumed
from minfer.errors import Refusal
from minfer.kv.batch import Batch
from minfer.kv.runs import LastRow
from minfer.kv.session.header import ANY
from minfer.kv.session.pieces import WHICH
from minfer.kv.session.reading import SessionFile
from minfer.kv.session.tables import Tables
from minfer.models.fingerprint import fingerprint, full_hash
from minfer.models.gguf import open_gguf
from minfer.sessions.wording import counted


@dataclass(frozen=True)
class Proof:
    """Whether the last row of a sequence, at `position`, came out as it was saved.

    last: what was saved. logits: xxh3 of those made now. same_row: whether its K and V cells of
    all layers are those of the file.
    """

    seq: int
    position: int
    last: LastRow
    logits: int
    same_row: bool

    @property
    def holds(self) -> bool:
        return self.same_row and self.logits == self.last.logits


def provable(tables: Tables) -> list[int]:
    """The sequences of which the last row's token, kind and logits are known."""
    return [seq for seq, entry in tables.entries.items() if entry.last and entry.last.logits]


def refuse_unprovable(file: SessionFile) -> None:
    """Refuse a file that tells of no sequence what its last row's logits were."""
    if not provable(file.tables):
        n = len(file.tables.entries)
        of = counted(n, "sequence")
        raise Refusal(
            "8.5",
            f"{file.where} keeps the logits of no last row, of {of}, so nothing can be "
            "proved; an engine's save keeps them unless rows were cut or removed since, and "
            "`minfer session transcode` drops them",
            {"sequences": n},
        )


def prove(engine: Engine, file: SessionFile) -> tuple[Resumed, list[Proof]]:
    """Make the last row of every provable sequence again; what a resume of the file said, too.

    file: verified; it is loaded again after each. Other sequences are released meanwhile, so that
    there is room for a row that they share.
    """
    resumed, proofs = engine.resume(file.path), []
    for seq in provable(file.tables):
        last = file.tables.entries[seq].last  # not the store's: it forgets logits of other numbers
        assert last is not None
        proofs.append(_again(engine, seq, last))
        engine.resume(file.path)
    return resumed, proofs


def _again(engine: Engine, seq: int, last: LastRow) -> Proof:
    store = engine.store
    position = store.written(seq) - 1
    saved = _last_cells(engine, seq)
    for other in store.sequences():
        if other != seq:
            store.release(other)
    store.truncate(seq, position)
    engine.forward(Batch([seq], [position], last.kind, [last.token]))
    made = store.tables.known(seq).last
    assert made is not None
    return Proof(seq, position, last, made.logits, _last_cells(engine, seq) == saved)


def _last_cells(engine: Engine, seq: int) -> list[bytes]:
    """The last row of a sequence as stored, K and V of every layer."""
    store, cells = engine.store, engine.store.tables.written_cells(seq)[-1][-1:]
    return [
        store.arena.canonical(layer, which, (cells,)).tobytes()
        for layer in range(store.n_layer)
        for which in range(len(WHICH))
    ]


@dataclass(frozen=True)
class Weights:
    """Hashes of all weights: as the session tells it, and of a model's file."""

    told: str
    found: str
    same_fingerprint: bool

    @property
    def equal(self) -> bool:
        return self.same_fingerprint and self.told == self.found


def compare_weights(file: SessionFile, model: Path, progress: bool = False) -> Weights:
    """Hash a model's file and compare it with what the session tells. progress: a bar on stderr."""
    told = file.host_part.model_hash
    if not told or file.header.model == ANY:
        raise Refusal(
            "8.8",
            f"{file.where} tells no hash of a model's weights; only sessions that an engine saved "
            "do",
            {"path": file.where},
        )
    weights = open_gguf(model)
    same = fingerprint(weights) == file.header.model
    return Weights(told, full_hash(weights, progress).hex(), same)

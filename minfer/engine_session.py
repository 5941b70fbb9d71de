"""Saving what an engine holds, and going on from it (contract 8)."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from minfer import numerics
from minfer.format import Floats
from minfer.kv.batch import Batch
from minfer.kv.runs import LastRow
from minfer.kv.session import host
from minfer.kv.session.identity import Identity, identified

if TYPE_CHECKING:
    from minfer.inference import Inference
    from minfer.loading import LoadedModel

Accept = Callable[[dict[str, Any]], object]


@dataclass(frozen=True)
class Resumed:
    """What a resume found.

    host: the state that was saved with the cache. bitwise: whether going on gives the logits, to
    the bit, that the saved engine would have given. differs: why not, "" if it does.
    """

    host: dict[str, Any]
    bitwise: bool
    differs: str


def identity_of(loaded: LoadedModel) -> Identity:
    """What sessions of a loaded model belong to."""
    store, hp = loaded.store, loaded.hp
    facts = numerics.facts(
        store.device,
        store.fmt,
        n_head=hp.n_head,
        n_head_kv=hp.n_head_kv,
        head_dim=hp.head_dim,
        weights=loaded.weight_formats,
        activations=loaded.activations,
    )
    name = os.fsencode(loaded.file.path.name).decode("utf-8", "replace")
    return Identity(numerics.fingerprint(facts), facts, loaded.fingerprint, name)


def last_rows(batch: Batch, rows: Sequence[int], logits: Floats) -> dict[int, LastRow]:
    """By sequence, what made the last row of its group. logits: of `rows` of the batch."""
    import xxhash

    row_of = dict(zip(rows, logits, strict=True))
    lasts = {}
    for group in batch.groups:
        last = group.row + group.n - 1
        digest = xxhash.xxh3_64_intdigest(np.ascontiguousarray(row_of[last]).data)
        lasts[group.seq] = LastRow((batch.tokens or ())[last], batch.kind, digest)
    return lasts


def save(engine: Inference, path: str | Path, state: Mapping[str, Any] | None) -> None:
    """Write the session; `Engine.save` says when it refuses."""
    identity = identified(engine.store)
    engine.store.save(path, host.pack(identity.name, engine.model_hash, identity.facts, state))


def resume(engine: Inference, path: str | Path, accept: Accept | None) -> Resumed:
    """Take the session over; `Engine.resume` says when it refuses."""
    found: dict[str, Any] = {}

    def look(saved: bytes) -> None:
        found.update(host.state(saved, str(path)))
        if accept is not None:
            accept(found)

    loaded = engine.store.load(path, look)
    return Resumed(found, loaded.bitwise, loaded.differs)

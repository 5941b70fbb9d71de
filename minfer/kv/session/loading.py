"""Putting a session file into a store: all of it or nothing (contract 8.2)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from minfer.errors import Refusal
from minfer.kv.session.header import ANY
from minfer.kv.session.host import line
from minfer.kv.session.identity import Identity, identified
from minfer.kv.session.pieces import put, view
from minfer.kv.session.reading import SessionFile
from minfer.kv.session.tables import Tables, without_logits
from minfer.ops import OPS
from minfer.uninterrupted import Uninterrupted

if TYPE_CHECKING:
    from minfer.kv.store import KvStore


Accept = Callable[[bytes], object]


@dataclass(frozen=True)
class Loaded:
    """What a load found. host: the host's bytes, as they were saved.

    bitwise: whether going on gives the numbers, to the bit, that the saved store would have given
    (8.5). differs: why not, "" if it does.
    """

    host: bytes
    bitwise: bool
    differs: str


def load(store: KvStore, path: str | Path, accept: Accept | None) -> Loaded:
    """Replace what `store` holds by what the file holds; `KvStore.load` says when it refuses."""
    with SessionFile(path) as file:
        identity = identified(store)
        file.verify()
        _refuse_other(file, store, identity)
        tables = file.tables
        if accept is not None:
            accept(file.host)
        differs = _differs(file, identity)
        _apply(store, file, without_logits(tables) if differs else tables)
        return Loaded(file.host, not differs, differs)


def _apply(store: KvStore, file: SessionFile, tables: Tables) -> None:
    """The second pass: from its begin to its end the store is empty."""
    arena, before = store.arena, store.tables.read_cells() if store.sanitize else set()
    filling = False  # an interrupt may come between any two lines
    try:
        with Uninterrupted():
            store.tables.replace(None)
            filling = True
        for piece, rows in file.rows(partial(view, arena)):
            if view(arena, piece) is None:
                put(arena, piece, rows)
        with Uninterrupted():
            store.tables.replace(tables)
            filling = False
            if store.sanitize:
                arena.clear(before - store.tables.read_cells())
    except BaseException as error:
        if filling and store.sanitize:
            arena.clear({*before, *chain(*tables.written())})
        if filling:
            error.add_note("the store was being filled from the file; it is empty now")
        raise


def _refuse_other(file: SessionFile, store: KvStore, identity: Identity) -> None:
    """Refuse a file that describes another run than that of `store`, saying how it differs."""
    have = file.header
    wanted = {
        "backend": (have.backend_name, store.device.name),
        "n_layer": (have.n_layer, store.n_layer),
        "n_ctx": (have.n_ctx, store.n_ctx),
        "n_kv_embd": (have.n_kv_embd, store.n_head_kv * store.head_dim),
        "n_head_kv": (have.n_head_kv, store.n_head_kv),
        "cache type": (have.fmt.value, store.fmt.value),
    }
    different = {name: pair for name, pair in wanted.items() if pair[0] != pair[1]}
    if different:
        what = ", ".join(f"{name} {a} and this run has {b}" for name, (a, b) in different.items())
        raise Refusal(
            "8.2",
            f"{file.where} holds {what}; {_way_out(file, different)}",
            {name.replace(" ", "_"): pair for name, pair in different.items()},
        )
    refuse_other_model(file, identity)


def _way_out(file: SessionFile, different: dict[str, tuple[object, object]]) -> str:
    """What to do about a file of another run."""
    if different.keys() & {"n_layer", "n_kv_embd", "n_head_kv"}:
        name = line(file.host_part.model)
        return f"it belongs to another model{name and ', ' + name}: load that one"
    ways = []
    if "n_ctx" in different:
        ways.append(f"load the model with n_ctx {different['n_ctx'][0]}")
    if "cache type" in different:
        ways.append(f"use cache type {different['cache type'][0]}")
    if "backend" in different:
        ways.append(f"use device {different['backend'][0]}")
    return " and ".join(ways) + ", or make another file by `minfer session transcode`"


def refuse_other_model(file: SessionFile, identity: Identity) -> None:
    """Refuse a file of another model than that of a run (8.8)."""
    model = file.header.model
    if model == identity.model:
        return
    theirs = _model(line(file.host_part.model), model)
    way_out = "load the model that it was saved with; other weights or metadata make other rows"
    if model == ANY:
        theirs, way_out = "no model: a store without one wrote it", "load it into such a store"
    raise Refusal(
        "8.8",
        f"{file.where} belongs to {theirs}, and this run has "
        f"{_model(identity.name, identity.model)}; {way_out}",
        {"model": model.hex(), "wanted": identity.model.hex()},
    )


def _model(name: str, fingerprint: bytes) -> str:
    if fingerprint == ANY:
        return "no model"
    return f"{name or 'a model'} ({fingerprint.hex()})"


def _differs(file: SessionFile, identity: Identity) -> str:
    """Why numbers may be others than those of the run that saved the file; "" if they are not."""
    if file.header.numerics == identity.numerics:
        return ""
    if file.header.numerics == ANY:
        return "its cells were made for another run, by `minfer session transcode`"
    then = {line(name): line(fact) for name, fact in file.host_part.facts.items()}
    now = identity.facts
    changed = {
        name: f"{name} {then.get(name, 'absent')} then, {now.get(name, 'absent')} now"
        for name in {**then, **now}
        if then.get(name) != now.get(name)
    }
    # what stands behind other variants of ops says more than their list
    causes = [words for name, words in changed.items() if name.split(" ")[0] not in OPS]
    told = (causes or list(changed.values())) if then else []
    return "; ".join(told) or "kernels or libraries are others"

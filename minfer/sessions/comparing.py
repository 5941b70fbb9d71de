"""Two session files beside each other: what they say, and their rows sequence by sequence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from minfer.format import Bytes, Floats
from minfer.kv.session.pieces import WHICH
from minfer.kv.session.reading import SessionFile
from minfer.sessions.description import Facts, describe
from minfer.sessions.deviation import Deviation, Planes
from minfer.sessions.progress import Update, bar
from minfer.sessions.rows import Codec, at_once, cells_at, cut, written

SHAPE = ("n_layer", "n_kv_embd", "n_head_kv")
LISTED = ("runs", "sequences")  # tables, told apart by their ids
ELSEWHERE = ("file", "host", "sizes", *LISTED)  # what is compared in its own way, or follows
Pair = tuple[Any, Any]


@dataclass(frozen=True)
class ComparedRows:
    """The rows that a sequence has in both files.

    compared: how many; of these `equal` are the same in every layer, byte for byte, or value for
    value where the formats differ. first: the first position that is not, None if all are.
    planes: by layer and "k" or "v", how far b lies from a, where anything differs.
    """

    seq: int
    compared: int
    equal: int
    first: int | None
    planes: Planes


@dataclass(frozen=True)
class Comparison:
    """What differs between files a and b.

    facts: by dotted name, the values of both. tables: by "runs 3" or "sequences 1", both records,
    None where there is none. host: names in the host part with other values. rows: a sequence
    each, None where the files hold rows of other shapes. equal: every byte is.
    """

    equal: bool
    facts: dict[str, Pair]
    tables: dict[str, Pair]
    host: list[str]
    rows: list[ComparedRows] | None


def compare(a: SessionFile, b: SessionFile, *, progress: bool = False) -> Comparison:
    """Compare two verified files. progress: a bar on stderr."""
    told = describe(a), describe(b)
    same_shape = all(told[0][name] == told[1][name] for name in SHAPE)
    rows = _rows(a, b, progress) if same_shape else None
    for file in (a, b):
        file.refuse_changed()
    return Comparison(
        a.checksum == b.checksum,
        _facts(*told),
        {k: pair for name in LISTED for k, pair in _records(name, *told).items()},
        _host(a, b),
        rows,
    )


def flat(facts: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Mappings inside mappings by dotted names."""
    found: dict[str, Any] = {}
    for name, value in facts.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{prefix}{name}.")
        else:
            found[prefix + name] = value
    return found


def differing(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, Pair]:
    """The values of both under every name where they are not the same."""
    pairs = {name: (a.get(name), b.get(name)) for name in {**a, **b}}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def _facts(*told: Facts) -> dict[str, Pair]:
    """All but tables; facts of numbers only where both files tell some."""
    compared = ({k: v for k, v in facts.items() if k not in ELSEWHERE} for facts in told)
    pairs = differing(*map(flat, compared))
    both = all(facts["numerics"]["facts"] for facts in told)
    return {k: pair for k, pair in pairs.items() if both or not k.startswith("numerics.facts.")}


def _records(name: str, *told: Facts) -> dict[str, Pair]:
    return differing(*({f"{name} {record['id']}": record for record in of[name]} for of in told))


def _host(a: SessionFile, b: SessionFile) -> list[str]:
    """Names that differ, down to those of the state."""
    if a.host == b.host:
        return []
    if None in (a.host_part.version, b.host_part.version):
        return ["bytes"]
    return list(differing(*(_named(file.host_part.content) for file in (a, b)))) or ["bytes"]


def _named(content: Mapping[str, Any]) -> dict[str, Any]:
    named = dict(content)
    state = named.pop("state", None)
    kept = state if isinstance(state, dict) else {"": state}
    return {**named, **{f"state.{name}".rstrip("."): value for name, value in kept.items()}}


def _rows(a: SessionFile, b: SessionFile, progress: bool) -> list[ComparedRows]:
    both = [seq for seq in a.tables.entries if seq in b.tables.entries]
    n = {seq: min(written(a, seq), written(b, seq)) for seq in both}
    planes = 2 * a.header.n_layer
    with bar(planes * sum(n.values()), "comparing", " rows", show=progress) as update:
        return [_sequence(a, b, seq, n[seq], update) for seq in both]


def _sequence(a: SessionFile, b: SessionFile, seq: int, n: int, update: Update) -> ComparedRows:
    differs, planes = np.zeros(n, np.bool_), {}
    codecs = Codec.of(a.header), Codec.of(b.header)
    for layer in range(a.header.n_layer):
        for which, name in enumerate(WHICH):
            deviation, any_differ = Deviation(a.header.n_head_kv), False
            for positions in cut(n, at_once(a.header, b.header)):
                cells = [cells_at(file, seq, layer, which, positions) for file in (a, b)]
                apart = _add(deviation, codecs, cells, a.header.fmt is b.header.fmt)
                differs[positions.start : positions.stop] |= apart
                any_differ |= bool(apart.any())
                update(len(positions))
            if any_differ:
                planes[layer, name] = deviation
    first = int(np.argmax(differs)) if differs.any() else None
    return ComparedRows(seq, n, n - int(differs.sum()), first, planes)


def _add(
    deviation: Deviation, codecs: tuple[Codec, Codec], cells: list[Bytes], by_bytes: bool
) -> NDArray[np.bool_]:
    """Which rows differ, [n]; what that comes to is added to `deviation`."""
    apart: NDArray[np.bool_]
    if by_bytes:
        apart = (cells[0] != cells[1]).any(axis=1)
        if not apart.any():
            deviation.add_equal(len(apart), codecs[0].head_dim)
            return apart
    rows = [codec.decode(some) for codec, some in zip(codecs, cells, strict=True)]
    deviation.add(*rows)
    return apart if by_bytes else _unequal(*rows)


def _unequal(a: Floats, b: Floats) -> NDArray[np.bool_]:
    """Which rows hold another value; NaN is equal to NaN."""
    unequal: NDArray[np.bool_] = ((a != b) & ~(np.isnan(a) & np.isnan(b))).any(axis=(1, 2))
    return unequal

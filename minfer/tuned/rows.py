"""A promoted row as a value, and as JSON, strictly read."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from minfer.format import KvFormat
from minfer.ops import DECODE, KINDS, OPS, PREFILL, Shape

FAMILIES = (("attn_window", "attn_map"),)  # equal bits: one variant, one set of numeric values
HEADED = (*FAMILIES[0], "rope", "qkv_rope_store")  # ops that a head_dim is asked of
ONE_KIND = {"matvec": DECODE, "matmul": PREFILL}
FIELDS = (
    *("op", "format", "head_dim", "kind", "variant", "module", "numeric", "free", "source"),
    *("made_with", "evidence"),
)
REACH = 2  # powers of two of n_q from where free values were timed to where they are taken
SCALARS = (bool, int, float, str)


class Key(NamedTuple):
    """What numeric values may depend on within one kind of device (contract 6.4)."""

    family: tuple[str, ...]
    fmt: str
    head_dim: int
    kind: str

    def __str__(self) -> str:
        heads = f"d{self.head_dim}" if self.head_dim else ""
        return " ".join(part for part in (self.fmt, self.kind, heads) if part)


def family(op: str) -> tuple[str, ...]:
    """The ops whose bits are those of `op`, itself included."""
    return next((ops for ops in FAMILIES if op in ops), (op,))


def key_of(op: str, fmt: KvFormat, shape: Shape) -> Key:
    """The key of the rows that a call asks: fmt "" and head_dim 0 where an op has none."""
    return Key(
        family(op),
        fmt.value if OPS[op].formats else "",
        shape.head_dim if op in HEADED else 0,
        ONE_KIND.get(op, shape.kind),
    )


@dataclass(frozen=True, eq=False)
class Row:
    """One promoted choice.

    module: of a user's variant, "" for one of minfer. numeric: by name, for the whole family.
    free: (n_q, values by name) by rising n_q, for the op alone. made_with: as `made_with`.
    evidence: speedup [low, mid, high] over the default, date, commit, and whatever else is known.
    """

    op: str
    fmt: str
    head_dim: int
    kind: str
    variant: str
    module: str
    numeric: Mapping[str, Any]
    free: tuple[tuple[int, Mapping[str, Any]], ...]
    source: str
    made_with: Mapping[str, str]
    evidence: Mapping[str, Any]

    @property
    def key(self) -> Key:
        return Key(family(self.op), self.fmt, self.head_dim, self.kind)

    @property
    def name(self) -> str:
        return f"{self.op} {self.key}"

    def free_at(self, n_q: int) -> Mapping[str, Any]:
        """The free values for `n_q` rows: those of the nearest that was timed, if it is near."""
        asked = math.log2(max(1, n_q))
        distances = [abs(math.log2(max(1, n)) - asked) for n, _ in self.free]
        nearest = min(distances)
        return self.free[distances.index(nearest)][1] if nearest <= REACH else {}

    @property
    def proof(self) -> str:
        """What the choice rests on, in one line."""
        low, mid, high = self.evidence["speedup"]
        made = self.evidence["commit"] or "unknown"
        commit = made[:9] + "+" * made.endswith("+")
        gain = f"{mid:.3g} times as fast as the default ({low:.3g} to {high:.3g})"
        return f"{self.op} {gain}, {self.evidence['date'][:10]}, commit {commit}"

    @classmethod
    def read(cls, given: object) -> Row:
        """A row of JSON; ValueError says what is wrong with it."""
        row = _fields(given)
        for name in ("op", "format", "kind", "variant", "source"):
            _check(isinstance(row[name], str), name)
        op, fmt, head_dim = row["op"], row["format"], row["head_dim"]
        _check(op in OPS, "op")
        _check(fmt in {f.value for f in KvFormat} if OPS[op].formats else fmt == "", "format")
        _check(type(head_dim) is int and (head_dim > 0) == (op in HEADED), "head_dim")
        _check(row["kind"] in KINDS and ONE_KIND.get(op, row["kind"]) == row["kind"], "kind")
        _check(isinstance(row["module"], str), "module")
        _check(_is_values(row["numeric"]), "numeric")
        made = row["made_with"]
        _check(
            isinstance(made, dict) and all(isinstance(v, str) for v in made.values()), "made_with"
        )
        _check_evidence(row["evidence"])
        named = {name: row[name] for name in FIELDS if name not in ("format", "free")}
        return cls(**named, fmt=fmt, free=_free(row["free"]))

    def as_dict(self) -> dict[str, Any]:
        """The row as JSON, in the order of `FIELDS`."""
        told = {name: getattr(self, name) for name in FIELDS if name not in ("format", "free")}
        told["format"] = self.fmt
        told["free"] = [{"n_q": n_q, "config": dict(values)} for n_q, values in self.free]
        for name in ("numeric", "made_with", "evidence"):
            told[name] = dict(told[name])
        return {name: told[name] for name in FIELDS if name != "module" or self.module}


def _check(holds: bool, name: str) -> None:
    if not holds:
        raise ValueError(f"its {name} cannot be read")


def _fields(given: object) -> dict[str, Any]:
    if not isinstance(given, dict):
        raise ValueError("it is no object")
    row = {"module": "", **given}
    for name in FIELDS:
        if name not in row:
            raise ValueError(f"it has no {name}")
    for name in row:
        if name not in FIELDS:
            raise ValueError(f"it has {name!r}, which is unknown")
    if not _printable(row):  # parts of it go to terminals
        raise ValueError("it holds characters that cannot be printed")
    return row


def _printable(value: object) -> bool:
    if isinstance(value, dict):
        return all(map(_printable, (*value, *value.values())))
    if isinstance(value, list):
        return all(map(_printable, value))
    return not isinstance(value, str) or value.isprintable()


def _is_values(given: object) -> bool:
    return isinstance(given, dict) and all(type(value) in SCALARS for value in given.values())


def _free(given: object) -> tuple[tuple[int, Mapping[str, Any]], ...]:
    _check(isinstance(given, list) and bool(given), "free")
    assert isinstance(given, list)
    for entry in given:
        _check(isinstance(entry, dict) and set(entry) == {"n_q", "config"}, "free")
        _check(type(entry["n_q"]) is int and entry["n_q"] >= 0, "free")
        _check(_is_values(entry["config"]), "free")
    found = {entry["n_q"]: entry["config"] for entry in given}
    _check(len(found) == len(given), "free")
    return tuple(sorted(found.items()))


def _check_evidence(given: object) -> None:
    _check(isinstance(given, dict), "evidence")
    assert isinstance(given, dict)
    speedup, commit = given.get("speedup"), given.get("commit")
    numbers = speedup if isinstance(speedup, list) else []
    _check(len(numbers) == 3 and all(map(_is_finite, numbers)), "speedup")
    _check(isinstance(given.get("date"), str), "date")
    _check(commit is None or isinstance(commit, str), "commit")


def _is_finite(given: object) -> bool:
    """Whether it is a number that a float can hold."""
    try:
        return type(given) in (int, float) and math.isfinite(given)  # type: ignore[arg-type]
    except OverflowError:
        return False

"""A batch: the tokens of one step, as groups of consecutive positions (contract 5.5, 6.2, 10)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from minfer.errors import Refusal
from minfer.kv.checks import sequence_id, whole_number
from minfer.ops import DECODE, check_kind

DECODE_ROWS_MAX = 8

Ints: TypeAlias = Sequence[int | np.integer[Any]] | NDArray[np.integer[Any]]


class Group(NamedTuple):
    """Positions [t, t + n) of sequence `seq`, in rows [row, row + n) of the batch."""

    seq: int
    t: int
    n: int
    row: int


@dataclass(frozen=True, slots=True, init=False)
class Batch:
    """The tokens of one step, checked on their own; the store checks them against its tables.

    seq_ids, positions: one number a token; the tokens of a sequence stand together and their
    positions are consecutive. kind: `prefill` (tokens of a prompt) or `decode` (generated and
    draft tokens, 1 to 8 rows a sequence). tokens: ids for the model, or None.
    """

    seq_ids: tuple[int, ...]
    positions: tuple[int, ...]
    kind: str
    tokens: tuple[int, ...] | None
    groups: tuple[Group, ...]

    def __init__(
        self, seq_ids: Ints, positions: Ints, kind: str, tokens: Ints | None = None
    ) -> None:
        check_kind(kind)
        seqs = tuple(sequence_id(seq) for seq in _listed(seq_ids, "seq_ids"))
        at = tuple(whole_number(pos, "position", "2.5") for pos in _listed(positions, "positions"))
        ids = None
        if tokens is not None:
            ids = tuple(whole_number(id, "token", "7.5") for id in _listed(tokens, "tokens"))
        _refuse_lengths(len(seqs), len(at), len(seqs) if ids is None else len(ids))
        for name, value in (("seq_ids", seqs), ("positions", at), ("kind", kind), ("tokens", ids)):
            object.__setattr__(self, name, value)
        object.__setattr__(self, "groups", _group(seqs, at, kind))

    @property
    def n_tokens(self) -> int:
        return len(self.seq_ids)


def _listed(values: Ints, name: str) -> list[object]:
    """`values` as a flat list; whatever is no flat list of numbers is refused."""
    if isinstance(values, np.ndarray) and values.ndim == 1:
        return list(values.tolist())
    if isinstance(values, (list, tuple, range)):
        return list(values)
    shape = getattr(values, "shape", None)
    what = type(values).__name__ if shape is None else f"{type(values).__name__} {tuple(shape)}"
    raise Refusal(
        "10",
        f"{name} of a batch is a {what}; give a list of whole numbers",
        {"name": name, "type": type(values).__name__, "shape": shape},
    )


def _refuse_lengths(n_seqs: int, n_positions: int, n_tokens: int) -> None:
    if not n_seqs == n_positions == n_tokens:
        raise Refusal(
            "2.5",
            f"a batch names {n_seqs} sequence ids, {n_positions} positions and {n_tokens} "
            "tokens; give one of each for every token",
            {"seq_ids": n_seqs, "positions": n_positions, "tokens": n_tokens},
        )
    if not n_seqs:
        raise Refusal("5.5", "a batch of 0 tokens; give at least one", {"n_tokens": 0})


def _group(seqs: tuple[int, ...], positions: tuple[int, ...], kind: str) -> tuple[Group, ...]:
    """Cut the tokens where the sequence changes, in the order they come."""
    groups: list[Group] = []
    first_row: dict[int, int] = {}
    row = 0
    for end in range(1, len(seqs) + 1):
        seq = seqs[row]
        if end < len(seqs) and seqs[end] == seq:
            _refuse_step(seq, positions[end - 1], positions[end], end)
            continue
        if seq in first_row:
            raise Refusal(
                "5.5",
                f"sequence {seq} appears at row {first_row[seq]} and again at row {row}; put "
                "the tokens of a sequence next to each other",
                {"seq": seq, "rows": [first_row[seq], row]},
            )
        first_row[seq] = row
        groups.append(Group(seq, positions[row], end - row, row))
        row = end
    if kind == DECODE:
        _refuse_long_decode(groups)
    return tuple(groups)


def _refuse_step(seq: int, before: int, after: int, row: int) -> None:
    if after != before + 1:
        what = "comes twice" if after == before else f"follows position {before}"
        raise Refusal(
            "5.5",
            f"position {after} of sequence {seq} {what} at row {row}; positions of a group "
            "are consecutive and rise by one",
            {"seq": seq, "position": after, "previous": before, "row": row},
        )


def _refuse_long_decode(groups: list[Group]) -> None:
    for group in groups:
        if group.n > DECODE_ROWS_MAX:
            raise Refusal(
                "6.2",
                f"sequence {group.seq} has {group.n} decode rows and a group holds "
                f"{DECODE_ROWS_MAX}; cut them into steps, or mark prompt tokens as prefill",
                {"seq": group.seq, "rows": group.n, "max": DECODE_ROWS_MAX},
            )

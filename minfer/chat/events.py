"""What happens while a conversation works, in the order it happens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True)
class Fed:
    """A part of a prompt is in the cache: `done` of `total` tokens that had to be fed."""

    done: int
    total: int


@dataclass(frozen=True)
class Token:
    """A generated token and the text that can be shown now that it is there, often none.

    token: None for text that had been held back, at the end of an answer.
    """

    token: int | None
    text: str


@dataclass(frozen=True)
class Dropped:
    """The oldest turns left the cache (contract 9.2).

    rows: how many rows were removed in place. rendered: why the rest is fed again instead, "" where
    it is not.
    """

    turns: int
    messages: int
    rows: int
    rendered: str

    def __str__(self) -> str:
        what = "the oldest turn" if self.turns == 1 else f"the oldest {self.turns} turns"
        how = f"the rest is fed again: {self.rendered}"
        if not self.rendered:
            how = f"{self.rows} rows were removed in place"
        return f"the context is full: {what} left it; {how}"


Event: TypeAlias = Fed | Token | Dropped

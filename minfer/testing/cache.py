"""What a KV cache shows to be tested: four methods, and whatever else it offers.

A row is an integer here. The cache under test turns it into K and V of all layers when it writes,
and back when it reads; see `kv_store` for how.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol


class Cache(Protocol):
    """What every cache must have. `seq` is a number of the caller's; positions count from 0."""

    def reserve(self, seq: int, cap: int) -> object:
        """Make `seq` known, with room for `cap` rows; no change if it has that already."""

    def release(self, seq: int) -> object:
        """Forget `seq`."""

    def write(self, seq: int, position: int, values: Sequence[int]) -> object:
        """Write rows from `position`, which is at most the number of rows, on.

        Rows above the last one written stay.
        """

    def read(self, seq: int) -> list[int]:
        """All rows of `seq` in position order."""


# Methods a cache may have as well, called with these arguments.
OPERATIONS = {
    "truncate": "(seq, rows): keep the first rows",
    "step": "(groups): write (seq, position, values) of several sequences, all or nothing",
    "failing_step": "(groups, layers): a step that breaks off; sequences end where it began",
    "append": "(seq, values): write at the end",
    "share_prefix": "(src, dst, rows): dst, which is empty, begins with the rows of src",
    "copy_prefix": "(src, dst, rows): the same by copying; dst may have a part of them already",
    "remove": "(seq, start, length): drop rows, later ones move down",
    "shift": "(seq, drop): drop the first rows",
    "resize": "(seq, cap): room for another number of rows",
    "defrag": "(need): make room, None for as much as can be",
    "reserve_with_defrag": "(seq, cap): reserve, making room for it",
    "resize_with_defrag": "(seq, cap): resize, making room for it",
}
REPORTS = {
    "state": "(): anything that compares equal as long as nothing changed",
    "sequences": "(): the known sequences",
    "check": "(): raise AssertionError about contradictions inside",
    "owners": "(): the run id of every cell, -1 where free: the cache follows contract 5",
}
# A cache with `owners` has these too, as minfer.KvStore has them.
PLACES = ("spans", "cap", "written", "stats")


def offers(cache: Any, name: str) -> bool:
    """Whether a cache has a method."""
    return callable(getattr(cache, name, None))

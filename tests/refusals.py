"""Calls that must be refused, and leave what they were made on as it was (contract 0.1)."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from minfer.errors import Refusal
from minfer.kv.sequences import Sequences
from minfer.kv.store import KvStore


def refused(held: Sequences | None, rule: str, call: Callable[[], object], *words: str) -> Refusal:
    """The refusal of `call`, which cites `rule`, says `words` and changed nothing in `held`."""
    before = state(held)
    with pytest.raises(Refusal) as caught:
        call()
    assert caught.value.rule == rule, caught.value
    for word in words:
        assert word in caught.value.message
    assert state(held) == before
    return caught.value


def state(held: Sequences | None) -> object:
    """Tables and bytes, to compare."""
    if held is None:
        return None
    held.check()
    regions = (
        [region for layer in range(held.n_layer) for region in held.region(layer)]
        if isinstance(held, KvStore)
        else []
    )
    return (
        held.digest(),
        held.generation,
        [a.tobytes() for region in regions for a in region.arrays],
    )


def numbers(error: Refusal) -> set[int]:
    """The whole numbers among the facts of a refusal, bools aside."""
    return {fact for fact in error.facts.values() if type(fact) is int}

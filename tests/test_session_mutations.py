"""Session files with changed bytes: refused with nothing changed, or loaded and sound (8.2)."""

from __future__ import annotations

import os
import random
from collections import Counter
from pathlib import Path

import pytest
from session_mutations import HEAD_DIM, Parts, Target, checksummed, mutated

FLIPS = (0x01, 0x80, 0xFF)


@pytest.fixture
def target(fmt: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Target:
    """A store to load into, on a disk that does not wait."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)
    return Target(fmt, tmp_path)


@pytest.mark.parametrize("fmt", HEAD_DIM)
def test_the_small_file_is_what_it_should_be(target: Target) -> None:
    assert target.loads(target.base)
    assert len(target.base) <= 4096
    assert Parts.of(target.base).packed() == target.base


@pytest.mark.parametrize("fmt", HEAD_DIM)
@pytest.mark.parametrize("flip", FLIPS, ids=hex)
def test_every_byte_that_is_flipped_is_seen(target: Target, flip: int) -> None:
    for at in range(len(target.base)):
        changed = bytearray(target.base)
        changed[at] ^= flip
        assert not target.loads(bytes(changed)), f"byte {at}"


@pytest.mark.parametrize("fmt", HEAD_DIM)
def test_every_length_but_its_own_is_seen(target: Target) -> None:
    for length in range(len(target.base)):
        assert not target.loads(target.base[:length]), f"{length} bytes"
    for more in (1, 15, 16, 64, 4096):
        assert not target.loads(target.base + bytes(more)), f"{more} bytes more"
        assert not target.loads(checksummed(target.base[:-16] + bytes(more)))
    assert not target.loads(target.base + target.base)


@pytest.mark.parametrize("fmt", HEAD_DIM)
def test_mutations(target: Target, fmt: str, tmp_path: Path) -> None:
    _mutate(target, seed=list(HEAD_DIM).index(fmt), n=6_667, keep=tmp_path)


@pytest.mark.parametrize("fmt", HEAD_DIM)
def test_mutations_allocate_little(target: Target, fmt: str, tmp_path: Path) -> None:
    target.counts_memory = True
    _mutate(target, seed=5 + list(HEAD_DIM).index(fmt), n=1_000, keep=tmp_path)


@pytest.mark.deep
@pytest.mark.parametrize("fmt", HEAD_DIM)
def test_many_mutations(target: Target, fmt: str, tmp_path: Path) -> None:
    _mutate(target, seed=10 + list(HEAD_DIM).index(fmt), n=66_667, keep=tmp_path)


def _mutate(target: Target, seed: int, n: int, keep: Path) -> None:
    """`n` files; those that load must be many, or the changes are too crude to reach the tables."""
    rng, taken = random.Random(seed), Counter[bool]()
    for i in range(n):
        data = mutated(target.base, rng)
        try:
            taken[target.loads(data)] += 1
        except BaseException as error:
            (keep / "failing.kv").write_bytes(data)
            error.add_note(f"mutation {i} of seed {seed} is {keep / 'failing.kv'}")
            raise
    assert taken[True] > n / 10 and taken[False] > n / 2, taken

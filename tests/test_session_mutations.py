"""Session files with changed bytes: refused with nothing changed, or loaded and sound (8.2)."""

from __future__ import annotations

import os
import random
from collections import Counter
from pathlib import Path

import pytest
from fuzz import session
from session_mutations import HEAD_DIM, Parts, Target, checksummed, mutated

from minfer.kv.session import tables

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


# --- the fuzzer -----------------------------------------------------------------------------------


def test_the_corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the fuzzer kept: every input reaches what none before it does."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)
    found = session.Fuzzer(session.CORPUS, tmp_path, seed=0)
    assert len(found.inputs) > 20 and len(found.reached) > 300
    assert all(len(data) <= 4096 for data in found.inputs)
    assert {found.target(data).loads(data) for data in found.inputs} == {True, False}


def test_the_fuzzer_keeps_what_is_new(tmp_path: Path) -> None:
    assert session.main([str(tmp_path), "--runs", "60"]) == 0
    assert len(list(tmp_path.glob("*.kv"))) > 5


def test_the_fuzzer_finds_a_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Tables that nobody checks: what it writes differs from a sound file in few bytes."""
    monkeypatch.setattr(tables, "problems", lambda n_ctx, runs, entries: [])
    assert session.main([str(tmp_path / "corpus"), "--runs", "5000"]) == 1
    printed = capsys.readouterr()
    assert "Error: " in printed.err
    data = Path(printed.out.split("failing: ")[1].strip()).read_bytes()
    bases = [Target(fmt, tmp_path).base for fmt in HEAD_DIM]
    (base,) = (base for base in bases if len(base) == len(data))
    different = [at for at, (a, b) in enumerate(zip(data[:-16], base, strict=False)) if a != b]
    assert len(different) <= 24

"""Batches: groups, and everything a batch is refused for (contract 5.5, 6.2, 2.5)."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from refusals import refused as refused_call

from minfer.errors import Refusal
from minfer.kv.batch import Batch, Group


def refused(rule: str, *words: str, **arguments: object) -> Refusal:
    return refused_call(None, rule, lambda: Batch(**arguments), *words)


def test_groups_are_stretches_of_one_sequence_in_batch_order() -> None:
    batch = Batch([7, 7, 7, 0, 3, 3], [4, 5, 6, 0, 9, 10], "prefill", [11, 12, 13, 14, 15, 16])
    assert batch.groups == (Group(7, 4, 3, 0), Group(0, 0, 1, 3), Group(3, 9, 2, 4))
    assert batch.n_tokens == 6
    assert batch.tokens == (11, 12, 13, 14, 15, 16)


def test_numpy_numbers_become_ints() -> None:
    batch = Batch(np.array([1, 1]), np.arange(2, dtype=np.int32), "decode", [np.int64(5), 6])
    assert batch == Batch([1, 1], range(2), "decode", (5, 6))
    for value in (*batch.seq_ids, *batch.positions, *(batch.tokens or ())):
        assert type(value) is int


def test_a_batch_is_a_value() -> None:
    batch = Batch([1], [0], "decode")
    with pytest.raises(dataclasses.FrozenInstanceError):
        batch.kind = "prefill"


@pytest.mark.parametrize("kind", ["Prefill", "", None, "draft"])
def test_only_two_kinds(kind: object) -> None:
    refused("1", repr(kind), "prefill, decode", seq_ids=[0], positions=[0], kind=kind)


@pytest.mark.parametrize("seq", [-1, 2**31, True, 1.0, "1", None, np.float32(1), np.bool_(True)])
def test_sequence_ids_are_whole_numbers_of_31_bits(seq: object) -> None:
    refused("5.2", repr(seq), seq_ids=[seq], positions=[0], kind="decode")


@pytest.mark.parametrize("position", [-1, 2**31, 0.0, False])
def test_positions_are_whole_numbers(position: object) -> None:
    refused("2.5", repr(position), seq_ids=[0], positions=[position], kind="decode")


@pytest.mark.parametrize("token", [-1, 3.0, True, "a"])
def test_tokens_are_whole_numbers(token: object) -> None:
    refused("7.5", repr(token), seq_ids=[0], positions=[0], kind="decode", tokens=[token])


def test_the_largest_sequence_id_is_taken() -> None:
    assert Batch([2**31 - 1], [0], "decode").groups == (Group(2**31 - 1, 0, 1, 0),)


def test_an_empty_batch_is_refused() -> None:
    refused("5.5", "0 tokens", seq_ids=[], positions=[], kind="prefill")


def test_lengths_must_agree() -> None:
    refused("2.5", "2 sequence ids, 1 positions", seq_ids=[1, 1], positions=[0], kind="prefill")
    refused(
        "2.5", "2 positions and 3", seq_ids=[1, 1], positions=[0, 1], kind="prefill", tokens=[1] * 3
    )


def test_gaps_repeats_and_falling_positions_are_refused() -> None:
    gap = refused(
        "5.5", "position 3", "row 2", seq_ids=[4] * 3, positions=[0, 1, 3], kind="prefill"
    )
    assert gap.facts == {"seq": 4, "position": 3, "previous": 1, "row": 2}
    refused("5.5", "comes twice", seq_ids=[4, 4], positions=[1, 1], kind="prefill")
    refused("5.5", "follows position 2", seq_ids=[4, 4], positions=[2, 1], kind="prefill")


def test_the_tokens_of_a_sequence_stand_together() -> None:
    refused("5.5", "row 0", "row 2", seq_ids=[1, 2, 1], positions=[0, 0, 1], kind="prefill")


def test_a_decode_group_has_at_most_eight_rows() -> None:
    eight = Batch([1] * 8 + [2] * 8, [*range(8), *range(8)], "decode")
    assert [group.n for group in eight.groups] == [8, 8]
    error = refused("6.2", "9 decode rows", seq_ids=[1] * 9, positions=range(9), kind="decode")
    assert error.facts["rows"] == 9
    assert Batch([1] * 9, range(9), "prefill").groups[0].n == 9


@pytest.mark.parametrize("ids", [5, "12", np.zeros((2, 2), np.int32), {1: 2}, None])
def test_whatever_is_no_flat_list_is_refused(ids: object) -> None:
    refused("10", "seq_ids", seq_ids=ids, positions=[0], kind="prefill")
